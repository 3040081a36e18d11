"""Recipes: one model and one target each, with what must come out. What CI converts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from moeconv.artifacts import ConversionReport
from moeconv.errors import SettingsError
from moeconv.present import missed_target
from moeconv.settings import Settings, parse_bytes, parse_confidence, parse_share, parse_target
from moeconv.toml import read_toml


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
        checks: list[tuple[str, float | None, float | None, int]] = [
            ("held-out loss", heldout.loss if heldout else None, self.heldout_loss_at_most, 1),
            ("calibration loss", calibration.loss if calibration else None, self.calibration_loss_at_most, 1),
            ("expert bytes", report.expert_bytes["pack"], self.expert_bytes_at_most, 1),
            ("reference", heldout.reference if heldout else None, self.reference_at_least, -1),
            ("reference", heldout.reference if heldout else None, self.reference_at_most, 1),
        ]
        words = {1: "at most", -1: "at least"}
        return [
            f"{name} is {found:.6g}, expected {words[sign]} {limit:.6g}"
            for name, found, limit, sign in checks
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
        """Packs go to OUT/NAME.pack, what can be reused to OUT/NAME.work. Raises SettingsError."""
        document = read_toml(path)
        expect = _table(document.pop("expect", {}), Expectations, f"{path}: [expect]")
        paths = document.pop("profile_paths", True)
        if not isinstance(paths, bool):
            raise SettingsError(f"{path}: profile_paths should be true or false, found {paths!r}")
        _parse(document)
        if isinstance(document.get("bits"), list):
            document["bits"] = tuple(document["bits"])
        for name in ("out", "work"):
            if name in document:
                raise SettingsError(f"{path}: {name} is not for a recipe to say: give --out to the command")
        if paths and "calib" not in document:
            raise SettingsError(f"{path}: without calib no paths can be profiled: add it, or profile_paths = false")
        name = path.stem
        document |= {"out": out / f"{name}.pack", "work": out / f"{name}.work"}
        return cls(name, _table(document, Settings, str(path)), expect, paths)


def _parse(document: dict[str, Any]) -> None:
    """Entries that are written as on the command line become what Settings hold."""
    if "target" in document:
        raise SettingsError("a recipe says its target as loss, size or bits_per_weight, not as target")
    given = {name: document.pop(name, None) for name in ("loss", "size", "bits_per_weight")}
    bits = given["bits_per_weight"]
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, (int, float))):
        raise SettingsError(f"bits_per_weight = {bits!r} has the wrong type")
    texts = {name: None if given[name] is None else str(given[name]) for name in ("loss", "size")}
    document["target"] = parse_target(texts["loss"], texts["size"], bits)
    for name, parse in (("margin", parse_share), ("racing", parse_share), ("confidence", parse_confidence)):
        if name in document:
            document[name] = parse(str(document[name]))
    if "memory" in document:
        document["memory_bytes"] = parse_bytes(str(document.pop("memory")), "memory")


def _table(values: Any, kind: Any, where: str) -> Any:
    """A TOML table as a dataclass: unknown, missing and wrongly typed entries raise SettingsError."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where} should be a table, found {values!r}")
    known = {field.name: field for field in fields(kind)}
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{where}: unknown entry {name!r}; known are {', '.join(sorted(known))}")
        if not _fits(value, types[name]):
            raise SettingsError(f"{where}: {name} = {value!r} has the wrong type")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise SettingsError(f"{where}: {missing[0]} is missing")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value may stand where `hint` is declared; true is not a number."""
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    allowed = get_args(hint) or (hint,)
    if isinstance(value, dict):
        return any(get_origin(t) is Mapping for t in allowed) and all(isinstance(item, str) for item in value.values())
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, tuple(t for t in allowed if isinstance(t, type))) or (
        isinstance(value, int) and float in allowed
    )
