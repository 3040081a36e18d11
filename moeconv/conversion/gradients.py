"""A sweep by gradients: every expert at every width from a few passes, scaled by layers that are measured whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeconv.artifacts import Bits, SensitivityTable, SweepCost, uniform
from moeconv.calibration import Sample, samples_digest
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.measure.assignments import Measure
from moeconv.measure.journal import identity
from moeconv.measure.metrics import METRICS
from moeconv.measure.scorers.build import build_scorer
from moeconv.measure.scorers.generated import GeneratedScorer
from moeconv.measure.scorers.text import TextScorer
from moeconv.source.experts import ExpertCalls
from moeconv.sweep.fisher import DRAWS, Costs, ExpertCosts, Gradients, LayerCosts
from moeconv.sweep.fisher_pairs import SCALE_TOKENS, PairGradients, PairScales, narrower, scaled_as_one
from moeconv.sweep.scales import LayerScales, Measured
from moeconv.sweep.sensitivity import BASE_BITS, probes_for
from moert.pack.model_spec import LayerKey


@dataclass(frozen=True)
class Ranked:
    """What gradients say, what whole layers cost, and what comes of both: `nats` above the base of each pattern and
    expert, in sum over `tokens`. `measure` tries plans on the same text."""

    costs: Costs
    scales: Measured
    nats: Mapping[LayerKey, list[list[float]]]
    tokens: int
    calls: ExpertCalls
    measure: Measure


def swept_by_gradients(bench: Bench, widths: Sequence[int], account: Account) -> tuple[SensitivityTable, SweepCost]:
    """On the samples that rank. Raises ConversionError."""
    settings, spec = bench.settings, bench.spec
    probes = probes_for(spec, widths, settings.per_projection)
    base: Bits = (BASE_BITS,) * len(spec.moe.ffn.projections)
    patterns = [base, *dict.fromkeys(probe.bits for probe in probes)]
    about = identity(samples_digest(bench.material.ranking), settings.context, settings.sweep_samples, "fisher")
    ranked = (_by_layers if spec.encoder is None else _of_pairs)(bench, patterns, about, account)
    found = ranked.costs.layers
    spent = SweepCost(
        len(probes), sum(count == 0 for costs in found.values() for count in costs.rows) * (len(patterns) - 1), 1.0,
        ranked.scales.flops + ranked.costs.flops,
        len(probes) * ranked.calls.flops(sum(sum(costs.rows) for costs in found.values())),
        ranked.scales.seconds + ranked.costs.seconds, 0,
    )  # fmt: skip
    kls = {
        (at.expert(number), bits): row[number] / ranked.tokens
        for at in found
        for bits, row in zip(patterns, ranked.nats[at], strict=True)
        for number in range(spec.moe.n)
    }
    costs = {probe: (math.nan, math.nan, kls[probe.key, probe.bits]) for probe in probes}
    coverage = {at.expert(number): count for at, one in found.items() for number, count in enumerate(one.rows)}
    all_at_base = ranked.measure.summary(ranked.measure(uniform(spec, BASE_BITS), f"all at {BASE_BITS}"))
    return SensitivityTable(BASE_BITS, all_at_base, costs, coverage), spent


def _by_layers(bench: Bench, patterns: Sequence[Bits], about: str, account: Account) -> Ranked:
    """Of a model that continues text."""
    settings, model, layers = bench.settings, bench.layered, len(bench.spec.decoder)
    scorer = bench.material.scorer(model, bench.material.ranking, settings.sweep_samples)
    assert isinstance(scorer, TextScorer), "it continues text"
    model.coded({bits for pattern in patterns for bits in pattern if bits < 16})
    gradients = Gradients(model, scorer.texts, patterns, DRAWS, settings.seed)
    costs = _found(gradients, bench, about, account, (layers, "layer"))
    scaled = LayerScales(model, scorer.texts, patterns)
    with account.progress("scales of layers", layers, "layer") as bar:
        exact = scaled.run(bench.journal, about, bar)
    measure = bench.measured_by(scorer, f"ranking/{settings.sweep_samples or 'all'}")
    share = len(scaled.places) / len(scorer.texts.ids)
    nats = {at: _scaled(one, exact.nats[at], share) for at, one in costs.layers.items()}
    return Ranked(costs, exact, nats, int(scorer.texts.scored.sum()), model.calls, measure)


def _of_pairs(bench: Bench, patterns: Sequence[Bits], about: str, account: Account) -> Ranked:
    """Of a model that reads one text and writes another."""
    settings, ranking = bench.settings, bench.material.ranking
    every = _pairs(bench, ranking, settings.sweep_samples)
    tokens = _tokens(every)
    some = _pairs(bench, every.samples, max(1, every.n_samples * SCALE_TOKENS // tokens))
    gradients = PairGradients(bench.trial, every, patterns, DRAWS, settings.seed, bench.memory.sweep_bytes // 2)
    costs = _found(gradients, bench, about, account, (len(gradients.parts), "batch"))
    with account.progress("scales of layers", len(bench.spec.moe_layers()), "layer") as bar:
        exact = PairScales(bench.trial, some, narrower(patterns)).run(bench.journal, about, bar)
    measure = bench.measure("ranking", ranking, settings.sweep_samples)
    nats = {
        at: scaled_as_one(one, patterns, exact.nats[at], _tokens(some) / tokens) for at, one in costs.layers.items()
    }
    return Ranked(costs, exact, nats, tokens, bench.trial.calls, measure)


def _found(way: ExpertCosts, bench: Bench, about: str, account: Account, work: tuple[int, str]) -> Costs:
    """`work`: how much it is, and of what."""
    with account.progress("gradients", *work) as bar:
        return way.run(bench.journal, about, bar)


def _pairs(bench: Bench, samples: Sequence[Sample], limit: int | None) -> GeneratedScorer:
    """At most so many of the samples, by the likelihood of their targets whatever the metric is."""
    material = bench.material
    likelihood = METRICS["token_perplexity"]
    scorer = build_scorer(bench.trial, material.tokenizer, samples, likelihood, material.extent(limit))
    assert isinstance(scorer, GeneratedScorer), "it reads one text and writes another"
    return scorer


def _tokens(scorer: GeneratedScorer) -> int:
    """Those that are scored; of choices the right one's."""
    return int(scorer.items.tokens[scorer.items.right].sum())


def _scaled(costs: LayerCosts, exact: Sequence[float], share: float) -> list[list[float]]:
    """Nats above the base of each pattern and expert; `exact` was measured on a `share` of the text."""
    rows = []
    for predicted, measured in zip(costs.costs, exact, strict=True):
        together, rise = sum(predicted) * share, measured - exact[0]
        factor = rise / together if together * rise > 0 else 1.0  # noise in what hardly costs anything
        rows.append([cost * factor for cost in predicted])
    return rows
