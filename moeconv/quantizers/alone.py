"""What widths do to the weights alone, where no text says what an expert's inputs are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from moeconv.quantizers.coder import ExpertCoder, restored
from moert.pack.codec import F32, power_of, times_two
from moert.pack.layout import DOWN
from moert.pack.model_spec import ExpertKey

SAMPLED_ROWS = 64  # of each matrix, evenly spread; rows are coded one by one, so that these stand for all


def squared_errors(coder: ExpertCoder, key: ExpertKey, widths: Iterable[int]) -> Mapping[int, float]:
    """Width → squared error of an expert's weights in sum, over all of its matrices, estimated from sampled rows.

    Raises CheckpointError or WeightsUnusable.
    """
    weights = dict(coder.checkpoint.expert(key))
    if coder.neurons is not None:
        weights[DOWN] = weights[DOWN].T  # whose rows are coded one by one then
    sampled = [(*_rows(weight), power_of(weight)) for weight in weights.values()]
    return {
        bits: sum(_error(coder, weight, bits, power) * share for weight, share, power in sampled) for bits in widths
    }


def _rows(weight: F32) -> tuple[F32, float]:
    """Some rows of a matrix [out, in], and how many of it each stands for."""
    places: Sequence[int] = np.unique(np.linspace(0, len(weight) - 1, SAMPLED_ROWS).round().astype(int)).tolist()
    return weight[places], len(weight) / len(places)


def _error(coder: ExpertCoder, weight: F32, bits: int, power: int) -> float:
    """Of rows of a matrix that counts a power of two."""
    if bits == 16:
        stored = weight if coder.mxfp4 else restored(weight, coder.dtype16)
    else:
        coded = coder.quantizer.quantize(times_two(weight, -power)[None], bits, None)[0]
        stored = restored(replace(coded, power=power), coder.dtype16)
    return float(np.square(weight - stored, dtype=np.float64).sum())
