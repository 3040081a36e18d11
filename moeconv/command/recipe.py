"""Recipes: TOML files with a model, a target, and limits that the result must keep; CI converts them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeconv.artifacts import ConversionReport
from moeconv.calibration.load import names, read_toml
from moeconv.command.present import missed_target
from moeconv.conversion.settings import ENTRIES, Settings, as_entries, settings_of, table
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.metrics import is_module
from moert.pack.errors import PackError
from moert.pack.messages import unknown


@dataclass(frozen=True)
class Expectations:
    """Limits that a recipe's result must keep; None is not checked."""

    heldout_loss_at_most: float | None = None
    calibration_loss_at_most: float | None = None
    expert_bytes_at_most: int | None = None
    reference_at_least: float | None = None
    reference_at_most: float | None = None

    def failures(self, report: ConversionReport) -> list[str]:
        """Returns a line for each limit that the result does not keep."""
        heldout, calibration = report.heldout, report.calibration
        checks: list[tuple[str, float | None, float | None, int, str]] = [
            ("the held-out loss is", heldout.loss if heldout else None, self.heldout_loss_at_most, 1, ".2%"),
            ("the calibration loss is", calibration.loss if calibration else None, self.calibration_loss_at_most, 1,
             ".2%"),
            ("the bytes of all experts are", report.expert_bytes["pack"], self.expert_bytes_at_most, 1, ",.0f"),
            ("the reference is", heldout.reference if heldout else None, self.reference_at_least, -1, ".6g"),
            ("the reference is", heldout.reference if heldout else None, self.reference_at_most, 1, ".6g"),
        ]  # fmt: skip
        words = {1: "at most", -1: "at least"}
        return [
            f"{name} {'not measured' if found is None else format(found, style)}, expected {words[sign]} "
            f"{format(limit, style)}"
            for name, found, limit, sign, style in checks
            if limit is not None and (found is None or sign * found > sign * limit)
        ]


KEYS = ({*ENTRIES} - {"overwrite"}) | {"profile_paths", "expect"}
"""The names of all entries of a recipe."""


@dataclass(frozen=True)
class Recipe:
    """A recipe as it was loaded. `paths` says whether paths are profiled too."""

    name: str
    settings: Settings
    expect: Expectations
    paths: bool

    def failures(self, report: ConversionReport) -> list[str]:
        """Returns lines on unmet expectations; a held-out loss above the target counts where no other limit is
        given."""
        missed = missed_target(report) if self.expect.heldout_loss_at_most is None else None
        return self.expect.failures(report) + ([missed] if missed else [])

    @classmethod
    def load(cls, path: Path, out: Path, allow_code: bool = False, overwrite: bool = False) -> Recipe:
        """Reads a recipe. Its pack goes to OUT/NAME.pack, its work directory is OUT/NAME.work. Paths in a recipe are
        relative to its folder. `allow_code`: its metric may be a program. Raises SettingsError."""
        document = read_toml(path)
        for name, option in (("out", "out"), ("work", "out"), ("overwrite", "overwrite")):
            if name in document:
                raise SettingsError(f"{path}: {name} is not a key of recipes: give --{option} to the command")
        with named(path):
            recipe = cls._of(path.stem, _placed(document, path.parent), out)
        if not allow_code and is_module(recipe.settings.metric or ""):
            raise SettingsError(
                f"{path}: metric = {document['metric']!r} is a program, which would run with all your rights: read "
                "it, then give --allow-code"
            )
        return replace(recipe, settings=replace(recipe.settings, overwrite=overwrite))

    @classmethod
    def _of(cls, name: str, document: dict[str, Any], out: Path) -> Recipe:
        expect = table(document.pop("expect", {}), Expectations, "[expect] ")
        paths = document.pop("profile_paths", True)
        if not isinstance(paths, bool):
            raise SettingsError(f"profile_paths should be true or false, found {paths!r}")
        if "model" not in document:
            raise SettingsError("model is missing: the folder of a model, relative to the recipe, or a hub id")
        if paths and "calib" not in document:
            raise SettingsError("without calib no paths can be profiled: add it, or profile_paths = false")
        known = sorted(KEYS)
        for entry in sorted(set(document) - {*known, "target"}):
            raise SettingsError(f"{entry} {unknown(entry, known)}")
        return cls(name, settings_of(document, out / f"{name}.pack", out / f"{name}.work"), expect, paths)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Puts the path of a recipe before the errors of a with block, whose messages name keys in place of options."""
    try:
        yield
    except (ConversionError, PackError) as error:
        error.args = (f"{path}: {as_keys(str(error))}", *error.args[1:])
        raise


def as_keys(message: str) -> str:
    """Returns a message with options of `moeconv quantize` by the names of keys. Those that the command has too stay
    as they are, and its --out is the place of work directories."""
    parts = re.split(r"--(out|work|overwrite)\b", message)
    kept = {"work": "--out"}
    return "".join(kept.get(part, f"--{part}") if at % 2 else as_entries(part) for at, part in enumerate(parts))


def check_apart(paths: Sequence[Path]) -> None:
    """Raises SettingsError for two recipes of one name, since the second would take the place of the first one's
    pack."""
    names = dict[str, Path]()
    for path in paths:
        if path.stem in names:
            raise SettingsError(
                f"{names[path.stem]} and {path} would both write {path.stem}.pack: rename one, or run them with --out "
                "of their own"
            )
        names[path.stem] = path


def _placed(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the entries with paths relative to the working directory. A hub id, a name in calib_data/ or hf:NAME
    stays as it is. Raises SettingsError for a model that lies in the working directory, but not in the recipe's
    folder."""
    placed = dict(document)
    model = document.get("model")
    if isinstance(model, str):
        is_hub_id = model.count("/") <= 1 and not model.startswith((".", "/", "~")) and not (folder / model).is_dir()
        if is_hub_id and Path(model).is_dir():
            raise SettingsError(f"there is no model {folder / model}: paths in a recipe are relative to its folder")
        placed["model"] = model if is_hub_id else str(folder / model)
    for name in ("calib", "heldout", "metric"):
        text = document.get(name)
        if isinstance(text, str) and _is_path(name, text, folder):
            placed[name] = str(folder / text)
    return placed


def _is_path(name: str, text: str, folder: Path) -> bool:
    if name == "metric":
        return text.split(":")[0].endswith(".py")
    if text.startswith("hf:") or text in names():
        return False
    return Path(text).suffix != "" or "/" in text or (folder / text).exists()
