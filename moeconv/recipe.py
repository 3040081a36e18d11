"""Recipes: one model and one target each, with what must come out. What CI converts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moeconv.artifacts import ConversionReport
from moeconv.errors import SettingsError
from moeconv.settings import Settings, parse_loss

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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

    @classmethod
    def load(cls, path: Path, out: Path) -> Recipe:
        """Packs go to OUT/NAME.pack, what can be reused to OUT/NAME.work. Raises SettingsError."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SettingsError(f"{path}: no such recipe") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{path}: not a readable recipe ({error})") from None
        expect = _table(document.pop("expect", {}), Expectations, f"{path}: [expect]")
        paths = bool(document.pop("profile_paths", True))
        if "loss" in document:
            document["target_loss"] = parse_loss(str(document.pop("loss")))
        if "bits" in document:
            document["bits"] = tuple(document["bits"])
        name = path.stem
        document |= {"out": out / f"{name}.pack", "work": out / f"{name}.work"}
        return cls(name, _table(document, Settings, str(path)), expect, paths)


def _table(values: Mapping[str, Any], kind: Any, where: str) -> Any:
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise SettingsError(f"{where}: unknown entry {unknown[0]!r}; known are {', '.join(sorted(known))}")
    try:
        return kind(**values)
    except TypeError as error:
        raise SettingsError(f"{where}: {error}") from None
