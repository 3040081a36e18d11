"""A conversion whose pack is routed by a hash function, trained on the unquantised model's own routing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moeconv.artifacts import RouteReport
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.lessons import course_of, decided_by, lesson_bytes, lesson_of
from moeconv.conversion.settings import Settings
from moeconv.conversion.taught import School, Taught
from moeconv.errors import SettingsError
from moeconv.foresight.following import HashRouting, refusal
from moeconv.foresight.training import trained
from moeconv.measure.workdir import WorkDir
from moert.pack.hash import HASH, HashFunction, RoutedLoss
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ModelSpec


def check_route(settings: Settings, spec: ModelSpec) -> None:
    """Raises SettingsError for routers that a function can't stand for."""
    if settings.by_hash and (why := refusal(spec.moe)) is not None:
        raise SettingsError(f"--route hash {why}: leave it out")


def taught_routing(bench: Bench, work: WorkDir, account: Account) -> Taught:
    """What takes the routers' place. Raises ConversionError."""
    spec, material = bench.spec, bench.material
    course = course_of(bench.settings, spec)
    about = {"subject": work.path.name, "text": "learning and ranking"}
    needed = lesson_bytes(spec, [material.learned, material.ranked], course)

    def train(folder: Path, scorers: tuple[Any, Any]) -> HashFunction:
        trial = bench.trial
        description = trial.checkpoint.description
        lesson = lesson_of(trial, description, scorers, course, folder, about, account.progress)
        return trained(lesson, course, account.say, account.progress)

    with account.step("hash function", bench.journal):
        school = School(bench, work, account, "hash", decided_by(about, course), needed)
        function = school.learnt(HashFunction.from_bytes, HashFunction.to_bytes, train)
    hits = list(function.layer_hits(spec).values())
    first, more = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    account.say(f"hash function: {first:.1%} of choices among the first it names, {more:.1%} among three times as many")
    top_k = spec.moe.router.top_k

    def body(found: LossEstimate) -> bytes:
        return replace(function, routed=RoutedLoss(top_k, found.loss, found.low, found.high)).to_bytes()

    def report(alone: LossEstimate, routers: LossEstimate) -> RouteReport:
        return RouteReport("hash", top_k, course.width, alone, routers)

    does = "routing by the hash function"
    return Taught("hash function", does, "--route", HashRouting(function), HASH, body, report)
