"""A conversion as Python programs ask for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeconv.artifacts import ConversionReport
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.entries import ENTRIES, as_entries, settings_of
from moeconv.conversion.settings import parse_bits, parse_fields
from moeconv.errors import ConversionError, SettingsError
from moeconv.progress import unseen
from moert.pack.errors import PackError

Place = str | os.PathLike[str]


_PARSERS: Mapping[str, Callable[[str], Any]] = {"bits": parse_bits, "fields": parse_fields}
"""Where a recipe has lists and tables, and Python may have the text of the command line."""


def quantize(
    model: Place, out: Place, work: Place | None, say: Callable[[str], None], entries: Mapping[str, Any]
) -> ConversionReport:
    """See moeconv.quantize."""
    place = Path(os.path.abspath(out))
    said = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in entries.items()}
    try:
        unknown = next((name for name in said if name not in ENTRIES or name == "model"), None)
        if unknown is not None:
            known = ", ".join(name for name in ENTRIES if name != "model")
            raise SettingsError(f"{unknown} is no setting: there are {known}")
        for name, parse in _PARSERS.items():
            if isinstance(said.get(name), str):
                said[name] = parse(said[name])
        kept = Path(work) if work is not None else place.parent / f"{place.name}.work"
        settings = settings_of({"model": os.fspath(model), **said}, place, kept)
        return Conversion(settings, say, unseen).run()[1]
    except (ConversionError, PackError) as error:
        error.args = (as_entries(str(error)), *error.args[1:])
        raise
