"""The likeliest token."""

from __future__ import annotations

from torch import Tensor


def choose(logits: Tensor) -> int:
    """logits [vocab] → the id with the largest; the smallest id among equals."""
    return int(logits.numpy().argmax())
