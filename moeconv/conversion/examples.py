"""A few held-out samples, for a person to see what a loss looks like."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from moeconv.artifacts import Assignment
from moeconv.conversion.bench import Bench
from moeconv.measure.journal import identity
from moeconv.measure.scorers.build import spread

SHOWN = 6


def side_by_side(bench: Bench, widths: Assignment) -> tuple[Mapping[str, str], ...]:
    """Input, target, what the unquantised model and what the pack make of it; empty where nothing is generated."""
    material, instead = bench.material, bench.instead
    if not material.metric.generates:
        return ()
    texts = material.splits.heldout
    chosen = [texts[at] for at in spread(len(texts), SHOWN)]

    def written() -> dict[str, Any]:
        trial = bench.trial
        scorer = material.scorer(trial, chosen, None)
        trial.assign(widths)
        with nullcontext() if instead is None else instead.on(trial):
            after = scorer.score().outputs
        trial.restore()
        return {"reference": scorer.score().outputs, "pack": after}

    rule = [] if instead is None else [instead.rule]
    name = identity("side by side", [[str(key), bits] for key, bits in sorted(widths.items())], *rule)
    found = bench.journal.remember(name, written)
    with bench.journal.believed():
        return tuple(
            {"input": sample.source, "target": sample.target, "reference": before, "pack": after}
            for sample, before, after in zip(chosen, found["reference"], found["pack"], strict=True)
        )
