"""Data sets with a manifest in calib_data/: built by their builders, and used only as the manifest describes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from moeconv.calibration.toml import read_toml
from moeconv.errors import CalibrationError

CATALOGUE = Path("calib_data")  # where conversions are started from, as are the paths in its manifests


@dataclass(frozen=True)
class Entry:
    """The files of the two splits, each with the hash that the manifest has for it, and the metric to judge by."""

    calibration: Path
    heldout: Path
    metric: str | None


def names() -> list[str]:
    return sorted(path.stem for path in CATALOGUE.glob("*.toml"))


def find_entry(name: str) -> Entry | None:
    """None when the name is not in the catalogue. Raises CalibrationError for a split that is not as in its manifest,
    SettingsError for a manifest that is no TOML."""
    path = CATALOGUE / f"{name}.toml"
    if Path(name).suffix or not path.is_file():
        return None
    manifest = read_toml(path)
    try:
        builder = f"build it with `python {_line(manifest['builder'])}`"
        splits = [manifest["splits"][name] for name in ("calibration", "heldout")]
        files = [(Path(_line(split["file"])), split["sha256"]) for split in splits]
        metric = _line(manifest["metric"]) if "metric" in manifest else None
    except (KeyError, TypeError):
        raise CalibrationError(
            f"{path}: needs a builder, and a file and its sha256 for both splits, each in one line"
        ) from None
    for file, sha256 in files:
        try:
            found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
        except OSError as error:
            raise CalibrationError(f"{str(file)[:100]} can't be read ({error.strerror}): {builder}") from None
        if found is None:
            raise CalibrationError(f"{file} is not there: {builder}")
        if found != sha256:
            raise CalibrationError(f"{file} differs from its manifest {path}: {builder}")
    return Entry(files[0][0], files[1][0], metric)


def _line(value: object) -> str:
    """Raises TypeError for what is not one line of text."""
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError
    return value
