"""Which neurons fire, counted beside the plain definition of every figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeconv.calibration import Sample
from moeconv.measure.firing import BLOCKS, LATELY, Activity, activity_of, has_zeros
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Act
from tests.tiny import tiny_olmoe, tiny_switch

TEXTS = ["a few words", "zigzag", "the quick brown fox", "one small step"] * 2


class Counter:
    """A bar that remembers."""

    def __init__(self) -> None:
        self.n = 0

    def update(self, n: int) -> None:
        self.n += n


def scorer_of(loaded: LoadedModel, folder: Path) -> Any:
    target = loaded.spec.encoder is not None
    samples = [Sample(text, text if target else "") for text in TEXTS]
    return build_scorer(
        loaded, load_tokenizer(folder / "tokenizer.json"), samples, METRICS["perplexity"], Extent(None, 16, 5)
    )


def fires(loaded: LoadedModel, place: LayerKey, calls: list[Call]) -> list[dict[tuple[int, int], bool]]:
    """For each token with experts, in order: its experts' neurons, as (expert, neuron), and whether they fire."""
    rows = []
    for call in calls:
        for x, chosen in zip(call.x, call.chosen.tolist(), strict=True):
            row = {}
            for expert in (number for number in chosen if number >= 0):
                up, *_ = loaded.calls.weights(place.expert(expert))
                for neuron, value in enumerate((up @ x).tolist()):
                    row[expert, neuron] = value > 0
            if row:
                rows.append(row)
    return rows


def plain(rows: list[dict[tuple[int, int], bool]], experts: int, d_ff: int) -> Activity:
    """The same figures token by token."""
    asked, fired = np.zeros(experts, np.int64), np.zeros((experts, d_ff), np.int64)
    lately, touched, blocks = np.zeros(len(LATELY), int), np.zeros(len(BLOCKS), int), np.zeros(len(BLOCKS), int)
    on = [{key for key, does in row.items() if does} for row in rows]
    for time, row in enumerate(rows):
        for expert in {expert for expert, _ in row}:
            asked[expert] += 1
            for place, size in enumerate(BLOCKS):
                starts = range(0, d_ff, size)
                blocks[place] += len(starts)
                touched[place] += sum(
                    any((expert, neuron) in on[time] for neuron in range(start, start + size)) for start in starts
                )
        for key in on[time]:
            fired[key] += 1
            for place, back in enumerate(LATELY):
                lately[place] += any(key in earlier for earlier in on[max(0, time - back) : time])
    return Activity(len(rows), asked, fired, lately, touched, blocks)


@pytest.mark.parametrize("overrides", [{}, {"expert_capacity": 2}, {"num_sparse_encoder_layers": 1}])
def test_counts_are_those_of_the_plain_definition(overrides: dict[str, Any], tmp_path: Path) -> None:
    loaded = LoadedModel(Checkpoint.open(tiny_switch(tmp_path / "hf", **overrides)))
    scorer, bar, heard = scorer_of(loaded, tmp_path / "hf"), Counter(), dict[LayerKey, list[Call]]()
    found = activity_of(loaded, scorer, bar)
    assert bar.n == len(TEXTS)
    latest: dict[LayerKey, Call] = {}
    with loaded.calls.answering(lambda place, call: latest.update({place: call})), torch.inference_mode():
        for _ in scorer.routes():
            for place, call in latest.items():
                heard.setdefault(place, []).append(call)
    assert found is not None
    assert list(found) == list(loaded.spec.moe_layers())
    for place, activity in found.items():
        expected = plain(fires(loaded, place, heard[place]), loaded.spec.moe.n, loaded.spec.moe.ffn.d_ff)
        assert activity.tokens == expected.tokens
        for name in ("asked", "fired", "lately", "touched", "blocks"):
            assert (getattr(activity, name) == getattr(expected, name)).all(), (place, name)
        assert 0.2 < activity.share < 0.8  # of random weights


def test_shares() -> None:
    fired = np.array([[4, 0, 0, 1], [0, 0, 0, 0], [2, 3, 0, 0]])
    activity = Activity(9, np.array([4, 0, 5]), fired, np.array([1, 2, 5, 5, 8]), np.arange(5), np.full(5, 10))
    assert activity.share == 10 / 36
    assert activity.by_expert[0] == 5 / 16
    assert np.isnan(activity.by_expert[1])
    assert activity.again.tolist() == [0.1, 0.2, 0.5, 0.5, 0.8]
    assert activity.block_share.tolist() == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert [activity.covered(most) for most in (1 / 12, 2 / 12, 0.5, 1.0)] == [0.4, 0.7, 1.0, 1.0]


def test_nothing_is_counted_where_nothing_is_zero(tmp_path: Path) -> None:
    loaded = LoadedModel(Checkpoint.open(tiny_olmoe(tmp_path / "hf")))
    assert activity_of(loaded, scorer_of(loaded, tmp_path / "hf"), Counter()) is None
    assert [name for name in ("relu", "relu2", "silu", "gelu", "gelu_new") if has_zeros(Act(name))] == ["relu", "relu2"]


def test_the_model_computes_as_before(tmp_path: Path) -> None:
    loaded = LoadedModel(Checkpoint.open(tiny_switch(tmp_path / "hf")))
    scorer = scorer_of(loaded, tmp_path / "hf")
    before = scorer.score().nats
    activity_of(loaded, scorer, Counter())
    assert (scorer.score().nats == before).all()
