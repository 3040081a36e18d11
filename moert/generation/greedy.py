"""The likeliest token."""

from __future__ import annotations

import numpy as np

from moert.errors import NotFinite
from moert.pack.codec import F32


def choose(logits: F32) -> int:
    """logits [vocab] → the id with the largest; the smallest id among equals."""
    return int(logits.argmax())


def check(logits: F32, number: int, what: str = "answer") -> None:
    """Raises NotFinite for token `number` of an answer, or of a text, where the largest of its logits is no number,
    which it is where any is none."""
    if not np.isfinite(logits.max()):
        raise NotFinite(
            f"the model gives no finite numbers for token {number} of the {what}: its weights or factors are damaged, "
            "or none of a model (moeconv verify PACK looks at all of them)"
        )
