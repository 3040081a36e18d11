"""A sweep by gradients: every expert at every width from a few passes, scaled by layers that are measured whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeconv.artifacts import Bits, SensitivityTable, Summary, SweepCost, uniform
from moeconv.calibration import samples_digest
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.measure.journal import identity
from moeconv.measure.scorers.text import TextScorer
from moeconv.sweep.fisher import DRAWS, Gradients, LayerCosts
from moeconv.sweep.scales import LayerScales
from moeconv.sweep.sensitivity import BASE_BITS, probes_for


def swept_by_gradients(bench: Bench, widths: Sequence[int], account: Account) -> tuple[SensitivityTable, SweepCost]:
    """On the samples that rank. Raises ConversionError."""
    settings, spec, model = bench.settings, bench.spec, bench.layered
    scorer = bench.material.scorer(model, bench.material.ranking, settings.sweep_samples)
    assert isinstance(scorer, TextScorer), "models that do not continue text were refused"
    probes = probes_for(spec, widths, settings.per_projection)
    base: Bits = (BASE_BITS,) * len(spec.moe.ffn.projections)
    patterns = [base, *dict.fromkeys(probe.bits for probe in probes)]
    model.coded({bits for pattern in patterns for bits in pattern if bits < 16})
    about = identity(samples_digest(bench.material.ranking), settings.context, settings.sweep_samples, "fisher")
    with account.progress("gradients", len(spec.decoder), "layer") as bar:
        found = Gradients(model, scorer.texts, patterns, DRAWS, settings.seed).run(bench.journal, about, bar)
    with account.progress("scales of layers", len(spec.decoder), "layer") as bar:
        scaled = LayerScales(model, scorer.texts, patterns)
        exact = scaled.run(bench.journal, about, bar)
    tokens = int(scorer.texts.scored.sum())
    share = len(scaled.places) / len(scorer.texts.ids)
    nats = {at: _scaled(costs, exact.nats[at], share) for at, costs in found.items()}
    spent = SweepCost(
        len(probes), sum(count == 0 for costs in found.values() for count in costs.rows) * (len(patterns) - 1), 1.0,
        exact.flops + sum(costs.flops for costs in found.values()),
        len(probes) * model.calls.flops(sum(sum(costs.rows) for costs in found.values())),
        exact.seconds + sum(costs.seconds for costs in found.values()), 0,
    )  # fmt: skip
    kls = {
        (at.expert(number), bits): row[number] / tokens
        for at in found
        for bits, row in zip(patterns, nats[at], strict=True)
        for number in range(spec.moe.n)
    }
    costs = {probe: (math.nan, math.nan, kls[probe.key, probe.bits]) for probe in probes}
    coverage = {at.expert(number): count for at, one in found.items() for number, count in enumerate(one.rows)}
    return SensitivityTable(BASE_BITS, _base(bench, scorer), costs, coverage), spent


def _scaled(costs: LayerCosts, exact: Sequence[float], share: float) -> list[list[float]]:
    """Nats above the base of each pattern and expert; `exact` was measured on a `share` of the windows."""
    rows = []
    for predicted, measured in zip(costs.costs, exact, strict=True):
        together, rise = sum(predicted) * share, measured - exact[0]
        factor = rise / together if together * rise > 0 else 1.0  # noise in what hardly costs anything
        rows.append([cost * factor for cost in predicted])
    return rows


def _base(bench: Bench, scorer: TextScorer) -> Summary:
    """All experts at the width that costs are beside."""
    measure = bench.measured_by(scorer, f"ranking/{bench.settings.sweep_samples or 'all'}")
    return measure.summary(measure(uniform(bench.spec, BASE_BITS), f"all at {BASE_BITS}"))
