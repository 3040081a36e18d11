"""Logits, changed by what a text has already and by what its user favours, before a token is chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moert.generation.settings import GenerationSettings
from moert.pack.codec import F32


def adjusted(scores: F32, settings: GenerationSettings, read: Sequence[int], written: Sequence[int]) -> F32:
    """Returns scores [vocab] with bias, then penalties; the same array where the settings have none. `read`: tokens
    that the decoder was given, `written`: those of the answer so far.

    The penalty of repetition is that of CTRL (Keskar et al. 2019, arXiv 1909.05858) as transformers has it; those of
    presence and frequency are OpenAI's.
    """
    if not settings.adjusts:
        return scores
    made: F32 = scores.copy()
    for token, bias in (settings.logit_bias or {}).items():
        made[token] += np.float32(bias)
    if settings.repeat_penalty != 1.0:
        penalty, seen = np.float32(settings.repeat_penalty), np.array([*read, *written], np.int64)
        there = made[seen]
        made[seen] = np.where(there < 0, there * penalty, there / penalty)
    if written and (settings.presence_penalty or settings.frequency_penalty):
        tokens, counts = np.unique(np.array(written, np.int64), return_counts=True)
        made[tokens] -= (settings.presence_penalty + settings.frequency_penalty * counts).astype(np.float32)
    return made
