"""`make bench-plans`: what the sweep's ranking of experts is worth, beside rankings that measure nothing, and MC-MoE's.

The recipe's sweep gives each expert its costs. The same costs are then given to experts in another order: at random, or
the largest to the experts that the most tokens of the sweep's text go to. The knapsack makes plans of as many bytes
from each, and all are measured on held-out text, beside all experts at one width.

MC-MoE (Huang et al. 2024, arXiv 2410.06270) chooses among 1, 2 and 3 bits, by an integer program in each layer. Its
plans stand beside those of the sweep with the same widths, in the same quantizer's codes and no more bytes. Writes
build/bench/plans.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from moeconv.artifacts import Bits, SensitivityTable, Target, uniform
from moeconv.conversion.measuring import Account, Bench, References, evaluated, job_of, swept
from moeconv.conversion.room import Memory
from moeconv.dense import SOURCE
from moeconv.plan.problem import Plan
from moeconv.plan.search import Question, assigned_bytes, budget_bytes, uniform_bytes
from moeconv.progress import unseen
from moeconv.promise.judging import estimate
from moeconv.quantizers.coder import batches
from moeconv.source.experts import Call, expert_ffn
from moert.pack.model_spec import ExpertKey, LayerKey
from recipes.bench.conversions import opened, run_models
from recipes.bench.program import as_program, own_recipe
from recipes.bench.result import Row, row_of_runs
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

# Rankings of experts that share the sweep's costs.


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


def with_widths(table: SensitivityTable, widths: Sequence[int]) -> SensitivityTable:
    """Returns the table without the costs at other widths."""
    return replace(table, costs={probe: cost for probe, cost in table.costs.items() if set(probe.bits) <= {*widths}})


# MC-MoE's widths. Its figures are of single layers: what a change does to later layers is not in them.

MC_WIDTHS = sized((1, 2, 3), (2, 3, 4))  # plain codes, with which the bench is tried out, have no width of 1
MC_BITS = sized((1.7, 2.1, 2.4), (3.0,))  # a weight, scales counted
ALPHA, BETA, GAMMA = 1.0, 1.5, 2.0
"""The exponents of frequency, router weight and error: the defaults of the authors' solver, whose code raises the error
to ALPHA. With the power of two that it names, the plans here lose less."""


@dataclass(frozen=True)
class Significance:
    """One layer's experts: the tokens that go to each and the sum of the router's weights of these tokens [experts];
    and the norm of what the layer's output changes by, with that expert alone at each of MC_WIDTHS
    [experts, widths]."""

    tokens: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]

    def costs(self) -> npt.NDArray[np.float64]:
        """Returns the costs that the program sums up [experts, widths]. Frequencies are counts here: a factor that a
        whole layer shares changes nothing."""
        return (self.tokens**ALPHA * self.weights**BETA)[:, None] * self.errors**GAMMA


def solved(costs: npt.NDArray[np.float64], nbytes: Sequence[int], budget: int) -> list[int]:
    """Returns the place of each expert's width [experts] with the least sum of `costs` [experts, widths], in `budget`
    bytes, where an expert at each width takes `nbytes` [widths]. As in MC-MoE, every width but the narrowest has at
    least one expert. Raises ValueError if there is no such choice."""
    experts, widths = costs.shape
    chosen = np.eye(experts * widths).reshape(experts, widths, -1)
    largest = costs.max()
    found = milp(
        (costs / largest if largest > 0 else costs).ravel(),
        constraints=[
            LinearConstraint(chosen.sum(1), 1, 1),
            LinearConstraint(np.tensordot(np.array(nbytes, float), chosen.sum(0), 1), ub=budget),
            LinearConstraint(chosen.sum(0)[1:], lb=1),
        ],
        integrality=np.ones(costs.size),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        raise ValueError(f"no widths of {experts} experts take {budget} bytes or less: {found.message}")
    places: list[int] = found.x.reshape(experts, widths).argmax(1).tolist()
    return places


@torch.inference_mode()
def significances(bench: Bench) -> dict[LayerKey, Significance]:
    """Returns MC-MoE's figures of all layers, on the text that the quantizer's moments are collected on."""
    calls, seen = bench.trial.calls, defaultdict[LayerKey, list[Call]](list)
    bench.trial.original_experts()
    with calls.during(watch=lambda at, call: seen[at].append(call)):
        bench.material.scorer(bench.trial, bench.material.ranking, bench.moment_samples).score()
    return {at: _significance(bench, at, seen[at]) for at in bench.spec.moe_layers()}


def _significance(bench: Bench, at: LayerKey, seen: Sequence[Call]) -> Significance:
    n, (x, chosen, weights) = bench.spec.moe.n, _joined(seen)
    errors = np.zeros((n, len(MC_WIDTHS)))
    total = np.zeros(n)
    for key, bits in _coded(bench, at):
        tokens, places = (chosen == key.expert).nonzero(as_tuple=True)
        weight = weights[tokens, places]
        total[key.expert] = float(weight.sum())
        before, after = (
            expert_ffn(x[tokens], each, bench.spec.moe.ffn, bench.trial.calls.supply.biases(key))
            for each in (bench.trial.calls.weights(key), bench.trial.weights(key, bits))
        )
        change = (after - before) * weight[:, None]
        errors[key.expert, MC_WIDTHS.index(int(bits[0]))] = float(change.norm())
    counts = torch.bincount(chosen[chosen >= 0], minlength=n)
    return Significance(counts.double().numpy(), total, errors)


def _joined(seen: Sequence[Call]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the inputs [tokens, d_model], experts and router weights [tokens, top_k] of several calls."""
    return (
        torch.cat([call.x for call in seen]),
        torch.cat([call.chosen for call in seen]),
        torch.cat([call.weights for call in seen]),
    )


