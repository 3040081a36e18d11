"""The pack that stands where a new one goes: unasked only one of the same model, as it was written, is replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moeconv.conversion.settings import Settings
from moeconv.errors import ConversionError, SettingsError
from moeconv.report.document import read_report
from moeconv.source.outline import CONFIG
from moert.pack.errors import PackError
from moert.pack.files import placed
from moert.pack.reader import Pack, is_pack, strangers


def check_replaced(settings: Settings, source: Path) -> str | None:
    """Returns the note that a pack is replaced, if one is there; `source`: the folder of the model. Raises
    SettingsError for a pack that may not be."""
    out = settings.out
    if not is_pack(out):
        return None
    if not settings.overwrite and (reason := _lost(out, source, placed(settings.model).name)) is not None:
        raise SettingsError(f"{out} {reason}, and would be lost: choose another --out, or give --overwrite")
    return f"note: {out} is a pack already: the new one takes its place at the end"


def _lost(out: Path, source: Path, name: str) -> str | None:
    """Returns what a pack holds that is not of this model; None where all is."""
    if others := strangers(out):
        return f"holds {others[0]}, which no conversion wrote"
    try:
        pack = Pack.open(out)
    except PackError as error:
        return f"is a pack that can't be read ({error})"
    config = pack.manifest.files.get(CONFIG)
    try:
        called = read_report(pack).model
    except (ConversionError, PackError):
        called = name
    same = config is not None and config.sha256 == hashlib.sha256((source / CONFIG).read_bytes()).hexdigest()
    return None if same and called == name else f"is a pack of another model{f' ({called})' if called != name else ''}"
