"""A conversion as Python programs ask for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeconv.artifacts import ConversionReport
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.entries import ENTRIES, as_entries, settings_of
from moeconv.errors import ConversionError, SettingsError
from moeconv.progress import Progress
from moert.pack.errors import PackError
from moert.pack.files import beside, placed
from moert.pack.messages import unknown

Place = str | os.PathLike[str]


def quantize(
    model: Place,
    out: Place,
    work: Place | None,
    told: tuple[Callable[[str], None], Progress],
    entries: Mapping[str, Any],
) -> ConversionReport:
    """See moeconv.quantize. `told`: what gets a line about each step, and what shows how far it is."""
    said = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in entries.items()}
    try:
        place = placed(_path("out", out))
        known = [name for name in ENTRIES if name != "model"]
        for name in said:
            if name not in known:
                raise SettingsError(f"{name} {unknown(name, known)}")
        kept = Path(_path("work", work)) if work is not None else beside(place, "work")
        settings = settings_of({"model": _path("model", model), **said}, place, kept)
        return Conversion(settings, *told).run()[1]
    except (ConversionError, PackError) as error:
        error.args = (as_entries(str(error)), *error.args[1:])
        raise


def _path(name: str, value: Place) -> str:
    """Raises SettingsError for what is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise SettingsError(f"{name} = {value!r}: expected text or a path")
    return os.fspath(value)
