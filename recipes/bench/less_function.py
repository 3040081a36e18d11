"""What is written where routing prefers, whether it is the same everywhere, and what the decision takes."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moert.engine.choosing import GenerationSettings
from moert.engine.engine import Engine
from moert.models.model import Model
from moert.models.router import PreferringRouter, Recent
from recipes.bench.less_packs import SHARES, text_of
from recipes.bench.result import Row, row_of_runs
from recipes.bench.sized import sized

LEAST = f"{min(SHARES):.0%}"
ROUTINGS = ("exact", *(f"{share:.0%}" for share in sorted(SHARES, reverse=True)))
WORDS = sized(1000, 8)
TEXTS, TEXT_TOKENS, TEXT_WORDS = sized((8, 125, 8), (1, 8, 8))  # that are written freely, a thousand tokens together
SHORT = {"max_new_tokens": 24, "ignore_eos": True}
DECISIONS, TURNS, DECISION_AIM = sized(2000, 20), sized(5, 1), 5.0


def rows(packs: Mapping[str, Path]) -> list[Row]:
    """`packs`: those of --resident."""
    found = [row for name, pack in packs.items() for row in same_rows(name, pack)]
    found += [row for name in ("wiki", "wikids") if name in packs for row in decision_rows(name, packs[name])]
    found += word_rows(packs["g2p"])
    return [*found, *(row for name in ("wiki", "wikids") if name in packs for row in text_rows(name, packs[name]))]


def texts(name: str, count: int) -> list[str]:
    """Held-out inputs, or beginnings of held-out texts."""
    path = Path(f"build/data/{text_of(name)}/heldout.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    return [row["input"] if "input" in row else " ".join(row["text"].split()[:TEXT_WORDS]) for row in rows]


def same_rows(name: str, pack: Path) -> list[Row]:
    """Answers that differ where room, threads, drive, prediction or batch do."""
    prompts = texts(name, 8)

    def answers(batch: bool = False, **changes: object) -> list[list[int]]:
        with Engine.open(pack, routing=LEAST, **changes) as engine:
            if batch:
                return [each.result.tokens for each in engine.generate_many(prompts, **SHORT)]
            return [engine.generate(prompt, **SHORT).result.tokens for prompt in prompts]

    expected = answers(cache="100%", threads=1, predict="none")
    differ = 0
    for changes in (
        {"cache": "25%"}, {"cache": "50%", "threads": 2}, {"cache": "25%", "io": "direct", "eviction": "expected"},
        {"cache": "40%", "io": "buffered", "predict": "none"}, {"cache": "50%", "batch": True},
    ):  # fmt: skip
        found = answers(**changes)
        differ += sum(one != other for one, other in zip(found, expected, strict=True))
    return [Row(f"{name}: answers that differ over room, drive, batch and threads", differ, "answers").at_most(0)]


def decision_rows(name: str, pack: Path) -> list[Row]:
    """Microseconds of a layer's decision for one token above exact routing, in turns."""
    with Engine.open(pack, routing=LEAST, threads=1) as engine:
        model: Model = engine.model
        at, router = next((at, each) for at, each in model.routers.items() if isinstance(each, PreferringRouter))
        assert model.preference is not None
        top_k, d_model = engine.spec.moe.router.top_k, engine.spec.d_model
        recent, chance = Recent(model.preference.recent, top_k), np.random.default_rng(0)
        tokens = chance.standard_normal((DECISIONS, 1, d_model), np.float32)
        exact = router._exact
        timed: dict[str, list[float]] = {"exact": [], "preferring": []}
        for _ in range(TURNS):
            for what in timed:
                started = time.perf_counter()
                if what == "exact":
                    for x in tokens:
                        exact.route(x, (1,))
                else:
                    for x in tokens:
                        router.route(x, (1,), (recent,))
                timed[what].append(1e6 * (time.perf_counter() - started) / DECISIONS)
    above = [two - one for one, two in zip(timed["exact"], timed["preferring"], strict=True)]
    return [
        row_of_runs(f"{name}: decision of a layer ({at.stack} {at.layer}), exact", timed["exact"], "µs"),
        row_of_runs(f"{name}: decision of a layer above exact", above, "µs").at_most(DECISION_AIM),
    ]


def word_rows(pack: Path) -> list[Row]:
    """Words of g2p that come out exactly right."""
    lines = Path("build/data/g2p/heldout.jsonl").read_text(encoding="utf-8").splitlines()[:WORDS]
    samples, settings, found = [json.loads(line) for line in lines], GenerationSettings(40), []
    for routing in ROUTINGS:
        with Engine.open(pack, routing=routing) as engine:
            answers = [engine.generate(sample["input"], settings).text for sample in samples]
        right = sum(text == sample["target"] for text, sample in zip(answers, samples, strict=True))
        found.append(Row(f"g2p, {routing}: words right", 100 * right / len(samples), "%", n=len(samples)))
    return found


def text_rows(name: str, pack: Path) -> list[Row]:
    """Of a thousand tokens written freely: how likely the unquantised model finds them, and how many four in a
    row were there before in the same text."""
    from moeconv.measure.trial import LoadedModel
    from moeconv.source.checkpoint import Checkpoint

    model, found = LoadedModel(Checkpoint.open(f"recipes/models/{name}")).model, []
    for routing in ROUTINGS:
        nats, again = [], []
        with Engine.open(pack, routing=routing) as engine:
            for seed, prompt in enumerate(texts(name, TEXTS)):
                settings = GenerationSettings(TEXT_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
                before, written = engine.encode(prompt), engine.generate(prompt, settings).result.tokens
                nats += nats_of(model, before, written)
                again.append(repeated(written))
        found += [
            Row(f"{name}, {routing}: perplexity of what it writes, unquantised", math.exp(statistics.mean(nats)), ""),
            Row(f"{name}, {routing}: repeated", 100 * statistics.mean(again), "% of four in a row"),
        ]
    return found


def nats_of(model: object, before: Sequence[int], written: Sequence[int]) -> list[float]:
    """Of each token written behind others."""
    import torch

    ids = torch.tensor([[*before, *written]])
    with torch.inference_mode():
        logs = model(ids).logits[0].log_softmax(-1)
    places = torch.arange(len(before) - 1, len(before) + len(written) - 1)
    return [-float(each) for each in logs[places, torch.tensor(written)]]


def repeated(tokens: Sequence[int]) -> float:
    """Share of four tokens in a row that came before in the same text."""
    grams = list(zip(*(itertools.islice(tokens, start, None) for start in range(4)), strict=False))
    return 1 - len(set(grams)) / len(grams)
