"""A metric of the `evaluate` library, from a file of the user's own: nothing is fetched.

Such a file is a program. It runs in this process with all that its user may do: only a user may name it, never a pack,
and what runs it says so (`moeconv.conversion.limits.module_note`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from moeconv.errors import SettingsError
from moeconv.measure.metrics.metric import Metric, mean


@dataclass(frozen=True)
class LocalJudge:
    """Calls the module for one sample, and takes the number under `key`, or the only one that there is."""

    path: Path
    key: str

    def __call__(self, prediction: str, target: str) -> tuple[float, float]:
        """(score, 1). Raises SettingsError."""
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
    """Whether it is the path of one."""
    return named.endswith(".py") or ".py:" in named


def unjudged(named: str) -> Metric:
    """`local_metric` without the module: what its values mean, and no judge."""
    file, _, key = named.partition(".py:")
    name = Path(file if file.endswith(".py") else file + ".py").name
    called = f"{name}:{key}" if key else name
    return Metric(called, not key.startswith("-"), "output", 2, None, mean)


def local_metric(named: str) -> Metric:
    """`path.py`, `path.py:key`, or `path.py:-key` for a value that is better when lower; its mean over samples. It is
    called by the file, without its folder.

    The module judges one text at once here, so that a missing key or a broken module is known before any work.
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
