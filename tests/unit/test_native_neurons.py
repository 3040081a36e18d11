"""Single neurons, natively: the bits of whole matrices, whatever lies where, whatever is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import Kind, Natives, activations, all_natives, normal, random_stored

from moert.kernels.backend import I64, Floats, Stored
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend, weights
from moert.pack.codec import F32, U8
from moert.pack.layout import MatrixPlace, NeuronLayout, group_of
from moert.pack.parts import Act, Ffn

Backends = NativeBackend | ReferenceBackend
REFERENCE = ReferenceBackend()
KINDS: tuple[Kind, ...] = (2, 3, 4, 8, "F16", "BF16")
GROUPS = (None, 16, 32, 64, 128, 48, 10, 1)
kinds, groups, seeds = st.sampled_from(KINDS), st.sampled_from(GROUPS), st.integers(0, 1 << 20)
blocks_of = st.integers(1, 12)
RELU = Ffn(1, Act("relu"), gated=False)


@pytest.fixture(scope="module")
def backends() -> Iterator[Natives]:
    with all_natives() as opened:
        yield opened


class Neurons(NamedTuple):
    """Matrices [d_ff, d_model] (`down` by columns), and the same in blocks."""

    spec: Ffn
    matrices: dict[str, Stored]
    biases: dict[str, F32]
    layout: NeuronLayout
    base: U8
    rows: I64
    columns: I64

    def fired(self, backend: Backends, x: F32, rows: I64 | None = None) -> F32:
        return backend.fire(self.layout, self.base, self.rows if rows is None else rows, x, self.spec)

    def projected(self, backend: Backends, hidden: F32, bias: F32 | None = None, columns: I64 | None = None) -> F32:
        return backend.project(self.layout, self.base, self.columns if columns is None else columns, hidden, bias)

    def whole(self, backend: NativeBackend, x: F32) -> F32:
        """What `fire` should give, as whole experts have it whose `down` picks so many neurons as it has outputs."""
        held = {name: backend.matrix(self.matrices[name], self.biases.get(name)) for name in self.layout.rows}
        tokens, ones = np.arange(len(x), dtype=np.int32), np.ones(len(x), np.float32)
        found, picks = [], np.eye(-(-self.layout.d_ff // x.shape[1]) * x.shape[1], self.layout.d_ff, dtype=np.float32)
        for first in range(0, self.layout.d_ff, x.shape[1]):
            down = backend.matrix(Floats("F32", picks[first : first + x.shape[1]]))
            found.append(np.zeros_like(x))
            ffn = backend.dense(held.get("gate"), held["up"], down)
            backend.mixture([ffn], [len(x)], tokens, ones, x, found[-1], self.spec)
        return np.concatenate(found, axis=1)[:, : self.layout.d_ff]

    def sparse(self, rng: np.random.Generator, tokens: int, share: float) -> F32:
        """hidden [tokens, d_ff] of which about `share` is not 0."""
        return normal(rng, tokens, self.layout.d_ff) * (rng.random((tokens, self.layout.d_ff)) < share)


def arrays_of(stored: Stored, rows: slice, per_block: int) -> list[npt.NDArray[np.generic]]:
    """What a piece has of a matrix: these rows, and zeros up to a whole block."""
    given = [stored.data] if isinstance(stored, Floats) else [stored.qweight, stored.scale, stored.minimum]
    made: list[npt.NDArray[np.generic]] = []
    for array in given:
        part = array[rows]
        made.append(np.concatenate([part, np.zeros((per_block - len(part), *part.shape[1:]), part.dtype)]))
    return made


def piece_of(matrices: Sequence[Stored], biases: Sequence[F32], at: slice, per_block: int) -> tuple[bytes, list[int]]:
    """Its bytes, and where in it each array begins."""
    body, places = bytearray(), []
    arrays = [array for stored in matrices for array in arrays_of(stored, at, per_block)]
    arrays += [np.concatenate([bias[at], np.zeros(per_block - len(bias[at]), np.float32)]) for bias in biases]
    for array in arrays:
        places.append(len(body))
        body += array.tobytes()
        body += bytes(-len(body) % 8)
    return bytes(body) + bytes(-len(body) % 512), places


def place_of(stored: Stored, places: list[int], bias_place: int | None) -> MatrixPlace:
    """Takes its places from the front of those that are left."""
    if isinstance(stored, Floats):
        assert stored.dtype != "F32"
        return MatrixPlace(16, 0, stored.dtype, (places.pop(0),), bias_place)
    mine = tuple(places.pop(0) for _ in range(3))
    return MatrixPlace(stored.bits, stored.group_size, "F16", mine, bias_place)


def in_blocks(
    rng: np.random.Generator, spec: Ffn, matrices: dict[str, Stored], biases: dict[str, F32], d_model: int,
    per_block: int,
) -> Neurons:  # fmt: skip
    """The pieces lie in any order, with something else between them."""
    names, n_blocks = spec.projections[:-1], -(-spec.d_ff // per_block)
    row_matrices, row_biases = [matrices[name] for name in names], [biases[name] for name in names if spec.bias]
    spans = [slice(k * per_block, min((k + 1) * per_block, spec.d_ff)) for k in range(n_blocks)]
    rows = [piece_of(row_matrices, row_biases, span, per_block) for span in spans]
    columns = [piece_of([matrices["down"]], [], span, per_block) for span in spans]
    left, bias_places = rows[0][1][: len(rows[0][1]) - len(row_biases)], rows[0][1][len(rows[0][1]) - len(row_biases) :]
    at = {name: place_of(matrices[name], left, bias_places.pop(0) if spec.bias else None) for name in names}
    pieces = [piece for piece, _ in rows + columns]
    offsets, body = np.zeros(2 * n_blocks, np.int64), bytearray()
    for which in rng.permutation(2 * n_blocks):
        body += rng.bytes(512 * int(rng.integers(0, 3)))
        offsets[which] = len(body)
        body += pieces[which]
    layout = NeuronLayout(
        d_model, spec.d_ff, per_block, n_blocks, at, place_of(matrices["down"], list(columns[0][1]), None),
        len(pieces[0]), len(pieces[-1]), 0, 0, 0, 0, None,
    )  # fmt: skip
    base = np.empty(len(body) + 64, np.uint8)
    base = base[-base.ctypes.data % 64 :][: len(body)]
    base[:] = np.frombuffer(bytes(body), np.uint8)
    return Neurons(spec, matrices, biases, layout, base, offsets[:n_blocks].copy(), offsets[n_blocks:].copy())


def problem(
    seed: int, d_model: int, d_ff: int, per_block: int, kinds: Sequence[Kind], group: int | None, gated: bool = False,
    bias: bool = False, act: Act = RELU.act,
) -> Neurons:  # fmt: skip
    rng, spec = np.random.default_rng(seed), Ffn(d_ff, act, gated, bias)
    matrices = {
        name: random_stored(rng, kind, d_ff, d_model, group, size=d_model**-0.5)
        for name, kind in zip(spec.projections, kinds, strict=False)
    }
    biases = {name: normal(rng, d_ff) for name in spec.projections[:-1] if bias}
    return in_blocks(rng, spec, matrices, biases, d_model, min(per_block, d_ff))


def same(found: F32, expected: F32) -> bool:
    """To the sign of a zero."""
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@settings(max_examples=80)
@given(
    seed=seeds, d_model=st.integers(1, 200), d_ff=st.integers(1, 120), per_block=blocks_of, group=groups,
    widths=st.lists(kinds, min_size=3, max_size=3), gated=st.booleans(), bias=st.booleans(),
    act=st.sampled_from([Act("relu"), Act("relu2"), Act("relu2", limit=0.4), Act("relu", plus=0.5)]),
    tokens=st.one_of(st.integers(1, 5), st.integers(1, 40)),
)  # fmt: skip
def test_what_neurons_have_is_what_whole_matrices_give(
    backends: Natives, seed: int, d_model: int, d_ff: int, per_block: int, group: int | None, widths: list[Kind],
    gated: bool, bias: bool, act: Act, tokens: int,
) -> None:  # fmt: skip
    """The same bits on all instruction sets, also of those blocks that are there; and near to the reference."""
    neurons = problem(seed, d_model, d_ff, per_block, widths, group, gated, bias, act)
    rng = np.random.default_rng(seed)
    x = activations(rng, tokens, d_model)
    some = np.where(rng.random(neurons.layout.n_blocks) < 0.5, neurons.rows, -1)
    there = np.repeat(some >= 0, neurons.layout.per_block)[:d_ff]
    first = neurons.fired(next(iter(backends.values())), x)
    for backend in backends.values():
        assert same(neurons.fired(backend, x), first), backend.name
        assert same(neurons.whole(backend, x), first + np.float32(0)), backend.name
        assert same(neurons.fired(backend, x, some), np.where(there, first, np.float32(0))), backend.name
    expected = neurons.fired(REFERENCE, x)
    room = 0.02 * np.abs(x).max() * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(first, expected, atol=0.02 + room, rtol=0.02)
    alone = neurons.fired(REFERENCE, x, some)
    assert same(alone, np.where(there, expected, np.float32(0)))


def test_neurons_of_floats_are_those_of_the_reference(backends: Natives) -> None:
    """Nothing is rounded to 8 bits then."""
    for gated in (False, True):
        neurons = problem(3, 130, 90, 7, ["F16", "BF16", "F16"], None, gated, True)
        x = activations(np.random.default_rng(4), 6, 130)
        for backend in backends.values():
            np.testing.assert_allclose(neurons.fired(backend, x), neurons.fired(REFERENCE, x), rtol=1e-4, atol=1e-4)


@settings(max_examples=80)
@given(
    seed=seeds, d_model=st.one_of(st.integers(1, 200), st.integers(900, 1300)), d_ff=st.integers(1, 150),
    per_block=blocks_of, group=groups, kind=kinds, bias=st.booleans(), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    tokens=st.one_of(st.integers(1, 5), st.integers(1, 40)),
)  # fmt: skip
def test_columns_of_those_that_fired(
    backends: Natives, seed: int, d_model: int, d_ff: int, per_block: int, group: int | None, kind: Kind, bias: bool,
    share: float, tokens: int,
) -> None:  # fmt: skip
    """The same bits on all instruction sets, by any number of threads, for one token or many, whether or not the other
    columns are there; and those of sums in double precision, rounded once for each neuron."""
    neurons, rng = problem(seed, d_model, d_ff, per_block, [8, kind], group), np.random.default_rng(seed)
    hidden, added = neurons.sparse(rng, tokens, share), normal(rng, d_model) if bias else None
    needed = np.zeros(neurons.layout.n_blocks, bool)
    needed[np.flatnonzero(hidden.any(axis=0)) // neurons.layout.per_block] = True
    only = np.where(needed, neurons.columns, -1)
    first = neurons.projected(next(iter(backends.values())), hidden, added)
    for backend in backends.values():
        assert same(neurons.projected(backend, hidden, added), first), backend.name
        assert same(neurons.projected(backend, hidden, added, only), first), backend.name
        for t in range(tokens):
            assert same(neurons.projected(backend, hidden[t : t + 1], added, only)[0], first[t]), backend.name
    expected = np.zeros((tokens, d_model), np.float32)
    columns = weights(neurons.matrices["down"]).astype(np.float64)
    for neuron in range(d_ff):  # a float32 times a float32 is exact in double precision, so it is rounded twice at most
        expected = (expected + hidden[:, neuron, None].astype(np.float64) * columns[neuron]).astype(np.float32)
    expected = expected if added is None else expected + added
    np.testing.assert_allclose(first, expected, rtol=1e-6, atol=1e-6)
    found = neurons.projected(REFERENCE, hidden, added)
    np.testing.assert_allclose(first, found, rtol=1e-5, atol=1e-5)
    assert same(found, neurons.projected(REFERENCE, hidden, added, only))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_skipped_and_change_no_bit(backends: Natives, kind: Kind) -> None:
    """Beside tokens that fire all neurons nothing is skipped. A sum so small that -0 is left of it becomes 0."""
    neurons, rng = problem(7, 70, 64, 5, [8, kind], 32), np.random.default_rng(8)
    hidden = neurons.sparse(rng, 9, 0.2)
    hidden[4], hidden[7] = 1, 0
    hidden[2] = np.where(hidden[2], np.float32(-1e-45), 0)
    for backend in backends.values():
        together = neurons.projected(backend, hidden)
        assert not np.signbit(together[together == 0]).any()
        assert not together[7].any()
        for t in range(9):
            assert same(neurons.projected(backend, hidden[t : t + 1])[0], together[t]), backend.name


def test_a_layout_of_real_size(backends: Natives) -> None:
    """Threads share the columns of one token, and parts of them that are floats at one time."""
    for kind, d_model in ((3, 2048), (4, 2100), ("BF16", 1100)):
        neurons = problem(9, d_model, 300, 6, [2, kind], 64)
        hidden = neurons.sparse(np.random.default_rng(1), 21, 0.3)
        found = [neurons.projected(backend, hidden) for backend in backends.values()]
        assert all(same(each, found[0]) for each in found)
        for backend in backends.values():
            assert same(neurons.projected(backend, hidden[:1]), found[0][:1])
            assert same(neurons.projected(backend, hidden[:3]), found[0][:3])


def test_a_neuron_that_fired_and_is_not_there(backends: Natives) -> None:
    neurons = problem(11, 40, 30, 4, [4, 4], 16)
    hidden, missing = neurons.sparse(np.random.default_rng(2), 6, 0.5), neurons.columns.copy()
    hidden[:, 9], missing[2] = 0, -1
    hidden[5, 9] = 1e-30
    for backend in (*backends.values(), REFERENCE):
        with pytest.raises(ValueError, match="not there"):
            neurons.projected(backend, hidden, columns=missing)
        hidden[5, 8:12] = 0
        left = hidden * (np.arange(30) // 4 != 2)
        assert neurons.projected(backend, left, columns=missing).shape == (6, 40)
        hidden[5, 9] = 1


def test_not_a_number_stays_with_its_token(backends: Natives) -> None:
    neurons = problem(12, 75, 40, 3, [8, 4], 16)
    good = neurons.sparse(np.random.default_rng(2), 6, 0.5)
    wrong = good.copy()
    wrong[3, 20] = np.nan
    others = [0, 1, 2, 4, 5]
    for backend in backends.values():
        found = neurons.projected(backend, wrong)
        assert np.isnan(found[3]).all()
        assert same(found[others], neurons.projected(backend, good)[others])


def test_nothing_at_all(backends: Natives) -> None:
    neurons, none = problem(13, 33, 20, 3, [4, 4], 16), np.full(7, -1, np.int64)
    bias = normal(np.random.default_rng(0), 33)
    for backend in (*backends.values(), REFERENCE):
        assert neurons.fired(backend, np.ones((0, 33), np.float32)).shape == (0, 20)
        assert neurons.projected(backend, np.ones((0, 20), np.float32)).shape == (0, 33)
        assert not neurons.fired(backend, np.ones((2, 33), np.float32), none).any()
        assert np.array_equal(neurons.projected(backend, np.zeros((2, 20), np.float32), bias, none), [bias, bias])


def test_groups_cover_the_row_of_a_column() -> None:
    """The reference reads a group size that is larger than a row as one scale a row, as the native kernels do."""
    assert group_of(33, 64) == group_of(33, 0) == 33
