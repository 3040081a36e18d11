"""Does a plan keep the promise? Judged on calibration text that took no part in ranking."""

from __future__ import annotations

from collections.abc import Sequence

from moeconv.errors import SettingsError
from moeconv.material import Material
from moeconv.measure import Measure
from moeconv.promise import Groups, Needed, interval, samples_needed, upper_bound
from moeconv.records import Record
from moert.pack.manifest import Measured

LARGEST_REFERENCE = 1e30


class Judge:
    """`measure` is that of the acceptance samples. Without a confidence the measured loss itself must hold."""

    def __init__(self, measure: Measure, material: Material) -> None:
        self.measure = measure
        self.material = material
        self.confidence = material.settings.confidence
        self._bounds: dict[tuple[tuple[float, ...], ...], float] = {}  # each costs thousands of draws

    def loss(self, record: Record) -> float:
        return self.measure.figures(record).loss

    def bound(self, record: Record) -> float | None:
        """What the held-out loss stays under with the confidence; None without one."""
        if self.confidence is None:
            return None
        if record.scores not in self._bounds:
            self._bounds[record.scores] = upper_bound(
                self.material.metric, self.measure.reference.columns(), record.columns(), confidence=self.confidence,
                heldout_samples=self.material.heldout.samples, seed=self.material.settings.seed,
                groups=self.material.judged.groups,
            )  # fmt: skip
        return self._bounds[record.scores]

    def holds(self, record: Record) -> bool:
        bound = self.bound(record)
        return (self.loss(record) if bound is None else bound) <= self.material.settings.planned_loss

    def text(self, record: Record) -> str:
        """The loss, and the bound that goes with the confidence."""
        bound = self.bound(record)
        promised = "" if bound is None else f", under {bound:.2%} at {self.confidence:.0%}"
        return f"loss {self.loss(record):.2%}{promised}"

    def needed(self, tried: Sequence[Record]) -> Needed | None:
        """How many samples the promise takes; None where there is enough, or nothing is promised."""
        if self.confidence is None:
            return None
        found = samples_needed(
            self.material.metric, self.measure.reference.columns(), [record.columns() for record in tried],
            target=self.material.settings.planned_loss, confidence=self.confidence,
            heldout_samples=self.material.heldout.samples, seed=self.material.settings.seed,
            groups=self.material.judged.groups,
        )  # fmt: skip
        return None if found.enough else found


def measured(measure: Measure, record: Record, groups: Groups | None, seed: int) -> Measured:
    """A record's figures, with a 95% interval of the loss. `groups` [samples] says which samples belong together."""
    reference = measure.reference
    low, high = interval(measure.metric, reference.columns(), record.columns(), seed=seed, groups=groups)
    figures = measure.figures(record)
    before = measure.metric.value(reference.columns())
    return Measured(before, figures.value, figures.loss, low, high, len(record.nats))


def check_reference(name: str, value: float, what: str) -> None:
    """Raises SettingsError where no loss can be measured against this value of the metric."""
    if not 0 < value < LARGEST_REFERENCE:
        raise SettingsError(
            f"the unquantised model has {name} {value:.4g} on the {what}, so no loss can be measured: check the text, "
            "--metric, --max-new-tokens, and the number of samples"
        )
