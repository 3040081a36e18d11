"""Recipes: TOML files with a model, a target, and limits that the result must keep; CI converts them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from moeconv.artifacts import ConversionReport
from moeconv.calibration.catalogue import names
from moeconv.calibration.toml import read_toml
from moeconv.command.present import missed_target
from moeconv.conversion.settings import (
    Settings,
    one_target,
    parse_bytes,
    parse_confidence,
    parse_dense_bits,
    parse_share,
)
from moeconv.errors import SettingsError

Parse = Callable[[str, str], float | Mapping[str, int] | None]
_PARSERS: Mapping[str, Parse | None] = {
    "loss": parse_share, "size": parse_bytes, "bits_per_weight": None, "margin": parse_share, "racing": parse_share,
    "confidence": parse_confidence, "memory": parse_bytes, "dense_bits": parse_dense_bits,
}  # fmt: skip
"""Entries that are numbers, or text as on the command line; (text, name of the entry) → value."""


_NOT_ENTRIES = {"out", "work", "target", "memory_bytes"}
_ENTRIES = sorted(
    {field.name for field in fields(Settings)} - _NOT_ENTRIES
    | {"loss", "size", "bits_per_weight", "memory", "profile_paths", "expect"}
)
"""All that a recipe may say."""


@dataclass(frozen=True)
class Expectations:
    """What must hold of a recipe's result; None is not checked."""

    heldout_loss_at_most: float | None = None
    calibration_loss_at_most: float | None = None
    expert_bytes_at_most: int | None = None
    reference_at_least: float | None = None
    reference_at_most: float | None = None

    def failures(self, report: ConversionReport) -> list[str]:
        """One line for each that does not hold; empty when all do."""
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


@dataclass(frozen=True)
class Recipe:
    """`paths` says whether the routing is profiled too."""

    name: str
    settings: Settings
    expect: Expectations
    paths: bool

    def failures(self, report: ConversionReport) -> list[str]:
        """What did not come out as expected; a held-out loss above the target counts where no other limit is given."""
        missed = missed_target(report) if self.expect.heldout_loss_at_most is None else None
        return self.expect.failures(report) + ([missed] if missed else [])

    @classmethod
    def load(cls, path: Path, out: Path) -> Recipe:
        """Packs go to OUT/NAME.pack, what can be reused to OUT/NAME.work. Paths in a recipe are relative to the folder
        that it lies in. Raises SettingsError."""
        document = read_toml(path)
        for name in ("out", "work"):
            if name in document:
                raise SettingsError(f"{path}: {name} is not for a recipe to say: give --out to the command")
        places = {"out": out / f"{path.stem}.pack", "work": out / f"{path.stem}.work"}
        try:
            return cls._of(path.stem, _placed(document, path.parent), places)
        except SettingsError as error:
            raise SettingsError(f"{path}: {_as_entries(str(error))}") from None

    @classmethod
    def _of(cls, name: str, document: dict[str, Any], places: dict[str, Path]) -> Recipe:
        expect = _table(document.pop("expect", {}), Expectations, "[expect] ")
        paths = document.pop("profile_paths", True)
        if not isinstance(paths, bool):
            raise SettingsError(f"profile_paths should be true or false, found {paths!r}")
        if "model" not in document:
            raise SettingsError("model is missing: the folder of a model, relative to the recipe, or a hub id")
        if paths and "calib" not in document:
            raise SettingsError("without calib no paths can be profiled: add it, or profile_paths = false")
        unknown = sorted(set(document) - set(_ENTRIES))
        if unknown and unknown != ["target"]:
            raise SettingsError(f"unknown entry {unknown[0]!r}; known are {', '.join(_ENTRIES)}")
        return cls(name, _table(_parsed(document) | places, Settings, ""), expect, paths)


def _placed(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The entries with paths as seen from here. What is a hub id, a name in calib_data/ or hf:NAME stays as it is.
    Raises SettingsError for a model that is there as seen from here, but not from the recipe's folder."""
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


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    """Entries that are written as on the command line become what Settings hold. Raises SettingsError."""
    if "target" in values:
        raise SettingsError("target: a recipe says it as loss, size or bits_per_weight")
    for name, parse in _PARSERS.items():
        if name in values:
            values[name] = _number(name, values[name], parse)
    values["target"] = one_target(*(values.pop(name, None) for name in ("loss", "size", "bits_per_weight")))
    if "memory" in values:
        values["memory_bytes"] = int(values.pop("memory"))
    if isinstance(values.get("bits"), list):
        values["bits"] = tuple(values["bits"])
    return values


def _number(name: str, value: Any, parse: Parse | None) -> float | Mapping[str, int] | None:
    """Text is parsed, a number is what it says. Raises SettingsError; true is not a number."""
    if isinstance(value, str) and parse is not None:
        return parse(value, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.maxsize:
        raise SettingsError(f"{name} = {value!r}: expected a number{'' if parse is None else ' or text'}")
    return value


def _as_entries(message: str) -> str:
    """Options by the names that they have in a recipe: --group-size is group_size there."""
    return re.sub(r"--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), message)


def _table(values: Any, kind: Any, where: str) -> Any:
    """A TOML table as a dataclass. Unknown, missing and wrongly typed entries raise SettingsError, `where` first."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where}should be a table, found {values!r}")
    known = {field.name: field for field in fields(kind)}
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{where}unknown entry {name!r}; known are {', '.join(sorted(known))}")
        if not _fits(value, types[name]):
            raise SettingsError(f"{where}{name} = {value!r} has the wrong type")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise SettingsError(f"{where}{missing[0]} is missing")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value may stand where `hint` is declared; true is not a number."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    allowed = get_args(hint) or (hint,)
    if isinstance(value, dict):
        kinds = [get_args(kind)[1] for kind in allowed if get_origin(kind) is Mapping]
        return bool(kinds) and all(isinstance(item, kinds[0]) for item in value.values())
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, tuple(t for t in allowed if isinstance(t, type))) or (
        isinstance(value, int) and float in allowed
    )
