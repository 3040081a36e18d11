"""Predictors of neurons: how they begin, what their thresholds keep, and what is computed of what they name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_predictor import random_predictor
from tiny_packs import SPECS
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.foresight.examples import LARGEST, LayerFirings
from moeconv.foresight.neurons import (
    LayerNetwork,
    NamedNeurons,
    NeuronCourse,
    NeuronLesson,
    begun,
    in_blocks,
    kept_of,
    threshold_of,
    thresholds,
    trained_neurons,
)
from moeconv.progress import unseen
from moeconv.source.experts import expert_ffn
from moert.pack.learnt import Kept
from moert.pack.model_spec import LayerKey

AT = LayerKey("decoder", 0)
FEATURES, D_FF, EXPERTS = 6, 20, 3


def matrices(seed: int = 0) -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Of each expert up and down, and their biases."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    return [
        ((random(D_FF, FEATURES), random(FEATURES, D_FF)), (random(D_FF) - 1, random(FEATURES))) for _ in range(EXPERTS)
    ]


def made_firings(seed: int, tokens: int = 300, top_k: int = 2) -> LayerFirings:
    """Of ReLU experts; one of the tokens' places has no expert."""
    rng, experts = np.random.default_rng(seed), matrices()
    x = (rng.standard_normal((tokens, FEATURES)) * [3, 2, 1, 1, 0.2, 0.1] + 0.3).astype(np.float16)
    chosen = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top_k].astype(np.int16)
    chosen[5, 1] = -1
    weights = np.zeros((tokens, top_k, D_FF), np.uint8)
    for token, slot in np.argwhere(chosen >= 0):
        (up, down), (bias, _) = experts[chosen[token, slot]]
        inner = torch.relu(up @ torch.from_numpy(x[token].astype(np.float32)) + bias) * down.norm(dim=0)
        weights[token, slot] = (inner / inner.max().clamp(min=1e-9) * LARGEST).ceil().byte().numpy()
    return LayerFirings(x, chosen, weights)


def lesson(folder: Path, about: str = "x") -> NeuronLesson:
    folder.mkdir(exist_ok=True, parents=True)
    train, heldout = {AT: made_firings(1, 1200)}, {AT: made_firings(2)}
    return NeuronLesson(train, heldout, lambda at: matrices(), {AT: [3, 3, 4]}, about, folder)  # type: ignore[arg-type, return-value]


def silent(line: str) -> None:
    pass


def test_of_full_rank_it_begins_with_what_fires() -> None:
    firings = made_firings(0)
    network = begun(FEATURES, matrices(), firings)  # type: ignore[arg-type]
    wrong = total = 0
    for expert, rows in firings.some(np.arange(len(firings))):
        named = network.scores(expert, network.compressed(rows.x)) >= 0
        wrong += int((named != (rows.weights > 0)).sum())
        total += named.numel()
    assert total == (2 * len(firings) - 1) * D_FF
    assert wrong <= total / 1000, "but for rounding"


def test_of_lower_rank_it_begins_better_than_by_chance_and_training_helps(tmp_path: Path) -> None:
    begun_so, trained = (
        trained_neurons(lesson(tmp_path / str(epochs)), NeuronCourse(2, epochs), silent, unseen).layers[AT].kept
        for epochs in (0, 6)
    )
    assert begun_so.firing > begun_so.neurons + 0.1
    assert trained.neurons < begun_so.neurons


@pytest.mark.parametrize("missed", [0.0, 0.02, 0.3])
def test_thresholds_leave_no_more_unnamed_than_was_said(tmp_path: Path, missed: float) -> None:
    told = lesson(tmp_path)
    layer = trained_neurons(told, NeuronCourse(2, 2, missed), silent, unseen).layers[AT]
    network, firings = LayerNetwork.of(layer), told.train[AT]
    for expert, rows in firings.some(np.arange(len(firings))):
        named = network.scores(expert, network.compressed(rows.x)) >= float(layer.threshold[expert])
        weights = rows.weights.double()
        lost = float(weights[~named].sum() / weights.sum())
        assert lost <= missed + 1e-3  # a score may fall by a rounding where more rows are multiplied at once
        assert lost >= missed - 0.02, "and not much less"


@given(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 255)), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
)
def test_a_threshold_is_the_largest_that_does(pairs: list[tuple[int, int]], missed: float) -> None:
    scores = np.array([score for score, _ in pairs], np.float32)
    weights = np.array([weight for _, weight in pairs], np.uint8)

    def lost(threshold: float) -> int:
        return int(weights[scores < threshold].sum(dtype=np.int64))

    found, allowed = threshold_of(scores, weights, missed), missed * int(weights.sum(dtype=np.int64))
    assert lost(found) <= allowed
    assert all(lost(score) > allowed for score in scores.tolist() if score > found)


def test_an_expert_of_which_nothing_is_known_is_named_whole() -> None:
    firings = made_firings(3)
    firings.chosen[firings.chosen == 1] = -1
    network = begun(2, matrices(), firings)  # type: ignore[arg-type]
    found = thresholds(network, firings, 0.05)
    assert found[1] == np.finfo(np.float32).min
    assert bool((network.scores(1, network.compressed(torch.randn(50, FEATURES) * 100)) >= float(found[1])).all())


