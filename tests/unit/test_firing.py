"""Which neurons fire and how often, counted beside plain loops, in memory and layer by layer, and their order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import tiny_of, tiny_olmoe, tiny_switch

from moeconv.calibration import Sample
from moeconv.measure import firing
from moeconv.measure.firing import (
    BLOCKS,
    LATELY,
    Activity,
    activity_of,
    by_frequency,
    covered,
    firing_counts,
    has_zeros,
)
from moeconv.measure.metrics import METRICS
from moeconv.measure.passes import LayeredModel, Room
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel
from moeconv.progress import unseen
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Act
from moert.pack.tensors import TOKENIZER

TEXTS = ["a few words", "zigzag", "the quick brown fox", "one small step"] * 4
FAMILIES = {
    "switch": tiny_switch, "gated": lambda path: tiny_olmoe(path, hidden_act="relu"), "dense": tiny_of("opt"),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "hf"))


def scorer_of(subject: Any, folder: Path) -> Any:
    target = subject.spec.encoder is not None
    samples = [Sample(text, text if target else "") for text in TEXTS]
    tokenizer = load_tokenizer(folder / TOKENIZER)
    return build_scorer(subject, tokenizer, samples, METRICS["perplexity"], Extent(None, 16, 5))


def calls_of(loaded: LoadedModel, scorer: Any) -> list[tuple[LayerKey, Call]]:
    """What experts are asked, batch by batch; of text that is written the whole is asked about last."""
    found, latest = list[tuple[LayerKey, Call]](), dict[LayerKey, Call]()
    with loaded.calls.during(answer=lambda place, call: latest.update({place: call})), torch.inference_mode():
        for _ in scorer.routes():
            found += latest.items()
            latest.clear()
    return found


def test_counts_are_those_of_a_plain_loop(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "ROWS", 3)
    loaded, moe = LoadedModel(source), source.spec.moe
    scorer = scorer_of(loaded, source.path)
    found = firing_counts(loaded, scorer, unseen)
    assert list(found) == list(source.spec.moe_layers())
    expected = {place: np.zeros((moe.n, moe.ffn.d_ff), int) for place in source.spec.moe_layers()}
    for place, call in calls_of(loaded, scorer):
        for x, chosen in zip(call.x, call.chosen.tolist(), strict=True):
            for expert in (number for number in chosen if number >= 0):
                inner = loaded.calls.inner(place.expert(expert), x[None])[0].tolist()
                for neuron, value in enumerate(inner):
                    expected[place][expert, neuron] += value != 0
    for place, counts in found.items():
        assert counts.dtype == np.int64
        assert 0 < counts.sum() < expected[place].size * len(TEXTS) * 20
        assert abs(counts - expected[place]).max() <= 1, "but for what rounding makes zero"
        assert (counts == expected[place]).mean() > 0.99
    activity = activity_of(loaded, scorer, unseen("", 1).__enter__())
    assert all(abs(activity[place].fired - counts).max() <= 1 for place, counts in found.items())


def test_layer_by_layer_they_are_the_same(source: Checkpoint, tmp_path: Path) -> None:
    if source.spec.encoder is not None:
        pytest.skip("encoder-decoders are converted in memory")
    loaded = LoadedModel(source)
    coder = ExpertCoder(source, QUANTIZERS["group"](None), None)
    layered = LayeredModel(coder, DenseCoder(source, None), Room(tmp_path, 1, 200_000), unseen)
    layered.original_experts()
    whole, apart = (firing_counts(subject, scorer_of(subject, source.path), unseen) for subject in (loaded, layered))
    assert list(whole) == list(apart)
    for place, counts in whole.items():
        assert abs(counts - apart[place]).max() <= 1
        assert (counts == apart[place]).mean() > 0.99
    again = firing_counts(layered, scorer_of(layered, source.path), unseen)
    assert all((again[place] == counts).all() for place, counts in apart.items())


counts = arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.integers(0, 5))


@given(counts)
def test_an_order_is_a_bijection_with_the_most_frequent_first(fired: np.ndarray) -> None:
    at = LayerKey("decoder", 3)
    order = by_frequency({at: fired})
    rows = order.layers[at]
    assert rows.dtype == np.uint32
    for mine, row in zip(fired, rows.tolist(), strict=True):
        assert sorted(row) == list(range(len(mine)))
        assert row == sorted(range(len(mine)), key=lambda neuron: (-mine[neuron], neuron))
    assert by_frequency({at: np.zeros_like(fired)}).layers[at].tolist() == [list(range(fired.shape[1]))] * len(fired)


def test_what_the_most_frequent_cover() -> None:
    at = LayerKey("decoder", 0)
    fired = {at: np.array([[0, 6, 1, 1], [4, 0, 0, 0]])}
    assert covered(fired, 0.25) == 10 / 12
    assert covered(fired, 0.5) == 11 / 12
    assert covered(fired, 1.0) == 1.0
    assert covered({at: np.zeros((2, 4), np.int64)}, 0.25) == 0.0


# All figures, token by token


def fires(loaded: LoadedModel, place: LayerKey, call: Call) -> list[dict[tuple[int, int], bool]]:
    """For each token with experts, in order: its experts' neurons, as (expert, neuron), and whether they fire."""
    rows = []
    for x, chosen in zip(call.x, call.chosen.tolist(), strict=True):
        row = {}
        for expert in (number for number in chosen if number >= 0):
            up, *_ = loaded.calls.weights(place.expert(expert))
            row |= {(expert, neuron): value > 0 for neuron, value in enumerate((up @ x).tolist())}
        rows += [row] if row else []
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
def test_activity_is_that_of_the_plain_definition(overrides: dict[str, Any], tmp_path: Path) -> None:
    """And the model computes as before."""
    loaded = LoadedModel(Checkpoint.open(tiny_switch(tmp_path / "hf", **overrides)))
    scorer, seen, moe = scorer_of(loaded, tmp_path / "hf"), list[int](), loaded.spec.moe
    before = scorer.score().nats
    found = activity_of(loaded, scorer, SimpleNamespace(update=seen.append))
    assert (scorer.score().nats == before).all()
    assert sum(seen) == len(TEXTS)
    assert list(found) == list(loaded.spec.moe_layers())
    calls = calls_of(loaded, scorer)
    for place, activity in found.items():
        rows = [row for at, call in calls if at == place for row in fires(loaded, place, call)]
        expected = plain(rows, moe.n, moe.ffn.d_ff)
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
    assert activity_of(loaded, scorer_of(loaded, tmp_path / "hf"), SimpleNamespace(update=print)) is None
    assert [name for name in ("relu", "relu2", "silu", "gelu", "gelu_new") if has_zeros(Act(name))] == ["relu", "relu2"]
