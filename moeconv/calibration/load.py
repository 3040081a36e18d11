"""Calibration text by name: data sets of the catalogue, files, data sets of the hub."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeconv.calibration.apart import is_dataset, rows_apart
from moeconv.calibration.rendering import ChatTemplate
from moeconv.calibration.samples import (
    FIELDS,
    MAX_ROWS,
    MAX_TEXT_BYTES,
    PARQUET,
    READERS,
    RUNNING,
    Render,
    Rows,
    Sample,
    Splits,
    check_row,
    divide,
    kind_of,
    renamed,
    to_sample,
    with_documents,
)
from moeconv.errors import CalibrationError, SettingsError
from moeconv.strict_json import bounded

# TOML from the standard library, or from its backport if Python is older than 3.11.

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_MOST_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the document in a TOML file. Raises SettingsError."""
    try:
        document: dict[str, Any] = tomllib.loads(bounded(path, _MOST_BYTES).decode("utf-8-sig"))
        return document
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: can't be read as TOML ({error})") from None


# Data sets with a manifest in calib_data/: built by their builders, and used only as the manifest describes them.

CATALOGUE = Path("calib_data")  # in the folder where conversions are started, as are the paths in its manifests


@dataclass(frozen=True)
class Entry:
    """A data set of the catalogue: the files of its two splits, whose hashes were checked, and the metric to judge
    by."""

    calibration: Path
    heldout: Path
    metric: str | None


def names() -> list[str]:
    return sorted(path.stem for path in CATALOGUE.glob("*.toml"))


def find_entry(name: str) -> Entry | None:
    """Returns the entry of a name; None if it is not in the catalogue. Raises CalibrationError for a split that differs
    from its manifest, SettingsError for a manifest that is no TOML."""
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
    """Returns a value that is one line of text. Raises TypeError for any other value."""
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError
    return value


# Calibration text from every source, checked, as two splits that share no sample.

MIN_SAMPLES = 8
ALONE = "give more, or held-out text of its own"
PARAGRAPHS = f"{ALONE}; blank lines divide it into samples"


@dataclass(frozen=True)
class Text:
    """Samples of one kind, and the place of each of them."""

    name: str
    kind: str
    samples: tuple[Sample, ...]
    places: tuple[str, ...]

    @property
    def seq2seq(self) -> bool:
        return self.kind not in RUNNING


def load_splits(
    calib: str,
    heldout: str | None,
    *,
    seed: int,
    fields: Mapping[str, str] | None = None,
    tokenizer: Path | None = None,
) -> Splits:
    """Returns calibration and held-out text. `calib` is a name from calib_data/, a JSONL, CSV, parquet or plain text
    file, or a data set (`read_dataset`); so is `heldout`; without it `calib` is divided in halves by `seed`.

    `fields` gives their names for our fields (`{"input": "question"}`), `tokenizer` is the folder of the model's
    tokenizer, whose template turns chat messages into text. Raises CalibrationError naming the file, and the line if it
    has lines.
    """
    with ChatTemplate(tokenizer) as chat:
        return _loaded(calib, heldout, seed, fields or {}, chat.render)


def _loaded(calib: str, heldout: str | None, seed: int, fields: Mapping[str, str], render: Render) -> Splits:
    entry = find_entry(calib)
    if entry is not None:
        if heldout is not None or fields:
            what = "held-out text" if heldout is not None else "--fields"
            raise CalibrationError(f"{CATALOGUE / calib}.toml says what is held out and how: leave {what} out")
        parts = [_read(str(path), {}, render) for path in (entry.calibration, entry.heldout)]
        return _pair(calib, parts[0], parts[1], entry.metric)
    text = _read(calib, fields, render)
    if heldout is not None:
        return _pair(calib, text, _read(heldout, fields, render), None)
    plain, least = Path(calib).suffix.lower() == ".txt", 2 * MIN_SAMPLES if text.seq2seq else 2
    _require(text.name, len(text.samples), least, PARAGRAPHS if plain else ALONE)
    try:
        samples, why = with_documents(text.samples, running=not text.seq2seq)
        splits = Splits(calib, text.seq2seq, *divide(samples, text.seq2seq, 0.5, seed), why=why)
    except CalibrationError as error:
        raise CalibrationError(f"{calib}: {error}") from None
    for part in (splits.calibration, splits.heldout):
        _require(f"{calib}, divided and without copies", len(part), MIN_SAMPLES if text.seq2seq else 1, ALONE)
    return splits


