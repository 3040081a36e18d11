"""The stages that choose widths: by measured plans, without text, and together with routing that prefers residents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moeconv.artifacts import Assignment, CurvePoint, ReadPoint, Residence, uniform
from moeconv.conversion.host import this_host
from moeconv.conversion.material import Coding
from moeconv.conversion.measuring import Account, Bench, References, Widths, evaluated
from moeconv.conversion.planning import Inputs
from moeconv.conversion.settings import LEAST_MEMORY, Settings, resident_text
from moeconv.errors import SettingsError, TargetMissed
from moeconv.measure.trial import Measure, Preferred
from moeconv.plan import ALLOCATORS, plan_within
from moeconv.plan.dense import Beside
from moeconv.plan.outlook import quantization_of, room_share
from moeconv.plan.problem import Frontier, LossMap, Option, Plan, Problem, Unit, layout_bytes, options
from moeconv.plan.search import (
    FINE,
    MeasuredPlan,
    Question,
    Step,
    budget_bytes,
    check_budget,
    curve,
    ladder,
    read_more,
    search,
    split,
    steps_of,
    uniform_bytes,
)
from moeconv.promise.judging import Judge, estimate
from moeconv.quantizers.coder import ORIGINAL, squared_errors
from moeconv.source.tensors import read_ahead
from moeconv.sweep.sensitivity import BASE_BITS
from moert.pack.manifest import Preference
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.tensors import TOKENIZER

# Widths without text: one for all experts, or the widths of a size that change the weights least. No loss is measured.


def textless_widths(settings: Settings, coding: Coding, account: Account) -> Assignment:
    """Returns widths without text. Raises TargetMissed for a size that no widths have; CheckpointError or
    WeightsUnusable."""
    path = coding.checkpoint.path
    if not (path / TOKENIZER).is_file() and coding.checkpoint.spelled is None:
        account.say(f"note: {path} has no {TOKENIZER}: the pack can't be run on text")
    if settings.bits != (16,):
        account.note("no text was given: what the pack loses was not measured, and nothing is promised")
    if settings.target.kind == "loss":
        return uniform(coding.spec, settings.bits[0])
    return _by_weights(settings, coding, account)


def _by_weights(settings: Settings, coding: Coding, account: Account) -> Assignment:
    """Returns the widths of the target's size with the least sum of squared errors of all weights."""
    spec, widths = coding.spec, sorted(settings.bits)
    check_budget(settings.target, spec, min(widths), coding.storage)
    budget = budget_bytes(settings.target, spec)
    assert budget is not None, "a loss needs text"
    names, nbytes, coder = spec.moe.ffn.projections, layout_bytes(spec, coding.storage), coding.experts(None)
    sizes = {bits: sum(nbytes(name, bits) for name in names) for bits in widths}
    units, keys = {}, spec.expert_keys()
    with account.progress("what widths do to weights", len(keys), "expert") as bar:
        for key in read_ahead(keys, coding.checkpoint.touch):
            found = squared_errors(coder, key, widths)
            units[Unit(key, tuple(range(len(names))))] = options(
                Option(bits, sizes[bits], found[bits]) for bits in widths
            )
            bar.update(1)
    largest = uniform_bytes(spec, max(widths), coding.storage)
    return plan_within(Problem(units), settings.allocation, min(budget, largest)).assignment


# The plan that a conversion chooses: the smallest with a measured loss that holds, or the best of a size.


