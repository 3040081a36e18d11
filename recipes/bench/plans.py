"""`make bench-plans`: what the sweep's ranking of experts is worth, beside rankings that measure nothing.

The recipe's sweep gives each expert its costs. The same costs are then given to experts in another order: at random, or
the largest to the experts that the most tokens of the sweep's text go to. The knapsack makes plans of as many bytes
from each, and all are measured on held-out text, beside all experts at one width. Writes build/bench/plans.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeconv.artifacts import SensitivityTable, Target, uniform
from moeconv.command.recipe import Recipe
from moeconv.conversion.measuring import Account, Bench, References, evaluated, job_of, swept
from moeconv.conversion.room import Memory
from moeconv.dense import SOURCE
from moeconv.plan.problem import Plan
from moeconv.plan.search import Question, uniform_bytes
from moeconv.progress import unseen
from moeconv.promise.judging import estimate
from moert.pack.model_spec import ExpertKey
from recipes.bench.conversions import opened
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized

FOLDER = Path("build/bench/plans")
MODELS: Mapping[str, Mapping[str, Any]] = sized(
    {"wiki": {}, "wikids": {}, "g2p": {"metric": "perplexity"}}, {"g2p": {"metric": "perplexity"}}
)
"""With what is otherwise than in their recipes."""
WIDTHS, UNIFORM = (2, 3, 4), (2, 3)
BITS = sized((2.4, 2.7), (2.7,))  # a weight, scales counted
SEEDS = sized(5, 2)
SIGNAL = "kl"


def reordered(table: SensitivityTable, order: Sequence[ExpertKey]) -> SensitivityTable:
    """Returns the table with the same costs, the largest at the narrowest width for the first expert in `order`."""
    narrowest = min(probe.bits for probe in table.costs)
    falling = sorted(
        (probe for probe in table.costs if probe.bits == narrowest), key=lambda probe: -table.cost(probe, SIGNAL)
    )
    source = {key: probe.key for key, probe in zip(order, falling, strict=True)}
    costs = {probe: table.costs[probe._replace(key=source[probe.key])] for probe in table.costs}
    return replace(table, costs=costs)


def rankings(table: SensitivityTable) -> dict[str, list[SensitivityTable]]:
    """Returns the table as it was measured, by usage, and in random orders."""
    keys = sorted(table.coverage)
    used = sorted(keys, key=lambda key: -table.coverage[key])
    shuffled = [np.random.default_rng(seed).permutation(len(keys)) for seed in range(SEEDS)]
    return {
        "sweep": [table],
        "usage": [reordered(table, used)],
        "random": [reordered(table, [keys[place] for place in order]) for order in shuffled],
    }


def rows_of(name: str) -> list[Row]:
    """Raises ConversionError."""
    settings = replace(
        Recipe.load(Path(f"recipes/{name}.toml"), FOLDER).settings, bits=WIDTHS, dense_bits=SOURCE, **MODELS[name]
    )
    with opened(settings) as bench:
        if bench.moments is not None:
            bench.collect_moments(bench.moments)
        references, account = References.of(bench), Account(say, unseen)
        job = job_of(bench.coding, bench.material, bench.moments, Memory())
        found = swept(bench, job, WIDTHS, references.judge.measure.samples_id, account).inputs.table
        rows = []
        for bits in UNIFORM:
            plan = Plan(uniform(bench.spec, bits), uniform_bytes(bench.spec, bits, bench.coding.storage), 0.0)
            rows += measured(f"{name}, all at {bits} bits", bench, references, [plan])
        tables = rankings(found)
        for bits in BITS:
            for ranking, several in tables.items():
                questions = (Question(bench.spec, one, bench.coding.storage, SIGNAL, WIDTHS) for one in several)
                plans = [each.within("knapsack", Target("bits", bits)) for each in questions]
                rows += measured(f"{name}, {bits:g} bits, {ranking}", bench, references, plans)
        return rows


def measured(where: str, bench: Bench, references: References, plans: Sequence[Plan]) -> list[Row]:
    """Returns the size of plans and their loss on held-out text, of several the median."""
    heldout, documents = references.heldout, references.judge.used.heldout
    losses = [estimate(heldout, evaluated(heldout, plan), documents, bench.settings.seed) for plan in plans]
    row = row_of_runs(f"{where}: loss", [100 * each.loss for each in losses], "%")
    if len(losses) == 1:
        row = row.within(100 * losses[0].low, 100 * losses[0].high, losses[0].samples)
    rows = [row, row_of_runs(f"{where}: experts", [plan.nbytes / 1e6 for plan in plans], "MB")]
    if len(losses) > 1:
        rows.insert(1, Row(f"{where}: least loss", 100 * min(each.loss for each in losses), "%"))
        rows.insert(2, Row(f"{where}: largest loss", 100 * max(each.loss for each in losses), "%"))
    say(f"{where}: {', '.join(f'{each.loss:.2%}' for each in losses)}")
    return rows


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans by the sweep, by usage and at random, in as many bytes.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    asked = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    rows = [row for name in asked.models for row in rows_of(name)]
    path = write("plans", context({"models": asked.models, "seeds": SEEDS}), rows)
    print(table(rows))
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    as_program(main)
