"""Does a plan keep the promise? Judged on calibration text that took no part in ranking."""

from __future__ import annotations

from collections.abc import Sequence

from moeconv.errors import SettingsError
from moeconv.evaluation import Evaluation
from moeconv.material import Material
from moeconv.measure import Measure
from moeconv.promise import Groups, Needed, interval, samples_needed, upper_bound
from moert.pack.manifest import LossEstimate

LARGEST_REFERENCE = 1e30


class Judge:
    """`measure` is that of the acceptance samples. Without a confidence the measured loss itself must hold."""

    def __init__(self, measure: Measure, material: Material) -> None:
        self.measure = measure
        self.material = material
        self.confidence = material.settings.confidence
        self._bounds: dict[tuple[tuple[float, ...], ...], float] = {}  # each costs thousands of draws

    def loss(self, evaluation: Evaluation) -> float:
        return self.measure.summary(evaluation).loss

    def bound(self, evaluation: Evaluation) -> float | None:
        """What the held-out loss stays under with the confidence; None without one."""
        if self.confidence is None:
            return None
        if evaluation.scores not in self._bounds:
            self._bounds[evaluation.scores] = upper_bound(
                self.material.metric, self.measure.reference.columns(), evaluation.columns(),
                confidence=self.confidence,
                heldout_samples=self.material.heldout.samples, seed=self.material.settings.seed,
                groups=self.material.judged.groups,
            )  # fmt: skip
        return self._bounds[evaluation.scores]

    def holds(self, evaluation: Evaluation) -> bool:
        bound = self.bound(evaluation)
        return (self.loss(evaluation) if bound is None else bound) <= self.material.settings.planned_loss

    def text(self, evaluation: Evaluation) -> str:
        """The loss, and the bound that goes with the confidence."""
        bound = self.bound(evaluation)
        promised = "" if bound is None else f", under {bound:.2%} at {self.confidence:.0%}"
        return f"loss {self.loss(evaluation):.2%}{promised}"

    def needed(self, tried: Sequence[Evaluation]) -> Needed | None:
        """How many samples the promise takes; None where there is enough, or nothing is promised."""
        if self.confidence is None:
            return None
        found = samples_needed(
            self.material.metric, self.measure.reference.columns(), [evaluation.columns() for evaluation in tried],
            target=self.material.settings.planned_loss, confidence=self.confidence,
            heldout_samples=self.material.heldout.samples, seed=self.material.settings.seed,
            groups=self.material.judged.groups,
        )  # fmt: skip
        return None if found.enough else found


def estimate(measure: Measure, evaluation: Evaluation, groups: Groups | None, seed: int) -> LossEstimate:
    """The loss, with a 95% interval. `groups` [samples] says which samples belong together."""
    reference = measure.reference
    low, high = interval(measure.metric, reference.columns(), evaluation.columns(), seed=seed, groups=groups)
    figures = measure.summary(evaluation)
    before = measure.metric.value(reference.columns())
    return LossEstimate(before, figures.value, figures.loss, low, high, len(evaluation.nats))


def check_reference(name: str, value: float, what: str) -> None:
    """Raises SettingsError where no loss can be measured against this value of the metric."""
    if not 0 < value < LARGEST_REFERENCE:
        raise SettingsError(
            f"the unquantised model has {name} {value:.4g} on the {what}, so no loss can be measured: check the text, "
            "--metric, --max-new-tokens, and the number of samples"
        )
