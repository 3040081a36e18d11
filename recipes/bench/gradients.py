"""`make bench-gradients`: the sweep by gradients beside the exact one, on reference models of every kind.

Each model is converted twice with its recipe's settings (g2p for another loss, see MODELS) and one work directory: with
experts ranked one by one, for the promised loss; and ranked by gradients, in the bytes that came of it. What both rank
on is the same text, and so is what both plans are judged on. Writes build/bench/gradients.json.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeconv.artifacts import FISHER, ConversionReport, Probe, SensitivityTable, Target
from moeconv.conversion.conversion import Conversion
from moeconv.dense import SOURCE
from moeconv.progress import unseen
from recipes.bench.conversions import correlation, run_models
from recipes.bench.program import as_program, own_recipe
from recipes.bench.result import Row
from recipes.bench.sized import sized

FOLDER = Path("build/bench/gradients")
_G2P = {"metric": "perplexity", "target": Target("loss", 0.003)}
MODELS: Mapping[str, Mapping[str, Any]] = sized(
    {"wiki": {}, "wikids": {}, "g2p": _G2P}, {"g2p": {**_G2P, "bits": (2, 4), "target": Target("loss", 0.5)}}
)
"""With what is otherwise than in their recipes: what g2p's asks for, all experts hold at 2 bits."""
RANK_AIM, FLOPS_AIM, TIME_AIM = 0.93, 0.05, 0.10


def convert(name: str, signal: str, target: Target | None = None) -> ConversionReport:
    """By its recipe but for these. Raises ConversionError."""
    settings = replace(own_recipe(name, FOLDER).settings, dense_bits=SOURCE, **MODELS[name])
    settings = replace(
        settings, signal=signal, target=target or settings.target, out=FOLDER / f"{name}-{signal}.pack",
    )  # fmt: skip
    print(f"{name}, --tune signal={signal}", file=sys.stderr, flush=True)
    return Conversion(settings, lambda line: print(line, file=sys.stderr), unseen).run()[1]


def rows_of(name: str) -> list[Row]:
    """Raises ConversionError."""
    exact = convert(name, "kl")
    nbytes = exact.expert_bytes["pack"]
    gradients = convert(name, FISHER, Target("size", nbytes))
    rows = rank_rows(name, costs(exact.sensitivity), costs(gradients.sensitivity))
    return [*rows, *effort_rows(name, exact, gradients), *plan_rows(name, exact, gradients)]


def costs(found: SensitivityTable | None) -> Mapping[Probe, float]:
    """The divergence of each probe."""
    assert found is not None, "experts were swept"
    return {probe: found.cost(probe, "kl") for probe in found.costs}


def rank_rows(name: str, exact: Mapping[Probe, float], gradients: Mapping[Probe, float]) -> list[Row]:
    """At each width over all experts, and inside layers, of which the median counts."""
    rows = []
    for bits in sorted({max(probe.bits) for probe in exact.keys() & gradients.keys()}):
        probes = sorted((probe for probe in exact.keys() & gradients.keys() if max(probe.bits) == bits), key=str)
        whole = _alike(probes, exact, gradients)
        layers = sorted({probe.key.at for probe in probes})
        within = [_alike([each for each in probes if each.key.at == at], exact, gradients) for at in layers]
        what, unit = f"{name}, {bits} bits: exact and gradients", "rank correlation"
        rows += [
            Row(what, whole, unit, n=len(probes)).at_least(RANK_AIM),
            Row(f"{what}, inside a layer", float(np.median(within)), unit, n=len(within)),
        ]
    return rows


def _alike(probes: list[Probe], exact: Mapping[Probe, float], gradients: Mapping[Probe, float]) -> float:
    return correlation(*(np.array([of[probe] for probe in probes]) for of in (exact, gradients)))


def effort_rows(name: str, exact: ConversionReport, gradients: ConversionReport) -> list[Row]:
    one, other = exact.sweep_cost, gradients.sweep_cost
    assert one is not None
    assert other is not None
    return [
        Row(f"{name}: operations in expert rows", other.flops / one.naive_flops, "of naive").at_most(FLOPS_AIM),
        Row(f"{name}: time", other.seconds / one.seconds, "of the exact sweep's").at_most(TIME_AIM),
        Row(f"{name}: time of the exact sweep", one.seconds, "s"),
    ]


def plan_rows(name: str, exact: ConversionReport, gradients: ConversionReport) -> list[Row]:
    """Both plans on the same text, in as many bytes; the one by gradients is to lose no more."""
    rows = []
    for what in ("calibration", "heldout"):
        one, other = getattr(exact, what), getattr(gradients, what)
        rows += [
            Row(f"{name}, {what}: loss of the exact plan", 100 * one.loss, "%").within(100 * one.low, 100 * one.high),
            Row(f"{name}, {what}: loss of the plan by gradients", 100 * other.loss, "%")
            .within(100 * other.low, 100 * other.high)
            .at_most(100 * one.loss),
        ]
    sizes = [report.expert_bytes["pack"] / 1e6 for report in (exact, gradients)]
    return [
        *rows,
        Row(f"{name}: experts of the exact plan", sizes[0], "MB"),
        Row(f"{name}: experts of the plan by gradients", sizes[1], "MB"),
    ]


def main() -> int:
    return run_models("gradients", "The sweep by gradients beside the exact one.", MODELS, FOLDER, rows_of, ["scipy"])


if __name__ == "__main__":
    as_program(main)