class Choice:
    """The choice of a plan. `plans` are those measured on the way, in that order."""

    def __init__(self, bench: Bench, inputs: Inputs, widths: Widths, judge: Judge, account: Account) -> None:
        self.settings, self.journal, self.spec = bench.settings, bench.journal, bench.spec
        self.tried, self.judge, self.account = widths.tried, judge, account
        allowed = sorted(set(self.settings.bits) & {*widths.probed, BASE_BITS})
        self.dense = bench.coding.dense
        beside = Beside(inputs.units, self.settings.purpose)
        self.question = Question(self.spec, inputs.table, bench.coding.storage, self.settings.signal, allowed, beside)
        self.plans: list[tuple[Plan, MeasuredPlan]] = []
        self._before: list[tuple[Plan, MeasuredPlan]] = []
        self._ratio = 1.0

    @property
    def judged(self) -> list[MeasuredPlan]:
        return [measured for _, measured in self.plans]

    def plan(self, resolution: float = FINE) -> Plan:
        """Returns the chosen plan, whose widths of matrices outside the experts stay from then on: of a loss, the
        smallest within `resolution` of its bytes. Raises TargetMissed."""
        with self.account.step("search", self.journal):
            if self.settings.target.kind == "loss":
                found = self._smallest(resolution)
                self.dense.choose(found.dense)
                return found
            plan = self.question.within(self.settings.allocation, self.settings.target)
            self._judged(plan)
            self.account.note(self.judge.counted_text())
            return plan

    def measured(self, plan: Plan) -> MeasuredPlan:
        """Returns the measurement of a plan of `plans`."""
        return next(measured for known, measured in reversed(self.plans) if known == plan)

    def divergence(self, plan: Plan) -> float:
        """Returns the divergence of a plan of `plans` from the unquantized model, in nats a token."""
        return self.judge.measure.summary(evaluated(self.judge.measure, plan)).kl

    def beyond(self, plan: Plan, times: float) -> Plan:
        """Returns the plan of the frontier that is predicted to lose so many times as much as a measured one."""
        frontier = self.question.frontier(self.settings.allocation)
        losses = LossMap(self.points(), float(frontier.costs[-1]))(frontier.costs)
        holds = np.flatnonzero(losses <= times * self.measured(plan).loss)
        return frontier[int(holds[0])] if len(holds) else plan

    def again(self, plan: Plan, before: MeasuredPlan) -> MeasuredPlan:
        """Returns the measurement of a plan after a change of the model that lasts. Plans are measured anew from then
        on, and the losses of all that were measured before are taken to have changed by the same factor."""
        self._before, self.plans = self.plans, []
        after = self._judged(plan)
        if before.loss > 0 < after.loss:
            self._ratio = after.loss / before.loss
        return after

    def back(self) -> None:
        """Takes the last change back: plans that were measured before it count again."""
        self.plans, self._before, self._ratio = self._before, [], 1.0

    def curve(self, chosen: Plan) -> tuple[CurvePoint, ...]:
        return curve(self.question.frontier(self.settings.allocation), self.judged, chosen, self._known())

    def _smallest(self, resolution: float) -> Plan:
        """Returns the smallest plan that was found to hold: the plan of the search, or all experts at the one width
        that was measured to hold, where noise made the search's plan larger."""
        flat = self.question.problem.priced(uniform(self.spec, max(self.tried)))
        frontier = self.question.frontier(self.settings.allocation)
        with suppress(TargetMissed):
            target = self.settings.planned_loss
            found = search(frontier, self._judged, target, self._known(), resolution, self.plans).plan
            if found.nbytes <= flat.nbytes:
                return found
        if self._judged(flat).decisive > self.settings.planned_loss:
            raise TargetMissed(f"no plan holds {self.settings.planned_loss:.2%}: allow wider experts with --bits")
        return flat

    def points(self) -> list[tuple[float, float]]:
        """Returns (predicted cost, measured loss) of all measured plans."""
        return [(one.cost, one.loss) for one in (*self._known(), *self.judged)]

    def _known(self) -> list[MeasuredPlan]:
        """Returns the plans of before a change, with their losses as the change is taken to have left them; without
        any, the uniform widths that were tried, which say less, as they leave other matrices as they are. Other plans
        in the journal are left out: the same command ends in the same plan, whatever was measured before."""
        if self._before:
            news = [plan for plan, _ in self.plans]
            return [one.scaled(self._ratio) for plan, one in self._before if plan not in news]
        found = []
        for width, evaluation in self.tried.items():
            with suppress(KeyError):  # a width that the problem does not have
                plan = self.question.problem.priced(uniform(self.spec, width))
                found.append(MeasuredPlan.of(plan, self.judge.loss(evaluation), self.judge.bound(evaluation)))
        return found

    def _judged(self, plan: Plan) -> MeasuredPlan:
        self.dense.choose(plan.dense)
        evaluation = evaluated(self.judge.measure, plan)
        self.account.say(f"a plan of {plan.nbytes / 1e6:,.2f} MB: {self.judge.text(evaluation)}")
        measured = MeasuredPlan.of(plan, self.judge.loss(evaluation), self.judge.bound(evaluation))
        self.plans.append((plan, measured))
        return measured


