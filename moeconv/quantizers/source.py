"""The quantizer "source": codes of four or eight bits that a checkpoint has, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from moeconv.quantizers.group import GroupQuantizer
from moeconv.quantizers.quantizer import Inputs, Wants
from moert.pack.codec import F32, Codes, QuantizedMatrix, Width, n_groups, pack_codes
from moert.pack.layout import group_of

_EVEN, _RISING = "even", "rising"
_TRIED = {
    4: (*product((_EVEN,), range(8, 0, -1), (1, -1)), *product((_RISING,), range(15, 0, -1), (1,))),
    8: (*product((_EVEN,), (127, 128), (1, -1)),),
}
"""By width, how the largest weight of a group may lie: so many steps from zero, or from the least weight."""


def codes_of_source(weights: F32, group_size: int, bits: int = 4) -> QuantizedMatrix | None:
    """Returns a matrix [out, in] as codes of four or eight bits with a scale for each group of inputs: of even steps on
    both sides of zero (Q4_0, Q8_0, symmetric int4), or of four bits upwards from the group's least weight (Q4_1); None
    if no such codes with scales and minima of float16 hold it exactly."""
    (rows, inputs), size, half = weights.shape, group_of(weights.shape[1], group_size), 1 << bits - 1
    padded = np.zeros((rows, n_groups(inputs, size) * size), np.float32)
    padded[:, :inputs] = weights
    groups = padded.reshape(-1, size)
    scale, minimum = np.zeros(len(groups), np.float16), np.zeros(len(groups), np.float16)
    codes = np.zeros(groups.shape, np.uint8)
    left = groups.any(axis=1).nonzero()[0]  # groups whose scale is not found yet
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for kind, steps, sign in _TRIED[bits]:
            if not len(left):
                break
            of = groups[left]
            if kind == _EVEN:
                step = (sign * np.abs(of).max(axis=1) / steps).astype(np.float16)
                least = -half * step
            else:
                step = ((of.max(axis=1) - of.min(axis=1)) / steps).astype(np.float16)
                least = of.min(axis=1).astype(np.float16)
            wide, low = step.astype(np.float32)[:, None], least.astype(np.float32)[:, None]
            found = np.rint((of - low) / wide)
            fits = ((found >= 0) & (found < 2 * half) & (found * wide + low == of)).all(axis=1)
            place = left[fits]
            scale[place], minimum[place], codes[place] = step[fits], least[fits], found[fits].astype(np.uint8)
            left = left[~fits]
    if len(left):
        return None
    packed = pack_codes(np.ascontiguousarray(codes.reshape(rows, -1)[:, :inputs]), bits)
    return QuantizedMatrix(bits, inputs, size, packed, scale.reshape(rows, -1), minimum.reshape(rows, -1))


@dataclass(frozen=True)
class SourceQuantizer:
    """At four or eight bits, the codes that a checkpoint with groups of `group_size` inputs has, without loss. Other
    matrices and widths are coded as by "group" without inputs."""

    group_size: int
    name: str = "source"
    codes: Codes = "plain"
    wants: Wants = "nothing"

    def too_few(self, rows: int, in_features: int) -> bool:
        return False

    def quantize(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        kept = [codes_of_source(one, self.group_size, int(bits)) if bits in _TRIED else None for one in weights]
        others = [one for one, codes in zip(weights, kept, strict=True) if codes is None]
        coded = iter(self._group.quantize(np.stack(others), bits, None) if others else [])
        return [next(coded) if codes is None else codes for codes in kept]

    def columns(self, weights: F32, bits: Width, inputs: Inputs | None) -> list[QuantizedMatrix]:
        """Returns the codes of the transposes, whose groups are none of the checkpoint's."""
        return self._group.columns(weights, bits, None)

    @property
    def _group(self) -> GroupQuantizer:
        return GroupQuantizer(self.group_size)
