"""Samples in two parts that share none: one to measure on, one to judge by."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moeconv.calibration.sample import Sample
from moeconv.errors import CalibrationError

Parts = tuple[tuple[Sample, ...], tuple[Sample, ...]]


def divide(samples: Sequence[Sample], seq2seq: bool, share: float, seed: int) -> Parts:
    """The first part gets about `share` of the samples, the second the rest; both get some.

    Samples of input and target are dealt by `seed`. Running text is cut once, at the border of rows that is nearest to
    `share` of its characters, so that each part stays running text. What is equal but for white space lies in one part
    only, short rows of running text excepted. Raises CalibrationError when there are not two different samples.
    """
    parts = _dealt(samples, share, seed) if seq2seq else _cut(samples, share)
    if not all(parts):
        raise CalibrationError(
            f"the text is {len(samples)} {'sample' if seq2seq else 'row'}{'s' * (len(samples) != 1)} with nothing to "
            "divide: give more, or --heldout"
        )
    return parts


def _dealt(samples: Sequence[Sample], share: float, seed: int) -> Parts:
    unique = list({sample.key: sample for sample in reversed(samples)}.values())[::-1]
    random.Random(seed).shuffle(unique)
    border = _inside(round(share * len(unique)), len(unique))
    return tuple(unique[:border]), tuple(unique[border:])


def _cut(samples: Sequence[Sample], share: float) -> Parts:
    goal = share * sum(len(sample.source) for sample in samples)
    border, length = 0, 0
    for sample in samples:
        if length + len(sample.source) / 2 > goal:
            break
        border, length = border + 1, length + len(sample.source)
    border = _inside(border, len(samples))
    first = {sample.key for sample in samples[:border]}
    rest = (sample for sample in samples[border:] if sample.is_short_row or sample.key not in first)
    return tuple(samples[:border]), tuple(rest)


def _inside(border: int, count: int) -> int:
    """The border, moved so that neither side is empty where there are two samples at all."""
    return max(1, min(border, count - 1))
