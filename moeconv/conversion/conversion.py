"""One conversion from start to end: the stages in their order, each leaving its artefact in the work directory.

A conversion with text goes through these stages. Each stands where it does for a reason; all losses are in the journal,
so that a run that was killed goes on from there.

1. moments (moments-*.safetensors): the experts' inputs on the ranking text. First: every code is made with them.
2. references: the unquantized model's answers, which every later loss is measured against. Text on which nothing can be
   promised ends the run here.
3. order of neurons (order-*.safetensors): counted on the unquantized model, before predictors are trained for it.
4. hash function or predictor of neurons (hash-*, neurons-*.safetensors): a part of every plan, so trained before the
   first one is judged.
5. looks: counted before the first plan is judged, since each look at a text weakens the promise that it carries.
6. losses of single parts: of 4 alone, then of the dense matrices alone. Where one of them misses the target, no width
   of experts can meet it.
7. uniform widths: all experts at one width. An unreachable target ends here; the sweep measures only widths around it.
8. sweep (planning.json): the cost of each expert at each width, then of each unit of other matrices. The longest stage,
   and the last that all targets share.
9. search: plans by these costs, measured until the smallest that holds the target is found.
10. scales (scales-*.safetensors): trained for the plan that was found, and searched again with them. After a first
    search, which says how coarse the experts will be; before residents, which are fitted to a plan.
11. residents (residences.json): routing that prefers experts in memory, fitted to the plan that was found.
12. held-out: the chosen plan on text that no stage before has seen. Once, and after all choices.
13. delivery: report and pack.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moeconv.artifacts import ConversionReport
from moeconv.conversion.choosing import Choice, check_resident, fitted, textless_widths
from moeconv.conversion.delivery import PROFILE_PATHS, Outcome, check_replaced, deliver
from moeconv.conversion.dense import swept_beside
from moeconv.conversion.material import (
    Coding,
    Material,
    as_stored,
    end_note,
    module_note,
    notes,
    plain_note,
    vocabulary_note,
)
from moeconv.conversion.measuring import (
    Account,
    Bench,
    References,
    dense_alone,
    evaluated,
    job_of,
    measured_references,
    side_by_side,
    swept,
    value_text,
    widths_worth_probing,
)
from moeconv.conversion.room import check_layered, check_room, memory_of, work_bytes
from moeconv.conversion.scales import chosen
from moeconv.conversion.settings import ENTRIES, Settings, as_entries, settings_of
from moeconv.conversion.taught import (
    Taught,
    check_route,
    course_of,
    loses_alone,
    neuron_course_of,
    neuron_order,
    reported,
    taught_neurons,
    taught_routing,
)
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.workdir import INPUTS, RESIDENCES, WorkDir
from moeconv.order import NeuronOrder
from moeconv.plan.problem import Plan
from moeconv.progress import Progress
from moeconv.promise.judging import Judge, bound_doubt, estimate, look, looks_text, standing
from moeconv.report.page import size
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.sensitivity import SweepJob
from moeconv.writer import check_target
from moert.pack.errors import PackError
from moert.pack.files import beside, placed
from moert.pack.manifest import Manifest
from moert.pack.messages import unknown

# Digests by which runs recognise the same measurements and the same conversion.

MEASURES = 4  # goes up when quantizers or scorers change what they give, so that old journals are left alone
_ASKED = (
    "margin", "confidence", "allocation", "signal", "per_projection", "bits", "samples", "sweep_samples",
    "heldout_samples",
)  # fmt: skip
"""Settings that decide a conversion, beside its target and the subject of its journal."""


def subject_of(material: Material, coding: Coding) -> dict[str, Any]:
    """Returns the subject of a journal as JSON values: if any of them changes, its measurements no longer hold."""
    settings, checkpoint, quantizer, dense = material.settings, coding.checkpoint, coding.quantizer, coding.dense_widths
    return {
        "model_sha256": checkpoint.sha256,
        "tokenizer_sha256": checkpoint.tokenizer_sha256,
        "quantizer": quantizer.name,
        "group_size": quantizer.group_size,
        "metric": material.metric_name,
        "metric_sha256": material.metric_sha256,
        "measures": MEASURES,
        "calibration_sha256": material.splits.digest("calibration"),
        "heldout_sha256": material.splits.digest("heldout"),
        "seed": settings.seed,
        "context": settings.context,
        "max_new_tokens": settings.max_new_tokens,
        "documents_sha256": material.documents_sha256,
        **({} if dense is None else {"dense": asdict(dense)}),
        **({} if coding.neurons is None else {"down": "columns"}),  # columns are coded otherwise
        **({} if not settings.by_hash else {"route": asdict(course_of(settings, coding.spec))}),
        **({} if not settings.predicts else {"predicted": asdict(neuron_course_of(settings, coding.spec))}),
    }


def directory_of(subject: dict[str, Any]) -> str:
    """Returns the name of the folder in the work directory that holds the measurements of this subject."""
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:12]


def conversion_of(subject: dict[str, Any], settings: Settings) -> str:
    """Returns the sha256 of all values that decide a conversion: equal for the same command, resumed or repeated."""
    asked = {name: getattr(settings, name) for name in _ASKED}
    asked |= {"racing": None, "target": asdict(settings.target)}  # racing: so that looks of earlier versions count
    if settings.chooses_dense:
        asked["dense"] = settings.purpose
    if settings.scales == "trained" and not (settings.learns or settings.resident):
        asked["scales"] = settings.scales
    if settings.resident:
        asked["resident"] = list(settings.resident)
    return hashlib.sha256(json.dumps([subject, asked]).encode()).hexdigest()


class Conversion:
    """A conversion, which `run` takes through its stages. `say` gets messages for a person, `progress(label, total)`
    shows how far a sweep is. `profiled_next`: paths are profiled right after, so that no message asks for it."""

    def __init__(
        self, settings: Settings, say: Callable[[str], None], progress: Progress, profiled_next: bool = False
    ) -> None:
        self.settings, self.account, self.profiled_next = settings, Account(say, progress), profiled_next

    def run(self) -> tuple[Manifest, ConversionReport]:
        """Writes the pack; returns its manifest and its report. Raises ConversionError (TargetMissed before anything is
        written) or a PackError."""
        say = self.account.say
        check_target(self.settings.out)
        work_place = placed(self.settings.work)
        if placed(self.settings.out) in (work_place, *work_place.parents):
            raise SettingsError(f"--work {self.settings.work}: --out {self.settings.out} holds it: give another --work")
        checkpoint = Checkpoint.open(self.settings.model)
        self.settings, stored_note = as_stored(self.settings, checkpoint)
        settings, coding = self.settings, Coding.of(checkpoint, self.settings)
        if note := check_replaced(settings, coding.checkpoint.path):
            say(note)
        for note in coding.checkpoint.notes:
            kept = note == coding.checkpoint.description.coding_note
            self.account.note(note) if kept else say(f"note: {note}")
        for told in (end_note(coding.checkpoint), plain_note(settings), stored_note):
            if told:
                say(told)
        if settings.laid_out == "auto":
            say(f"experts lie {'by expert' if coding.neurons is None else 'by columns of neurons'} (--layout auto)")
        if settings.calib is None:
            return self._unmeasured(coding)
        check_resident(settings, coding)
        check_route(settings, coding.spec)
        if note := module_note(settings.metric):
            say(note)
        material = Material.read(settings, coding.checkpoint)
        memory = memory_of(settings, coding, material)
        coding.check(settings, memory.layered)
        check_layered(settings, memory, coding.checkpoint)
        if note := vocabulary_note(material.tokenizer, coding.spec):
            say(note)
        sizes = (part.samples for part in (material.ranked, material.judged, material.heldout))
        for note in notes(settings, coding.spec, *sizes):
            say(note)
        subject = subject_of(material, coding)
        directory = directory_of(subject)
        job = job_of(coding, material, None if memory.layered else coding.moments_in(settings.work / directory), memory)
        if memory.layered:
            needed, place = work_bytes(material, coding), settings.work / directory
            say(f"the model goes through memory layer by layer; {place} takes at most {size(needed)}")
            check_room(place, needed, "--work", place)
        with WorkDir(settings.work / directory) as work:
            work.save("subject.json", subject)
            beside = coding.beside_in(settings.work / directory, memory.layered)
            journal = work.journal(directory)
            bench = Bench(coding.weighing(beside), material, journal, job.moments, memory, self.account.progress)
            say(f"work directory {work.path}, {len(journal)} measurements in its journal")
            coding.checkpoint.check_finite()
            return self._measured(bench, job, work, conversion_of(subject, settings))

    def _unmeasured(self, coding: Coding) -> tuple[Manifest, ConversionReport]:
        if coding.neurons is not None:
            self.account.say("note: neurons lie as in the checkpoint: without text none is known to fire often")
        outcome = Outcome(textless_widths(self.settings, coding, self.account))
        return deliver(self.settings, coding.experts(None), coding.dense, outcome, self.account, self._lost)

    def _measured(
        self, bench: Bench, job: SweepJob, work: WorkDir, conversion: str
    ) -> tuple[Manifest, ConversionReport]:
        """Runs the stages that the first lines of this file list; `conversion` is the digest of all that decides it."""
        account = self.account
        self._collect_moments(bench)  # 1
        references = measured_references(bench, account)  # 2
        judge = references.judge
        order = neuron_order(bench, work, account)  # 3
        taught = self._taught(bench, work, order)  # 4
        bench.instead = None if taught is None else taught.instead
        references.judged_with(bench.instead)
        looks = self._count_looks(bench, judge, conversion)  # 5
        alone = None if taught is None else loses_alone(taught, bench, references, account)  # 6
        dense = dense_alone(bench, judge, account)
        widths = widths_worth_probing(bench, judge, account)  # 7
        sweep = swept(bench, job, widths.probed, judge.measure, account)  # 8
        inputs = replace(sweep.inputs, units=swept_beside(bench, account))
        work.save(INPUTS, inputs.to_json(), bench.journal)  # a run that ends later leaves it to be planned from
        choice = Choice(bench, inputs, widths, judge, account)
        found, learnt = chosen(bench, choice, work, account)  # 9, 10
        if learnt is not None:
            inputs = replace(inputs, trained=bench.coding.dense.trained.digest)
            work.save(INPUTS, inputs.to_json(), bench.journal)
        plan, routings = fitted(bench, references, choice, found, account)  # 11
        residences = tuple(one.residence for one in routings)
        work.save(RESIDENCES, {"residences": [asdict(one) for one in residences]}, bench.journal)
        outcome = replace(
            self._outcome(bench, references, plan, looks),  # 12
            preferences=tuple(one.preference for one in routings),
            residences=residences,
            table=inputs.table,
            sweep_cost=sweep.cost,
            curve=choice.curve(plan),
            dense_alone=dense,
            order=order,
            scales=learnt,
        )
        if taught is not None and alone is not None and outcome.heldout is not None:
            report = reported(taught, bench, references, plan, alone)
            outcome = replace(outcome, learnt={taught.file: taught.body(outcome.heldout)}, taught=report)
        return deliver(self.settings, bench.coder, bench.coding.dense, outcome, account, self._lost)  # 13

    def _collect_moments(self, bench: Bench) -> None:
        """Collects the moments that codes need, where they need any and the work directory has none."""
        file = bench.moments or bench.coding.dense.moments_file
        if file is not None and not bench.journal.sealed(file):
            with self.account.step("moments", bench.journal):
                bench.collect_moments(file)
                bench.journal.seal(file)

    def _taught(self, bench: Bench, work: WorkDir, order: NeuronOrder | None) -> Taught | None:
        """Returns the hash function or the predictor that is part of every measured plan; None if none is trained."""
        if self.settings.by_hash:
            return taught_routing(bench, work, self.account)
        return taught_neurons(bench, work, self.account, order) if self.settings.predicts else None

    def _count_looks(self, bench: Bench, judge: Judge, conversion: str) -> int:
        texts = (f"{bench.coding.checkpoint.sha256} {text}" for text in bench.material.judged_texts)
        looks = look(self.settings.work, conversion, texts)
        self.account.note(looks_text(looks, judge.stated))
        return looks

    def _outcome(self, bench: Bench, references: References, plan: Plan, looks: int) -> Outcome:
        """Returns the losses of the chosen plan on both texts, with its confidence bound."""
        account, judge, heldout, seed = self.account, references.judge, references.heldout, self.settings.seed
        accepted, used = evaluated(judge.measure, plan), judge.used
        bound = judge.bound(accepted)
        calibration = estimate(judge.measure, accepted, used.acceptance, seed)
        account.note(bound_doubt(bound, calibration.high))
        with account.step("held-out", bench.journal):
            result = evaluated(heldout, plan)
            found = estimate(heldout, result, used.heldout, seed)
            account.say(f"the pack on held-out text: {value_text(heldout, result)}")
            shown = side_by_side(bench, plan.assignment)
        return Outcome(
            widths=plan.assignment,
            metric=bench.material.metric.name,
            calibration=calibration,
            upper_bound=bound,
            confidence=judge.stated if bound is not None and math.isfinite(bound) else None,
            standing=standing(judge, looks, account.notes),
            heldout=found,
            splits=bench.material.splits,
            steps=tuple(account.steps),
            samples=shown,
            evaluations=(*judge.measure.used.values(), *heldout.used.values()),
        )

    def _lost(self, commands: Sequence[str]) -> None:
        for command in commands:
            if command != PROFILE_PATHS or not self.profiled_next:
                out = self.settings.out
                self.account.say(
                    f"note: {out} had what moeconv {command} added for other weights, and that is gone: run moeconv "
                    f"{command} {out} again"
                )


# The conversion as a Python function.

Place = str | os.PathLike[str]


def quantize(
    model: Place,
    out: Place,
    work: Place | None,
    told: tuple[Callable[[str], None], Progress],
    entries: Mapping[str, Any],
) -> ConversionReport:
    """Converts a model; see moeconv.quantize. `told`: the function that gets a line about each step, and the one that
    shows how far a step is."""
    said = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in entries.items()}
    try:
        place = placed(_path("out", out))
        known = [name for name in ENTRIES if name != "model"]
        for name in said:
            if name not in known:
                raise SettingsError(f"{name} {unknown(name, known)}")
        kept = Path(_path("work", work)) if work is not None else beside(place, "work")
        settings = settings_of({"model": _path("model", model), **said}, place, kept)
        return Conversion(settings, *told).run()[1]
    except (ConversionError, PackError) as error:
        error.args = (as_entries(str(error)), *error.args[1:])
        raise


def _path(name: str, value: Place) -> str:
    """Returns a path as text. Raises SettingsError for a value that is neither text nor a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise SettingsError(f"{name} = {value!r}: expected text or a path")
    return os.fspath(value)
