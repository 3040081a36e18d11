"""The stages that measure: the unquantized model, all experts at one width, the sweep over single experts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from moeconv.artifacts import FISHER, Assignment, Bits, SensitivityTable, Step, SweepCost, uniform
from moeconv.calibration import Sample, samples_digest
from moeconv.calibration.samples import IN_RUNS
from moeconv.conversion.material import Coding, Material
from moeconv.conversion.planning import Inputs
from moeconv.conversion.room import Memory
from moeconv.conversion.settings import Settings
from moeconv.dense import width_text
from moeconv.errors import TargetMissed
from moeconv.measure.codes import CodingJob, CodingWorker, LayerCoding, Shared, collect_beside
from moeconv.measure.firing import Ordered, counted, ordered
from moeconv.measure.metrics import METRICS
from moeconv.measure.passes import LayeredModel
from moeconv.measure.scorers import Scorer
from moeconv.measure.scoring import GeneratedScorer, TextScorer, build_scorer, spread
from moeconv.measure.trial import Evaluation, Instead, LoadedModel, Measure, Trial
from moeconv.measure.workdir import Journal, identity
from moeconv.plan.problem import Plan
from moeconv.progress import Progress, unseen
from moeconv.promise.bound import Evidence
from moeconv.promise.judging import Judge, at_chance, check_reference, estimate, needed_text, unreached_text
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder, KeptCodes
from moeconv.quantizers.moments import collect, widest
from moeconv.source.archs.config import transformers_model
from moeconv.source.archs.weights import linears_of
from moeconv.source.experts import ExpertCalls
from moeconv.sweep.cluster import runner_for
from moeconv.sweep.fisher import (
    DRAWS,
    SCALE_TOKENS,
    Costs,
    Gradients,
    LayerCosts,
    LayerScales,
    Measured,
    PairGradients,
    PairScales,
    have_gradients,
    narrower,
    scaled_as_one,
)
from moeconv.sweep.probes import blocks_for
from moeconv.sweep.sensitivity import BASE_BITS, Sweep, SweepJob, SweepWorker, probes_for
from moeconv.tuned import said
from moert.pack.codec import Width
from moert.pack.manifest import LossEstimate, in_words
from moert.pack.model_spec import LayerKey, ModelSpec

# Messages of a conversion, and the notes and times of steps that its report keeps.


class Account:
    """The messages, notes and times of a conversion. `say` gets messages for a person, `progress(label, total)` shows
    how far a sweep is. `notes` name the limits of the promise."""

    def __init__(self, say: Callable[[str], None], progress: Progress) -> None:
        self.say, self.progress = say, progress
        self.notes: list[str] = []
        self.steps: list[Step] = []
        self._started = time.perf_counter()

    def seconds(self) -> float:
        """Returns the seconds that this run has taken until now."""
        return time.perf_counter() - self._started

    def note(self, line: str | None) -> None:
        """Says a note now, and keeps it for the report."""
        if line is not None:
            self.notes.append(line)
            self.say(f"note: {line}")

    @contextmanager
    def step(self, name: str, journal: Journal) -> Iterator[None]:
        """Adds a Step with the seconds that the block took and reused, without those of steps inside it."""
        started, known, before = time.perf_counter(), journal.reused_seconds, len(self.steps)
        yield
        inside = self.steps[before:]
        seconds = time.perf_counter() - started - sum(step.seconds for step in inside)
        reused = journal.reused_seconds - known - sum(step.reused_seconds for step in inside)
        self.steps.append(Step(name, round(seconds, 2), round(reused, 2)))


# The bench of the stages: the model, its text, its journal.

EXACT_PROBES = 4096
"""With more probes than this, experts are not measured one by one unless the user asks for it."""
ROWS_AN_INPUT = 10  # tokens that an expert should see for each of its inputs, on average, before they are weighed


class Bench:
    """The model, text and journal that stages measure with. The model and its coder are made when they are first
    needed: a run that only reads its journal needs little of them. `moments` is the file that the coder reads then,
    None where the quantizer needs none. `show` says how far a pass through a model's layers is. `instead`: the hash
    function in the routers' place, or the predictor that leaves out neurons, where plans are judged."""

    def __init__(
        self, coding: Coding, material: Material, journal: Journal, moments: Path | None,
        memory: Memory | None = None, show: Progress = unseen,
    ) -> None:  # fmt: skip
        self.coding, self.material, self.journal, self.moments = coding, material, journal, moments
        self.memory, self.show = memory or Memory(), show
        self.instead: Instead | None = None

    def by_gradients(self, widths: Sequence[Width]) -> bool:
        """Returns whether the sweep is by gradients: asked for, or the model is too large for an exact sweep."""
        settings, spec = self.settings, self.spec
        if self.memory.layered or settings.signal == FISHER:
            return True
        exact_was_asked = settings.signal != "kl" or settings.cluster is not None
        many = len(spec.expert_keys()) * len(set(widths)) > EXACT_PROBES
        return many and not exact_was_asked and have_gradients(self.coding.checkpoint.family, spec)

    @property
    def settings(self) -> Settings:
        return self.material.settings

    @property
    def spec(self) -> ModelSpec:
        return self.coding.spec

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model in memory."""
        return LoadedModel(self.coding.checkpoint, self.coding.dense)

    @cached_property
    def coder(self) -> ExpertCoder:
        if not self.memory.layered:
            return self.coding.experts(self.moments)
        kept = KeptCodes(self.journal.path.parent / "codes", self.journal.subject, self.journal)
        return ExpertCoder(self.coding.checkpoint, self.coding.quantizer, None, kept, self.coding.neurons)

    @cached_property
    def layered(self) -> LayeredModel:
        """The model layer by layer, with the same codes."""
        folder = self.journal.path.parent / "passes"
        model = LayeredModel(self.coder, self.coding.dense, self.memory.room(self.spec, folder), self.show)
        if self.coder.kept is not None:
            seen = self.material.scorer(model, self.material.ranking, self.moment_samples)
            assert isinstance(seen, TextScorer)
            likely = {bits for bits in self.settings.bits if bits <= BASE_BITS}  # the sweep wants most of these
            model.coded = LayerCoding(model, self.coder.kept, seen.texts, likely, self._shared(folder)).ensure
        return model

    def _shared(self, folder: Path) -> Shared | None:
        """Returns the workers that code beside this process, which keeps its passes in `folder`; None without a
        cluster."""
        address, kept = self.settings.cluster, self.coder.kept
        if address is None or kept is None:
            return None
        model = self.coding.checkpoint.given.absolute()
        job = CodingJob(
            model, self.settings.coded_by, self.settings.group_size, kept.folder.absolute(), kept.about,
            self.coding.neurons,
        )  # fmt: skip
        return Shared(job, lambda: runner_for(address, CodingWorker, [model, folder.absolute()]))

    def restore(self) -> None:
        """Brings back the unquantized model, if one was made."""
        if "trial" in self.__dict__:
            self.trial.restore()

    @cached_property
    def trial(self) -> Trial:
        """The model that plans are tried on."""
        if self.memory.layered:
            return cast("Trial", self.layered)  # all of it that Measure asks for
        return Trial(self.loaded, self.coder)

    def measure(
        self, what: str, samples: tuple[Sample, ...], limit: int | None, instead: Instead | None = None
    ) -> Measure:
        found = Measure(
            lambda: self.trial, lambda: self.material.scorer(self.trial, samples, limit), self.material.metric,
            self.journal, f"{what}/{limit or 'all'}", instead,
        )  # fmt: skip
        found.dense = self.coding.dense
        return found

    def measured_by(self, scorer: Scorer, what: str) -> Measure:
        """Returns the measure over the samples of a scorer of the layered model; `what` names it in the journal."""
        layered = cast("Trial", self.layered)
        return Measure(lambda: layered, lambda: scorer, self.material.metric, self.journal, what)

    def ordered_neurons(self, size: int) -> Ordered:
        """Returns the order of neurons for blocks of `size` by how they fire on the text that moments are collected on:
        of unquantized experts, with all other weights as the pack stores them."""
        self.trial.original_experts()
        material, extent = self.material, self.material.extent(self.moment_samples)
        scorer = build_scorer(self.trial, material.tokenizer, material.ranking, material.metric, extent)
        with transformers_model(self.coding.checkpoint.path):
            return ordered(counted(self.trial, scorer, self.show), size)

    def collect_moments(self, path: Path) -> None:
        """Writes the moments of the inputs of experts on the ranking text into a file, and those of the matrices
        outside them whose widths the conversion chooses; only these where the model goes through memory layer by
        layer, whose experts are coded at once."""
        if self.memory.layered:
            seen = self.material.scorer(self.layered, self.material.ranking, self.moment_samples)
            assert isinstance(seen, TextScorer)
            collect_beside(self.layered, seen.texts, self.coding.weighed, path)
            return
        scorer = self.material.scorer(self.loaded, self.material.ranking, self.moment_samples)
        wants = self.coding.quantizer.wants
        self.loaded.set_dense(stored=True)
        with transformers_model(self.coding.checkpoint.path):
            linears = linears_of(self.loaded.model, self.coding.checkpoint.description, self.coding.weighed)
            moments = collect(self.loaded.calls, scorer.score, wants, linears)
        moments.save(path)

    @property
    def moment_samples(self) -> int:
        """The number of samples of the ranking text that moments and firing neurons are collected on."""
        spec, ranked = self.spec, self.material.ranked
        wanted = ROWS_AN_INPUT * widest(spec) * spec.moe.n / spec.moe.router.top_k
        scarcer = min(tokens for tokens in (ranked.encoder_tokens, ranked.decoder_tokens) if tokens)
        return math.ceil(wanted * ranked.samples / scarcer)


# The unquantized model's answers on both texts that losses are measured on, and the judge of plans.


@dataclass(frozen=True)
class References:
    """The measures of losses: `judge` measures on the acceptance text, `heldout` only the chosen plan."""

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
        """Makes `instead` a part of every plan that is judged from now on."""
        self.judge.measure.instead = self.heldout.instead = instead


def measured_references(bench: Bench, account: Account) -> References:
    """Returns the references, measured. Raises SettingsError where no loss can be measured against them, TargetMissed
    for a doubt with strict."""
    found, material = References.of(bench), bench.material

    def doubt(line: str | None) -> None:
        """Notes why the promise is less than the user asked for. Raises TargetMissed with strict."""
        if line is not None and bench.settings.strict:
            raise TargetMissed(f"{said('strict')}: {line}")
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
    """Returns the metric of an evaluation as text; a perplexity per word is followed by the one per token, which
    depends less on the language of a text."""
    metric = measure.metric
    said, samples = f"{in_words(metric.name)} {metric.value(found.columns()):.4f}", f"on {len(found.nats)} samples"
    if metric.unit != "words":
        return f"{said} {samples}"
    return f"{said} (per token {found.token_perplexity():.4f}) {samples}"


def evaluated(measure: Measure, plan: Plan) -> Evaluation:
    return measure(plan.assignment, f"plan of {plan.nbytes} bytes")


# A few held-out samples that show a person the effect of a loss.

SHOWN = 6


def side_by_side(bench: Bench, widths: Assignment) -> tuple[Mapping[str, str], ...]:
    """Returns held-out samples: input, target, the unquantized model's output and the pack's; empty where the metric
    generates no text."""
    material, instead = bench.material, bench.instead
    if not material.metric.generates:
        return ()
    texts = material.splits.heldout
    chosen = [texts[at] for at in spread(len(texts), SHOWN)]

    def written() -> dict[str, Any]:
        trial = bench.trial
        scorer = material.scorer(trial, chosen, None)
        trial.assign(widths)
        with nullcontext() if instead is None else instead.on(trial):
            after = scorer.score().outputs
        trial.restore()
        return {"reference": scorer.score().outputs, "pack": after}

    dense = bench.coding.dense
    rule: list[Any] = [[*unit, bits] for unit, bits in dense.chosen.items()]
    rule += [{"trained": dense.trained.digest}] if dense.trained else []
    rule += [] if instead is None else [instead.rule]
    name = identity("side by side", [[str(key), bits] for key, bits in sorted(widths.items())], *rule)
    found = bench.journal.remember(name, written)
    with bench.journal.believed():
        return tuple(
            {"input": sample.source, "target": sample.target, "reference": before, "pack": after}
            for sample, before, after in zip(chosen, found["reference"], found["pack"], strict=True)
        )


# Measurements before the sweep: the matrices outside the experts alone, and all experts at one width.


@dataclass(frozen=True)
class Widths:
    """Widths of experts: `probed` are those that single experts may get, `tried` the evaluations of all experts at one
    width."""

    probed: Sequence[Width]
    tried: Mapping[Width, Evaluation]


def dense_alone(bench: Bench, judge: Judge, account: Account) -> LossEstimate | None:
    """Returns the loss from quantizing only the matrices outside the experts; None without --dense-bits. Raises
    TargetMissed where that alone misses the target."""
    if bench.coding.dense_widths is None:
        return None
    settings, widths = bench.settings, width_text(bench.coding.dense_widths.bits)
    with account.step("dense matrices", bench.journal):
        evaluation = judge.measure(uniform(bench.spec, ORIGINAL), "dense matrices alone")
        found = estimate(judge.measure, evaluation, judge.used.acceptance, settings.seed)
    account.say(
        f"dense matrices at {widths}, experts unquantized: loss {found.loss:.2%} (95% interval {found.low:+.2%} to "
        f"{found.high:+.2%})"
    )
    if settings.target.kind == "loss" and not judge.holds(evaluation):
        raise TargetMissed(
            f"with unquantized experts and the dense matrices at {widths}: {judge.text(evaluation)}; the target of "
            f"{judge.planned_loss:.2%} is missed before any expert is quantized: "
            f"{_advice(judge, evaluation, 'give wider --dense-bits')}, or a larger --loss"
        )
    return found


def widths_worth_probing(bench: Bench, judge: Judge, account: Account) -> Widths:
    """Returns the widths up to the first at which all experts together meet the target, and one more. Says, before the
    long sweep, that there is too little text for the promise; raises TargetMissed for an unreachable target."""
    widths, tried = sorted(bench.settings.bits), dict[Width, Evaluation]()
    if bench.settings.target.kind != "loss":
        return Widths(widths, tried)
    with account.step("uniform widths", bench.journal):
        for width in widths:
            last = tried[width] = judge.measure(uniform(bench.spec, width), f"all at {width}")
            account.say(f"all experts at {width!s:>2} bits: {judge.text(last)}")
            if judge.holds(last):
                break
    account.note(judge.counted_text())
    if judge.holds(last) and len(tried) == 1 and not bench.coding.dense.chooses:
        return Widths(widths[:1], tried)  # nothing can be smaller
    needed, stated = judge.needed(list(tried.values())), judge.stated
    if needed is not None and stated is not None:
        promised = f"{judge.planned_loss:.2%} at {stated:.0%}"
        account.say(f"note: {needed_text(needed, judge.counted, promised, bench.material.judged_share)}")
    if not judge.holds(last):
        advice = _advice(judge, last, "allow wider experts with --bits")
        raise TargetMissed(
            f"with all experts at {widths[-1]} bits: {judge.text(last)}; the target of "
            f"{judge.planned_loss:.2%} is missed: {advice}, or a larger --loss"
        )
    return Widths(widths[: len(tried) + 1], tried)  # single experts may still want more than all together


def _advice(judge: Judge, missed: Evaluation, wider: str) -> str:
    """Returns the advice for an evaluation that misses the target: more text if only its bound does, else `wider`."""
    only_bound = judge.loss(missed) <= judge.planned_loss
    return "give more text, or ask for less --confidence" if only_bound else wider


# The sweep by gradients: every expert at every width from a few passes, scaled by layers that are measured whole.


@dataclass(frozen=True)
class Ranked:
    """The costs by gradients, the measured `scales` of whole layers, and the result of both: `nats` above the base for
    each pattern and expert, summed over `tokens`. `measure` tries plans on the same text."""

    costs: Costs
    scales: Measured
    nats: Mapping[LayerKey, list[list[float]]]
    tokens: int
    calls: ExpertCalls
    measure: Measure


def swept_by_gradients(bench: Bench, widths: Sequence[Width], account: Account) -> tuple[SensitivityTable, SweepCost]:
    """Returns the sensitivities and the cost of a sweep by gradients on the ranking text. Raises ConversionError."""
    settings, spec = bench.settings, bench.spec
    if settings.signal != FISHER:
        why = "the model does not fit the memory" if bench.memory.layered else "there are many of them"
        account.note(f"experts are ranked by gradients ({said('signal', FISHER)}): {why}")
    probes = probes_for(spec, widths, settings.per_projection)
    base: Bits = (BASE_BITS,) * len(spec.moe.ffn.projections)
    patterns = [base, *dict.fromkeys(probe.bits for probe in probes)]
    about = identity(samples_digest(bench.material.ranking), settings.context, settings.sweep_samples, "fisher")
    ranked = (_by_layers if spec.encoder is None else _of_pairs)(bench, patterns, about, account)
    found = ranked.costs.layers
    spent = SweepCost(
        len(probes), sum(count == 0 for costs in found.values() for count in costs.rows) * (len(patterns) - 1), 1.0,
        ranked.scales.flops + ranked.costs.flops,
        len(probes) * ranked.calls.flops(sum(sum(costs.rows) for costs in found.values())),
        ranked.scales.seconds + ranked.costs.seconds, 0,
    )  # fmt: skip
    kls = {
        (at.expert(number), bits): row[number] / ranked.tokens
        for at in found
        for bits, row in zip(patterns, ranked.nats[at], strict=True)
        for number in range(spec.moe.n)
    }
    costs = {probe: (math.nan, math.nan, kls[probe.key, probe.bits]) for probe in probes}
    coverage = {at.expert(number): count for at, one in found.items() for number, count in enumerate(one.rows)}
    all_at_base = ranked.measure.summary(ranked.measure(uniform(spec, BASE_BITS), f"all at {BASE_BITS}"))
    return SensitivityTable(BASE_BITS, all_at_base, costs, coverage), spent


def _by_layers(bench: Bench, patterns: Sequence[Bits], about: str, account: Account) -> Ranked:
    """Returns the costs of a model that continues text."""
    settings, model = bench.settings, bench.layered
    layers = len(model.skeleton.layers)
    scorer = bench.material.scorer(model, bench.material.ranking, settings.sweep_samples)
    assert isinstance(scorer, TextScorer), "it continues text"
    model.coded({bits for pattern in patterns for bits in pattern if bits < 16})
    gradients = Gradients(model, scorer.texts, patterns, DRAWS, settings.seed)
    with account.progress("gradients", layers, "layer") as bar:
        costs = gradients.run(bench.journal, about, bar)
    scaled = LayerScales(model, scorer.texts, patterns)
    with account.progress("scales of layers", layers, "layer") as bar:
        exact = scaled.run(bench.journal, about, bar)
    measure = bench.measured_by(scorer, f"ranking/{settings.sweep_samples or 'all'}")
    share = len(scaled.places) / len(scorer.texts.ids)
    nats = {at: _scaled(one, exact.nats[at], share) for at, one in costs.layers.items()}
    return Ranked(costs, exact, nats, int(scorer.texts.scored.sum()), model.calls, measure)


def _of_pairs(bench: Bench, patterns: Sequence[Bits], about: str, account: Account) -> Ranked:
    """Returns the costs of a model that reads one text and writes another."""
    settings, ranking = bench.settings, bench.material.ranking
    every = _pairs(bench, ranking, settings.sweep_samples)
    tokens = _tokens(every)
    some = _pairs(bench, every.samples, max(1, every.n_samples * SCALE_TOKENS // tokens))
    gradients = PairGradients(bench.trial, every, patterns, DRAWS, settings.seed, bench.memory.sweep_bytes // 2)
    with account.progress("gradients", len(gradients.parts), "batch") as bar:
        costs = gradients.run(bench.journal, about, bar)
    with account.progress("scales of layers", len(bench.spec.moe_layers()), "layer") as bar:
        exact = PairScales(bench.trial, some, narrower(patterns)).run(bench.journal, about, bar)
    measure = bench.measure("ranking", ranking, settings.sweep_samples)
    nats = {
        at: scaled_as_one(one, patterns, exact.nats[at], _tokens(some) / tokens) for at, one in costs.layers.items()
    }
    return Ranked(costs, exact, nats, tokens, bench.trial.calls, measure)


def _pairs(bench: Bench, samples: Sequence[Sample], limit: int | None) -> GeneratedScorer:
    """Returns a scorer of at most `limit` samples, by the likelihood of their targets, whatever the metric is."""
    material = bench.material
    likelihood = METRICS["token_perplexity"]
    scorer = build_scorer(bench.trial, material.tokenizer, samples, likelihood, material.extent(limit))
    assert isinstance(scorer, GeneratedScorer), "it reads one text and writes another"
    return scorer


def _tokens(scorer: GeneratedScorer) -> int:
    """Returns the number of scored tokens; of choices only the right one's."""
    return int(scorer.items.tokens[scorer.items.right].sum())


