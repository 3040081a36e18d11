"""Samples in two parts that share none: one to measure on, one to judge by."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moeconv.calibration.sample import Sample
from moeconv.errors import CalibrationError

RANKING_SHARE = 0.25  # of the calibration text ranks experts; plans are judged on the rest

Parts = tuple[tuple[Sample, ...], tuple[Sample, ...]]


def divide(samples: Sequence[Sample], seq2seq: bool, share: float, seed: int) -> Parts:
    """The first part gets about `share` of the samples, the second the rest; both get some, and no document is torn.

    Samples of input and target are dealt by `seed`, documents whole, those without one singly. Running text is cut
    once, at the border of documents (of rows, where it has none) that is nearest to `share` of its characters, so that
    each part stays running text. What is equal but for white space lies in one part only, short rows of running text
    excepted. Raises CalibrationError when there are not two different samples, or all are of one document.
    """
    parts = _dealt(samples, share, seed) if seq2seq else _cut(samples, share)
    if not all(parts):
        found = f"{len(samples)} {'sample' if seq2seq else 'row'}{'s' * (len(samples) != 1)}"
        one = " of one document" * (len(samples) > 1 and samples[0].document != "")
        raise CalibrationError(f"the text is {found}{one} with nothing to divide: give more, or --heldout")
    return parts


def _dealt(samples: Sequence[Sample], share: float, seed: int) -> Parts:
    unique = list({sample.key: sample for sample in reversed(samples)}.values())[::-1]
    documents: dict[object, list[Sample]] = {}
    for place, sample in enumerate(unique):
        documents.setdefault(sample.document or place, []).append(sample)
    dealt = list(documents.values())
    random.Random(seed).shuffle(dealt)
    border = _nearest([len(document) for document in dealt], share)
    first, second = ([sample for document in part for sample in document] for part in (dealt[:border], dealt[border:]))
    return tuple(first), tuple(second)


def _cut(samples: Sequence[Sample], share: float) -> Parts:
    starts = [
        place
        for place, sample in enumerate(samples)
        if place == 0 or not sample.document or sample.document != samples[place - 1].document
    ]
    stops = [*starts[1:], len(samples)]
    lengths = [
        sum(len(sample.source) for sample in samples[start:stop]) for start, stop in zip(starts, stops, strict=True)
    ]
    border = [*starts, len(samples)][_nearest(lengths, share)]
    first = {sample.key for sample in samples[:border]}
    rest = (sample for sample in samples[border:] if sample.is_short_row or sample.key not in first)
    return tuple(samples[:border]), tuple(rest)


def _nearest(sizes: Sequence[int], share: float) -> int:
    """How many of the documents come first, so that they have about `share` of all; neither side is empty where there
    are two of them at all."""
    goal, border, length = share * sum(sizes), 0, 0
    for size in sizes:
        if length + size / 2 > goal:
            break
        border, length = border + 1, length + size
    return max(1, min(border, len(sizes) - 1))
