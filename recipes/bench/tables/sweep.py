"""`make bench-sweep`: the exact sweep beside full evaluations, and what ranks experts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

MODELS = ("g2p", "marks", "wiki", "wikids")
SIGNALS = ("kl", "nll", "metric")
_COMPARED = re.compile(r"(?P<model>.+), (?P<bits>\d+) bits: probes compared")


def parts(result: Result) -> Sequence[Part]:
    ranks = [f"ranks alike on other samples: {SIGNALS[0]}", *SIGNALS[1:]]
    costs: list[Line] = [("", "operations in experts", "least that is possible", "time", *ranks)]
    costs += [
        (
            name, f"{{{name}: operations in expert rows|%}}", f"{{{name}: those that no exact sweep can spare|%}}",
            f"{{{name}: wall time|%}}", *(f"{{{name}: {signal} on other samples|.2f}}" for signal in SIGNALS),
        )
        for name in MODELS
        if f"{name}: wall time" in result.by_name
    ]  # fmt: skip
    agreement: list[Line] = [
        ("", "bits", "probes compared", "largest difference, nats a token", "of the divergence", "outputs that differ")
    ]
    agreement += [
        agreed(found["model"], found["bits"], result)
        for found in map(_COMPARED.fullmatch, result.by_name)
        if found is not None and found["model"] in MODELS
    ]
    return [costs, agreement]


def agreed(model: str, bits: str, result: Result) -> Line:
    """Only models that write outputs have some that could differ."""
    about = f"{model}, {bits} bits"
    differ = f"{about}: outputs that differ"
    return (
        model,
        bits,
        f"{{{about}: probes compared}} {{{about}: probes compared@unit}}",
        f"{{{about}: largest difference|.1e}}",
        f"{{{about}: largest difference of the divergence|.1e}}",
        f"{{{differ}}} {{{differ}@unit}}" if differ in result.by_name else "",
    )
