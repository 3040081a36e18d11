"""The plan that a conversion chooses: the smallest that holds when it is measured, or the best of a size."""

from __future__ import annotations

from contextlib import suppress

from moeconv.artifacts import CurvePoint, uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.planning import Inputs
from moeconv.conversion.references import evaluated
from moeconv.conversion.widths import Widths
from moeconv.errors import TargetMissed
from moeconv.plan.curve import curve
from moeconv.plan.problem import Plan
from moeconv.plan.question import Question
from moeconv.plan.search import MeasuredPlan, search
from moeconv.promise.judging import Judge
from moeconv.sweep.sensitivity import BASE_BITS


class Choice:
    """`plans` were measured on the way, in that order."""

    def __init__(self, bench: Bench, inputs: Inputs, widths: Widths, judge: Judge, account: Account) -> None:
        self.settings, self.journal, self.spec = bench.settings, bench.journal, bench.spec
        self.tried, self.judge, self.account = widths.tried, judge, account
        allowed = sorted(set(self.settings.bits) & {*widths.probed, BASE_BITS})
        self.question = Question(self.spec, inputs.table, bench.coding.storage, self.settings.signal, allowed)
        self.plans: list[tuple[Plan, MeasuredPlan]] = []

    @property
    def judged(self) -> list[MeasuredPlan]:
        return [measured for _, measured in self.plans]

    def plan(self) -> Plan:
        """Raises TargetMissed."""
        with self.account.step("search", self.journal):
            if self.settings.target.kind == "loss":
                return self._smallest()
            plan = self.question.within(self.settings.allocation, self.settings.target)
            self._judged(plan)
            self.account.note(self.judge.counted_text())
            return plan

    def curve(self, chosen: Plan) -> tuple[CurvePoint, ...]:
        return curve(self.question.frontier(self.settings.allocation), self.judged, chosen, self._flat())

    def _smallest(self) -> Plan:
        """The smallest plan found to hold: that of the search, or where noise made it larger, all experts at the one
        width that was measured to hold."""
        flat = self.question.problem.priced(uniform(self.spec, max(self.tried)))
        frontier = self.question.frontier(self.settings.allocation)
        with suppress(TargetMissed):
            found = search(frontier, self._judged, self.settings.planned_loss, self._flat()).plan
            if found.nbytes <= flat.nbytes:
                return found
        self._judged(flat)
        return flat

    def points(self) -> list[tuple[float, float]]:
        """(predicted cost, measured loss) of all that was measured."""
        return [*self._flat(), *((one.cost, one.loss) for one in self.judged)]

    def _flat(self) -> list[tuple[float, float]]:
        """(predicted cost, measured loss) of the uniform widths that were tried. Other plans that the journal may know
        are left out: the same command ends in the same plan, whatever was measured before."""
        points = []
        for width, evaluation in self.tried.items():
            with suppress(KeyError):  # a width that the problem does not have
                cost = self.question.problem.priced(uniform(self.spec, width)).cost
                points.append((cost, self.judge.loss(evaluation)))
        return points

    def _judged(self, plan: Plan) -> MeasuredPlan:
        evaluation = evaluated(self.judge.measure, plan)
        self.account.say(f"a plan of {plan.nbytes / 1e6:,.2f} MB: {self.judge.text(evaluation)}")
        measured = MeasuredPlan.of(plan, self.judge.loss(evaluation), self.judge.bound(evaluation))
        self.plans.append((plan, measured))
        return measured