def _read(named: str, fields: Mapping[str, str], render: Render) -> Text:
    samples: list[Sample] = []
    places: list[str] = []
    first_kind, letters = "", 0
    for place, row in _rows(named, {*FIELDS, *fields.values()}):
        row = renamed(row, fields, place)
        kind = kind_of(row, place)
        first_kind = first_kind or kind
        if kind != first_kind:
            raise CalibrationError(f"{place}: holds {kind}, but {places[0]} {first_kind}: use one kind")
        samples.append(to_sample(row, kind, place, render))
        places.append(place)
        here = _letters(samples[-1])
        check_row(here, place)
        letters += here
        if letters > MAX_TEXT_BYTES or len(samples) > MAX_ROWS:
            raise CalibrationError(
                f"{place}: over {MAX_ROWS} rows or {MAX_TEXT_BYTES >> 20} MiB of text up to here: give a part of it"
            )
    if not any(sample.source.strip() for sample in samples):
        raise CalibrationError(f"{named}: holds no samples")
    return Text(named, first_kind, tuple(samples), tuple(places))


def _letters(sample: Sample) -> int:
    return len(sample.source) + len(sample.target) + sum(map(len, sample.choices))


def _rows(named: str, wanted: Collection[str]) -> Rows:
    if is_dataset(named):
        return rows_apart(named, wanted)
    path, kinds = Path(named), (*READERS, PARQUET)
    if path.suffix.lower() not in kinds:
        known = ", ".join(names()) or f"none in {CATALOGUE.absolute()}"
        raise CalibrationError(
            f"calibration text {named!r}: not a {', '.join(kinds)} file, a saved data set or hf:NAME, "
            f"nor a name in calib_data/ ({known})"
        )
    if not path.is_file():
        raise CalibrationError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    if path.suffix.lower() == PARQUET:
        return rows_apart(named, wanted)
    return READERS[path.suffix.lower()](path)


def _pair(name: str, calibration: Text, heldout: Text, metric: str | None) -> Splits:
    if calibration.kind != heldout.kind:
        raise CalibrationError(
            f"{calibration.name} and {heldout.name} hold different kinds of samples ({calibration.kind}; "
            f"{heldout.kind}): give both the same fields"
        )
    for text in (calibration, heldout):
        _require(text.name, len(text.samples), MIN_SAMPLES if text.seq2seq else 1)
    _require_disjoint(calibration, heldout)
    parts = [with_documents(text.samples, running=not text.seq2seq) for text in (calibration, heldout)]
    (first, why), (second, _) = parts
    return Splits(name, calibration.seq2seq, tuple(first), tuple(second), metric, why)


def _require(name: str, count: int, least: int, advice: str = "give more") -> None:
    if count < least:
        raise CalibrationError(f"{name}: too few samples: {count}, needs at least {least}: {advice}")


def _require_disjoint(calibration: Text, heldout: Text) -> None:
    """Raises CalibrationError if samples other than short rows are in both texts, whatever their white space."""
    places: dict[tuple[str, str], str] = {}
    for sample, place in zip(calibration.samples, calibration.places, strict=True):
        places.setdefault(sample.key, place)
    shared = [
        (place, places[sample.key])
        for sample, place in zip(heldout.samples, heldout.places, strict=True)
        if sample.key in places and not sample.is_short_row
    ]
    if shared:
        place, other = shared[0]
        raise CalibrationError(
            f"{place}: the same as {other}; calibration and held-out text share {len(shared)} samples: "
            "a loss measured on them would prove nothing"
        )
