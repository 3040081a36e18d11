"""One conversion from start to end: the stages in their order, each leaving its artefact in the work directory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import moeconv
from moeconv import artifacts
from moeconv.allocation import greedy, widths_at
from moeconv.artifacts import BitBounds, BitPlan, ConversionReport, SensitivityTable
from moeconv.bounds import bracket
from moeconv.calibration import Sample, load_splits
from moeconv.checkpoint import Checkpoint
from moeconv.emit import emit
from moeconv.measure import Measure
from moeconv.metrics import METRICS, default_metric
from moeconv.quantizers import QUANTIZERS, Quantizer
from moeconv.reference import measured_reference
from moeconv.scorers import Scorer, Scores
from moeconv.scorers.build import build_scorer, check_fit, load_tokenizer, spread
from moeconv.scorers.generated import GeneratedScorer
from moeconv.sensitivity import Progress, sweep
from moeconv.settings import Settings
from moeconv.trial import Trial
from moeconv.workdir import WorkDir
from moert.pack.layout import expert_layout
from moert.pack.manifest import Manifest, Measured, Quality
from moert.pack.model_spec import ExpertKey
from moert.pack.writer import check_target

SHOWN_SAMPLES = 6
TOKENIZER = "tokenizer.json"


@dataclass
class Conversion:
    """Runs the stages. `say` takes progress messages for a person, `progress` wraps the sweep's iterable."""

    settings: Settings
    say: Callable[[str], None]
    progress: Progress

    def run(self) -> tuple[Manifest, ConversionReport]:
        """Raises ConversionError (TargetMissed before anything is written) or a PackError."""
        started = time.perf_counter()
        check_target(self.settings.out)
        self.checkpoint = Checkpoint.open(self.settings.model)
        self.quantizer: Quantizer = QUANTIZERS[self.settings.quantizer](self.settings.group_size)
        if self.settings.calib is None:
            return self._unmeasured(started)
        self._read_text(self.settings.calib)
        self.trial = Trial(self.checkpoint, self.quantizer)
        identity = self._identity()
        with WorkDir(self.settings.work / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]) as self.work:
            self.work.save("identity.json", identity)
            self._prepare()
            bounds = self._bounds()  # first: an unreachable target is said before the long sweep
            table = self._sensitivity()
            plan = self._plan(table, bounds)
            return self._deliver(table, bounds, plan, started)

    # Stages -----------------------------------------------------------------------------------------------------------

    def _read_text(self, calib: str) -> None:
        settings = self.settings
        self.splits = load_splits(calib, settings.heldout, seed=settings.seed)
        self.metric = METRICS[settings.metric or self.splits.metric or default_metric(self.splits.seq2seq)]
        check_fit(self.checkpoint.spec, self.splits, self.metric, settings.max_new_tokens)
        self.tokenizer = load_tokenizer(self.checkpoint.path / TOKENIZER)

    def _prepare(self) -> None:
        """Scorers for every split, so that unusable text is found now, and the references of the calibration split."""
        settings = self.settings
        self.journal = self.work.journal()
        self.say(f"work directory {self.work.path}, {len(self.journal)} measurements in its journal")
        self.heldout_scorer = self._scorer(self.splits.heldout, settings.heldout_samples)
        self.measure = self._measure(settings.samples, "calibration")
        self.sweep_measure = (
            self.measure
            if settings.sweep_samples is None
            else self._measure(settings.sweep_samples, "calibration for the sweep")
        )

    def _scorer(self, samples: tuple[Sample, ...], limit: int | None) -> Scorer:
        return build_scorer(
            self.trial,
            self.tokenizer,
            samples,
            self.metric,
            limit=limit,
            context=self.settings.context,
            max_new_tokens=self.settings.max_new_tokens,
        )

    def _measure(self, limit: int | None, what: str) -> Measure:
        scorer = self._scorer(self.splits.calibration, limit)
        reference = self._reference(scorer, "calibration", limit)
        value = self.metric.value(reference.per_sample)
        self.say(f"reference on {what}: {self.metric.name} {value:.4f} on {scorer.n_samples} samples")
        samples_id = f"{self.splits.digest('calibration')}/{limit or 'all'}"
        return Measure(self.trial, scorer, self.metric, reference.per_sample, self.journal, samples_id)

    def _sensitivity(self) -> SensitivityTable | None:
        if self.settings.bits == (16,):
            return None
        table = sweep(self.sweep_measure, self.trial.spec.expert_keys(), self.progress)
        self.work.save(f"sensitivity-{self.settings.sweep_samples or 'all'}.json", table)
        return table

    def _bounds(self) -> BitBounds:
        keys = self.trial.spec.expert_keys()
        losses = {}
        for width in sorted(self.settings.bits):
            losses[width] = self.measure(dict.fromkeys(keys, width), f"all at {width}").loss
            self.say(f"all experts at {width:2d} bits: loss {losses[width]:.2%}")
        bounds = bracket(losses, self.settings.planned_loss)
        self.work.save(f"bounds-{self.settings.planned_loss:g}.json", bounds)
        return bounds

    def _plan(self, table: SensitivityTable | None, bounds: BitBounds) -> BitPlan:
        ranking = table.ranking() if table else self.trial.spec.expert_keys()

        def loss_of(count: int) -> float:
            loss = self.measure(widths_at(ranking, bounds, count), f"{count} at {bounds.low}").loss
            self.say(f"{count} experts at {bounds.low}, {len(ranking) - count} at {bounds.high} bits: loss {loss:.2%}")
            return loss

        plan = greedy(ranking, bounds, loss_of)
        self.work.save(f"plan-{self.settings.planned_loss:g}.json", plan)
        return plan

    def _deliver(
        self, table: SensitivityTable | None, bounds: BitBounds, plan: BitPlan, started: float
    ) -> tuple[Manifest, ConversionReport]:
        calibration, _ = self._judge(self.measure.scorer, "calibration", plan)
        heldout, shown = self._judge(self.heldout_scorer, "heldout", plan)
        quality = Quality(
            self.metric.name, self.settings.target_loss, calibration, heldout,
            self.splits.digest("calibration"), self.splits.digest("heldout"),
        )  # fmt: skip
        report = self._report(plan.widths, calibration, heldout, table, bounds, plan, shown, started)
        return self._emit(plan.widths, quality, report, table)

    def _judge(self, scorer: Scorer, split: str, plan: BitPlan) -> tuple[Measured, tuple[Mapping[str, str], ...]]:
        """Measures the plan on a split, with an interval; also a few outputs side by side."""
        limit = self.settings.samples if split == "calibration" else self.settings.heldout_samples
        reference = self._reference(scorer, split, limit)
        self.trial.assign(plan.widths)
        scores = scorer.score()
        low, high = self.metric.interval(reference.per_sample, scores.per_sample, seed=self.settings.seed)
        before, after = self.metric.value(reference.per_sample), self.metric.value(scores.per_sample)
        measured = Measured(before, after, self.metric.loss(before, after), low, high, scorer.n_samples)
        return measured, _side_by_side(scorer, reference, scores)

    def _reference(self, scorer: Scorer, split: str, limit: int | None) -> Scores:
        return measured_reference(self.trial, scorer, self.metric, self.work, f"{split}-{limit or 'all'}")

    def _unmeasured(self, started: float) -> tuple[Manifest, ConversionReport]:
        if not (self.checkpoint.path / TOKENIZER).is_file():
            self.say(f"note: {self.checkpoint.path} has no {TOKENIZER}: the pack can't be run on text")
        widths = dict.fromkeys(self.checkpoint.spec.expert_keys(), 16)
        report = self._report(widths, None, None, None, None, None, (), started)
        return self._emit(widths, None, report, None)

    # Delivery ---------------------------------------------------------------------------------------------------------

    def _emit(
        self,
        widths: Mapping[ExpertKey, int],
        quality: Quality | None,
        report: ConversionReport,
        table: SensitivityTable | None,
    ) -> tuple[Manifest, ConversionReport]:
        projections = self.checkpoint.spec.moe.projections
        manifest = emit(
            self.checkpoint,
            {key: dict.fromkeys(projections, bits) for key, bits in widths.items()},
            self.quantizer,
            self.settings.out,
            seed=self.settings.seed,
            creator=f"moeconv {moeconv.__version__}",
            importance=table.importance if table else None,
            quality=quality,
            extra_files={"report.json": (json.dumps(artifacts.to_json(report), indent=1) + "\n").encode()},
        )
        return manifest, report

    def _report(
        self,
        widths: Mapping[ExpertKey, int],
        calibration: Measured | None,
        heldout: Measured | None,
        table: SensitivityTable | None,
        bounds: BitBounds | None,
        plan: BitPlan | None,
        shown: tuple[Mapping[str, str], ...],
        started: float,
    ) -> ConversionReport:
        settings, spec = self.settings, self.checkpoint.spec
        sizes = self._expert_bytes(widths)
        projections = len(spec.moe.projections)
        counts: dict[int, int] = {}
        for bits in widths.values():
            counts[bits] = counts.get(bits, 0) + projections
        used = {} if calibration is None else {**self.measure.used, **self.sweep_measure.used}
        return ConversionReport(
            model=Path(settings.model).name,
            calibration_source=settings.calib or "",
            heldout_source=settings.heldout,
            seed=settings.seed,
            metric=self.metric.name if calibration else "",
            quantizer=self.quantizer.name,
            group_size=self.quantizer.group_size,
            target_loss=settings.target_loss,
            calibration=calibration,
            heldout=heldout,
            bits_histogram=dict(sorted(counts.items())),
            effective_bits=8 * sizes["pack"] / (len(widths) * spec.weights_per_expert()),
            expert_bytes=sizes,
            context=settings.context,
            evaluations=len(used),
            evaluation_seconds=round(sum(found.seconds for found in used.values()), 2),
            seconds=round(time.perf_counter() - started, 2),
            sensitivity=table,
            bounds=bounds,
            plan_steps=plan.steps if plan else (),
            samples=shown,
        )

    def _expert_bytes(self, widths: Mapping[ExpertKey, int]) -> dict[str, int]:
        """Bytes of all experts, scales counted: as planned, and uniform per channel at 4, 8 and 16 bits."""
        spec = self.checkpoint.spec

        def total(plan: Mapping[ExpertKey, int], group_size: int) -> int:
            return sum(
                expert_layout(
                    spec, key, dict.fromkeys(spec.moe.projections, bits), group_size, "F16", 4096
                ).tensor_bytes
                for key, bits in plan.items()
            )

        uniform = {
            name: total(dict.fromkeys(widths, bits), 0) for name, bits in (("int4", 4), ("int8", 8), ("fp16", 16))
        }
        return {"pack": total(widths, self.quantizer.group_size), **uniform}

    def _identity(self) -> dict[str, str | int | None]:
        """What a journal is about: anything of this changed, and nothing in it would be true."""
        return {
            "model_sha256": self.checkpoint.sha256(),
            "tokenizer_sha256": hashlib.sha256((self.checkpoint.path / TOKENIZER).read_bytes()).hexdigest(),
            "quantizer": self.quantizer.name,
            "group_size": self.quantizer.group_size,
            "metric": self.metric.name,
            "calibration_sha256": self.splits.digest("calibration"),
            "heldout_sha256": self.splits.digest("heldout"),
            "context": self.settings.context,
            "max_new_tokens": self.settings.max_new_tokens,
        }


def _side_by_side(scorer: Scorer, reference: Scores, scores: Scores) -> tuple[Mapping[str, str], ...]:
    """A few samples, spread over the split: input, target, what the reference and what the pack make of it."""
    if not isinstance(scorer, GeneratedScorer) or not reference.outputs:
        return ()
    return tuple(
        {
            "input": scorer.samples[place].source,
            "target": scorer.samples[place].target,
            "reference": reference.outputs[place],
            "pack": scores.outputs[place],
        }
        for place in spread(scorer.n_samples, SHOWN_SAMPLES)
    )
