"""Widths for all experts before anything is measured: one for all, or two whose mean is as many bits as are asked for.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moeconv.plan.problem import Storage, layout_bytes
from moert.pack.model_spec import ExpertKey, ModelSpec


@dataclass(frozen=True)
class Mixture:
    """A `share` of the experts at the width `high`, spread evenly over all layers, all others at `low`.

    `bits_per_weight`: scales and minima counted. `per_layer`: experts in each layer.
    """

    low: int
    high: int
    share: float
    bits_per_weight: float
    per_layer: int

    def width(self, key: ExpertKey) -> int:
        """Of one expert: which of them get the higher one is of no account here, only how many."""
        place = key.layer * self.per_layer + key.expert
        return self.high if int((place + 1) * self.share) > int(place * self.share) else self.low

    def parts(self) -> Mapping[int, float]:
        """Width → share of the experts."""
        return {
            bits: part for bits, part in ((self.low, 1 - self.share), (self.high, self.share)) if part > 0
        }  # fmt: skip


def effective_bits(spec: ModelSpec, storage: Storage, bits: int) -> float:
    """Of a weight of an expert at this width, scales and minima counted."""
    nbytes = layout_bytes(spec, storage)
    return 8 * sum(nbytes(name, bits) for name in spec.moe.ffn.projections) / spec.weights_per_expert()


def uniform(spec: ModelSpec, storage: Storage, bits: int) -> Mixture:
    """All experts at one width."""
    return Mixture(bits, bits, 0.0, effective_bits(spec, storage, bits), spec.moe.n)


def mixture(spec: ModelSpec, storage: Storage, widths: Sequence[int], bits_per_weight: float) -> Mixture | None:
    """Of the two `widths` that are nearest below and above. None where all are wider or all are narrower: no pack has
    so many bits."""
    found = sorted((effective_bits(spec, storage, bits), bits) for bits in widths)
    for (less, low), (more, high) in pairwise(found):
        if less <= bits_per_weight <= more:
            return Mixture(low, high, (bits_per_weight - less) / (more - less), bits_per_weight, spec.moe.n)
    return None
