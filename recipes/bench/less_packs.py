"""The packs of `make bench-less`: conversions with --resident, and the demo's packs with routing fitted to a loss
beyond that of their widths. What was measured for them before is not measured again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeconv.artifacts import ConversionReport
from moeconv.command.recipe import Recipe
from moeconv.conversion.choosing import Bonuses
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.measuring import Account, References
from moeconv.conversion.settings import Settings
from moeconv.measure.trial import Preferred
from moeconv.plan.problem import Plan
from moeconv.plan.search import MeasuredPlan, search
from moeconv.progress import bar
from moert.pack.files import write_atomically
from moert.pack.manifest import PREFERRING_MINOR, Preference, dump_manifest
from moert.pack.reader import MANIFEST, Pack
from recipes.bench.opened import opened
from recipes.bench.sized import sized

FOLDER = Path("build/bench/less")
PLAIN = {name: Path(f"build/demo/{name}.pack") for name in ("wiki", "g2p")} | {
    name: Path(f"build/references/{name}.pack") for name in sized(("wikids", "marks"), ())
}
"""Packs of --loss 5% alone, as `make demo` and `make report` left them with their work directories."""
SHARES = sized((0.25, 0.5), (0.5,))
BEYOND = sized((0.005, 0.01), (0.01,))
"""What routing may lose beyond the widths."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def settings_of(name: str) -> Settings:
    """Those of the recipe that made the plain pack, and with --resident."""
    recipe = Recipe.load(Path(f"recipes/{name}.toml"), PLAIN[name].parent)
    return replace(recipe.settings, out=FOLDER / f"{name}.pack", resident=SHARES)


def text_of(name: str) -> str:
    """The set in calib_data/ that a model's recipe names."""
    named = settings_of(name).calib
    assert named is not None
    return named


def converted(name: str) -> tuple[Path, ConversionReport]:
    """A pack whose widths and routing keep the loss together."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = settings_of(name)
    _, report = Conversion(settings, say, bar).run()
    return settings.out, report


# Widths as they are, and routing beside them --------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """Routing for a `share` of the experts that was let lose `beyond` more than the widths. `loss`: what it lost more
    on the held-out text; `read` and `exact_read`: bytes of experts a token there that are not among those used last,
    with it and with exact routing."""

    share: float
    beyond: float
    preference: Preference
    loss: float
    read: float
    exact_read: float


def levels(name: str) -> list[Level]:
    """Of the plain pack, for each of SHARES and BEYOND: what reads least."""
    manifest = Pack.open(PLAIN[name]).manifest
    names = manifest.model.moe.ffn.projections
    assignment = {entry.key: tuple(entry.bits[each] for each in names) for entry in manifest.experts}
    plan = Plan(assignment, sum(entry.tensor_bytes for entry in manifest.experts), 0.0)
    with opened(settings_of(name)) as bench:
        references = References.of(bench)
        return [
            _level(Bonuses(bench, share, Account(say, bar)), references, plan, beyond)
            for share in SHARES
            for beyond in BEYOND
        ]


def _level(bonuses: Bonuses, references: References, plan: Plan, beyond: float) -> Level:
    judge, heldout = references.judge, references.heldout

    def measured(routing: Plan) -> MeasuredPlan:
        found = judge.measure.preferring(plan.assignment, bonuses.preference(routing), "routing beside these widths")
        loss, read = judge.loss(found.evaluation), bonuses.read(plan, found)
        say(f"{bonuses.share:.0%}: {read:,.0f} bytes a token, loss {loss:.2%}")
        return MeasuredPlan(routing.nbytes, routing.cost, loss, None)

    alone = judge.loss(judge.measure.preferring(plan.assignment, bonuses.exact, "exact routing").evaluation)
    found = search(bonuses.frontier(plan), measured, (1 + alone) * (1 + beyond) - 1)
    preference = bonuses.preference(found.plan)
    held = {what: heldout.preferring(plan.assignment, one, "routing") for what, one in
            (("exact", bonuses.exact), ("preferring", preference))}  # fmt: skip

    def lost(one: Preferred) -> float:
        return 1 + heldout.summary(one.evaluation).loss

    return Level(
        bonuses.share, beyond, preference, lost(held["preferring"]) / lost(held["exact"]) - 1,
        bonuses.read(plan, held["preferring"]), bonuses.read(plan, held["exact"]),
    )  # fmt: skip


def with_preferences(source: Path, preferences: Sequence[Preference], out: Path) -> Path:
    """The same weights with other preferences, as links to the files of the source."""
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(source, out, copy_function=os.link)
    (out / MANIFEST).unlink()
    manifest = replace(Pack.open(source).manifest, preferences=tuple(preferences), minor=PREFERRING_MINOR)
    write_atomically(out / MANIFEST, dump_manifest(manifest).encode())
    return out


def level_packs(name: str, found: Sequence[Level]) -> Mapping[float, Path]:
    """By what routing may lose beyond the widths: the plain pack with a preference for each share."""
    return {
        beyond: with_preferences(
            PLAIN[name],
            [level.preference for level in found if level.beyond == beyond],
            FOLDER / f"{name}-{100 * beyond:g}.pack",
        )
        for beyond in BEYOND
    }
