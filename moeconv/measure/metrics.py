"""How good is a model on its samples? Metrics behind one type, found by name or by the path of a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from moeconv.errors import SettingsError

# A metric: columns of scores for each sample, and one value out of their sums.

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A metric: how samples are judged, and how one value follows from their scores.

    `reads` names the object that is judged, and so the arguments of `judge`:
    - "output": the generated text; `judge(prediction, target)` gives its columns
    - "choice": the likeliest of the sample's choices; `judge(chosen, label)` gives its columns
    - "nats": the likelihood of its text; no judge: the columns are the nats and the number of `unit` in the text
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
        """Returns the values [...] of sums of the columns over samples [..., columns]."""
        return self.of_sums(np.asarray(sums, dtype=np.float64))

    def value(self, scores: F64) -> float:
        """Returns the value over all samples, of scores [n, columns]."""
        return float(self.value_of_sums(np.asarray(scores).sum(axis=0)))

    @overload
    def loss(self, reference: float, value: float) -> float: ...
    @overload
    def loss(self, reference: F64, value: F64) -> F64: ...
    def loss(self, reference: Any, value: Any) -> Any:
        """Returns the relative drop of the metric, or the relative rise if lower is better. Negative where the value
        got better, NaN against a reference of 0. Arrays of one shape give an array."""
        before = np.asarray(reference, dtype=np.float64)
        worse = before - value if self.higher_is_better else value - before
        lost = np.full(np.broadcast(before, worse).shape, np.nan)
        np.divide(worse, before, out=lost, where=before != 0)
        return lost if lost.ndim else float(lost)


def mean(sums: F64) -> F64:
    """Returns mean scores [...] of sums of (score, weight) [..., 2]."""
    means: F64 = sums[..., 0] / sums[..., 1]
    return means


# Metrics of generated text. Each judge gives (score, 1) for a sample; the value is the mean score.


def rouge(kind: str, prediction: str, target: str) -> tuple[float, float]:
    """Returns (F-measure, 1) of "rouge1", "rouge2" or "rougeL" (Lin 2004), by the package rouge-score, without
    stemming."""
    return float(_rouge_scorer(kind).score(target, prediction)[kind].fmeasure), 1.0


@cache
def _rouge_scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=False)


def exact_match(prediction: str, target: str) -> tuple[float, float]:
    """Returns (1, 1) if the texts have the same words in the same order, whatever the white space between them, else
    (0, 1)."""
    return float(prediction.split() == target.split()), 1.0


GENERATED = (
    Metric("rouge1", True, "output", 2, partial(rouge, "rouge1"), mean),
    Metric("rouge2", True, "output", 2, partial(rouge, "rouge2"), mean),
    Metric("rougeL", True, "output", 2, partial(rouge, "rougeL"), mean),
    Metric("exact_match", True, "output", 2, exact_match, mean),
)


# Metrics of likelihood: of a given text (perplexity), or of a sample's possible labels (accuracy, F1).

LARGEST_EXPONENT = 600.0  # a perplexity beyond this is as bad as any, and still a finite number


def perplexity(sums: F64) -> F64:
    """Returns exp(nats a unit) [...] of sums of (nats, units) [..., 2]."""
    values: F64 = np.exp(np.minimum(mean(sums), LARGEST_EXPONENT))
    return values


def likeliest(nats: Sequence[float]) -> int:
    """Returns the place of the choice that the model takes: the one with the fewest nats in all, the first of equals.

    Nats are summed over a choice's tokens and not divided by their number. This is the usual accuracy of GLUE and
    SuperGLUE tasks, whose labels are a few fixed words (rank classification: Brown et al. 2020, Sanh et al. 2022).
    """
    return int(np.argmin(np.asarray(nats, dtype=np.float64)))


def correct(chosen: int, label: int) -> tuple[float, float]:
    """Returns (1 if the choice is right else 0, 1)."""
    return float(chosen == label), 1.0


def positives(chosen: int, label: int) -> tuple[float, float, float]:
    """Returns (true positive, chosen as positive, positive by its label), each 0 or 1. Choice 1 is the positive one, as
    in MRPC ("equivalent") and MultiRC ("true"). Raises SettingsError for a third choice, where F1 has no one
    meaning."""
    if max(chosen, label) > 1:
        raise SettingsError("--metric f1 is for two choices, the second being the positive one: use accuracy here")
    return float(chosen and label), float(chosen), float(label)


def f1(sums: F64) -> F64:
    """Returns 2 TP / (chosen + labelled) [...] of sums of `positives` [..., 3]; 0 if no sample is positive by choice or
    label."""
    both = sums[..., 1] + sums[..., 2]
    values: F64 = 2 * sums[..., 0] / np.where(both > 0, both, 1.0)
    return values


LIKELIHOOD = (
    Metric("perplexity", False, "nats", 2, None, perplexity, "words"),
    Metric("token_perplexity", False, "nats", 2, None, perplexity, "tokens"),
    Metric("accuracy", True, "choice", 2, correct, mean),
    Metric("f1", True, "choice", 3, positives, f1),
)


# A metric of the `evaluate` library, from a file of the user's own: nothing is fetched.
# The file is a program. It runs in this process with all rights of its user: only a user may name it, never a pack, and
# a command that runs it says so (`moeconv.conversion.material.module_note`).


@dataclass(frozen=True)
class LocalJudge:
    """The judge of a user's module: it calls the module for one sample, and takes the number under `key`, or the only
    number."""

    path: Path
    key: str

    def __call__(self, prediction: str, target: str) -> tuple[float, float]:
        """Returns (score, 1). Raises SettingsError if the module fails or gives no finite number."""
        module = _module(self.path)
        try:
            found = module.compute(predictions=[prediction], references=[target])
        except Exception as error:  # the module may raise anything
            raise SettingsError(f"--metric {self.path} can't judge a text ({_first_line(error)})") from None
        return self._number(found), 1.0

    def _number(self, found: Any) -> float:
        if not isinstance(found, dict) or not found:
            raise SettingsError(f"--metric {self.path} gave {found!r:.60}: it must give a dict of numbers")
        keys = ", ".join(map(str, found))
        if not self.key and len(found) > 1:
            raise SettingsError(f"--metric {self.path} gives several values ({keys}): name one as {self.path}:KEY")
        key = self.key or next(iter(found))
        if key not in found:
            raise SettingsError(f"--metric {self.path} gives no {key!r}: it gives {keys}")
        try:
            score = float(found[key])
        except (TypeError, ValueError):
            raise SettingsError(f"--metric {self.path}: {key} is {found[key]!r:.60}, which is no number") from None
        if not math.isfinite(score):
            raise SettingsError(f"--metric {self.path}: {key} is {score} for a text: it must be finite")
        return score


def is_module(named: str) -> bool:
    """Returns whether a metric's name is the path of a module."""
    return named.endswith(".py") or ".py:" in named


