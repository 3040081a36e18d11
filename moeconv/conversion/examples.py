"""A few held-out samples, for a person to see what a loss looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moeconv.artifacts import Assignment
from moeconv.conversion.material import Material
from moeconv.measure.journal import Journal, identity
from moeconv.measure.scorers.build import spread
from moeconv.measure.trial import Trial

SHOWN = 6


def side_by_side(
    material: Material, trial: Callable[[], Trial], journal: Journal, widths: Assignment
) -> tuple[Mapping[str, str], ...]:
    """Input, target, what the unquantised model and what the pack make of it; empty where nothing is generated."""
    if not material.metric.generates:
        return ()
    texts = material.splits.heldout
    chosen = [texts[at] for at in spread(len(texts), SHOWN)]

    def written() -> dict[str, Any]:
        scorer = material.scorer(trial(), chosen, None)
        trial().assign(widths)
        after = scorer.score().outputs
        trial().restore()
        return {"reference": scorer.score().outputs, "pack": after}

    name = identity("side by side", [[str(key), bits] for key, bits in sorted(widths.items())])
    found = journal.remember(name, written)
    return tuple(
        {"input": sample.source, "target": sample.target, "reference": before, "pack": after}
        for sample, before, after in zip(chosen, found["reference"], found["pack"], strict=True)
    )
