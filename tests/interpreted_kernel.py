"""Runs the Triton kernels in Triton's interpreter, beside torch alone; exits with 1 where they differ. To be started
with TRITON_INTERPRET=1, which Triton reads when it is imported."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import torch

from moert.beside.gpu import triton_kernel
from moert.beside.gpu.torch_backend import tiled
from moert.beside.gpu.torch_matrices import TorchMatrix, copied, lying, placed
from moert.pack.codec import CODES
from tests.native_problems import KINDS, normal, random_stored
from tests.random_packs import random_trellis
from tests.unit.test_torch_ops import random_mxfp4, trellis_part

SHAPES = ((1, 1), (8, 256), (9, 33), (37, 300), (5, 513))
TOKENS = (1, 2, 4, 5, 9)
CODED_SHAPES, CODED_TOKENS = ((1, 1), (9, 33), (5, 513), (300, 160)), (1, 5)
CPU = torch.device("cpu")


def differing(name: str, matrix: TorchMatrix, tokens: int) -> list[str]:
    x = torch.from_numpy(normal(np.random.default_rng(tokens), tokens, matrix.cols))
    found, expected = triton_kernel.product(x, matrix), tiled(x, matrix)
    apart = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    return [] if apart < 2e-5 else [f"{name}, {matrix.rows} x {matrix.cols}, {tokens} tokens: {apart:.2g} apart"]


def small_exponents(matrix: TorchMatrix) -> TorchMatrix:
    """So that sums are finite."""
    assert matrix.scale is not None
    matrix.scale.copy_(matrix.scale % 12 + 120)
    return matrix


def main() -> int:
    rng, wrong, checked = np.random.default_rng(0), list[str](), 0
    for rows, cols in SHAPES:
        matrices = {
            f"{kind} in groups of {group}": placed(random_stored(rng, kind, rows, cols, group), None, CPU)
            for kind in KINDS
            for group in (None, 32, 10)
        }
        body, part = random_mxfp4(rng, rows, cols)
        matrices["MXFP4"] = small_exponents(lying(copied(np.frombuffer(body, np.uint8), CPU), part))
        for name, matrix in matrices.items():
            for tokens in TOKENS:
                wrong += differing(name, matrix, tokens)
                checked += 1
    triton_kernel.PROGRAMS = 4  # so that each has more inputs than are turned at a time
    for (rows, cols), bits, tokens in product(CODED_SHAPES, CODES, CODED_TOKENS):
        body, part = trellis_part(random_trellis(rng, rows, cols, bits))
        wrong += differing(f"{bits} bits of trellis codes", lying(copied(body, CPU), part), tokens)
        checked += 1
    print(*wrong or [f"{checked} products"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