def unjudged(named: str) -> Metric:
    """Returns the metric of `local_metric` without its judge: the module is not loaded."""
    file, _, key = named.partition(".py:")
    name = Path(file if file.endswith(".py") else file + ".py").name
    called = f"{name}:{key}" if key else name
    return Metric(called, not key.startswith("-"), "output", 2, None, mean)


def local_metric(named: str) -> Metric:
    """Returns the metric of a user's module: `path.py`, `path.py:key`, or `path.py:-key` for a value that is better
    when lower; its value is the mean over samples, its name the file's without the folder.

    The module judges one text at once here, so that a missing key or a broken module is known before any work. Raises
    SettingsError.
    """
    file, _, key = named.partition(".py:")
    path = Path(file if file.endswith(".py") else file + ".py")
    if not path.is_file():
        raise SettingsError(f"--metric {named}: {path} is not there")
    judge = LocalJudge(path, key.removeprefix("-"))
    judge("one text", "one text")
    return replace(unjudged(named), judge=judge)


@cache
def _module(path: Path) -> Any:
    import evaluate

    try:
        return evaluate.load(str(path), keep_in_memory=True)
    except Exception as error:  # the file may raise anything while it is imported
        raise SettingsError(f"--metric {path} can't be loaded as an evaluate module ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


METRICS: dict[str, Metric] = {metric.name: metric for metric in (*GENERATED, *LIKELIHOOD)}


def find_metric(named: str) -> Metric:
    """Returns the metric of a name in METRICS, or of the path of a local `evaluate` module (see `local_metric`). Raises
    SettingsError."""
    if named in METRICS:
        return METRICS[named]
    if is_module(named):
        return local_metric(named)
    raise SettingsError(
        f"--metric {named}: not known; there are {', '.join(METRICS)}, or give path/to/metric.py of an evaluate module"
    )


def recorded_metric(named: str) -> Metric:
    """Returns the metric of earlier scores: as `find_metric`, but a user's module is not run, and need not be there.
    Raises SettingsError."""
    return unjudged(named) if is_module(named) else find_metric(named)


def default_metric(seq2seq: bool, choices: bool = False) -> str:
    """Returns the name of the usual metric for samples of this kind (see `Splits`)."""
    if choices:
        return "accuracy"
    return "rouge2" if seq2seq else "perplexity"


__all__ = ["F64", "METRICS", "Metric", "default_metric", "find_metric", "is_module", "likeliest", "recorded_metric"]
