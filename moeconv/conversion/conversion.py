"""One conversion from start to end: the stages in their order, each leaving its artefact in the work directory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path

from moeconv.artifacts import ConversionReport, SensitivityTable, Step, SweepCost, uniform
from moeconv.calibration import Sample
from moeconv.conversion.delivery import Outcome, deliver
from moeconv.conversion.examples import side_by_side
from moeconv.conversion.limits import notes
from moeconv.conversion.material import Material
from moeconv.conversion.planning import Inputs
from moeconv.conversion.settings import Settings
from moeconv.conversion.subject import conversion_of, directory_of, subject_of
from moeconv.errors import SettingsError, TargetMissed
from moeconv.measure.assignments import Measure
from moeconv.measure.evaluation import Evaluation
from moeconv.measure.loaded import LoadedModel
from moeconv.measure.trial import Trial
from moeconv.measure.workdir import INPUTS, WorkDir
from moeconv.plan.curve import curve
from moeconv.plan.problem import Plan
from moeconv.plan.question import Question, check_budget
from moeconv.plan.search import MeasuredPlan, search
from moeconv.promise.evidence import Evidence
from moeconv.promise.judging import Judge, at_chance, check_reference, estimate
from moeconv.promise.looks import look
from moeconv.promise.standing import bound_doubt, looks_text, needed_text, standing, unreached_text
from moeconv.quantizers import QUANTIZERS, Quantizer
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder
from moeconv.quantizers.dense import DenseCoder, dense_of, width_text
from moeconv.quantizers.moments import Moments, collect, moments_bytes
from moeconv.source.archs.errors import transformers_model
from moeconv.source.checkpoint import TOKENIZER, Checkpoint
from moeconv.sweep.memory import blocks_for
from moeconv.sweep.runners import runner_for
from moeconv.sweep.sensitivity import BASE_BITS, Bar, RaceRules, Sweep, probes_for
from moeconv.sweep.worker import SweepJob
from moert.pack.manifest import LossEstimate, Manifest
from moert.pack.reader import is_pack
from moert.pack.writer import check_target

ROWS_AN_INPUT = 10  # tokens that an expert should see for each of its inputs, on average, before they are weighed
RACING_BLOCKS, RACING_SPAN = 8, 0.1

Progress = Callable[[str, int], AbstractContextManager[Bar]]


class Conversion:
    """Runs the stages. `say` takes messages for a person, `progress(label, total)` shows how far a sweep is.
    `profiled_next` says that paths are profiled right after, so that nobody is told to do it."""

    def __init__(
        self, settings: Settings, say: Callable[[str], None], progress: Progress, profiled_next: bool = False
    ) -> None:
        self.settings, self.say, self.progress = settings, say, progress
        self.profiled_next = profiled_next
        self.steps: list[Step] = []
        self.tried: dict[int, Evaluation] = {}  # uniform widths
        self.judged: list[MeasuredPlan] = []
        self.dense_alone: LossEstimate | None = None
        self.notes: list[str] = []  # on what the promise does not cover
        self.looks = 1

    def run(self) -> tuple[Manifest, ConversionReport]:
        """Raises ConversionError (TargetMissed before anything is written) or a PackError."""
        self.started = time.perf_counter()
        check_target(self.settings.out)
        if is_pack(self.settings.out):
            self.say(f"note: {self.settings.out} is a pack already: the new one takes its place at the end")
        self.checkpoint = Checkpoint.open(self.settings.model)
        self.quantizer: Quantizer = QUANTIZERS[self.settings.quantizer](self.settings.group_size)
        self.dense = DenseCoder(self.checkpoint, dense_of(self.checkpoint.spec, self.settings.dense_bits))
        if self.settings.calib is None:
            return self._unmeasured()
        check_budget(self.settings.target, self.checkpoint.spec, min(self.settings.bits), self.quantizer.group_size)
        self._check_moments()
        self.material = Material.read(self.settings, self.checkpoint)
        sizes = (part.samples for part in (self.material.ranked, self.material.judged, self.material.heldout))
        for note in notes(self.settings, self.checkpoint.spec, *sizes):
            self.say(note)
        self.blocks = blocks_for(self.checkpoint.spec, self.material.ranked, self.settings.memory_bytes)
        if self.settings.racing is not None:
            self.blocks = min(max(self.blocks, RACING_BLOCKS), self.material.ranked.samples)
        self.subject = subject_of(self.material, self.checkpoint, self.quantizer, self.dense.dense)
        directory = directory_of(self.subject)
        with WorkDir(self.settings.work / directory) as self.work:
            self.work.save("subject.json", self.subject)
            self.journal = self.work.journal(directory)
            self.say(f"work directory {self.work.path}, {len(self.journal)} measurements in its journal")
            self.checkpoint.check_finite()
            self.moments = self._moments()
            self._references()
            self._dense_alone()
            widths = self._uniform_widths()
            table, cost = self._sweep(widths)
            plan, question = self._plan(widths)
            return self._deliver(table, cost, plan, question)

    def _unmeasured(self) -> tuple[Manifest, ConversionReport]:
        if not (self.checkpoint.path / TOKENIZER).is_file():
            self.say(f"note: {self.checkpoint.path} has no {TOKENIZER}: the pack can't be run on text")
        outcome = Outcome(uniform(self.checkpoint.spec, 16))
        coder = ExpertCoder(self.checkpoint, self.quantizer, None)
        return deliver(self.settings, coder, self.dense, outcome, self._seconds(), self._lost_paths)

    def _seconds(self) -> float:
        """Seconds that this run has taken until now."""
        return time.perf_counter() - self.started

    def _lost_paths(self) -> None:
        if not self.profiled_next:
            out = self.settings.out
            self.say(
                f"note: {out} had paths that were profiled with other weights and are gone: run moeconv profile-paths "
                f"{out} again"
            )

    def _check_moments(self) -> None:
        """Raises SettingsError where the moments that the quantizer needs do not fit in --memory."""
        wants = self.quantizer.wants
        needed = 0 if wants == "nothing" else moments_bytes(self.checkpoint.spec, wants)
        if needed > self.settings.memory_bytes:
            raise SettingsError(
                f"--quantizer {self.quantizer.name} collects {needed / 1e6:,.0f} MB about the inputs of this model's "
                f"experts: give --memory {math.ceil(needed / 1e6):,}MB or more, or take --quantizer group"
            )

    # What is made when it is first needed; a run that only reads its journal needs little of it ----------------------

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model in memory."""
        return LoadedModel(self.checkpoint, self.dense)

    @cached_property
    def trial(self) -> Trial:
        return Trial(self.loaded, self.coder)

    @cached_property
    def coder(self) -> ExpertCoder:
        moments = None if self.moments is None else Moments.load(self.moments)
        return ExpertCoder(self.checkpoint, self.quantizer, moments)

    def _measure(self, what: str, samples: tuple[Sample, ...], limit: int | None) -> Measure:
        return Measure(
            lambda: self.trial, lambda: self.material.scorer(self.trial, samples, limit), self.material.metric,
            self.journal, f"{what}/{limit or 'all'}",
        )  # fmt: skip

    # Stages -----------------------------------------------------------------------------------------------------------

    def _moments(self) -> Path | None:
        """File with the moments of the experts' inputs on the ranking text; None where the quantizer needs none."""
        if self.quantizer.wants == "nothing":
            return None
        path = self.work.path / f"moments-{self.quantizer.wants}.safetensors"
        if not path.is_file():
            with self._step("moments"), transformers_model(self.checkpoint.path):
                scorer = self.material.scorer(self.loaded, self.material.ranking, self._moment_samples())
                self.loaded.set_dense(stored=True)
                collect(self.loaded.calls, scorer.score, self.quantizer.wants).save(path)
        return path

    def _moment_samples(self) -> int:
        spec, ranked = self.checkpoint.spec, self.material.ranked
        wanted = ROWS_AN_INPUT * max(spec.d_model, spec.moe.ffn.d_ff) * spec.moe.n / spec.moe.router.top_k
        scarcer = min(tokens for tokens in (ranked.encoder_tokens, ranked.decoder_tokens) if tokens)
        return math.ceil(wanted * ranked.samples / scarcer)

    def _references(self) -> None:
        """The unquantised model's answers, on both texts that losses are measured on."""
        acceptance = self._measure("acceptance", self.material.acceptance, self.settings.samples)
        self.heldout = self._measure("held-out", self.material.splits.heldout, self.settings.heldout_samples)
        evidence = Evidence(self.material.judged.documents, self.material.heldout.documents)
        settings = self.settings
        self.judge = Judge(acceptance, evidence, settings.planned_loss, settings.confidence, settings.seed)
        self._doubt(self.judge.too_few())
        with self._step("reference"):
            texts = (
                ("calibration", acceptance, self.material.judged),
                ("held-out", self.heldout, self.material.heldout),
            )
            for what, measure, volume in texts:
                name, value = measure.metric.name, measure.metric.value(measure.reference.columns())
                check_reference(name, value, f"{what} text")
                self.say(f"reference on {what} text: {name} {value:.4f} on {len(measure.reference.nats)} samples")
                self._doubt(at_chance(measure.reference, volume.entropy, what))
        self._count_looks()

    def _doubt(self, line: str | None) -> None:
        """Says why the promise is less than was asked for. Raises TargetMissed with --strict."""
        if line is not None and self.settings.strict:
            raise TargetMissed(f"--strict: {line}")
        self._note(line)

    def _note(self, line: str | None) -> None:
        """Says it now, and in the report."""
        if line is not None:
            self.notes.append(line)
            self.say(f"note: {line}")

    def _count_looks(self) -> None:
        texts = (f"{self.checkpoint.sha256} {text}" for text in self.material.judged_texts)
        self.looks = look(self.settings.work, conversion_of(self.subject, self.settings), texts)
        self._note(looks_text(self.looks, self.judge.stated))

    def _dense_alone(self) -> None:
        """Measures what quantising the matrices outside the experts loses by itself, where --dense-bits asks for it.
        Raises TargetMissed where that alone misses the target."""
        if self.dense.dense is None:
            return
        widths, judge = width_text(self.dense.dense.bits), self.judge
        with self._step("dense matrices"):
            evaluation = judge.measure(uniform(self.checkpoint.spec, ORIGINAL), "dense matrices alone")
            found = estimate(judge.measure, evaluation, judge.used.acceptance, self.settings.seed)
        self.say(
            f"dense matrices at {widths}, experts unquantised: loss {found.loss:.2%} (95% interval {found.low:+.2%} to "
            f"{found.high:+.2%})"
        )
        self.dense_alone = found
        if self.settings.target.kind == "loss" and not judge.holds(evaluation):
            raise TargetMissed(
                f"with unquantised experts and the dense matrices at {widths}: {judge.text(evaluation)}; the target of "
                f"{self.settings.planned_loss:.2%} is missed before any expert is quantised: "
                f"{self._advice(evaluation, 'give wider --dense-bits')}, or a larger --loss"
            )

    def _advice(self, missed: Evaluation, wider: str) -> str:
        """Advice where this evaluation misses the target: more text if only its bound does, else `wider`."""
        only_bound = self.judge.loss(missed) <= self.settings.planned_loss
        return "give more text, or ask for less --confidence" if only_bound else wider

    def _uniform_widths(self) -> list[int]:
        """Widths worth probing: those up to the first at which all experts together meet the target, and one more. An
        unreachable target, or too little text for the promise, is said here, before the long sweep."""
        widths = sorted(self.settings.bits)
        if self.settings.target.kind != "loss":
            return widths
        with self._step("uniform widths"):
            for width in widths:
                last = self.tried[width] = self.judge.measure(uniform(self.checkpoint.spec, width), f"all at {width}")
                self.say(f"all experts at {width:2d} bits: {self.judge.text(last)}")
                if self.judge.holds(last):
                    break
        tried = list(self.tried.values())
        if self.judge.holds(last) and len(tried) == 1:
            return widths[:1]  # nothing can be smaller
        self._say_if_too_little(tried)
        if not self.judge.holds(last):
            advice = self._advice(last, "allow wider experts with --bits")
            raise TargetMissed(
                f"with all experts at {widths[-1]} bits: {self.judge.text(last)}; the target of "
                f"{self.settings.planned_loss:.2%} is missed: {advice}, or a larger --loss"
            )
        return widths[: len(tried) + 1]  # single experts may still want more than all together

    def _say_if_too_little(self, tried: Sequence[Evaluation]) -> None:
        needed, stated = self.judge.needed(tried), self.judge.stated
        if needed is not None and stated is not None:
            promised = f"{self.settings.planned_loss:.2%} at {stated:.0%}"
            self.say(f"note: {needed_text(needed, self.judge.used, promised)}")

    def _sweep(self, widths: list[int]) -> tuple[SensitivityTable, SweepCost]:
        settings, material = self.settings, self.material
        probes = probes_for(self.checkpoint.spec, widths, settings.per_projection)
        job = SweepJob(
            self.checkpoint.path.absolute(), settings.quantizer, settings.group_size, self.moments, material.ranking,
            material.metric_name, settings.sweep_samples, settings.context, settings.max_new_tokens, self.blocks,
            BASE_BITS, self.dense.dense,
        )  # fmt: skip
        rules = None if settings.racing is None else RaceRules(settings.signal, settings.racing, RACING_SPAN)
        sweep = Sweep(self.journal, job, material.metric, probes, rules)
        reads = [job.model, *([job.moments] if job.moments else []), *material.metric_file]
        with (
            self._step("sweep"),
            self.progress("sweep", sweep.missing()) as bar,
            runner_for(settings.cluster, lambda: self.trial, reads) as runner,
        ):
            sweep.run(runner, bar)
        if settings.signal == "metric":
            check_reference(material.metric.name, sweep.reference_value(), "samples of the sweep")
        table = sweep.table()
        self._note(unreached_text(table))
        self.inputs = Inputs(
            str(self.checkpoint.path.absolute()), self.quantizer.name, self.quantizer.group_size, material.metric_name,
            self.judge.measure.samples_id, table, {} if self.dense.dense is None else self.dense.dense.bits,
        )  # fmt: skip
        self.work.save(INPUTS, self.inputs.to_json())
        return table, sweep.cost()

    def _plan(self, widths: list[int]) -> tuple[Plan, Question]:
        settings = self.settings
        allowed = sorted(set(settings.bits) & {*widths, BASE_BITS})
        question = Question(self.checkpoint.spec, self.inputs.table, self.inputs.group_size, settings.signal, allowed)
        with self._step("search"):
            if settings.target.kind == "loss":
                return self._smallest(question), question
            plan = question.within(settings.allocation, settings.target)
            self._judged(plan)
            return plan, question

    def _smallest(self, question: Question) -> Plan:
        """The smallest plan found to hold: that of the search, or where noise made it larger, all experts at the one
        width that was measured to hold."""
        flat = question.problem.priced(uniform(self.checkpoint.spec, max(self.tried)))
        frontier = question.frontier(self.settings.allocation)
        with suppress(TargetMissed):
            found = search(frontier, self._judged, self.settings.planned_loss, self._flat(question)).plan
            if found.nbytes <= flat.nbytes:
                return found
        self._judged(flat)
        return flat

    def _flat(self, question: Question) -> list[tuple[float, float]]:
        """(predicted cost, measured loss) of the uniform widths that were tried. Other plans that the journal may know
        are left out: the same command ends in the same plan, whatever was measured before."""
        points = []
        for width, evaluation in self.tried.items():
            with suppress(KeyError):  # a width that the problem does not have
                cost = question.problem.priced(uniform(self.checkpoint.spec, width)).cost
                points.append((cost, self.judge.loss(evaluation)))
        return points

    def _judged(self, plan: Plan) -> MeasuredPlan:
        evaluation = self._evaluated(self.judge.measure, plan)
        self.say(f"a plan of {plan.nbytes / 1e6:,.2f} MB: {self.judge.text(evaluation)}")
        self.judged.append(MeasuredPlan.of(plan, self.judge.loss(evaluation), self.judge.bound(evaluation)))
        return self.judged[-1]

    def _evaluated(self, measure: Measure, plan: Plan) -> Evaluation:
        return measure(plan.assignment, f"plan of {plan.nbytes} bytes")

    # Delivery ---------------------------------------------------------------------------------------------------------

    def _deliver(
        self, table: SensitivityTable, cost: SweepCost, plan: Plan, question: Question
    ) -> tuple[Manifest, ConversionReport]:
        accepted, seed, used = self._evaluated(self.judge.measure, plan), self.settings.seed, self.judge.used
        bound = self.judge.bound(accepted)
        self._note(bound_doubt(bound))
        with self._step("held-out"):
            heldout = estimate(self.heldout, self._evaluated(self.heldout, plan), used.heldout, seed)
            shown = side_by_side(self.material, lambda: self.trial, self.journal, plan.assignment)
        outcome = Outcome(
            widths=plan.assignment,
            metric=self.material.metric_name,
            calibration=estimate(self.judge.measure, accepted, used.acceptance, seed),
            upper_bound=bound,
            confidence=self.judge.stated if bound is not None and math.isfinite(bound) else None,
            standing=standing(self.judge, self.looks, self.notes),
            heldout=heldout,
            splits=self.material.splits,
            table=table,
            sweep_cost=cost,
            curve=curve(question.frontier(self.settings.allocation), self.judged, plan, self._flat(question)),
            steps=tuple(self.steps),
            samples=shown,
            dense_alone=self.dense_alone,
            evaluations=(*self.judge.measure.used.values(), *self.heldout.used.values()),
        )
        return deliver(self.settings, self.coder, self.dense, outcome, self._seconds(), self._lost_paths)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Adds a Step with the seconds that the block took and reused, without those of steps inside it."""
        started, known, before = time.perf_counter(), self.journal.reused_seconds, len(self.steps)
        yield
        inside = self.steps[before:]
        seconds = time.perf_counter() - started - sum(step.seconds for step in inside)
        reused = self.journal.reused_seconds - known - sum(step.reused_seconds for step in inside)
        self.steps.append(Step(name, round(seconds, 2), round(reused, 2)))