def _scaled(costs: LayerCosts, exact: Sequence[float], share: float) -> list[list[float]]:
    """Returns nats above the base [patterns, experts]; `exact` was measured on a `share` of the text."""
    rows = []
    for predicted, measured in zip(costs.costs, exact, strict=True):
        together, rise = sum(predicted) * share, measured - exact[0]
        factor = rise / together if together * rise > 0 else 1.0  # else the measured cost is noise
        rows.append([cost * factor for cost in predicted])
    return rows


# The sweep of a conversion, run where its settings say and kept for later plans.


@dataclass(frozen=True)
class Swept:
    """The inputs of planning, and the cost of the sweep that measured them; None where nothing had to be."""

    inputs: Inputs
    cost: SweepCost | None


def job_of(coding: Coding, material: Material, moments: Path | None, memory: Memory) -> SweepJob:
    """Returns the job of an exact sweep. Raises SettingsError for a memory in which no sweep fits."""
    settings = material.settings
    blocks = 1 if memory.layered else blocks_for(coding.spec, material.ranked, memory.sweep_bytes)
    return SweepJob(
        coding.checkpoint.given.absolute(), settings.coded_by, settings.group_size, moments, material.ranking,
        material.metric_name, material.extent(settings.sweep_samples), blocks, BASE_BITS,
        coding.dense_widths, coding.neurons,
    )  # fmt: skip


