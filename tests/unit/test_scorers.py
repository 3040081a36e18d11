"""Scorers: what is remembered of one state must not change what is measured of another."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_olmoe, tiny_switch
from tokenizers import Tokenizer

from moeconv.calibration import Sample
from moeconv.checkpoint import Checkpoint
from moeconv.errors import CalibrationError
from moeconv.metrics import METRICS
from moeconv.quantizers import QUANTIZERS
from moeconv.scorers.build import build_scorer, load_tokenizer, spread
from moeconv.scorers.text import windows_of
from moeconv.trial import Trial


def text(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(1, 4))) for _ in range(count))


def build(path: Path, metric: str, rng: random.Random):
    trial = Trial(Checkpoint.open(path), QUANTIZERS["channel"](0))
    if trial.spec.encoder is None:
        samples = [Sample(text(rng, 12)) for _ in range(30)]
    else:
        samples = [Sample(text(rng, rng.randint(1, 4)), text(rng, 3)) for _ in range(40)]
    scorer = build_scorer(
        trial,
        load_tokenizer(path / "tokenizer.json"),
        samples,
        METRICS[metric],
        limit=None,
        context=24,
        max_new_tokens=8,
    )
    return trial, scorer


@pytest.mark.parametrize(
    ("family", "metric"), [("switch", "rouge2"), ("switch", "perplexity"), ("olmoe", "perplexity")]
)
def test_resumed_scores_equal_scores_from_the_start(family: str, metric: str, tmp_path: Path) -> None:
    path = tiny_switch(tmp_path) if family == "switch" else tiny_olmoe(tmp_path, num_hidden_layers=3)
    trial, resuming = build(path, metric, random.Random(0))
    _, fresh = build(path, metric, random.Random(0))
    fresh.subject = trial
    keys = trial.spec.expert_keys()
    base = dict.fromkeys(keys, 4)
    trial.assign(base)
    resuming.score(keep=True)
    changed_outputs = 0
    for key in keys:
        trial.assign({**base, key: 2})
        expected, found = fresh.score(), resuming.score()
        assert found.outputs == expected.outputs, key
        assert np.allclose(found.per_sample, expected.per_sample, rtol=1e-5)
        assert found.nll == pytest.approx(expected.nll, rel=1e-6)
        trial.assign(base)
        changed_outputs += expected.outputs != fresh.score().outputs
    assert changed_outputs or metric == "perplexity", "no perturbation changed a generated text: nothing was tested"


def test_small_capacity_is_never_resumed(tmp_path: Path) -> None:
    trial, scorer = build(tiny_switch(tmp_path, expert_capacity=2), "rouge2", random.Random(0))
    scorer.score(keep=True)
    assert scorer._kept_outputs == []
    assert trial.spec.moe.capacity == 2


def test_generated_text_is_that_of_transformers(tmp_path: Path) -> None:
    trial, scorer = build(tiny_switch(tmp_path), "rouge2", random.Random(1))
    outputs = scorer.score().outputs
    for sample, output in list(zip(scorer.samples, outputs, strict=True))[:12]:
        ids = torch.tensor([scorer.tokenizer.encode(sample.source).ids])
        written = trial.model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=8)[0, 1:].tolist()
        assert output == scorer.tokenizer.decode(written, skip_special_tokens=True)


def test_windows_count_the_words_that_end_in_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_olmoe(tmp_path) / "tokenizer.json"))
    samples = [Sample(text(random.Random(2), 40))]
    windows, words = windows_of(samples, tokenizer, 16)
    assert windows.shape[1] == 16
    total = len(samples[0].source.split())
    assert total - len(windows) - 2 <= words.sum() <= total
    with pytest.raises(CalibrationError, match="too few"):
        windows_of(samples, tokenizer, 400)


def test_spread_is_even() -> None:
    assert spread(10, 5) == [0, 2, 4, 6, 8]
    assert spread(3, None) == spread(3, 7) == [0, 1, 2]
