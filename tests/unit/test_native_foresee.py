"""Native kernels of what foresees experts: beside the reference and torch, and the same bits alone as beside others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import all_natives, normal

from moert.kernels.backend import I32
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend, sparsemax
from moert.pack.codec import F32

Backends = NativeBackend | ReferenceBackend
REFERENCE = ReferenceBackend()
seeds, widths = st.integers(0, 1 << 20), st.integers(1, 200)
counts_of = st.lists(st.integers(0, 9), max_size=20)


@pytest.fixture(scope="module")
def natives() -> Iterator[list[NativeBackend]]:
    with all_natives() as opened:
        yield list(opened.values())


class Sequences:
    """Of so many rows each, for an LSTM of some width."""

    def __init__(self, seed: int, counts: Sequence[int], width: int) -> None:
        rng = np.random.default_rng(seed)
        self.counts, self.inputs = list(counts), 2 * normal(rng, sum(counts), 4 * width)
        self.recurrent = normal(rng, width, 4 * width) / np.float32(width**0.5)
        self.state = normal(rng, len(counts), 2, width)

    def read(self, backend: Backends, backward: bool) -> tuple[F32, F32]:
        """Output and state."""
        state = self.state.copy()
        return backend.lstm(self.inputs, self.recurrent, state, self.counts, backward), state

    def alone(self, backend: Backends, backward: bool, most: int) -> tuple[F32, F32]:
        """One sequence after the other, so many rows at once."""
        state, made = self.state.copy(), np.empty((len(self.inputs), len(self.recurrent)), np.float32)
        for place, (end, count) in enumerate(zip(np.cumsum(self.counts), self.counts, strict=True)):
            pieces = [slice(at, min(at + most, end)) for at in range(end - count, end, most)]
            for at in reversed(pieces) if backward else pieces:
                inputs, own = self.inputs[at], state[place : place + 1]
                made[at] = backend.lstm(inputs, self.recurrent, own, [len(inputs)], backward)
        return made, state


def same(found: tuple[F32, F32], expected: tuple[F32, F32]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@settings(max_examples=40)
@given(seed=seeds, counts=counts_of, width=widths, backward=st.booleans(), most=st.integers(1, 9))
def test_an_lstm(
    natives: list[NativeBackend], seed: int, counts: list[int], width: int, backward: bool, most: int
) -> None:
    """To float32 what the reference gives; on all instruction sets, alone and in pieces, the same bits."""
    sequences = Sequences(seed, counts, width)
    first = sequences.read(natives[0], backward)
    for found, expected in zip(first, sequences.read(REFERENCE, backward), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6 * max(1, np.abs(expected).max(initial=0)))
    for backend in natives:
        assert same(sequences.read(backend, backward), first), backend.name
        assert same(sequences.alone(backend, backward, most), first), backend.name


@pytest.mark.parametrize("backward", [False, True])
def test_an_lstm_of_many_sequences_beside_torch(natives: list[NativeBackend], backward: bool) -> None:
    """With the weights of torch's own, at a size at which threads share a step."""
    import torch

    counts, width, inputs = [12, 0, 3, 7, 12, 1, *range(20)], 160, 40
    torch.manual_seed(0)
    network = torch.nn.LSTM(inputs, width, batch_first=True)
    bias = (network.bias_ih_l0 + network.bias_hh_l0).detach()
    recurrent = np.ascontiguousarray(network.weight_hh_l0.detach().numpy().T)
    x, state = torch.randn(sum(counts), inputs), torch.randn(len(counts), 2, width)
    gates, left = (x @ network.weight_ih_l0.detach().T + bias).numpy(), state.numpy().copy()
    found = [(backend.lstm(gates, recurrent, own := left.copy(), counts, backward), own) for backend in natives]
    assert all(same(each, found[0]) for each in found)
    for place, rows in enumerate(torch.split(x, counts)):
        at = slice(sum(counts[:place]), sum(counts[: place + 1]))
        if not len(rows):
            assert np.array_equal(found[0][1][place], left[place])
            continue
        before = state[place, 0][None, None], state[place, 1][None, None]
        with torch.no_grad():
            y, (h, c) = network(rows.flip(0)[None] if backward else rows[None], before)
        y = y[0].flip(0) if backward else y[0]
        np.testing.assert_allclose(found[0][0][at], y.numpy(), rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(found[0][1][place], torch.cat([h[0], c[0]]).numpy(), rtol=1e-5, atol=5e-6)


def test_rows_that_are_columns_of_a_wider_array(natives: list[NativeBackend]) -> None:
    """Both directions come of one product."""
    sequences = Sequences(3, [3, 1, 4], 24)
    expected = sequences.read(natives[0], True)
    wide = normal(np.random.default_rng(4), len(sequences.inputs), 2 * 96)
    wide[:, 96:] = sequences.inputs
    sequences.inputs = wide[:, 96:]
    for backend in natives:
        assert same(sequences.read(backend, True), expected), backend.name


def nearest_on_the_simplex(scores: F32) -> npt.NDArray[np.float64]:
    """By the definition of Martins & Astudillo 2016, algorithm 1: scores [n]."""
    falling = np.sort(scores.astype(np.float64))[::-1]
    sums, places = np.cumsum(falling), np.arange(1, len(scores) + 1)
    k = places[1 + places * falling > sums].max()
    return np.maximum(scores - (sums[k - 1] - 1) / k, 0)


@settings(max_examples=100)
@given(seed=seeds, rows=st.integers(1, 5), n=st.integers(1, 60), size=st.sampled_from([0.01, 0.3, 1, 5, 100]))
def test_sparsemax(seed: int, rows: int, n: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    scores = np.float32(size) * normal(rng, rows, 2, n)
    scores[0, :, rng.random(n) < 0.3] = 0  # equal ones
    shares = sparsemax(scores)
    assert shares.dtype == np.float32
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-5)
    expected = np.apply_along_axis(nearest_on_the_simplex, -1, scores)
    np.testing.assert_allclose(shares, expected, atol=3e-7 * max(1, float(np.abs(scores).max())))


def spans_of(rng: np.random.Generator, rows: int, keys: int) -> I32:
    """Any; a few of them are empty, or end before they begin."""
    spans = rng.integers(0, keys + 1, (rows, 2), dtype=np.int32)
    return np.where(rng.random((rows, 1)) < 0.75, np.sort(spans, axis=1), spans)


@settings(max_examples=40)
@given(
    seed=seeds, rows=st.integers(0, 30), keys=st.integers(1, 80), width=widths, size=st.sampled_from([0.1, 1, 1, 10])
)  # fmt: skip
def test_sparse_attention(
    natives: list[NativeBackend], seed: int, rows: int, keys: int, width: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    queries, key, values = (
        np.float32(size) * normal(rng, rows, width),
        normal(rng, keys, width),
        normal(rng, keys, width),
    )
    spans = spans_of(rng, rows, keys)
    expected, first = (backend.attend_sparsely(queries, key, values, spans) for backend in (REFERENCE, natives[0]))
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=2e-5 * max(1, size))
    assert not first[spans[:, 0] >= spans[:, 1]].any()
    for backend in natives:
        assert np.array_equal(backend.attend_sparsely(queries, key, values, spans), first), backend.name
        for row in range(rows):
            alone = backend.attend_sparsely(queries[row : row + 1], key, values, spans[row : row + 1])
            assert np.array_equal(alone[0], first[row]), backend.name


def test_a_key_that_is_far_above_the_others_is_all_that_is_read(natives: list[NativeBackend]) -> None:
    rng = np.random.default_rng(0)
    queries, values = normal(rng, 6, 32), normal(rng, 6, 32)
    spans = np.stack([np.zeros(6), np.arange(1, 7)], axis=1).astype(np.int32)
    for backend in (*natives, REFERENCE):
        assert np.array_equal(backend.attend_sparsely(100 * queries, queries, values, spans), values), backend.name


def test_nothing_to_read(natives: list[NativeBackend]) -> None:
    for backend in (*natives, REFERENCE):
        for counts in ([], [0], [0, 0, 0]):
            sequences = Sequences(0, counts, 20)
            made, state = sequences.read(backend, False)
            assert made.shape == (0, 20)
            assert np.array_equal(state, sequences.state)
        none = np.empty((0, 20), np.float32)
        assert backend.attend_sparsely(none, none, none, np.empty((0, 2), np.int32)).shape == (0, 20)
        assert not backend.attend_sparsely(np.ones((1, 20), np.float32), none, none, np.zeros((1, 2), np.int32)).any()