def swept(bench: Bench, job: SweepJob, widths: Sequence[Width], measure: Measure, account: Account) -> Swept:
    """Returns the inputs of planning after a sweep; `measure` is how plans are judged. Raises ConversionError."""
    material, quantizer = bench.material, bench.coding.quantizer
    if set(widths) == {BASE_BITS} and not bench.coding.dense.chooses:  # no other width, so nothing to compare
        base = measure.summary(measure(uniform(bench.spec, BASE_BITS), f"all at {BASE_BITS}"))
        table, cost = SensitivityTable(BASE_BITS, base, {}, {}), None
    else:
        with account.step("sweep", bench.journal):
            if bench.by_gradients(widths):
                table, cost = swept_by_gradients(bench, widths, account)
            else:
                table, cost = _exactly(bench, job, widths, account)
    account.note(unreached_text(table))
    inputs = Inputs(
        str(job.model), quantizer.name, quantizer.group_size, material.metric_name, measure.samples_id, table,
        {} if job.dense is None else job.dense.bits, job.neurons is not None,
    )  # fmt: skip
    return Swept(inputs, cost)


def _exactly(
    bench: Bench, job: SweepJob, widths: Sequence[Width], account: Account
) -> tuple[SensitivityTable, SweepCost]:
    settings, material = bench.settings, bench.material
    probes = probes_for(bench.spec, widths, settings.per_projection)
    sweep = Sweep(bench.journal, job, material.metric, probes)
    reads = [job.model, *([job.moments] if job.moments else []), *material.metric_file]
    with (
        account.progress("sweep", sweep.missing()) as bar,
        runner_for(settings.cluster, SweepWorker, reads, lambda job: SweepWorker(job, bench.trial)) as runner,
    ):
        sweep.run(runner, bar)
    if settings.signal == "metric":
        check_reference(in_words(material.metric.name), sweep.reference_value(), "samples of the sweep")
    return sweep.table(), sweep.cost()
