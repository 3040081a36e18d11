"""Which experts does a layer select after those that it selected last? Counted in a pack's recorded trace. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.experts.policy.usage import F64, I64, place_of
from moert.pack.model_spec import ModelSpec
from moert.pack.paths import DROPPED, Trace

MOST_BYTES = 16 << 20
"""Tables that would be larger are not made."""
_PRIOR = 20.0  # visits that an expert's overall share counts for, beside those that were seen after another expert


class Succession:
    """`shares` by place of a layer [num_experts, num_experts]: of the tokens that a layer sent to expert a, the share
    whose next token it sent to expert b. Kept in 16 bits."""

    def __init__(self, shares: Mapping[int, npt.NDArray[np.floating[Any]]]) -> None:
        self._shares = {place: share.astype(np.float16) for place, share in shares.items()}

    @classmethod
    def of(cls, trace: Trace, spec: ModelSpec, first_token: int = 0) -> Succession:
        """Counts decoder layers, from a token of the trace on; what an encoder reads next has nothing to do with it.

        The trace must be one of this model (Trace.check).
        """
        if "decoder" not in trace.stacks or 2 * len(spec.moe_layers("decoder")) * trace.num_experts**2 > MOST_BYTES:
            return cls({})
        chosen = trace.stacks["decoder"].experts[first_token:].astype(np.int64)  # [tokens, layers, top_k]
        return cls({
            place_of(at): _shares(chosen[:, index], trace.num_experts)
            for index, at in enumerate(spec.moe_layers("decoder"))
        })  # fmt: skip

    def after(self, place: int, experts: Collection[int]) -> F64 | None:
        """[num_experts]: how likely the layer selects each at its next visit, if it selected `experts` at this one.

        The mean over `experts`. None for a layer that was not counted.
        """
        if place not in self._shares or not experts:
            return None
        shares, chosen = self._shares[place], list(experts)
        if len(chosen) == 1:
            alone: F64 = shares[chosen[0]].astype(np.float64)
            return alone
        likely: F64 = np.add.reduce(shares[chosen], axis=0, dtype=np.float64)
        likely /= len(chosen)
        return likely


def _shares(chosen: I64, num_experts: int) -> F64:
    """chosen [tokens, top_k] of one layer → [num_experts, num_experts]."""
    before, after = np.broadcast_arrays(chosen[:-1, :, None], chosen[1:, None, :])
    real = (before != DROPPED) & (after != DROPPED)
    pairs = np.bincount(before[real] * num_experts + after[real], minlength=num_experts**2)
    selected = [np.bincount(part[part != DROPPED], minlength=num_experts) for part in (chosen[:-1], chosen)]
    overall = selected[1] / max(1, len(chosen))
    shares: F64 = (pairs.reshape(num_experts, num_experts) + _PRIOR * overall) / (selected[0][:, None] + _PRIOR)
    return shares
