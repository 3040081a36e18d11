"""Logarithms of probabilities, out of logits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moert.kernels.backend import I64
from moert.pack.codec import F32

ENTRY_BYTES = 600
"""Of memory for one Likely and for what JSON makes of it (420 measured)."""


class Likely(NamedTuple):
    """A token, its text behind what came before it ("" where the prompt was token ids), and the natural logarithm of
    its probability."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """One step of an answer: the token that was chosen, and the likeliest ones, the likeliest first. The probabilities
    are the model's own: before penalties, bias, temperature and filters."""

    chosen: Likely
    likeliest: tuple[Likely, ...]


def log_softmax(logits: F32) -> F32:
    """[vocab]"""
    shifted = logits - logits.max()
    made: F32 = shifted - np.log(np.exp(shifted).sum())
    return made


def largest(scores: F32, count: int) -> Iterable[int]:
    """Where the `count` largest are, in any order."""
    if not count:
        return ()
    if count >= len(scores):
        return range(len(scores))
    found: list[int] = np.argpartition(scores, len(scores) - count)[-count:].tolist()
    return found


def log_likelihoods(logits: F32, tokens: I64) -> F32:
    """logits [rows, vocab], which are overwritten, and a token for each row → logarithms of their probabilities."""
    logits -= logits.max(axis=1, keepdims=True)
    right = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    np.exp(logits, out=logits)
    made: F32 = right - np.log(logits.sum(axis=1))
    return made