def _coded(bench: Bench, at: LayerKey) -> Iterator[tuple[ExpertKey, Bits]]:
    """Yields a layer's experts at each width, with their codes made in large batches."""
    alike = len(bench.spec.moe.ffn.projections)
    wanted = [(at.expert(number), (bits,) * alike) for bits in MC_WIDTHS for number in range(bench.spec.moe.n)]
    for batch in batches(bench.spec, wanted):
        bench.coder.prepare(batch)
        yield from batch


def mc_plan(bench: Bench, found: Mapping[LayerKey, Significance], bits: float) -> Plan:
    """Returns MC-MoE's plan: as many bytes in each layer, all layers together with `bits` a weight or less."""
    spec, storage = bench.spec, bench.coding.storage
    budget = budget_bytes(Target("bits", bits), spec)
    assert budget is not None
    nbytes = [uniform_bytes(spec, width, storage) // len(spec.expert_keys()) for width in MC_WIDTHS]
    widths = {
        at.expert(number): (MC_WIDTHS[place],) * len(spec.moe.ffn.projections)
        for at, layer in found.items()
        for number, place in enumerate(solved(layer.costs(), nbytes, budget // len(found)))
    }
    return Plan(widths, assigned_bytes(spec, widths, storage), 0.0)


# All plans of a model, measured.


def rows_of(name: str) -> list[Row]:
    """Raises ConversionError."""
    probed = sorted({*WIDTHS, *MC_WIDTHS})
    settings = replace(
        own_recipe(name, FOLDER).settings,
        bits=tuple(probed), dense_bits=SOURCE, **MODELS[name],
    )  # fmt: skip
    with opened(settings) as bench:
        if bench.moments is not None:
            bench.collect_moments(bench.moments)
        references, account = References.of(bench), Account(say, unseen)
        job = job_of(bench.coding, bench.material, bench.moments, Memory())
        found = swept(bench, job, probed, references.judge.measure, account).inputs.table
        rows = []
        for bits in UNIFORM:
            plan = Plan(uniform(bench.spec, bits), uniform_bytes(bench.spec, bits, bench.coding.storage), 0.0)
            rows += measured(f"{name}, all at {bits} bits", bench, references, [plan])
        tables = rankings(with_widths(found, WIDTHS))
        for bits in BITS:
            for ranking, several in tables.items():
                questions = (Question(bench.spec, one, bench.coding.storage, SIGNAL, WIDTHS) for one in several)
                plans = [each.within("knapsack", Target("bits", bits)) for each in questions]
                rows += measured(f"{name}, {bits:g} bits, {ranking}", bench, references, plans)
        question = Question(bench.spec, with_widths(found, MC_WIDTHS), bench.coding.storage, SIGNAL, MC_WIDTHS)
        significant = significances(bench)
        for bits in MC_BITS:
            theirs = mc_plan(bench, significant, bits)
            mine = question.within("knapsack", Target("size", theirs.nbytes))
            for ranking, plan in ((f"sweep of {MC_WIDTHS[0]} to {MC_WIDTHS[-1]}", mine), ("MC-MoE", theirs)):
                rows += measured(f"{name}, {bits:g} bits, {ranking}", bench, references, [plan])
        return rows


def measured(where: str, bench: Bench, references: References, plans: Sequence[Plan]) -> list[Row]:
    """Returns the size of plans, and their loss and divergence on held-out text, of several the median."""
    heldout, documents = references.heldout, references.judge.used.heldout
    evaluations = [evaluated(heldout, plan) for plan in plans]
    losses = [estimate(heldout, each, documents, bench.settings.seed) for each in evaluations]
    kls = [each.summary(heldout.metric, heldout.reference).kl for each in evaluations]
    row = row_of_runs(f"{where}: loss", [100 * each.loss for each in losses], "%")
    if len(losses) == 1:
        row = row.within(100 * losses[0].low, 100 * losses[0].high, losses[0].samples)
    rows = [
        row,
        row_of_runs(f"{where}: experts", [plan.nbytes / 1e6 for plan in plans], "MB"),
        row_of_runs(f"{where}: divergence", kls, "nats a token"),
    ]
    if len(losses) > 1:
        rows.insert(1, Row(f"{where}: least loss", 100 * min(each.loss for each in losses), "%"))
        rows.insert(2, Row(f"{where}: largest loss", 100 * max(each.loss for each in losses), "%"))
    say(f"{where}: {', '.join(f'{each.loss:.2%}' for each in losses)}")
    return rows


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    about = "Plans by the sweep and by others, in as many bytes."
    return run_models("plans", about, MODELS, FOLDER, rows_of, seeds=SEEDS)


if __name__ == "__main__":
    as_program(main)
