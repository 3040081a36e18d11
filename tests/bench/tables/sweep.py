"""`make bench-sweep`: the exact sweep beside full evaluations, and what ranks experts."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part

MODELS = ("g2p", "docline", "wiki")
SIGNALS = ("kl", "nll", "metric")


def parts(result: Result) -> Sequence[Part]:
    ranks = [f"ranks alike on other samples: {SIGNALS[0]}", *SIGNALS[1:]]
    lines: list[Line] = [("", "operations in experts", "least that is possible", "time", *ranks)]
    lines += [
        (
            name, f"{{{name}: operations in expert rows|%}}", f"{{{name}: those that no exact sweep can spare|%}}",
            f"{{{name}: wall time|%}}", *(f"{{{name}: {signal} on other samples|.2f}}" for signal in SIGNALS),
        )
        for name in MODELS
    ]  # fmt: skip
    return [lines]
