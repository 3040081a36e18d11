"""How fast kernels are said to be: bytes of the weights that were multiplied, over the time that it took."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moert.kernels import library
from moert.kernels.speed import PASSES, WIDTHS, Weights, kernel_speeds


@pytest.mark.parametrize(("bits", "nbytes"), [(2, 2048 * (512 + 128)), (4, 2048 * (1024 + 128)), (16, 2048 * 4096)])
def test_a_matrix_counts_with_its_scales(bits: int, nbytes: int) -> None:
    data = np.zeros(20 << 20, np.uint8)
    weights = Weights.laid_out(data, bits)
    assert weights.nbytes == nbytes
    assert len(weights.matrices) == len(data) // nbytes


@pytest.mark.parametrize(("bits", "nbytes"), [(1.5, 2048 * 384), (4, 2048 * 1024)])
def test_trellis_codes_count_with_what_ends_their_blocks(bits: float, nbytes: int) -> None:
    weights = Weights.laid_out(np.zeros(20 << 20, np.uint8), bits, trellis=True)
    assert weights.nbytes == nbytes + 2 * 2048 // 128 + 2 * 2048
    assert len(weights.matrices) == (20 << 20) // weights.nbytes


def test_the_best_pass_counts() -> None:
    loaded = library.load()
    if loaded is None:
        pytest.skip("no native kernels")
    # Each pass looks at the clock twice: they take 1, 2, 3, 4 seconds, and so on for each width.
    steps = itertools.chain.from_iterable((10.0 * at, 10.0 * at + at % PASSES + 1) for at in itertools.count())
    speeds = kernel_speeds(loaded, 1, 20 << 20, lambda: next(steps))
    whole = {bits: Weights.laid_out(np.zeros(20 << 20, np.uint8), bits) for bits in WIDTHS}
    assert speeds == {bits: each.nbytes * len(each.matrices) / 1.0 for bits, each in whole.items()}
