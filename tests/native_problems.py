"""Problems for the native kernels: random matrices of every kind, and the exact answer in double precision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moert.kernels import library
from moert.kernels.backend import StoredWeights
from moert.kernels.native import NativeBackend
from moert.pack.codec import INT_WIDTHS, QuantizedMatrix, dequantize, n_groups, pack_codes, unpack_codes
from moert.pack.layout import group_of

F64 = npt.NDArray[np.float64]
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
KINDS = (*INT_WIDTHS, *FLOATS)
Kind = int | str
BLOCK = 32
THREADS = (1, 3)


def running() -> list[str]:
    """Names of the instruction sets that this processor runs; none without the library."""
    found = library.load()
    return [] if found is None else [each.name for each in found.instruction_sets if each.runs]


def open_native(name: str, threads: int = 1) -> NativeBackend:
    found = library.load()
    assert found is not None
    return NativeBackend(found, found.choose(name), threads)


def random_stored(
    rng: np.random.Generator, kind: Kind, rows: int, cols: int, group: int | None, size: float = 0.05
) -> StoredWeights:
    """Weights of about `size`, of a width or float type; `group` None: one scale a row. Some rows are zeros."""
    empty = rng.random(rows) < 0.1
    if isinstance(kind, str):
        values = torch.from_numpy(rng.normal(0, size, (rows, cols)))
        values[torch.from_numpy(empty)] = 0
        return values.to(FLOATS[kind])
    covered = group_of(cols, cols if group is None else group)
    codes = rng.integers(0, 1 << kind, (rows, cols)).astype(np.uint8)
    shape = (rows, n_groups(cols, covered))
    scale = rng.uniform(0.2, 1, shape) * size * 4 / (1 << kind)
    minimum = rng.normal(-2, 0.5, shape) * size
    scale[empty] = minimum[empty] = 0
    return QuantizedMatrix(
        kind, cols, covered, pack_codes(codes, kind), scale.astype(np.float16), minimum.astype(np.float16)
    )


def exact(stored: StoredWeights) -> F64:
    """The weights [rows, cols]; of codes without the rounding that float32 would bring in."""
    if isinstance(stored, Tensor):
        return stored.double().numpy()
    scale, minimum = each_input(stored, stored.scale), each_input(stored, stored.minimum)
    found: F64 = codes_of(stored) * scale + minimum
    assert np.allclose(found, dequantize(stored), rtol=1e-6, atol=1e-6 * np.abs(found).max(initial=0))
    return found


def magnitude(stored: StoredWeights) -> F64:
    """[rows, cols]: what is summed up for each weight, without signs."""
    if isinstance(stored, Tensor):
        return np.abs(exact(stored))
    scale, minimum = each_input(stored, stored.scale), each_input(stored, stored.minimum)
    return codes_of(stored) * np.abs(scale) + np.abs(minimum)


def codes_of(stored: QuantizedMatrix) -> F64:
    return unpack_codes(stored.qweight, stored.bits, stored.in_features).astype(np.float64)


def each_input(stored: QuantizedMatrix, by_group: npt.NDArray[np.float16]) -> F64:
    return np.repeat(by_group.astype(np.float64), stored.group_size, axis=1)[:, : stored.in_features]


def rounded(x: npt.NDArray[np.float32]) -> F64:
    """x [tokens, cols] as matrices of codes see it: for each 32 inputs a scale of amax / 127 and whole numbers."""
    tokens, cols = x.shape
    blocks = np.zeros((tokens, -(-cols // BLOCK) * BLOCK), np.float32)
    blocks[:, :cols] = x
    blocks = blocks.reshape(tokens, -1, BLOCK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    turns = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    whole, scale = np.rint(blocks * turns), amax / np.float32(127)
    return (whole.astype(np.float64) * scale).reshape(tokens, -1)[:, :cols]


def seen(stored: StoredWeights, x: npt.NDArray[np.float32]) -> F64:
    return x.astype(np.float64) if isinstance(stored, Tensor) else rounded(x)


def product(stored: StoredWeights, x: npt.NDArray[np.float32]) -> tuple[F64, F64]:
    """x [tokens, cols] → [tokens, rows], and the sum of the magnitudes of what was added up for each."""
    inputs = seen(stored, x)
    return inputs @ exact(stored).T, np.abs(inputs) @ magnitude(stored).T


def step_doubt(x: F64, share: float) -> F64:
    """x [tokens, cols], known to `share` of each block's largest → how far off its rounding may be: a step where a
    number is as near as that to the middle of two, else 0."""
    tokens, cols = x.shape
    blocks = np.zeros((tokens, -(-cols // BLOCK) * BLOCK))
    blocks[:, :cols] = x
    blocks = blocks.reshape(tokens, -1, BLOCK)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    scaled = np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)
    near = np.abs(scaled - np.floor(scaled) - 0.5) < 2 * 127 * share
    return (near * step).reshape(tokens, -1)[:, :cols]
