"""What is left of a model's performance where the hash function takes the place of its routers (SiDA, Table 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moert.engine.engine import Engine
from moert.pack.reader import Pack
from recipes.bench.hash_packs import Subject, heldout, inputs
from recipes.bench.result import Row
from recipes.bench.sized import sized
from recipes.bench.streamed import THREADS

KEPT_AIM = 0.98
ROUTINGS = {"routers": "exact", "hash": "hash"}
WINDOWS = sized(24, 2)
SAMPLES = 4
"""Times as many inputs as elsewhere."""


def routings(subject: Subject) -> dict[str, str]:
    """Those that are possible: the function takes the place of routers only that weigh by a softmax."""
    score = Pack.open(subject.pack).manifest.model.moe.router.score
    return {what: routing for what, routing in ROUTINGS.items() if score == "softmax" or routing == "exact"}


def kept_rows(subject: Subject) -> list[Row]:
    """The same text with the routers and with the function, all experts in memory; nothing where it can't be."""
    judged = {what: _judged(subject, routing) for what, routing in routings(subject).items()}
    if len(judged) < len(ROUTINGS):
        return []
    exact, hashed = judged["routers"], judged["hash"]
    what = "perplexity" if subject.is_text else Path(subject.metric).stem
    kept = exact / hashed if subject.is_text else hashed / exact
    return [
        *(Row(f"{subject.name}: {what} with {each}", value, "") for each, value in judged.items()),
        Row(f"{subject.name}: kept", kept, "of its performance").at_least(KEPT_AIM),
    ]


def _judged(subject: Subject, routing: str) -> float:
    with Engine.open(subject.pack, routing=routing, predict="none", threads=THREADS, notify=lambda _: None) as engine:
        return _perplexity(engine, inputs(subject, "long", WINDOWS)) if subject.is_text else _metric(engine, subject)


def _perplexity(engine: Engine, windows: Sequence[Sequence[int]]) -> float:
    nats = count = 0.0
    for ids in windows:
        engine.reserve(len(ids), 1)
        logits = engine.model.forward_all(list(ids)).astype(np.float64)[:-1]
        logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        nats -= float(logs[np.arange(len(logs)), ids[1:]].sum())
        count += len(logs)
    return math.exp(nats / count)


def _metric(engine: Engine, subject: Subject) -> float:
    from moeconv.measure.metrics import find_metric

    metric, scores = find_metric(subject.metric), list[tuple[float, ...]]()
    assert metric.judge is not None
    samples = heldout(subject)[: SAMPLES * subject.inputs]
    prompts = [sample["input"] for sample in samples]
    answers = engine.generate_many(prompts, max_new_tokens=subject.new_tokens)
    for answer, sample in zip(answers, samples, strict=True):
        scores.append(metric.judge(answer.text, sample["target"]))
    return metric.value(np.array(scores))
