"""Trellis codes: the codec, the C beside numpy, and their error beside that of gptq."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.quantizers import QUANTIZERS, Inputs, coding
from moeconv.quantizers import trellis as quantizer
from moeconv.quantizers.trellis import TrellisQuantizer
from moert.kernels import library
from moert.pack.codec import (
    CODES,
    F32,
    block_bytes,
    decoded,
    dequantize,
    dequantize_trellis,
    pack_windows,
    rows_of_blocks,
    signs,
    turned,
    turned_together,
)

needs_library = pytest.mark.skipif(library.load() is None, reason="the native kernels were not built")

WIDTHS = sorted(CODES)
SHANNON = {bits: 4.0**-bits for bits in WIDTHS}
"""The least squared error of normally distributed weights of deviation 1 (the distortion-rate function)."""
NORMAL = {1: 0.275, 1.5: 0.142, 2: 0.0735, 2.5: 0.0390, 3: 0.0205, 4: 0.0057}
"""The squared error that these codes come to."""


def inputs_of(n: int, size: int, seed: int) -> Inputs:
    """Moments of correlated inputs."""
    rng = np.random.default_rng(seed)
    mixed = np.eye(size) + 0.6 * rng.standard_normal((size, size)) / np.sqrt(size)
    x = rng.standard_normal((n, 4 * size, size)) @ mixed
    return Inputs.of(np.full(n, 4 * size), np.einsum("nti,ntj->nij", x, x).astype(np.float32) / (4 * size))


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_table_has_each_number_with_both_signs_and_windows_name_all_pairs_about_equally_often(bits: float) -> None:
    code = CODES[bits]
    table = code.table.astype(int)
    assert (np.diff(table) > 0).all()
    assert table[-1] == 127
    assert (table == -table[::-1]).all()
    pairs, counts = np.unique(code.values(np.arange(4096, dtype=np.uint32)), axis=0, return_counts=True)
    assert len(pairs) >= 4096 // 4
    assert counts.max() <= 4 * 4096 // len(table) ** 2 + 4


@settings(max_examples=30)
@given(st.sampled_from(WIDTHS), st.integers(1, 200), st.integers(0, 1000))
def test_windows_come_back_from_their_stream(bits: float, steps: int, seed: int) -> None:
    step = CODES[bits].step
    stream = np.random.default_rng(seed).integers(0, 2, steps * step + 12 - step, np.uint8)
    at = np.arange(steps) * step
    windows = sum(stream[at + i].astype(np.uint32) << np.uint32(i) for i in range(12))
    packed = pack_windows(np.asarray(windows, np.uint32), step)
    assert (np.unpackbits(packed, bitorder="little")[: len(stream)] == stream).all()
    assert len(packed) == -(-(steps * step) // 8) + 2


@pytest.mark.parametrize("size", [1, 2, 6, 64, 96, 320])
def test_turning_twice_gives_the_values_times_their_number(size: int) -> None:
    values = normal(3, size)
    np.testing.assert_allclose(turned(turned(values)), values * turned_together(size), rtol=1e-5, atol=1e-5)
    assert set(signs(size)) <= {-1.0, 1.0}


def test_signs_are_about_half_of_each_and_their_formula_stays() -> None:
    assert abs(signs(4096).mean()) < 0.05
    assert signs(16).astype(int).tolist() == [1, 1, -1, 1, 1, -1, 1, 1, -1, -1, 1, 1, 1, -1, 1, -1]


@pytest.mark.parametrize("bits", WIDTHS)
def test_normal_weights_are_coded_within_a_fifth_of_what_is_possible(bits: float) -> None:
    weights = normal(1, 128, 128)
    (matrix,) = TrellisQuantizer().quantize(weights, bits, None)
    error = float(np.square(dequantize_trellis(matrix) - weights).mean() / np.square(weights).mean())
    assert SHANNON[bits] < error < NORMAL[bits]
    assert matrix.stream.nbytes == block_bytes(128, 128, CODES[bits].step)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(1, 140), st.integers(1, 9), st.booleans(), st.integers(0, 99))
@needs_library
def test_numpy_finds_the_codes_of_the_c(bits: float, out: int, in_features: int, sweep: bool, seed: int) -> None:
    """Bit for bit. Some rows are zero."""
    weights = normal(2, out, in_features, seed=seed) * (np.random.default_rng(seed).random((2, out, 1)) > 0.2)
    inputs = inputs_of(2, in_features, seed)
    found = []
    for way in (coding.code_pairs, lambda: None):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(quantizer, "code_pairs", way)
            found.append(TrellisQuantizer(int(sweep)).quantize(weights, bits, inputs))
    for one, other in zip(*found, strict=True):
        assert one.stream.tobytes() == other.stream.tobytes()
        assert one.scale.tobytes() == other.scale.tobytes()
        assert len(one.stream) == sum(block_bytes(n, in_features, CODES[bits].step) for n in rows_of_blocks(out))
        assert decoded(one).shape == (out, in_features)
    zero = ~weights.any(2)
    back = np.stack([dequantize_trellis(matrix) for matrix in found[0]])
    assert (back[zero] == 0).all()


@needs_library
def test_all_instruction_sets_find_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, inputs = normal(1, 40, 32), inputs_of(1, 32, 1)
    loaded = library.load()
    assert loaded is not None
    found = set()
    for each in loaded.instruction_sets:
        if each.runs:
            monkeypatch.setattr(type(loaded), "choose", lambda *_, number=each.number: number)
            monkeypatch.setattr(quantizer, "code_pairs", coding.code_pairs.__wrapped__)
            found.add(TrellisQuantizer(1).quantize(weights, 2, inputs)[0].stream.tobytes())
    assert len(found) == 1


def test_less_is_lost_than_by_gptq_with_fewer_bits() -> None:
    weights, inputs = normal(2, 128, 96), inputs_of(2, 96, 3)

    def lost(back: list[F32]) -> float:
        missed = np.stack(back) - weights
        return float(np.einsum("noi,nij,noj->", missed, inputs.moment, missed))

    coded = {sweeps: TrellisQuantizer(sweeps).quantize(weights, 2, inputs) for sweeps in (0, 1)}
    other = QUANTIZERS["gptq"](0).quantize(weights, 2, inputs)
    theirs = lost([dequantize(matrix) for matrix in other])
    mine = {sweeps: lost([dequantize_trellis(matrix) for matrix in found]) for sweeps, found in coded.items()}
    assert mine[0] < 0.8 * theirs
    assert mine[1] < mine[0]


def test_a_matrix_is_coded_as_it_is_alone() -> None:
    weights, inputs = normal(3, 24, 32), inputs_of(3, 32, 4)
    together = TrellisQuantizer().quantize(weights, 1.5, inputs)
    for i, matrix in enumerate(together):
        own = Inputs(inputs.rows[i : i + 1], inputs.moment[i : i + 1], inputs.counted[i : i + 1])
        (alone,) = TrellisQuantizer().quantize(weights[i : i + 1], 1.5, own)
        assert alone.stream.tobytes() == matrix.stream.tobytes()


def test_codes_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, inputs, found = normal(2, 300, 64), inputs_of(2, 64, 5), []
    for threads in (1, 3):
        monkeypatch.setattr(quantizer.torch, "get_num_threads", lambda threads=threads: threads)
        found.append(TrellisQuantizer(sweeps=1).coded(weights, 2, inputs))
    for mine, theirs in zip(*found, strict=True):
        assert np.array_equal(mine.stream, theirs.stream)
        assert np.array_equal(mine.scale, theirs.scale)


def test_many_rows_are_coded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are whole blocks, so that their streams follow one another."""
    weights = np.random.default_rng(2).standard_normal((1, 300, 16)).astype(np.float32)
    whole = TrellisQuantizer().coded(weights, 2, None)[0]
    monkeypatch.setattr(quantizer, "_ROWS_AT_ONCE", 128)
    pieces = TrellisQuantizer().coded(weights, 2, None)[0]
    assert (pieces.stream.tobytes(), pieces.scale.tobytes()) == (whole.stream.tobytes(), whole.scale.tobytes())