# Savings and costs of each layer's bonus, and plans of bonuses: routing for one share of the experts in memory.

STEPS = (0.0, 0.25, 0.5, 0.8, 1.3, 2.0)
"""Bonuses that each layer is tried with, as multiples of its gap (Preferring.gap)."""
_MIDDLE = 3
"""The step of all layers but the one that is tried. A change in one layer flips choices in all layers above it, which
costs about the same however many layers are changed: if the others were routed exactly, each step would be charged
that cost."""
_SAMPLES = 16
"""Least number of samples of the ranking text, where it has as many: neighbouring steps differ by a tenth of a
percent."""
_LEAST_COST = 1e-6


class _Tried(NamedTuple):
    found: Preferred
    kl: float


class Bonuses:
    """The bonuses of a decoder's layers, each tried at all STEPS, with unquantized experts, on the ranking text."""

    def __init__(self, bench: Bench, share: float, account: Account) -> None:
        self.spec, self.share, self._bench, self._account = bench.spec, share, bench, account
        moe = bench.spec.moe
        self.places = [at for at in bench.spec.moe_layers() if at.stack == "decoder"]
        self.recent = max(moe.router.top_k, int(share * moe.n + 1e-9))
        self.sure = 0 if moe.router.top_k == 1 else max(1, moe.router.top_k // 3)
        self._bytes_of = layout_bytes(bench.spec, bench.coding.storage)

    @property
    def exact(self) -> Preference:
        """The preference without any bonus: exact routing, with the misses of the same number of experts in memory."""
        return self._with([0.0] * len(self.places))

    def frontier(self, plan: Plan) -> Frontier:
        """Returns plans of bonuses by the bytes that they read of experts with these widths; see ladder."""
        return ladder({at: [self._step(plan, at, number) for number in range(len(STEPS))] for at in self.places})

    def _step(self, plan: Plan, at: LayerKey, number: int) -> Step:
        """Returns a step of one layer. Its cost is the rise above no bonus, and never 0, so that plans end with exact
        routing."""
        tried = self._tried[at, number]
        cost = 0.0 if number == 0 else max(_LEAST_COST, tried.kl - self._tried[at, 0].kl)
        return Step(number, self._layer_read(plan, at, tried.found), cost)

    def preference(self, routing: Plan) -> Preference:
        """Returns the preference of a plan of `frontier`."""
        numbers = steps_of(routing.assignment)
        return self._at([numbers[at] for at in self.places])

    def missed(self, routing: Plan) -> dict[ExpertKey, int]:
        """Returns how often each expert of the decoder would be read, if no layer changed another one's choices."""
        numbers = steps_of(routing.assignment)
        return {
            at.expert(number): count
            for at in self.places
            for number, count in enumerate(self._tried[at, numbers[at]].found.missed[at])
        }

    def read(self, plan: Plan, found: Preferred) -> float:
        """Returns the bytes that a token reads, all layers together, where memory holds the preferred experts."""
        return sum(self._layer_read(plan, at, found) for at in self.places) / max(1, found.tokens)

    @cached_property
    def _measure(self) -> Measure:
        settings, ranking = self._bench.settings, self._bench.material.ranking
        samples = None if settings.sweep_samples is None else max(settings.sweep_samples, _SAMPLES)
        return self._bench.measure("routing", ranking, samples)

    @cached_property
    def _gaps(self) -> tuple[float, ...]:
        return self._measure.preferring(uniform(self.spec, ORIGINAL), self.exact, "exact routing").gaps

    @cached_property
    def _tried(self) -> dict[tuple[LayerKey, int], _Tried]:
        middle, tried = [_MIDDLE] * len(self.places), dict[tuple[LayerKey, int], _Tried]()
        with self._account.progress("routing", 1 + len(self.places) * (len(STEPS) - 1)) as bar:
            for place, at in enumerate(self.places):
                for number, step in enumerate(STEPS):
                    if number == _MIDDLE and place:
                        tried[at, number] = tried[self.places[0], number]
                        continue
                    steps = [*middle[:place], number, *middle[place + 1 :]]
                    found = self._measure.preferring(
                        uniform(self.spec, ORIGINAL), self._at(steps), f"{at} prefers by {step:g} gaps"
                    )
                    tried[at, number] = _Tried(found, self._measure.summary(found.evaluation).kl)
                    bar.update(1)
        return tried

    def _at(self, steps: Sequence[int]) -> Preference:
        """Returns the preference with these STEPS of the layers."""
        return self._with([STEPS[step] * gap for step, gap in zip(steps, self._gaps, strict=True)])

    def _with(self, bonus: Sequence[float]) -> Preference:
        return Preference(self.share, self.recent, self.sure, tuple(float(np.float32(one)) for one in bonus))

    def _layer_read(self, plan: Plan, at: LayerKey, found: Preferred) -> int:
        return sum(
            count * self._nbytes(plan.assignment, at.expert(number)) for number, count in enumerate(found.missed[at])
        )

    def _nbytes(self, assignment: Assignment, key: ExpertKey) -> int:
        names = self.spec.moe.ffn.projections
        return sum(self._bytes_of(name, bits) for name, bits in zip(names, assignment[key], strict=True))


# Routing fitted to a share of the experts in memory, together with the widths: the fewest bytes read for a token at a
# measured loss that holds.


@dataclass(frozen=True)
class Fitted:
    """Routing for one share of the experts in memory, and the widths that go with it."""

    plan: Plan
    preference: Preference
    residence: Residence


class Fitting:
    """The fitting of routing to one share of the experts. The steps of each layer are measured alone (Bonuses), plans
    of them together with widths on the acceptance text, as `search` needs them."""

    def __init__(self, bench: Bench, references: References, choice: Choice, share: float, account: Account) -> None:
        self.bench, self.judge, self.heldout, self.choice = bench, references.judge, references.heldout, choice
        self.account, self.share = account, share
        self.bonuses = Bonuses(bench, share, account)
        self.together: dict[int, list[ReadPoint]] = {}
        """The measured points of widths with routing, by the bytes of the widths."""

    def widths(self, plan: Plan, memory_is_fixed: bool) -> Plan:
        """Returns the widths that divide the loss between themselves and routing so that a token reads least. `plan` is
        the smallest that holds by itself; it stays where no division holds."""
        frontier = self.bonuses.frontier(plan)
        middle = frontier[len(frontier) // 2]
        judged = self._judged(plan, middle)
        alone = min(self.choice.judged, key=lambda one: abs(one.nbytes - plan.nbytes))
        routing = LossMap([(0.0, 0.0), (middle.cost, max(0.0, judged.loss - alone.loss))], 0.0)(frontier.costs)
        problem = read_more(self.choice.question.problem.with_dense(plan.dense), self.bonuses.missed(middle))
        allocated = ALLOCATORS[self.bench.settings.allocation](problem)
        losses = LossMap(self.choice.points(), float(allocated.costs[-1]))(allocated.costs)
        margin = judged.decisive - judged.loss
        target = self.judge.planned_loss - margin
        places = split(allocated.sizes, losses, frontier.sizes, routing, target, memory_is_fixed)
        if places is None:
            return plan
        return self.choice.question.problem.priced(allocated[places[0]].assignment, plan.dense)

    def fit(self, plan: Plan) -> Fitted:
        """Returns routing fitted to these widths. Raises TargetMissed where not even exact routing holds with them."""
        bonuses, measure = self.bonuses, self.judge.measure
        found = search(bonuses.frontier(plan), lambda routing: self._judged(plan, routing), self.judge.planned_loss)
        preference = bonuses.preference(found.plan)
        accepted = measure.preferring(plan.assignment, preference, "the routing that was chosen")
        held = self.heldout.preferring(plan.assignment, preference, "the routing that was chosen")
        used, seed = self.judge.used, self.bench.settings.seed
        calibration = estimate(measure, accepted.evaluation, used.acceptance, seed)
        heldout = estimate(self.heldout, held.evaluation, used.heldout, seed)
        preference = replace(preference, calibration=calibration, heldout=heldout)
        exact = self.heldout.preferring(plan.assignment, bonuses.exact, "exact routing")
        residence = Residence(
            self.share, preference.recent, preference.sure, preference.bonus,
            bonuses.read(plan, exact), bonuses.read(plan, held),
            calibration, self.judge.bound(accepted.evaluation), heldout,
            self._alone(plan), tuple(self.together[plan.nbytes]),
        )  # fmt: skip
        return Fitted(plan, preference, residence)

    def _alone(self, plan: Plan) -> tuple[ReadPoint, ...]:
        """Returns the measured points of widths alone; their bytes are those that exact routing of this plan misses."""
        exact = self.judge.measure.preferring(plan.assignment, self.bonuses.exact, "exact routing")
        return tuple(
            ReadPoint(self.bonuses.read(one, exact), found.loss, found.upper) for one, found in self.choice.plans
        )

    def _judged(self, plan: Plan, routing: Plan) -> MeasuredPlan:
        preference = self.bonuses.preference(routing)
        found = self.judge.measure.preferring(plan.assignment, preference, "widths and routing")
        evaluation, read = found.evaluation, self.bonuses.read(plan, found)
        self.account.say(
            f"routing for {self.share:.0%} in memory, {read:,.0f} bytes a token: {self.judge.text(evaluation)}"
        )
        loss, bound = self.judge.loss(evaluation), self.judge.bound(evaluation)
        self.together.setdefault(plan.nbytes, []).append(ReadPoint(read, loss, bound))
        return MeasuredPlan(routing.nbytes, routing.cost, loss, bound)


def check_resident(settings: Settings, coding: Coding) -> None:
    """Raises SettingsError for memory that moert could not run in, whatever the widths, and for a model without a
    choice of experts."""
    if settings.resident and not coding.spec.moe.chooses:
        raise SettingsError(
            "--resident would have no choice, as every token passes all experts of a layer: leave it out"
        )
    least = min(settings.bits)
    for asked in settings.resident:
        if asked >= LEAST_MEMORY:
            _room(coding, uniform(coding.spec, least), int(asked))


def fitted(
    bench: Bench, references: References, choice: Choice, plan: Plan, account: Account
) -> tuple[Plan, tuple[Fitted, ...]]:
    """Returns the widths, and routing for each entry of --resident; the widths are fitted to the first. `plan` is the
    smallest that holds by itself, which stays where fitted widths miss the target. Raises TargetMissed."""
    made: dict[float, Fitted] = {}
    with account.step("routing", bench.journal):
        for number, asked in enumerate(bench.settings.resident):
            share = _share(bench, plan, asked, account)
            if share >= 1 or share in made:
                account.say(f"routing for {share:.0%} in memory: {'exact' if share >= 1 else 'there is one already'}")
                continue
            fitting = Fitting(bench, references, choice, share, account)
            if number:
                made[share] = fitting.fit(plan)
                continue
            try:
                together = fitting.widths(plan, memory_is_fixed=asked >= LEAST_MEMORY)
                if (left := _share(bench, together, asked, account)) != share:
                    share, fitting = left, Fitting(bench, references, choice, left, account)
                made[share] = fitting.fit(together)
                plan = together
            except TargetMissed:
                made[share] = fitting.fit(plan)
    return plan, tuple(made.values())


def _share(bench: Bench, plan: Plan, asked: float, account: Account) -> float:
    """Returns the share of the experts in memory, in whole percent where `asked` is bytes. Raises SettingsError."""
    if asked < LEAST_MEMORY:
        return asked
    memory_bytes = int(asked)
    name = f"room in {memory_bytes} for {plan.nbytes}"  # so that a run that goes on asks for the same
    found = bench.journal.remember(name, lambda: {"room": _room(bench.coding, plan.assignment, memory_bytes)})
    with bench.journal.believed():
        share = min(100, max(1, int(100 * found["room"]))) / 100
    account.say(f"{resident_text([asked])} has room for {share:.0%} of the experts")
    return share


def _room(coding: Coding, widths: Assignment, memory_bytes: int) -> float:
    spec, names = coding.spec, coding.spec.moe.ffn.projections
    quantization = quantization_of(coding.storage, coding.dense_widths)
    wide = coding.checkpoint.description.wide
    try:
        return room_share(
            spec, quantization, lambda key: dict(zip(names, widths[key], strict=True)), wide, this_host(),
            memory_bytes,
        )  # fmt: skip
    except ValueError as error:
        raise SettingsError(
            f"--resident {resident_text([memory_bytes])}: moert can't run this model in that: give {error} or more"
        ) from None
