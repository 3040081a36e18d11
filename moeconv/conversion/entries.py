"""What a conversion is asked by name, in a recipe or in Python: text as on the command line, or numbers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from moeconv.conversion.settings import (
    Settings,
    one_target,
    parse_bits,
    parse_bytes,
    parse_confidence,
    parse_dense_bits,
    parse_fields,
    parse_resident,
    parse_share,
)
from moeconv.errors import SettingsError
from moert.pack.messages import fits, unknown, wanted


class Options(TypedDict, total=False):
    """What a conversion is asked by name, but for the model and where the pack goes: the options of `moeconv quantize`,
    as text as they are written there or as numbers."""

    loss: str | float
    size: str | float
    bits_per_weight: str | float
    margin: str | float
    confidence: str | float
    strict: bool
    resident: str | float | Sequence[str | float]
    calib: str | os.PathLike[str] | None
    heldout: str | os.PathLike[str] | None
    fields: str | Mapping[str, str] | None
    metric: str | os.PathLike[str] | None
    quantizer: str | None
    group_size: str | int | None
    allocation: str
    signal: str
    per_projection: bool
    bits: str | int | Sequence[str | int]
    dense_bits: str | int | Mapping[str, int] | None
    samples: str | int | None
    sweep_samples: str | int | None
    heldout_samples: str | int | None
    context: str | int
    max_new_tokens: str | int | None
    memory: str | int
    racing: str | float
    cluster: str | None
    layout: str | None
    piece_bytes: str | int | None
    route: str
    neurons: str
    seed: str | int
    overwrite: bool


ENTRIES = sorted({"model", *Options.__annotations__})
"""All that there is to say in a recipe, but for `overwrite`."""
Parse = Callable[[str, str], float | Mapping[str, int] | None]


def _plain_number(text: str, name: str) -> float:
    """Raises SettingsError."""
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{name} {text!r}: expected a number") from None


def _bits(value: Any) -> tuple[int, ...]:
    """Raises SettingsError."""
    return parse_bits(",".join(map(str, value if isinstance(value, (list, tuple)) else (value,))))


def _resident(value: Any) -> tuple[float, ...]:
    """Raises SettingsError."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(one for part in parts for one in (parse_resident(part) if isinstance(part, str) else (part,)))


_PARSERS: Mapping[str, Parse] = {
    "loss": parse_share, "size": parse_bytes, "bits_per_weight": _plain_number, "margin": parse_share,
    "racing": parse_share, "confidence": parse_confidence, "memory": parse_bytes, "dense_bits": parse_dense_bits,
}  # fmt: skip
"""Entries that are numbers, or text as on the command line; (text, name of the entry) → value."""
_FORMS: Mapping[str, Callable[[Any], Any]] = {
    "bits": _bits, "resident": _resident,
    "fields": lambda value: parse_fields(value) if isinstance(value, str) else value,
}  # fmt: skip
"""Entries that are one or several of something, or text as on the command line."""


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
    for name, form in _FORMS.items():
        if name in values:
            values[name] = form(values[name])
    values["target"] = one_target(*(values.pop(name, None) for name in ("loss", "size", "bits_per_weight")))
    if "memory" in values:
        values["memory_bytes"] = int(values.pop("memory"))
    return values


def _number(name: str, value: Any, parse: Parse) -> float | Mapping[str, int] | None:
    """Text is parsed, a number is what it says. Raises SettingsError; true is not a number."""
    if isinstance(value, str):
        return parse(value, name)
    if name == "dense_bits" and isinstance(value, Mapping):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < sys.maxsize:
        raise SettingsError(f"{name} = {value!r}: expected a number or text")
    return value


def as_entries(message: str) -> str:
    """Options by the names that they have in a recipe: --group-size is group_size there."""
    return re.sub(r"--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), message)


def table(values: Any, kind: Any, where: str) -> Any:
    """A TOML table as a dataclass; whole numbers may be text. Unknown, missing and wrongly typed entries raise
    SettingsError, `where` first."""
    if not isinstance(values, dict):
        raise SettingsError(f"{where}should be a table, found {values!r}")
    known = {field.name: field for field in fields(kind)}
    types = get_type_hints(kind)
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{where}{name} {unknown(name, sorted(known))}")
        if isinstance(value, str) and not fits(value, types[name]) and re.fullmatch(r"\s*\d{1,18}\s*", value):
            value = values[name] = int(value)
        if not fits(value, types[name]):
            raise SettingsError(f"{where}{name} = {value!r}: expected {wanted(types[name])}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in values]
    if missing:
        raise SettingsError(f"{where}{missing[0]} is missing")
    return kind(**values)
