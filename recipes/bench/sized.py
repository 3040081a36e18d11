"""How much a bench does: enough to believe its figures, or with `--smoke`, which every bench takes, only enough to see
that it still runs. What a bench starts hears of it by the environment, also where another Python runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

_VARIABLE = "MOERT_BENCH_SMOKE"
if "--smoke" in sys.argv:
    sys.argv.remove("--smoke")
    os.environ[_VARIABLE] = "1"
SMOKE = _VARIABLE in os.environ

T = TypeVar("T")


def sized(whole: T, smoke: T) -> T:
    """Returns the second size under `--smoke`, otherwise the first."""
    return smoke if SMOKE else whole


TRAINING: Sequence[str] = sized((), ("--samples", "64", "--epochs", "1"))
"""Of `moeconv train-hash` and `train-neurons`, which otherwise train as they do by default."""
