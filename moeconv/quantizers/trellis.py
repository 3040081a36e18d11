"""Trellis codes: GPTQ for pairs of inputs, all rows of a block by the cheapest path through the trellis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.quantizers import viterbi
from moeconv.quantizers.coding import PairCode, Pairs, code_pairs
from moeconv.quantizers.gptq import GptqQuantizer, by_blocks, factor_of, hessian_of, product
from moeconv.quantizers.group import to_float16
from moeconv.quantizers.quantizer import Coded, Inputs, Wants, check_range
from moert.pack.codec import (
    CODES,
    F32,
    ROWS,
    WINDOW,
    Codes,
    QuantizedMatrix,
    TrellisMatrix,
    Width,
    pack_windows,
    rows_of_blocks,
    signs,
    turned,
    turned_together,
)

# GPTQ (Frantar et al. 2022) with pairs of inputs in the place of inputs: the error of a pair is made up for by later
# ones. All rows of a block are coded at once, by the path through the trellis whose error under H is least (QTIP, Tseng
# et al. 2024). Sweeps code each pair anew, to what is best with all others as they are. Matrices are turned here, [n,
# in, out].

_ROWS_AT_ONCE = 16384  # whole blocks: of more rows, as heads have, the turned copies would take gigabytes
_LOOK = 16  # rows of the next pair that the end of a pair's path takes into account
_GAIN: Mapping[Width, float] = {1: 2.04, 1.5: 2.24, 2: 2.40, 2.5: 2.52, 3: 2.72, 4: 3.24}
"""By bits, the table's largest number times the scale over the deviation of a row's weights, where coding begins: the
best for normally distributed weights."""


@dataclass(frozen=True)
class TrellisQuantizer:
    """The quantizer "trellis": one scale for each output channel, inputs turned; at 8 bits the codes of GptqQuantizer,
    whose moments these are too."""

    sweeps: int = 0
    name: str = "trellis"
    group_size: int = 0
    codes: Codes = "trellis"
    wants: Wants = "products"

    def too_few(self, rows: int, in_features: int) -> bool:
        return rows < in_features

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> Sequence[Coded]:
        if bits == 8:
            return GptqQuantizer(self.group_size).quantize(weights, bits, inputs)
        return self.coded(weights, bits, inputs)

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        raise TypeError("trellis codes of columns: blocks of neurons have plain codes")

    def coded(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[TrellisMatrix]:
        """Returns the codes of n matrices of one shape, `weights` [n, out, in], at one of the widths of CODES. Raises
        WeightsUnusable as `quantize` does."""
        check_range(weights)
        n, out, in_features = weights.shape
        if out > _ROWS_AT_ONCE:
            starts = range(0, out, _ROWS_AT_ONCE)
            coded = [self.coded(weights[:, at : at + _ROWS_AT_ONCE], bits, inputs) for at in starts]
            return [_beneath(pieces) for pieces in zip(*coded, strict=True)]
        filled, odd = sum(rows_of_blocks(out)), in_features % 2
        by_input = np.zeros((n, in_features + odd, filled), np.float32)
        rows = turned(weights * signs(in_features)) / np.float32(turned_together(in_features) ** 0.5)
        by_input[:, :in_features, :out] = rows.transpose(0, 2, 1)
        hessian = _alike(n, in_features + odd) if inputs is None else _turned_hessian(inputs)
        scale, windows = _Problem(torch.from_numpy(by_input), hessian, bits).solved(self.sweeps)
        step = CODES[bits].step
        return [
            TrellisMatrix(bits, in_features, _streams(own, step), scales[:out, None].astype(np.float16))
            for scales, own in zip(scale.numpy(), windows, strict=True)
        ]


def _beneath(pieces: Sequence[TrellisMatrix]) -> TrellisMatrix:
    """Returns matrices of whole blocks as one, each beneath the one before."""
    stream, scale = (np.concatenate([getattr(one, part) for one in pieces]) for part in ("stream", "scale"))
    return TrellisMatrix(pieces[0].bits, pieces[0].in_features, stream, scale)


def _streams(windows: npt.NDArray[np.uint16], step: int) -> npt.NDArray[np.uint8]:
    """Returns the streams of the blocks of a matrix from the windows of its steps [pairs, rows]."""
    blocks = (windows[:, first : first + ROWS] for first in range(0, windows.shape[1], ROWS))
    return np.concatenate([pack_windows(block.reshape(-1).astype(np.uint32), step) for block in blocks])


class _Hessian(NamedTuple):
    """The moments of n matrices' turned inputs, and U [n, in, in], upper triangular, with H⁻¹ = Uᵀ U."""

    products: Tensor
    factor: Tensor


_HESSIANS: WeakKeyDictionary[Inputs, _Hessian] = WeakKeyDictionary()


