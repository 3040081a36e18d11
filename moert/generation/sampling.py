"""Drawing a token at random. Filters apply in the order temperature, top-k, top-p, min-p, as transformers has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moert.generation.settings import GenerationSettings
from moert.pack.codec import F32
from moert.pack.fence import fenced

_MANY, _LONGEST_S = 1 << 21, 600.0


def choose(logits: F32, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """logits [vocab] → an id, drawn from what the settings leave."""
    below = np.cumsum(softmax(filtered(logits, settings)), dtype=np.float64)
    return int(np.searchsorted(below, generator.random() * below[-1], side="right"))


def filtered(logits: F32, settings: GenerationSettings) -> F32:
    """logits [vocab] → the same over the temperature, minus infinity where a filter refuses a token."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scores: F32 = logits / np.float32(settings.temperature)
    if not np.isfinite(scores).all():  # so cold that float32 overflows: only distances to the largest matter
        with np.errstate(over="ignore"):
            scores = ((logits.astype(np.float64) - logits.max()) / settings.temperature).astype(np.float32)
    if settings.top_k:
        scores = keep_top_k(scores, settings.top_k)
    if settings.top_p < 1.0:
        scores = keep_top_p(scores, settings.top_p)
    if settings.min_p > 0.0:
        scores = keep_min_p(scores, settings.min_p)
    return scores


def keep_top_k(scores: F32, k: int) -> F32:
    """Keeps the k largest, and any equal to the last of them."""
    k = min(k, len(scores))
    smallest = np.partition(scores, len(scores) - k)[len(scores) - k]
    kept: F32 = np.where(scores < smallest, np.float32(-np.inf), scores)
    return kept


def keep_top_p(scores: F32, p: float) -> F32:
    """Keeps the likeliest tokens until they hold a probability of p, at least one."""
    order = ordered(scores)
    below = np.cumsum(softmax(scores[order])) <= np.float32(1 - p)
    below[-1] = False
    kept: F32 = scores.copy()
    kept[order[below]] = -np.inf
    return kept


def ordered(scores: F32) -> npt.NDArray[np.intp]:
    """Where they are from the smallest on, the first of equal ones first. Ctrl-C is heard where that takes long."""
    if len(scores) < _MANY:
        return np.argsort(scores, kind="stable")
    return fenced(lambda: np.argsort(scores, kind="stable"), _LONGEST_S)


def keep_min_p(scores: F32, p: float) -> F32:
    """Keeps what is at least p times as likely as the likeliest token."""
    probabilities = softmax(scores)
    kept: F32 = np.where(probabilities < np.float32(p) * probabilities.max(), np.float32(-np.inf), scores)
    return kept


def softmax(scores: F32) -> F32:
    powers = np.exp(scores - scores.max())
    shares: F32 = powers / powers.sum()
    return shares
