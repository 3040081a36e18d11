"""What a metric is: columns of scores for each sample, and one value out of their sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """How samples are judged, and how one value comes out of what was judged.

    `reads` says by what a sample is judged, and so what `judge` takes:
    - "output": the generated text; `judge(prediction, target)` gives its columns
    - "choice": the likeliest of the sample's choices; `judge(chosen, label)` gives its columns
    - "nats": the likelihood of its text; no judge: the columns are nats and how many `unit` they are spread over
    A value depends on the sums of the columns alone, so that a bootstrap may work on sums: `of_sums` takes
    [..., columns] and gives [...].
    """

    name: str
    higher_is_better: bool
    reads: Literal["output", "nats", "choice"]
    columns: int
    judge: Callable[[Any, Any], tuple[float, ...]] | None
    of_sums: Callable[[F64], F64]
    unit: Literal["", "words", "tokens"] = ""

    @property
    def generates(self) -> bool:
        """True when the model must generate text to be judged."""
        return self.reads == "output"

    def value_of_sums(self, sums: F64) -> F64:
        """Sums of the columns over samples [..., columns] → values [...]."""
        return self.of_sums(np.asarray(sums, dtype=np.float64))

    def value(self, scores: F64) -> float:
        """Scores [n, columns] → the value over all samples."""
        return float(self.value_of_sums(np.asarray(scores).sum(axis=0)))

    @overload
    def loss(self, reference: float, value: float) -> float: ...
    @overload
    def loss(self, reference: F64, value: F64) -> F64: ...
    def loss(self, reference: Any, value: Any) -> Any:
        """Relative drop of the metric, or relative rise where lower is better. Negative where the value got better,
        NaN against a reference of 0. Arrays of one shape give an array."""
        before = np.asarray(reference, dtype=np.float64)
        worse = before - value if self.higher_is_better else value - before
        lost = np.full(np.broadcast(before, worse).shape, np.nan)
        np.divide(worse, before, out=lost, where=before != 0)
        return lost if lost.ndim else float(lost)


def mean(sums: F64) -> F64:
    """Sums of (score, weight) [..., 2] → mean scores [...]."""
    means: F64 = sums[..., 0] / sums[..., 1]
    return means
