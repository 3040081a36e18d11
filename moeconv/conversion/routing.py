"""A conversion whose pack is routed by a hash function: trained on the unquantised model's own routing, once for a work
directory, and measured with all plans."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from moeconv.artifacts import RouteReport, uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.lessons import course_of, decided_by, lesson_bytes, lesson_of
from moeconv.conversion.material import Material
from moeconv.conversion.references import References
from moeconv.conversion.room import check_room
from moeconv.conversion.settings import Settings
from moeconv.errors import ConversionError, SettingsError, TargetMissed
from moeconv.foresight.following import HashRouting, refusal
from moeconv.foresight.training import Course, trained
from moeconv.measure.scorers.build import build_scorer
from moeconv.measure.workdir import WorkDir
from moeconv.plan.problem import Plan
from moeconv.promise.judging import estimate
from moeconv.quantizers.coder import ORIGINAL
from moeconv.source.archs.errors import transformers_model
from moert.pack.errors import PackError
from moert.pack.hash import HashFunction, RoutedLoss
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ModelSpec


def check_route(settings: Settings, spec: ModelSpec) -> None:
    """Raises SettingsError for routers that a function can't stand for."""
    if settings.by_hash and (why := refusal(spec.moe)) is not None:
        raise SettingsError(f"--route hash {why}: leave it out")


def taught(bench: Bench, work: WorkDir, account: Account) -> HashRouting | None:
    """What takes the routers' place; None where nothing does. Raises ConversionError."""
    settings, material = bench.settings, bench.material
    if not settings.by_hash:
        return None
    course = course_of(settings, bench.spec)
    about = {"subject": work.path.name, "text": "learning and ranking"}
    path = work.path / f"hash-{decided_by(about, course)[:12]}.safetensors"
    with account.step("hash function", bench.journal):
        if (function := _kept(path)) is None:
            function = _trained(bench, material, course, about, work, account)
            work.save_bytes(path.name, function.to_bytes())
            shutil.rmtree(work.path / "hash", ignore_errors=True)
    hits = list(function.layer_hits(bench.spec).values())
    first, more = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    account.say(f"hash function: {first:.1%} of choices among the first it names, {more:.1%} among three times as many")
    return HashRouting(function)


def _kept(path: Path) -> HashFunction | None:
    if not path.is_file():
        return None
    try:
        return HashFunction.from_bytes(path.read_bytes())
    except (OSError, PackError) as error:
        raise ConversionError(f"{path} can't be read ({error}): delete it, and it is trained again") from None


def _trained(
    bench: Bench, material: Material, course: Course, about: dict[str, str], work: WorkDir, account: Account
) -> HashFunction:
    folder, trial = work.path / "hash", bench.trial
    check_room(folder, lesson_bytes(bench.spec, [material.learned, material.ranked], course), "--work", folder)
    trial.restore()
    scorers = tuple(
        build_scorer(trial, material.tokenizer, text, material.metric, material.extent(None))
        for text in (material.learning, material.ranking)
    )
    with transformers_model(trial.checkpoint.path):
        lesson = lesson_of(
            trial, trial.checkpoint.description, (scorers[0], scorers[1]), course, folder, about, account.progress
        )
    return trained(lesson, course, account.say, account.progress)


def routed_alone(bench: Bench, references: References, account: Account) -> LossEstimate | None:
    """What routing by the function loses by itself, with unquantised experts; None where routers route. Raises
    TargetMissed where that alone misses the target."""
    if bench.instead is None:
        return None
    judge, settings = references.judge, bench.settings
    with account.step("hash function", bench.journal):
        evaluation = judge.measure(uniform(bench.spec, ORIGINAL), "routing alone")
        found = estimate(judge.measure, evaluation, judge.used.acceptance, settings.seed)
    beside = "" if bench.coding.dense_widths is None else " and --dense-bits"
    account.say(f"routing by the hash function{beside}, experts unquantised: {judge.text(evaluation)}")
    if settings.target.kind == "loss" and not judge.holds(evaluation):
        raise TargetMissed(
            f"with unquantised experts, routing by the hash function{beside}: {judge.text(evaluation)}; the target of "
            f"{judge.planned_loss:.2%} is missed before any expert is quantised: give more text to train on, leave "
            "--route out, or take a larger --loss"
        )
    return found


def route_report(bench: Bench, references: References, plan: Plan, alone: LossEstimate | None) -> RouteReport | None:
    """None where routers route."""
    if alone is None:
        return None
    heldout, used = references.heldout, references.judge.used
    own = heldout.by_routers(plan.assignment, "the plan with its own routers")
    routers = estimate(heldout, own, used.heldout, bench.settings.seed)
    course = course_of(bench.settings, bench.spec)
    return RouteReport("hash", bench.spec.moe.router.top_k, course.width, alone, routers)


def with_loss(function: HashFunction, spec: ModelSpec, found: LossEstimate | None) -> HashFunction:
    """The function with what a pack loses that is routed by it."""
    assert found is not None
    return replace(function, routed=RoutedLoss(spec.moe.router.top_k, found.loss, found.low, found.high))