def test_what_is_kept_is_counted_of_rows_neurons_and_blocks(tmp_path: Path) -> None:
    told = lesson(tmp_path)
    layer = trained_neurons(told, NeuronCourse(2, 1), silent, unseen).layers[AT]
    counts, firings = np.zeros(6), told.heldout[AT]
    for token, slot in np.argwhere(firings.chosen >= 0):
        expert = firings.chosen[token, slot]
        scores = layer.heads[expert].astype(np.float32) @ (
            layer.compress.astype(np.float32) @ firings.x[token].astype(np.float32)
        )
        named, fires = scores + layer.bias[expert] >= layer.threshold[expert], firings.weights[token, slot] > 0
        size = (3, 3, 4)[expert]
        blocks = [named[start : start + size].any() for start in range(0, D_FF, size)]
        counts += [(named & fires).sum(), fires.sum(), named.sum(), len(named), sum(blocks), len(blocks)]
    assert layer.kept == pytest.approx(counts[::2] / counts[1::2], abs=1e-3)


def test_the_same_seed_gives_the_same_bytes_and_another_others(tmp_path: Path) -> None:
    def body(name: str, seed: int) -> bytes:
        return trained_neurons(lesson(tmp_path / name), NeuronCourse(2, 3, seed=seed), silent, unseen).to_bytes()

    assert body("a", 0) == body("b", 0)
    assert body("c", 1) != body("a", 0)


class Interrupted(Exception):
    pass


class Ends:
    """A bar of a run that is killed in the middle of its third epoch."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, label: str, total: int, unit: str = "probe", /) -> Ends:
        return self

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: int) -> None:
        self.batches += n
        if self.batches == 8:
            raise Interrupted


class Counting:
    """A bar that notes how far it came."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def __call__(self, label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Counting]:
        self.total = total
        return nullcontext(self)

    def update(self, n: int) -> None:
        self.done += n


def test_what_was_interrupted_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    course = NeuronCourse(2, 5)
    whole = trained_neurons(lesson(tmp_path / "whole"), course, silent, unseen).to_bytes()
    with pytest.raises(Interrupted):
        trained_neurons(lesson(tmp_path / "other"), course, silent, Ends())
    assert list((tmp_path / "other").glob("*.pt"))
    bar = Counting()
    assert trained_neurons(lesson(tmp_path / "other"), course, silent, bar).to_bytes() == whole
    assert bar.done == bar.total, "what was done before counts"
    assert trained_neurons(lesson(tmp_path / "other"), course, silent, unseen).to_bytes() == whole, "nothing to do"
    short = NeuronCourse(2, 1)
    fresh = trained_neurons(lesson(tmp_path / "fresh"), short, silent, unseen).to_bytes()
    other = trained_neurons(lesson(tmp_path / "whole", "another text"), short, silent, unseen).to_bytes()
    assert other == fresh != whole, "a checkpoint about something else is not taken"
    (tmp_path / "other" / f"{AT}.pt").write_bytes(b"nonsense")
    with pytest.raises(ConversionError, match=r"D00\.pt can't be read .*: delete it"):
        trained_neurons(lesson(tmp_path / "other"), course, silent, unseen)


@pytest.mark.parametrize("size", [1, 3, 7, 20, 25])
def test_all_of_a_block_is_computed_where_one_is_named(size: int) -> None:
    """Token by token, against the plain words of SPEC.md."""
    spec = SPECS["switch"]
    predictor = random_predictor(spec)
    place = next(iter(predictor.layers))
    layer, d_ff = predictor.layers[place], spec.moe.ffn.d_ff
    x = torch.randn((9, spec.expert_width), generator=torch.Generator().manual_seed(0))
    named_neurons = NamedNeurons(predictor, lambda key: size)
    some = 0
    for expert in range(spec.moe.n):
        found = named_neurons.computed(place.expert(expert), x).numpy()
        assert found.shape == (9, d_ff)
        for row, token in zip(found, x.numpy(), strict=True):
            scores = layer.heads[expert].astype(np.float32) @ (layer.compress.astype(np.float32) @ token)
            named = scores + layer.bias[expert] >= layer.threshold[expert]
            expected = [bool(named[at // size * size : at // size * size + size].any()) for at in range(d_ff)]
            assert row.tolist() == expected
            some += sum(expected)
    assert 0 < some < 9 * d_ff * spec.moe.n or size >= 20


def test_blocks_at_the_end_may_be_smaller() -> None:
    named = torch.tensor([[False, False, False, False, True], [True, False, False, False, False]])
    assert in_blocks(named, 2).tolist() == [[False, False, True], [True, False, False]]


def test_what_is_left_out_counts_as_zero() -> None:
    """In the arithmetic of experts, of which nothing else changes."""
    from moeconv.source.experts import expert_inner, expert_outer

    (weights, biases), ffn = matrices()[0], SPECS["switch"].moe.ffn
    x = torch.randn((4, FEATURES), generator=torch.Generator().manual_seed(1))
    inner = expert_inner(x, weights, biases, ffn)
    assert torch.equal(expert_outer(inner, weights, biases), expert_ffn(x, weights, ffn, biases))
    without = inner.clone()
    without[:, 3:6] = 0
    gone = inner[:, 3:6] @ weights[1][:, 3:6].T
    assert torch.allclose(expert_outer(without, weights, biases) + gone, expert_ffn(x, weights, ffn, biases), atol=1e-4)


def test_kept_of_nothing_is_nothing() -> None:
    firings = made_firings(0)
    network = begun(2, matrices(), firings)  # type: ignore[arg-type]
    assert kept_of(network, np.full(EXPERTS, 1e9, np.float32), firings, [3] * EXPERTS) == Kept(0, 0, 0)