def _turned_hessian(inputs: Inputs) -> _Hessian:
    """Returns the Hessian of some inputs, filled up to an even number, remembered as long as the inputs exist."""
    if inputs not in _HESSIANS:
        odd = inputs.moment.shape[1] % 2
        products = np.pad(_turned_products(hessian_of(inputs).products.numpy()), ((0, 0), (0, odd), (0, odd)))
        if odd:
            products[:, -1, -1] = products[:, 0, 0]
        found = torch.from_numpy(products)
        _HESSIANS[inputs] = _Hessian(found, torch.stack([factor_of(each) for each in found]))
    return _HESSIANS[inputs]


def _alike(n: int, inputs: int) -> _Hessian:
    """Returns the Hessian of n matrices for which all errors count alike."""
    eye = torch.eye(inputs).expand(n, -1, -1)
    return _Hessian(eye, eye)


def _turned_products(products: F32) -> F32:
    """Returns moments of inputs [n, in, in] as those of the turned inputs."""
    size = products.shape[1]
    sign, share = signs(size), np.float32(1 / turned_together(size))
    once = turned(products * sign * sign[:, None] * share)
    return np.ascontiguousarray(turned(once.transpose(0, 2, 1)))


@cache
def _pair_code(bits: Width) -> tuple[PairCode, npt.NDArray[np.uint16]]:
    """Returns the code of a width by states, and the window of each state [4096]."""
    states = np.arange(1 << WINDOW, dtype=np.uint32)
    windows = np.zeros_like(states)
    for i in range(WINDOW):
        windows |= (states >> np.uint32(i) & 1) << np.uint32(WINDOW - 1 - i)
    first, second = np.ascontiguousarray(CODES[bits].values(windows).T)
    return PairCode(CODES[bits].step, first, second), windows.astype(np.uint16)


class _Problem:
    """The problem of coding turned weights [n, in, out]."""

    def __init__(self, weights: Tensor, hessian: _Hessian, bits: Width) -> None:
        self.weights, self.bits = weights, bits
        self.products, self.factor = hessian

    def solved(self, sweeps: int) -> tuple[Tensor, npt.NDArray[np.uint16]]:
        """Returns scales [n, out], exact in float16, and windows [n, in / 2, out]."""
        scale = to_float16(self.weights.square().mean(1).sqrt() * (_GAIN[self.bits] / 127))
        coded = torch.zeros_like(self.weights)
        states = self._coded(self.weights.clone(), self.factor, scale, coded)
        scale = self.refitted(coded, scale)
        for _ in range(sweeps):
            pull = product(self.products, self.weights - coded * scale[:, None])
            states = self._coded(pull, self.products, scale, coded, improves=True)
            scale = self.refitted(coded, scale)
        return scale, _pair_code(self.bits)[1][states]

    def refitted(self, coded: Tensor, scale: Tensor) -> Tensor:
        """Returns the scales that are best for the codes under H; the given one for a row that has none."""
        of_codes = product(self.products, coded)
        best = to_float16((of_codes * self.weights).sum(1) / (of_codes * coded).sum(1))
        return torch.where((best > 0) & (scale > 0), best, scale)

    def _coded(
        self, values: Tensor, factor: Tensor, scale: Tensor, coded: Tensor, improves: bool = False
    ) -> npt.NDArray[np.uint16]:
        """Returns the states [n, in / 2, out] of codes that are made, or improved, and fills in their values,
        `coded` [n, in, out]. `values`, which change, and factor are those of moert_code_inputs (csrc/moert.h)."""
        n, inputs, out = values.shape
        states = np.zeros((n, inputs // 2, out), np.uint16)
        weight = scale.square()
        weight /= torch.where(weight.sum(1) > 0, weight.mean(1), 1.0)[:, None]
        run, code = code_pairs() or viterbi.code_pairs, _pair_code(self.bits)[0]
        wanted, by, scales, weights, found = (each.numpy() for each in (values, factor, scale, weight, coded))
        parts = [(i, first) for i in range(n) for first in range(0, out, ROWS)]
        last = dict.fromkeys(parts, -1)

        def settle(block: slice, moved: Tensor) -> None:
            known, pairs = slice(block.start, min(block.stop + 2, inputs)), slice(block.start // 2, block.stop // 2)
            move = moved.numpy()

            def state_after(part: tuple[int, int]) -> int:
                i, first = part
                rows = slice(first, first + ROWS)
                of_block = Pairs(
                    wanted[i, known, rows], by[i, known, known], scales[i, rows], weights[i, rows],
                    found[i, known, rows], move[i, :, rows], states[i, pairs, rows], _LOOK, improves,
                )  # fmt: skip
                return run(code, of_block, last[part])

            last.update(zip(parts, pool.map(state_after, parts), strict=True))

        with ThreadPoolExecutor(min(torch.get_num_threads(), len(parts))) as pool:
            by_blocks(values, factor, settle)
        return states
