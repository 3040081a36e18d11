"""Routing fitted to a share of the experts in memory, together with the widths: the smallest read a token whose loss
holds when it is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeconv.artifacts import Assignment, ReadPoint, Residence, uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.choice import Choice
from moeconv.conversion.coding import Coding
from moeconv.conversion.host import this_host
from moeconv.conversion.references import References
from moeconv.conversion.settings import LEAST_MEMORY, Settings, resident_text
from moeconv.errors import SettingsError, TargetMissed
from moeconv.measure.assignments import Preferred
from moeconv.plan import ALLOCATORS
from moeconv.plan.frontier import Frontier
from moeconv.plan.lossmap import LossMap
from moeconv.plan.outlook import room_share
from moeconv.plan.problem import Plan, layout_bytes
from moeconv.plan.residence import Step, ladder, read_more, split, steps_of
from moeconv.plan.search import MeasuredPlan, search
from moeconv.promise.judging import estimate
from moeconv.quantizers.coder import ORIGINAL
from moert.pack.manifest import Preference, Quantization
from moert.pack.model_spec import ExpertKey, LayerKey

STEPS = (0.0, 0.2, 0.4, 0.6, 0.9, 1.3, 2.0)
"""Bonuses that each layer is tried with, times its gap (Preferring.gap)."""


@dataclass(frozen=True)
class Fitted:
    """Routing for one share, and widths that go with it."""

    plan: Plan
    preference: Preference
    residence: Residence


class Fitting:
    """Of routing for one share of the experts. The steps of each layer are measured alone, with unquantised experts, on
    the ranking text, and plans of them together with widths on the acceptance text, as `search` asks for them."""

    def __init__(self, bench: Bench, references: References, choice: Choice, share: float, account: Account) -> None:
        self.bench, self.judge, self.heldout, self.choice = bench, references.judge, references.heldout, choice
        self.account, self.share, self.spec = account, share, bench.spec
        moe = bench.spec.moe
        self.places = [at for at in bench.spec.moe_layers() if at.stack == "decoder"]
        self.recent = max(moe.router.top_k, int(share * moe.n + 1e-9))
        self.sure = int(moe.router.top_k > 1)
        self.bytes_of = layout_bytes(bench.spec, bench.coding.storage)
        self.found: dict[tuple[LayerKey, int], Preferred] = {}
        self.together: dict[int, list[ReadPoint]] = {}
        """What was measured, by the bytes of its widths."""

    def widths(self, plan: Plan) -> Plan:
        """Those that leave as much of the loss to routing as it makes the better use of. `plan` is the smallest that
        holds by itself."""
        self._measure_steps()
        frontier = self._frontier(plan)
        middle = frontier[len(frontier) // 2]
        judged = self._judged(plan, middle)
        alone = min(self.choice.judged, key=lambda one: abs(one.nbytes - plan.nbytes))
        routing = LossMap([(0.0, 0.0), (middle.cost, max(0.0, judged.loss - alone.loss))], 0.0)(frontier.costs)
        problem = read_more(self.choice.question.problem, self._missed(middle))
        allocated = ALLOCATORS[self.bench.settings.allocation](problem)
        losses = LossMap(self.choice.points(), float(allocated.costs[-1]))(allocated.costs)
        margin = judged.decisive - judged.loss
        places = split(allocated.sizes, losses, frontier.sizes, routing, self.judge.planned_loss - margin)
        if places is None:
            return plan
        return self.choice.question.problem.priced(allocated[places[0]].assignment)

    def fit(self, plan: Plan) -> Fitted:
        """Raises TargetMissed where not even exact routing holds with these widths."""
        self._measure_steps()
        frontier = self._frontier(plan)
        found = search(frontier, lambda routing: self._judged(plan, routing), self.judge.planned_loss)
        preference = self._preference(found.plan)
        accepted = self.judge.measure.preferring(plan.assignment, preference, "the routing that was chosen")
        held = self.heldout.preferring(plan.assignment, preference, "the routing that was chosen")
        used, seed = self.judge.used, self.bench.settings.seed
        calibration = estimate(self.judge.measure, accepted.evaluation, used.acceptance, seed)
        heldout = estimate(self.heldout, held.evaluation, used.heldout, seed)
        preference = replace(preference, calibration=calibration, heldout=heldout)
        exact = self.heldout.preferring(plan.assignment, self._exact(), "exact routing")
        residence = Residence(
            self.share, self.recent, self.sure, preference.bonus,
            self._read(plan, exact), self._read(plan, held),
            calibration, self.judge.bound(accepted.evaluation), heldout,
            self._alone(plan), tuple(self.together[plan.nbytes]),
        )  # fmt: skip
        return Fitted(plan, preference, residence)

    def _alone(self, plan: Plan) -> tuple[ReadPoint, ...]:
        """What was measured of widths, with what the routing of this plan misses where it is exact."""
        exact = self.judge.measure.preferring(plan.assignment, self._exact(), "exact routing")
        return tuple(ReadPoint(self._read(one, exact), found.loss, found.upper) for one, found in self.choice.plans)

    def _measure_steps(self) -> None:
        if self.found:
            return
        settings, material = self.bench.settings, self.bench.material
        measure = self.bench.measure("routing", material.ranking, settings.sweep_samples)
        widths = uniform(self.spec, ORIGINAL)
        exact = measure.preferring(widths, self._exact(), "exact routing")
        with self.account.progress("routing", len(self.places) * (len(STEPS) - 1)) as bar:
            for place, at in enumerate(self.places):
                self.found[at, 0] = exact
                for number, share in enumerate(STEPS[1:], 1):
                    bonus = [0.0] * len(self.places)
                    bonus[place] = share * exact.gaps[place]
                    what = f"{at} prefers by {bonus[place]:.4g}"
                    self.found[at, number] = measure.preferring(widths, self._with(bonus), what)
                    bar.update(1)
        self.kls = {key: measure.summary(one.evaluation).kl for key, one in self.found.items()}
        self.gaps = exact.gaps

    def _frontier(self, plan: Plan) -> Frontier:
        layers = {
            at: [
                Step(number, self._layer_read(plan, at, self.found[at, number]), self.kls[at, number])
                for number in range(len(STEPS))
            ]
            for at in self.places
        }
        return ladder(layers)

    def _judged(self, plan: Plan, routing: Plan) -> MeasuredPlan:
        found = self.judge.measure.preferring(plan.assignment, self._preference(routing), "widths and routing")
        evaluation, read = found.evaluation, self._read(plan, found)
        self.account.say(
            f"routing for {self.share:.0%} in memory, {read:,.0f} bytes a token: {self.judge.text(evaluation)}"
        )
        loss, bound = self.judge.loss(evaluation), self.judge.bound(evaluation)
        self.together.setdefault(plan.nbytes, []).append(ReadPoint(read, loss, bound))
        return MeasuredPlan(routing.nbytes, routing.cost, loss, bound)

    def _preference(self, routing: Plan) -> Preference:
        numbers = steps_of(routing.assignment)
        return self._with([STEPS[numbers[at]] * gap for at, gap in zip(self.places, self.gaps, strict=True)])

    def _with(self, bonus: Sequence[float]) -> Preference:
        return Preference(self.share, self.recent, self.sure, tuple(float(np.float32(one)) for one in bonus))

    def _exact(self) -> Preference:
        return self._with([0.0] * len(self.places))

    def _missed(self, routing: Plan) -> dict[ExpertKey, int]:
        """How often each expert of the decoder would be read, as far as layers were measured alone."""
        numbers = steps_of(routing.assignment)
        return {
            at.expert(number): count
            for at in self.places
            for number, count in enumerate(self.found[at, numbers[at]].missed[at])
        }

    def _layer_read(self, plan: Plan, at: LayerKey, found: Preferred) -> int:
        return sum(
            count * self._nbytes(plan.assignment, at.expert(number)) for number, count in enumerate(found.missed[at])
        )

    def _read(self, plan: Plan, found: Preferred) -> float:
        """Bytes that a token reads, all layers together, where memory holds what is preferred."""
        return sum(self._layer_read(plan, at, found) for at in self.places) / max(1, found.tokens)

    def _nbytes(self, assignment: Mapping[ExpertKey, Sequence[int]], key: ExpertKey) -> int:
        names = self.spec.moe.ffn.projections
        return sum(self.bytes_of(name, bits) for name, bits in zip(names, assignment[key], strict=True))


def check_resident(settings: Settings, coding: Coding) -> None:
    """Raises SettingsError for memory that moert could not run in, whatever the widths."""
    least = min(settings.bits)
    for asked in settings.resident:
        if asked >= LEAST_MEMORY:
            _room(coding, uniform(coding.spec, least), int(asked))


def fitted(
    bench: Bench, references: References, choice: Choice, plan: Plan, account: Account
) -> tuple[Plan, tuple[Fitted, ...]]:
    """The widths, and routing for each share that was asked for; the widths are fitted to the first. `plan` is the
    smallest that holds by itself, which stays where routing needs all of the loss. Raises TargetMissed."""
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
                together = fitting.widths(plan)
                if (left := _share(bench, together, asked, account)) != share:
                    share, fitting = left, Fitting(bench, references, choice, left, account)
                made[share] = fitting.fit(together)
                plan = together
            except TargetMissed:
                made[share] = fitting.fit(plan)
    return plan, tuple(made.values())


def _share(bench: Bench, plan: Plan, asked: float, account: Account) -> float:
    """Of the experts, in whole percent where memory was asked for. Raises SettingsError."""
    if asked < LEAST_MEMORY:
        return asked
    memory_bytes = int(asked)
    name = f"room in {memory_bytes} for {plan.nbytes}"  # so that a run that goes on asks for the same
    found = bench.journal.remember(name, lambda: {"room": _room(bench.coding, plan.assignment, memory_bytes)})
    share = min(100, max(1, int(100 * found["room"]))) / 100
    account.say(f"{resident_text([asked])} has room for {share:.0%} of the experts")
    return share


def _room(coding: Coding, widths: Assignment, memory_bytes: int) -> float:
    spec, names = coding.spec, coding.spec.moe.ffn.projections
    quantization = Quantization("", coding.storage.group_size, "BF16", 0, coding.dense_widths, coding.storage.mxfp4)
    computed = coding.checkpoint.description.computed
    try:
        return room_share(
            spec, quantization, lambda key: dict(zip(names, widths[key], strict=True)), computed, this_host(),
            memory_bytes,
        )  # fmt: skip
    except ValueError as error:
        raise SettingsError(
            f"--resident {resident_text([memory_bytes])}: moert can't run this model in that: give {error} or more"
        ) from None
