"""The interface of every predictor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moert.pack.model_spec import Stack

Selected = npt.NDArray[np.integer[Any]]
"""What the router of one layer selected: [tokens, top_k] expert ids, -1 where a token was dropped."""


class Predictor(Protocol):
    def next_experts(self, stack: Stack, layer: int, history: Sequence[Selected]) -> list[int]:
        """The experts that `layer` is likely to need, most probable first; those not expected are left out.

        `layer` counts the layers with experts of the stack from 0; `history` holds what this group of tokens
        selected in the layers before it, in order (empty for the first layer).
        """
        ...


def in_order_of(scores: npt.NDArray[np.floating[Any]]) -> list[int]:
    """scores [num_experts] → experts with a score above zero, highest first, ties by id."""
    order = np.argsort(-scores, kind="stable")
    return [int(expert) for expert in order if scores[expert] > 0]
