"""The likeliest token."""

from __future__ import annotations

from moert.pack.codec import F32


def choose(logits: F32) -> int:
    """logits [vocab] → the id with the largest; the smallest id among equals."""
    return int(logits.argmax())
