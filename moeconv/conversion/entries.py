"""What a conversion is asked by name, in a recipe or in Python: text as on the command line, or numbers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from moeconv.conversion.settings import (
    Settings,
    one_target,
    parse_bytes,
    parse_confidence,
    parse_dense_bits,
    parse_resident,
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
ENTRIES = sorted(
    {field.name for field in fields(Settings)} - _NOT_ENTRIES | {"loss", "size", "bits_per_weight", "memory"}
)
"""All that there is to say."""


def settings_of(entries: Mapping[str, Any], out: Path, work: Path) -> Settings:
    """Raises SettingsError, which still names options: see `as_entries`."""
    settings: Settings = table(_parsed(dict(entries)) | {"out": out, "work": work}, Settings, "")
    return settings


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
    if isinstance(values.get("resident"), str):
        values["resident"] = parse_resident(values["resident"])
    return values


def _number(name: str, value: Any, parse: Parse | None) -> float | Mapping[str, int] | None:
    """Text is parsed, a number is what it says. Raises SettingsError; true is not a number."""
    if isinstance(value, str) and parse is not None:
        return parse(value, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.maxsize:
        raise SettingsError(f"{name} = {value!r}: expected a number{'' if parse is None else ' or text'}")
    return value


def as_entries(message: str) -> str:
    """Options by the names that they have in a recipe: --group-size is group_size there."""
    return re.sub(r"--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), message)


def table(values: Any, kind: Any, where: str) -> Any:
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
