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

from moeconv import order
from moeconv.calibration import Sample
from moeconv.measure import firing
from moeconv.measure.firing import Counted, Ordered, counted, ordered
from moeconv.measure.metrics import METRICS
from moeconv.measure.passes import LayeredModel, Room
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel
from moeconv.order import NeuronOrder, by_frequency, together, touched
from moeconv.progress import unseen
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call
from moert.pack.model_spec import LayerKey
from moert.pack.tensors import TOKENIZER
from recipes.train.activity import BLOCKS, LATELY, Activity, activity_of

TEXTS = ["a few words", "zigzag", "the quick brown fox", "one small step"] * 4
FAMILIES = {
    "switch": tiny_switch, "gated": lambda path: tiny_olmoe(path, hidden_act="relu"), "dense": tiny_of("opt"),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "hf"))


def counts_of(subject: Any, folder: Path) -> dict[LayerKey, np.ndarray]:
    return {place: layer.counts for place, layer in counted(subject, scorer_of(subject, folder), unseen)}


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
    found = counts_of(loaded, source.path)
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
    whole, apart = (counts_of(subject, source.path) for subject in (loaded, layered))
    assert list(whole) == list(apart)
    for place, counts in whole.items():
        assert abs(counts - apart[place]).max() <= 1
        assert (counts == apart[place]).mean() > 0.99
    again = counts_of(layered, source.path)
    assert all((again[place] == counts).all() for place, counts in apart.items())


# Orders of neurons

counts = arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.integers(0, 5))
bits = arrays(np.bool_, st.tuples(st.integers(0, 20), st.integers(1, 20)))
GROUPS, SIZE = 16, 4


@given(counts)
def test_the_most_frequent_come_first(fired: np.ndarray) -> None:
    for mine, row in zip(fired, by_frequency(fired).tolist(), strict=True):
        assert row == sorted(range(len(mine)), key=lambda neuron: (-mine[neuron], neuron))
    assert (by_frequency(np.zeros_like(fired)) == np.arange(fired.shape[1])).all()


def plainly_together(fired: np.ndarray, neurons: list[int], size: int) -> list[int]:
    """By sets of rows, of neurons by falling frequency."""
    rows = {neuron: set(fired[:, neuron].nonzero()[0].tolist()) for neuron in neurons}
    found, asked, left = list[int](), set[int](), list(neurons)
    while left:
        if len(found) % size == 0:
            asked, chosen = set(), left[0]
        else:
            chosen = max(left, key=lambda each: len(rows[each] & asked) / max(1, len(rows[each] | asked)))
        left.remove(chosen)
        found.append(chosen)
        asked |= rows[chosen]
    return found


@given(bits, st.integers(1, 6), st.sampled_from((4, 64)))
def test_neurons_are_put_together_as_a_plain_loop_puts_them(fired: np.ndarray, size: int, near: int) -> None:
    frequent = by_frequency(fired.sum(axis=0)).tolist()
    step = max(1, near // size) * size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(order, "NEAR", near)
        found = together(fired, size).tolist()
    assert sorted(found) == list(range(fired.shape[1]))
    parts = (frequent[start : start + step] for start in range(0, len(frequent), step))
    assert found == [neuron for part in parts for neuron in plainly_together(fired, part, size)]


def test_blocks_that_are_asked_for() -> None:
    fired = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]], bool)
    assert touched(fired, np.arange(5), 2) == 6 / 12
    assert touched(fired, np.array([0, 3, 1, 2, 4]), 2) == 5 / 12


def planted(rows: int, seed: int = 0) -> np.ndarray:
    """Groups of neurons, of equal frequency and spread over the expert, of which nearly all fire together."""
    rng = np.random.default_rng(seed)
    asked = np.repeat(rng.random((rows, GROUPS)) < 0.1, SIZE, axis=1) & (rng.random((rows, GROUPS * SIZE)) < 0.95)
    return asked[:, np.random.default_rng(7).permutation(GROUPS * SIZE)]


def seen(fired: np.ndarray) -> Counted:
    """By an expert between two that see nothing."""
    layer = Counted(3, fired.shape[1])
    for start in range(0, len(fired), 100):
        layer.see(1, fired[start : start + 100])
    return layer


def test_neurons_that_fire_together_lie_together() -> None:
    fired = planted(1000)
    found, (frequent, grouped) = seen(fired).order(1, SIZE)
    groups = np.argsort(np.random.default_rng(7).permutation(GROUPS * SIZE))  # the places of each group
    blocks = {frozenset(block) for block in found.reshape(GROUPS, SIZE).tolist()}
    assert blocks == {frozenset(group) for group in groups.reshape(GROUPS, SIZE).tolist()}
    assert grouped == touched(fired[500:], found, SIZE) < 0.5 * frequent


def test_neurons_that_fire_by_themselves_lie_by_frequency() -> None:
    rng = np.random.default_rng(1)
    fired = rng.random((400, 200)) < rng.beta(0.5, 4, size=200)
    layer = seen(fired)
    found, (frequent, grouped) = layer.order(1, 8)
    assert 0 < frequent <= grouped
    assert (found == by_frequency(layer.counts[1])).all()
    assert (layer.counts[1] == fired.sum(axis=0)).all()


@pytest.mark.parametrize(("rows", "size"), [(0, 4), (1, 4), (1000, 1)])
def test_without_a_comparison_neurons_lie_by_frequency(rows: int, size: int) -> None:
    layer = seen(planted(rows))
    found, shares = layer.order(1, size)
    assert shares == (0, 0)
    assert (found == by_frequency(layer.counts[1])).all()


def test_of_much_text_the_first_rows_say_what_lies_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "KEPT", 250)
    fired = planted(1000)
    layer = seen(fired)
    found, (_, grouped) = layer.order(1, SIZE)
    assert grouped == touched(fired[125:250], found, SIZE)
    assert (layer.counts[1] == fired.sum(axis=0)).all()


def test_an_order_has_all_experts_of_all_layers() -> None:
    places, fired = [LayerKey("encoder", 1), LayerKey("decoder", 3)], planted(1000)
    found = ordered([(place, seen(fired)) for place in places], SIZE)
    assert list(found.order.layers) == list(found.counts) == places
    assert len(found.shares) == len(places), "only one expert of each has seen something"
    for place, rows in found.order.layers.items():
        assert rows.dtype == np.uint32
        assert rows[[0, 2]].tolist() == [list(range(GROUPS * SIZE))] * 2
        assert (rows[1] == seen(fired).order(1, SIZE)[0]).all()
        assert (found.counts[place][1] == fired.sum(axis=0)).all()


def test_what_the_most_frequent_cover() -> None:
    def covered(fired: list[list[int]], most: float) -> float:
        return Ordered(NeuronOrder({}), {LayerKey("decoder", 0): np.array(fired)}, []).covered(most)

    fired = [[0, 6, 1, 1], [4, 0, 0, 0]]
    assert [covered(fired, most) for most in (0.25, 0.5, 1.0)] == [10 / 12, 11 / 12, 1.0]
    assert covered([[0] * 4] * 2, 0.25) == 0.0


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
