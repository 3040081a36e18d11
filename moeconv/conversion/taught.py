"""What is trained before a conversion is measured, once for a work directory, and then is a part of every plan: it
takes the place of routers, or says which neurons are computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moeconv.artifacts import NeuronsReport, RouteReport, uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.references import References
from moeconv.conversion.room import check_room
from moeconv.errors import ConversionError, TargetMissed
from moeconv.measure.assignments import Instead
from moeconv.measure.scorers.build import build_scorer
from moeconv.measure.workdir import WorkDir
from moeconv.plan.problem import Plan
from moeconv.promise.judging import estimate
from moeconv.quantizers.coder import ORIGINAL
from moeconv.source.archs.errors import transformers_model
from moert.pack.errors import PackError
from moert.pack.manifest import LossEstimate

T = TypeVar("T")
Report = RouteReport | NeuronsReport


@dataclass(frozen=True)
class Taught:
    """`what` it is and `does`, for a person, and the `option` that asks for it. `file`: its name in the pack, and
    `body`: what that holds, given what the pack loses with it on held-out text. `report`: of what it loses alone, and
    what the pack loses without it."""

    what: str
    does: str
    option: str
    instead: Instead
    file: str
    body: Callable[[LossEstimate], bytes]
    report: Callable[[LossEstimate, LossEstimate], Report]


@dataclass(frozen=True)
class School:
    """Where something is taught, on the unquantised model: in the folder `name` of the work directory, which takes
    `needed_bytes` at most while it lasts. What was learnt stays there, by `digest`, all that decides it."""

    bench: Bench
    work: WorkDir
    account: Account
    name: str
    digest: str
    needed_bytes: int
    limits: tuple[int | None, int | None] = (None, None)
    """Samples of both texts; None: all."""

    def learnt(
        self, read: Callable[[bytes], T], write: Callable[[T], bytes], train: Callable[[Path, tuple[Any, Any]], T]
    ) -> T:
        """What was learnt before, or by `train`, in a folder and with scorers of the text to learn and of that to judge
        by. Raises ConversionError."""
        path, folder = self.work.path / f"{self.name}-{self.digest[:12]}.safetensors", self.work.path / self.name
        if self.bench.journal.sealed(path):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed right after it had learnt
            try:
                return read(path.read_bytes())
            except (OSError, PackError) as error:
                raise ConversionError(f"{path} can't be read ({error}): delete it, and it is trained again") from None
        trial, material = self.bench.trial, self.bench.material
        check_room(folder, self.needed_bytes, "--work", folder)
        folder.mkdir(exist_ok=True)
        trial.restore()
        scorers = [
            build_scorer(trial, material.tokenizer, text, material.metric, material.extent(limit))
            for text, limit in zip((material.learning, material.ranking), self.limits, strict=True)
        ]
        with transformers_model(trial.checkpoint.path):
            found = train(folder, (scorers[0], scorers[1]))
        self.work.save_bytes(path.name, write(found), self.bench.journal)
        shutil.rmtree(folder, ignore_errors=True)
        return found


def loses_alone(taught: Taught, bench: Bench, references: References, account: Account) -> LossEstimate:
    """What it loses by itself, with unquantised experts. Raises TargetMissed where that alone misses the target."""
    judge, settings = references.judge, bench.settings
    with account.step(taught.what, bench.journal):
        evaluation = judge.measure(uniform(bench.spec, ORIGINAL), f"{taught.does} alone")
        found = estimate(judge.measure, evaluation, judge.used.acceptance, settings.seed)
    beside = "" if bench.coding.dense_widths is None else " and --dense-bits"
    account.say(f"{taught.does}{beside}, experts unquantised: {judge.text(evaluation)}")
    if settings.target.kind == "loss" and not judge.holds(evaluation):
        raise TargetMissed(
            f"with unquantised experts, {taught.does}{beside}: {judge.text(evaluation)}; the target of "
            f"{judge.planned_loss:.2%} is missed before any expert is quantised: give more text to train on, leave "
            f"{taught.option} out, or take a larger --loss"
        )
    return found


def reported(taught: Taught, bench: Bench, references: References, plan: Plan, alone: LossEstimate) -> Report:
    """With what the plan loses without it."""
    heldout, used = references.heldout, references.judge.used
    own = heldout.by_itself(plan.assignment, f"the plan without {taught.option}")
    return taught.report(alone, estimate(heldout, own, used.heldout, bench.settings.seed))
