"""Plans for another target, as `moeconv plan` shows them, from the measurements of a conversion. Measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moeconv.artifacts import (
    PURPOSES,
    CurvePoint,
    DenseCosts,
    DenseUnit,
    Probe,
    Residence,
    SensitivityTable,
    Summary,
    Target,
)
from moeconv.conversion.settings import DEFAULT_ALLOCATION, PIECE_BYTES, check_choice, check_ranking, check_target
from moeconv.dense import TRELLIS_WIDTHS, dense_units
from moeconv.errors import SettingsError, TargetMissed
from moeconv.measure.metrics import Metric, recorded_metric
from moeconv.measure.trial import known_plans, unquantized
from moeconv.measure.workdir import INPUTS, RESIDENCES, Journal, finished_work
from moeconv.plan.dense import ONLY_EXPERTS, Beside
from moeconv.plan.problem import Frontier, LossMap, Plan, Storage
from moeconv.plan.search import MeasuredPlan, Question, assigned_bytes, check_budget, curve, uniform_bytes, weights_of
from moeconv.quantizers import GROUP_SIZES, codes_of
from moeconv.source.checkpoint import Checkpoint
from moeconv.strict_json import amount, listed, named, text
from moeconv.strict_json import number as finite
from moert.pack.codec import WIDTHS, Width
from moert.pack.documents import read
from moert.pack.errors import PackError
from moert.pack.layout import Neurons
from moert.pack.manifest import WIDTHS_OF
from moert.pack.model_spec import STACKS, ExpertKey, ModelSpec
from moert.pack.parts import ROLES


@dataclass(frozen=True)
class Inputs:
    """The inputs of planning beside the journal. `samples` names the samples that plans are judged on, `dense` the
    widths outside the experts, by role, `units` the costs of units that get widths with the experts. `by_columns`:
    experts lie in blocks of neurons. `trained`: the digest of the trained numbers of the pack; empty without any."""

    model: str
    quantizer: str
    group_size: int
    metric: str
    samples: str
    table: SensitivityTable
    dense: Mapping[str, int] = field(default_factory=dict)
    by_columns: bool = False
    units: DenseCosts = field(default_factory=dict)
    trained: str = ""

    def storage(self, mxfp4: bool) -> Storage:
        """Returns how the experts are stored; the size of their blocks changes no size that planning counts."""
        neurons = Neurons(PIECE_BYTES, bundled=False) if self.by_columns else None
        return Storage(self.group_size, mxfp4, neurons, codes_of(self.quantizer))

    def to_json(self) -> dict[str, Any]:
        table = self.table
        return {
            "model": self.model,
            "quantizer": self.quantizer,
            "group_size": self.group_size,
            "metric": self.metric,
            "samples": self.samples,
            "dense": dict(self.dense),
            "base_bits": table.base_bits,
            "base": [table.base.value, table.base.loss, table.base.nll, table.base.kl],
            "coverage": [[*key, tokens] for key, tokens in table.coverage.items()],
            **({"by_columns": True} if self.by_columns else {}),
            **({"trained": self.trained} if self.trained else {}),
            "units": [[*unit, bits, *cost] for unit, costs in self.units.items() for bits, cost in costs.items()],
            "costs": [[*probe.key, list(probe.bits), list(cost)] for probe, cost in table.costs.items()],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Inputs:
        """Returns the inputs that `to_json` wrote. Raises KeyError, TypeError, ValueError or OverflowError for other
        values."""

        def number(figure: float | None) -> float:
            return math.nan if figure is None else finite(figure, INPUTS)  # it could not be measured

        def key_of(stack: str, layer: int, expert: int) -> ExpertKey:
            if stack not in STACKS or type(layer) is not int or type(expert) is not int:
                raise ValueError("a key that no expert has")
            return ExpertKey(stack, layer, expert)

        costs = {}
        for *key, bits, (metric, nll, kl) in values["costs"]:
            costs[Probe(key_of(*key), tuple(bits))] = number(metric), number(nll), number(kl)
        units: dict[DenseUnit, dict[int, tuple[float, float, float]]] = {}
        widths = *TRELLIS_WIDTHS, *WIDTHS
        for role, stack, layer, part, bits, metric, nll, kl in values.get("units", []):
            placed = role in ROLES and stack in ("", *STACKS) and type(layer) is int and type(part) is str
            if not placed or bits not in widths:
                raise ValueError("a unit that there is not")
            units.setdefault(DenseUnit(role, stack, layer, part), {})[bits] = number(metric), number(nll), number(kl)
        base_bits, group_size = values["base_bits"], values["group_size"]
        dense = dict(named(amount)(values.get("dense", {}), INPUTS))
        texts = {name: text(values[name], INPUTS) for name in ("model", "quantizer", "metric", "samples")}
        known = set(map(str, WIDTHS_OF[codes_of(texts["quantizer"])]))
        measured = [base_bits, *(bits for probe in costs for bits in probe.bits)]
        there = all(type(width) in (int, float) and str(width) in known for width in measured)
        if not there or not set(dense.values()) <= set(WIDTHS):
            raise ValueError("a width that there is not")
        if type(group_size) is not int or group_size not in (0, *GROUP_SIZES):
            raise ValueError(f"a group size of {group_size!r}")
        coverage = {key_of(*key): amount(tokens, INPUTS) for *key, tokens in values.get("coverage", [])}
        table = SensitivityTable(base_bits, Summary(*map(number, values["base"])), costs, coverage)
        by_columns = bool(values.get("by_columns", False))
        trained = text(values.get("trained", ""), INPUTS)
        return cls(
            group_size=group_size, table=table, dense=dense, by_columns=by_columns, units=units, trained=trained,
            **texts,
        )  # fmt: skip

    def fits(self, spec: ModelSpec) -> bool:
        """Returns whether the table is about the experts of this model, and the units are its own."""
        probes, n_projections = self.table.costs, len(spec.moe.ffn.projections)
        whole = all(len(probe.bits) == n_projections for probe in probes)
        known = [*dense_units(spec), *dense_units(spec, by_layer=False)]
        return (
            whole
            and self.units.keys() <= set(known)
            and {probe.key for probe in probes} in (set(), set(spec.expert_keys()))
        )


@dataclass(frozen=True)
class Planned:
    """The curve of a work directory, and the point on it for a target, from earlier measurements. `expert_bytes`: of
    the experts at that point, `units` the widths of the other matrices there, if they are part of plans, which save the
    bytes of `purpose` then."""

    model: str
    quantizer: str
    group_size: int
    weights: int
    int4_bytes: int
    points: tuple[CurvePoint, ...]
    chosen: CurvePoint
    dense: Mapping[str, int]
    residences: tuple[Residence, ...]
    expert_bytes: int
    units: Mapping[str, int]
    purpose: str


def plan(
    work: Path, target: Target, allocation: str, signal: str, bits: Sequence[Width] | None, purpose: str = PURPOSES[0]
) -> Planned:  # fmt: skip
    """Returns the curve of a work directory and the point for a target. Raises SettingsError for a directory without a
    finished sweep, CheckpointError where its model is gone, TargetMissed."""
    check_ranking(allocation, signal)
    check_target(target)
    check_choice("for", purpose, PURPOSES)
    inputs, journal, residences = _finished(work)
    checkpoint, metric = Checkpoint.open(inputs.model), recorded_metric(inputs.metric)
    spec, storage = checkpoint.spec, inputs.storage(checkpoint.description.mxfp4)
    if not inputs.fits(spec):
        raise SettingsError(
            f"the sweep in {work} is not about the experts of {inputs.model}: the model was replaced since, run "
            "`moeconv quantize` again"
        )
    known = sorted({width for probe in inputs.table.costs for width in probe.bits} | {inputs.table.base_bits})
    unknown = sorted(set(bits or ()) - set(known))
    if unknown:
        raise SettingsError(f"--bits {unknown[0]}: the sweep in {work} has no measurements at that width, only {known}")
    check_budget(target, spec, min(bits or known), storage)
    joined = target.kind == "loss" and allocation == DEFAULT_ALLOCATION and bool(inputs.units)
    if purpose != PURPOSES[0] and not joined:
        raise SettingsError(
            f"--for {purpose} has no effect without --loss, or where experts alone get widths: leave it out"
        )
    beside = Beside(inputs.units, purpose) if joined else ONLY_EXPERTS
    question = Question(spec, inputs.table, storage, signal, sorted(bits or known), beside)
    frontier, measured = question.frontier(allocation), measured_plans(question, inputs, journal, metric)
    if target.kind == "loss":
        chosen = _smallest(frontier, measured, target.value)
    else:
        chosen = question.within(allocation, target)
    points = curve(frontier, measured, chosen)
    return Planned(
        Path(inputs.model).name, inputs.quantizer, inputs.group_size, weights_of(spec), uniform_bytes(spec, 4),
        points, next(point for point in points if point.chosen), inputs.dense, residences,
        assigned_bytes(spec, chosen.assignment, storage),
        {f"{unit}{' in trellis codes' if bits < 0 else ''}": abs(bits) for unit, bits in chosen.dense.items()},
        purpose,
    )  # fmt: skip


def _finished(work: Path) -> tuple[Inputs, Journal, tuple[Residence, ...]]:
    stored, journal, fitted = finished_work(work)
    try:
        residences = listed(partial(read, Residence))(fitted, RESIDENCES)
        return Inputs.from_json(stored), journal, residences
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, PackError) as error:
        raise SettingsError(
            f"{journal.path.with_name(INPUTS)} is not what a sweep writes ({type(error).__name__}: "
            f"{str(error)[:200]}): run `moeconv quantize` again"
        ) from None


def measured_plans(question: Question, inputs: Inputs, journal: Journal, metric: Metric) -> list[MeasuredPlan]:
    """Returns the plans that the journal has measurements of, without those with a width that the problem lacks."""
    reference = unquantized(journal, inputs.samples)
    if reference is None:
        return []
    found = []
    for assignment, dense, evaluation in known_plans(
        journal, inputs.samples, question.spec.expert_keys(), inputs.trained
    ):
        if dense and not question.has_units:
            continue
        try:
            priced = question.problem.priced(assignment, dense)
        except KeyError:
            continue
        loss = evaluation.summary(metric, reference).loss
        found.append(MeasuredPlan(priced.nbytes, priced.cost, loss, None))
    return found


def _smallest(frontier: Frontier, measured: Sequence[MeasuredPlan], target: float) -> Plan:
    """Returns the smallest plan with a predicted loss that meets the target. Raises TargetMissed."""
    losses = LossMap([(one.cost, one.loss) for one in measured], float(frontier.costs[-1]))(frontier.costs)
    holds = np.flatnonzero(losses <= target)
    if not len(holds):
        raise TargetMissed(f"no plan is predicted to lose less than {losses.min():.2%}: sweep with wider --bits")
    return frontier[int(holds[0])]
