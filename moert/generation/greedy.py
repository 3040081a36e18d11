"""The likeliest token."""

from __future__ import annotations

import numpy as np

from moert.errors import NotFinite
from moert.pack.codec import F32


def choose(logits: F32) -> int:
    """logits [vocab] → the id with the largest; the smallest id among equals."""
    return int(logits.argmax())


def checked(logits: F32, number: int) -> int:
    """The same for token `number` of an answer. Raises NotFinite: where any logit is no number, the largest is none."""
    largest = choose(logits)
    if not np.isfinite(logits[largest]):
        raise NotFinite(
            f"the model gives no finite numbers for token {number} of the answer: its weights or factors are damaged, "
            "or none of a model (moeconv verify PACK looks at all of them)"
        )
    return largest
