"""Problems for the native kernels: random matrices of every kind, and the exact answer in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pytest

from moert.kernels import library
from moert.kernels.backend import Floats, Stored
from moert.kernels.native import NativeBackend
from moert.pack.codec import (
    F32,
    INT_WIDTHS,
    QuantizedMatrix,
    TrellisMatrix,
    dequantize,
    dequantize_trellis,
    n_groups,
    pack_codes,
    signs,
    stream_bytes,
    to_bfloat16,
    turned,
    turned_together,
    unpack_codes,
)
from moert.pack.layout import group_of
from moert.pack.parts import Ffn

F64 = npt.NDArray[np.float64]
Dtype = Literal["F16", "BF16", "F32"]
FLOATS: tuple[Dtype, ...] = get_args(Dtype)
Kind = int | Dtype
KINDS: tuple[Kind, ...] = (*INT_WIDTHS, *FLOATS)
CODED: tuple[Kind, ...] = (-2, -3, -4)
"""Bits of trellis codes, below 0 as in moert.h."""
THREADS = (1, 3)
Natives = dict[tuple[str, int], NativeBackend]
"""By instruction set and threads."""


def running() -> list[str]:
    """Names of the instruction sets that this processor runs; none without the library."""
    found = library.load()
    return [] if found is None else [each.name for each in found.instruction_sets if each.runs]


def open_native(name: str, threads: int = 1) -> NativeBackend:
    found = library.load()
    assert found is not None
    return NativeBackend(found, found.choose(name), threads)


@contextmanager
def all_natives() -> Iterator[Natives]:
    """Those of all instruction sets that run here, with one thread and with several; skips a test without any."""
    if library.load() is None:
        pytest.skip(f"no native kernels: {library.missing()}")
    opened = {(name, threads): open_native(name, threads) for name in running() for threads in THREADS}
    yield opened
    for backend in opened.values():
        backend.close()


def normal(rng: np.random.Generator, *shape: int) -> F32:
    return rng.normal(size=shape).astype(np.float32)


def activations(rng: np.random.Generator, tokens: int, cols: int) -> F32:
    """A few outliers and a few zeros among them, and the first block of the first token all zeros."""
    x = rng.normal(0, 1, (tokens, cols)) * np.where(rng.random((tokens, cols)) < 0.02, 30, 1)
    x[rng.random((tokens, cols)) < 0.05] = 0
    x[0, :32] *= rng.integers(0, 2)
    return x.astype(np.float32)


def floats(dtype: Dtype, values: npt.NDArray[np.floating]) -> Floats:
    """The values rounded to a float type."""
    if dtype == "BF16":
        return Floats(dtype, to_bfloat16(values.astype(np.float32)))
    return Floats(dtype, values.astype(np.float16 if dtype == "F16" else np.float32))


def random_stored(
    rng: np.random.Generator, kind: Kind, rows: int, cols: int, group: int | None, size: float = 0.05
) -> Stored:
    """Weights of about `size`, of a width or float type; `group` None: one scale a row. Some rows are zeros."""
    empty = rng.random(rows) < 0.1
    if isinstance(kind, str):
        values = rng.normal(0, size, (rows, cols))
        values[empty] = 0
        return floats(kind, values)
    if kind < 0:
        stream = rng.integers(0, 256, stream_bytes(-kind, rows, cols)).astype(np.uint8)
        of_rows = np.where(empty, 0, rng.uniform(0.2, 1, rows))[:, None] * size / 64
        return TrellisMatrix(-kind, cols, stream, of_rows.astype(np.float16))
    covered = group_of(cols, cols if group is None else group)
    codes = rng.integers(0, 1 << kind, (rows, cols)).astype(np.uint8)
    shape = (rows, n_groups(cols, covered))
    scale = rng.uniform(0.2, 1, shape) * size * 4 / (1 << kind)
    minimum = rng.normal(-2, 0.5, shape) * size
    scale[empty] = minimum[empty] = 0
    return QuantizedMatrix(
        kind, cols, covered, pack_codes(codes, kind), scale.astype(np.float16), minimum.astype(np.float16)
    )


def exact(stored: Stored) -> F64:
    """The weights [rows, cols]; of codes without the rounding that float32 would bring in."""
    if isinstance(stored, Floats):
        return stored.widened().astype(np.float64)
    if isinstance(stored, TrellisMatrix):
        return dequantize_trellis(stored).astype(np.float64)
    scale, minimum = each_input(stored, stored.scale), each_input(stored, stored.minimum)
    found: F64 = codes_of(stored) * scale + minimum
    assert np.allclose(found, dequantize(stored), rtol=1e-6, atol=1e-6 * np.abs(found).max(initial=0))
    return found


def magnitude(stored: Stored) -> F64:
    """[rows, cols]: what is summed up for each weight, without signs."""
    if isinstance(stored, Floats):
        return np.abs(exact(stored))
    if isinstance(stored, TrellisMatrix):
        return np.abs(exact(stored)) + 256 * stored.scale.astype(np.float64)
    scale, minimum = each_input(stored, stored.scale), each_input(stored, stored.minimum)
    found: F64 = codes_of(stored) * np.abs(scale) + np.abs(minimum)
    return found


def codes_of(stored: QuantizedMatrix) -> F64:
    return unpack_codes(stored.qweight, stored.bits, stored.in_features).astype(np.float64)


def each_input(stored: QuantizedMatrix, by_group: npt.NDArray[np.float16]) -> F64:
    return np.repeat(by_group.astype(np.float64), stored.group_size, axis=1)[:, : stored.in_features]


def block_of(stored: QuantizedMatrix) -> int:
    """Inputs that are rounded with one scale."""
    found = library.load()
    assert found is not None
    return int(found.functions.moert_block(stored.in_features, stored.group_size))


def rounded(x: F32, block: int) -> F64:
    """x [tokens, cols] as matrices of codes see it: for each block a scale of amax / 127 and whole numbers."""
    tokens, cols = x.shape
    blocks = np.zeros((tokens, -(-cols // block) * block), np.float32)
    blocks[:, :cols] = x
    blocks = blocks.reshape(tokens, -1, block)
    amax = np.abs(blocks).max(-1, keepdims=True)
    turns = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    whole, scale = np.rint(blocks * turns), amax / np.float32(127)
    found: F64 = (whole.astype(np.float64) * scale).reshape(tokens, -1)[:, :cols]
    return found


def seen(stored: Stored, x: F32) -> F64:
    """x [tokens, cols] as a matrix sees it; trellis codes see inputs that were turned before they were rounded."""
    if isinstance(stored, TrellisMatrix):
        sign, root = signs(stored.in_features), np.float32(turned_together(stored.in_features) ** 0.5)
        block = 64 if stored.in_features > 512 else 32
        found: F64 = turned(rounded(turned(x * sign) / root, block)) * sign / root  # type: ignore[arg-type]
        return found
    return x.astype(np.float64) if isinstance(stored, Floats) else rounded(x, block_of(stored))


def product(stored: Stored, x: F32) -> tuple[F64, F64]:
    """x [tokens, cols] → [tokens, rows], and the sum of the magnitudes of what was added up for each."""
    inputs = seen(stored, x)
    return inputs @ exact(stored).T, np.abs(inputs) @ magnitude(stored).T


def step_doubt(x: F64, share: float, block: int) -> F64:
    """x [tokens, cols], known to `share` of each block's largest → how far off its rounding may be: a step where a
    number is as near as that to the middle of two, else 0."""
    tokens, cols = x.shape
    blocks = np.zeros((tokens, -(-cols // block) * block))
    blocks[:, :cols] = x
    blocks = blocks.reshape(tokens, -1, block)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    scaled = np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)
    near = np.abs(scaled - np.floor(scaled) - 0.5) < 2 * 127 * share
    found: F64 = (near * step).reshape(tokens, -1)[:, :cols]
    return found


Projections = dict[str, Stored]
Biases = dict[str, F32]
ACTIVATION: dict[str, Callable[[F64], F64]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def plain_expert(expert: Projections, x: F32, spec: Ffn, biases: Biases | None = None) -> tuple[F64, F64]:
    """x [tokens, d_model] → expert(x), and a bound of what float32 and a rounding that falls the other way change."""
    act, limit, bias = spec.act, math.inf if spec.act.limit is None else spec.act.limit, biases or {}
    up, up_terms = _biased(product(expert["up"], x), bias.get("up"))
    bent, bent_terms = _biased(product(expert["gate"], x), bias.get("gate")) if spec.gated else (up, up_terms)
    hidden = ACTIVATION[act.name](act.slope * np.minimum(bent, limit)) / act.slope
    slope = 2 * np.abs(bent) if act.name == "relu2" else 1.2  # at most
    error = 1e-6 * slope * bent_terms + 1e-6 * np.abs(hidden)
    if spec.gated:
        up = np.clip(up, -limit, limit) + act.plus
        error = error * np.abs(up) + 1e-6 * (up_terms + abs(act.plus)) * (np.abs(hidden) + error)
        hidden = hidden * up
    down = expert["down"]
    inputs, wide = seen(down, hidden.astype(np.float32)), magnitude(down)
    if isinstance(down, QuantizedMatrix):
        share = float((error / np.maximum(np.abs(hidden).max(-1, keepdims=True), 1e-30)).max()) + 1e-6
        error = error + step_doubt(hidden, 40 * share, block_of(down)) + 4 * error.max(-1, keepdims=True)
    value, terms = _biased((inputs @ exact(down).T, np.abs(inputs) @ wide.T), bias.get("down"))
    return value, 1e-6 * terms + error @ wide.T


def _biased(found: tuple[F64, F64], bias: F32 | None) -> tuple[F64, F64]:
    return found if bias is None else (found[0] + bias, found[1] + np.abs(bias))
