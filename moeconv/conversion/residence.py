"""Routing fitted to a share of the experts in memory, together with the widths: the smallest read a token whose loss
holds when it is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeconv.artifacts import Assignment, ReadPoint, Residence, uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.bonuses import Bonuses
from moeconv.conversion.choice import Choice
from moeconv.conversion.coding import Coding
from moeconv.conversion.host import this_host
from moeconv.conversion.references import References
from moeconv.conversion.settings import LEAST_MEMORY, Settings, resident_text
from moeconv.errors import SettingsError, TargetMissed
from moeconv.plan import ALLOCATORS
from moeconv.plan.lossmap import LossMap
from moeconv.plan.outlook import quantization_of, room_share
from moeconv.plan.problem import Plan
from moeconv.plan.residence import read_more, split
from moeconv.plan.search import MeasuredPlan, search
from moeconv.promise.judging import estimate
from moert.pack.manifest import Preference


@dataclass(frozen=True)
class Fitted:
    """Routing for one share, and widths that go with it."""

    plan: Plan
    preference: Preference
    residence: Residence


class Fitting:
    """Of routing for one share of the experts. The steps of each layer are measured alone (Bonuses), and plans of them
    together with widths on the acceptance text, as `search` asks for them."""

    def __init__(self, bench: Bench, references: References, choice: Choice, share: float, account: Account) -> None:
        self.bench, self.judge, self.heldout, self.choice = bench, references.judge, references.heldout, choice
        self.account, self.share = account, share
        self.bonuses = Bonuses(bench, share, account)
        self.together: dict[int, list[ReadPoint]] = {}
        """What was measured, by the bytes of its widths."""

    def widths(self, plan: Plan, memory_is_fixed: bool) -> Plan:
        """Those that leave as much of the loss to routing as it makes the better use of. `plan` is the smallest that
        holds by itself."""
        frontier = self.bonuses.frontier(plan)
        middle = frontier[len(frontier) // 2]
        judged = self._judged(plan, middle)
        alone = min(self.choice.judged, key=lambda one: abs(one.nbytes - plan.nbytes))
        routing = LossMap([(0.0, 0.0), (middle.cost, max(0.0, judged.loss - alone.loss))], 0.0)(frontier.costs)
        problem = read_more(self.choice.question.problem, self.bonuses.missed(middle))
        allocated = ALLOCATORS[self.bench.settings.allocation](problem)
        losses = LossMap(self.choice.points(), float(allocated.costs[-1]))(allocated.costs)
        margin = judged.decisive - judged.loss
        target = self.judge.planned_loss - margin
        places = split(allocated.sizes, losses, frontier.sizes, routing, target, memory_is_fixed)
        if places is None:
            return plan
        return self.choice.question.problem.priced(allocated[places[0]].assignment)

    def fit(self, plan: Plan) -> Fitted:
        """Raises TargetMissed where not even exact routing holds with these widths."""
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
        """What was measured of widths, with what the routing of this plan misses where it is exact."""
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
    """Raises SettingsError for memory that moert could not run in, whatever the widths, and where there is nothing to
    route."""
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
                together = fitting.widths(plan, memory_is_fixed=asked >= LEAST_MEMORY)
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
    with bench.journal.believed():
        share = min(100, max(1, int(100 * found["room"]))) / 100
    account.say(f"{resident_text([asked])} has room for {share:.0%} of the experts")
    return share


def _room(coding: Coding, widths: Assignment, memory_bytes: int) -> float:
    spec, names = coding.spec, coding.spec.moe.ffn.projections
    quantization = quantization_of(coding.storage, coding.dense_widths)
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
