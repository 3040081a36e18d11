"""Drawing a token at random. Filters apply in the order temperature, top-k, top-p, min-p, as transformers has it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moert.generation.settings import GenerationSettings


def choose(logits: Tensor, settings: GenerationSettings, generator: torch.Generator) -> int:
    """logits [vocab] → an id, drawn from what the settings leave."""
    probabilities = filtered(logits, settings).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def filtered(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """logits [vocab] → the same over the temperature, minus infinity where a filter refuses a token."""
    scores = logits / settings.temperature
    if not bool(scores.isfinite().all()):  # so cold that float32 overflows: only distances to the largest matter
        scores = ((logits.double() - logits.max()) / settings.temperature).float()
    if settings.top_k:
        scores = keep_top_k(scores, settings.top_k)
    if settings.top_p < 1.0:
        scores = keep_top_p(scores, settings.top_p)
    if settings.min_p > 0.0:
        scores = keep_min_p(scores, settings.min_p)
    return scores


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Keeps the k largest, and any equal to the last of them."""
    smallest = scores.topk(min(k, scores.shape[-1])).values[-1]
    return scores.masked_fill(scores < smallest, -math.inf)


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Keeps the likeliest tokens until they hold a probability of p, at least one."""
    ascending, order = scores.sort()
    below = ascending.softmax(-1).cumsum(-1) <= 1 - p
    below[-1] = False
    return scores.masked_fill(torch.zeros_like(below).scatter(0, order, below), -math.inf)


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Keeps what is at least p times as likely as the likeliest token."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < p * probabilities.max(), -math.inf)
