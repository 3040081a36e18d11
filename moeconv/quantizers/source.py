"""The quantizer "source": codes of four bits that a checkpoint has, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from moeconv.quantizers.group import GroupQuantizer
from moeconv.quantizers.quantizer import Inputs, Wants
from moert.pack.codec import F32, Codes, QuantizedMatrix, Width, n_groups, pack_codes
from moert.pack.layout import group_of

_BITS, _MOST = 4, 8  # codes stand for -8 to 7 steps


def codes_of_source(weights: F32, group_size: int) -> QuantizedMatrix | None:
    """Returns a matrix [out, in] as codes of four bits with a scale for each group of inputs, whose steps go from -8 to
    7 or from -7 to 8; None if no such codes with scales of float16 hold it exactly."""
    (rows, inputs), size = weights.shape, group_of(weights.shape[1], group_size)
    padded = np.zeros((rows, n_groups(inputs, size) * size), np.float32)
    padded[:, :inputs] = weights
    groups = padded.reshape(-1, size)
    largest = np.abs(groups).max(axis=1)
    scale, codes = np.zeros(len(groups), np.float16), np.full(groups.shape, _MOST, np.uint8)
    left = largest.nonzero()[0]  # groups whose scale is not found yet
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for steps, sign in product(range(_MOST, 0, -1), (1, -1)):
            tried = (sign * largest[left] / steps).astype(np.float16)
            step = tried.astype(np.float32)[:, None]
            found = np.rint(groups[left] / step)
            fits = ((found >= -_MOST) & (found < _MOST) & (found * step == groups[left])).all(axis=1)
            scale[left[fits]], codes[left[fits]] = tried[fits], (found[fits] + _MOST).astype(np.uint8)
            left = left[~fits]
            if not len(left):
                break
        minimum = -_MOST * scale
    if len(left) or not np.isfinite(minimum).all():
        return None
    packed = pack_codes(np.ascontiguousarray(codes.reshape(rows, -1)[:, :inputs]), _BITS)
    return QuantizedMatrix(_BITS, inputs, size, packed, scale.reshape(rows, -1), minimum.reshape(rows, -1))


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
