"""The unquantised model's answers, on both texts that losses are measured on, and who judges plans by them."""

from __future__ import annotations

from dataclasses import dataclass

from moeconv.calibration.documents import IN_RUNS
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.errors import TargetMissed
from moeconv.measure.assignments import Instead, Measure
from moeconv.measure.evaluation import Evaluation
from moeconv.plan.problem import Plan
from moeconv.promise.evidence import Evidence
from moeconv.promise.judging import Judge, at_chance, check_reference
from moert.pack.manifest import in_words


@dataclass(frozen=True)
class References:
    """`judge` measures on the acceptance text; on `heldout` only what was chosen is measured."""

    judge: Judge
    heldout: Measure

    @classmethod
    def of(cls, bench: Bench) -> References:
        material, settings = bench.material, bench.settings
        acceptance = bench.measure("acceptance", material.acceptance, settings.samples, bench.instead)
        heldout = bench.measure("held-out", material.splits.heldout, settings.heldout_samples, bench.instead)
        why = material.splits.why
        evidence = Evidence(material.judged.documents, material.heldout.documents, why, runs=why == IN_RUNS)
        return cls(Judge(acceptance, evidence, settings.planned_loss, settings.confidence, settings.seed), heldout)

    def judged_with(self, instead: Instead | None) -> None:
        """From here on that is a part of what is judged."""
        self.judge.measure.instead = self.heldout.instead = instead


def measured_references(bench: Bench, account: Account) -> References:
    """Raises SettingsError where no loss can be measured against them, TargetMissed for a doubt with --strict."""
    found, material = References.of(bench), bench.material

    def doubt(line: str | None) -> None:
        """Says why the promise is less than was asked for."""
        if line is not None and bench.settings.strict:
            raise TargetMissed(f"--strict: {line}")
        account.note(line)

    evidence = found.judge.evidence
    account.say(
        f"plans are judged on {evidence.count} documents, {len(set(evidence.heldout.tolist()))} are held out: "
        f"{evidence.why}"
    )
    doubt(found.judge.too_few())
    with account.step("reference", bench.journal):
        texts = (("calibration", found.judge.measure, material.judged), ("held-out", found.heldout, material.heldout))
        for what, measure, volume in texts:
            name, value = in_words(measure.metric.name), measure.metric.value(measure.reference.columns())
            check_reference(name, value, f"{what} text")
            account.say(f"reference on {what} text: {value_text(measure, measure.reference)}")
            doubt(at_chance(measure.reference, volume.entropy, what))
    return found


def value_text(measure: Measure, found: Evaluation) -> str:
    """Returns the metric of an evaluation as text; behind a perplexity per word that per token, which depends less on
    the language of a text."""
    metric = measure.metric
    said, samples = f"{in_words(metric.name)} {metric.value(found.columns()):.4f}", f"on {len(found.nats)} samples"
    if metric.unit != "words":
        return f"{said} {samples}"
    return f"{said} (per token {found.token_perplexity():.4f}) {samples}"


def evaluated(measure: Measure, plan: Plan) -> Evaluation:
    return measure(plan.assignment, f"plan of {plan.nbytes} bytes")
