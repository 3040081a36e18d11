"""The quantizer "source": codes of four bits that a checkpoint has, as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeconv.quantizers.group import GroupQuantizer
from moeconv.quantizers.quantizer import Inputs, Wants
from moert.pack.codec import F32, Codes, QuantizedMatrix, Width, n_groups, pack_codes
from moert.pack.layout import group_of

F16 = npt.NDArray[np.float16]
Flags = npt.NDArray[np.bool_]

_BITS, _MOST = 4, 8  # codes stand for -8 to 7 steps


def codes_of_source(weights: F32, group_size: int) -> QuantizedMatrix | None:
    """Returns a matrix [out, in] as codes of four bits with a scale for each group of inputs, whose steps go from -8 to
    7 or from -7 to 8; None if no such codes with scales of float16 hold it exactly."""
    (rows, inputs), size = weights.shape, group_of(weights.shape[1], group_size)
    padded = np.zeros((rows, n_groups(inputs, size) * size), np.float32)
    padded[:, :inputs] = weights
    groups = padded.reshape(rows, -1, size)
    largest = np.abs(groups).max(axis=2)
    scale, found = np.zeros(largest.shape, np.float16), largest == 0
    with np.errstate(over="ignore", invalid="ignore"):
        for steps in range(_MOST, 0, -1):
            for sign in (1, -1):
                scale, found = _with(groups, (sign * largest / steps).astype(np.float16), scale, found)
        minimum = -_MOST * scale
    if not found.all() or not np.isfinite(minimum).all():
        return None
    step = np.where(scale == 0, 1, scale.astype(np.float32))
    codes = (np.rint(groups / step[:, :, None]) + _MOST).astype(np.uint8).reshape(rows, -1)[:, :inputs]
    return QuantizedMatrix(_BITS, inputs, size, pack_codes(np.ascontiguousarray(codes), _BITS), scale, minimum)


def _with(groups: F32, tried: F16, scale: F16, found: Flags) -> tuple[F16, Flags]:
    """Returns scales [rows, groups] and whether they hold their groups exactly, after trying others."""
    step = np.where(tried == 0, np.inf, tried.astype(np.float32))[:, :, None]
    codes = np.rint(groups / step)
    fits = ((codes >= -_MOST) & (codes < _MOST) & (codes * np.where(np.isinf(step), 0, step) == groups)).all(axis=2)
    better = fits & ~found
    return np.where(better, tried, scale), found | better


@dataclass(frozen=True)
class SourceQuantizer:
    """At four bits, the codes that a checkpoint with symmetric groups of `group_size` inputs has, without loss. Other
    matrices and widths are coded as by "group" without inputs."""

    group_size: int
    name: str = "source"
    codes: Codes = "plain"
    wants: Wants = "nothing"

    def too_few(self, rows: int, in_features: int) -> bool:
        return False

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        kept = [codes_of_source(one, self.group_size) if bits == _BITS else None for one in weights]
        others = [one for one, codes in zip(weights, kept, strict=True) if codes is None]
        coded = iter(self._group.quantize(np.stack(others), bits, None) if others else [])
        return [next(coded) if codes is None else codes for codes in kept]

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        """Returns the codes of the transposes, whose groups are none of the checkpoint's."""
        return self._group.columns(weights, bits, None)

    @property
    def _group(self) -> GroupQuantizer:
        return GroupQuantizer(self.group_size)
