"""Calibration text from wherever it lies, checked, as two splits that share no sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from moeconv.calibration.apart import rows_apart
from moeconv.calibration.catalogue import CATALOGUE, find_entry, names
from moeconv.calibration.chat import ChatTemplate
from moeconv.calibration.datasets import is_dataset
from moeconv.calibration.division import divide
from moeconv.calibration.documents import with_documents
from moeconv.calibration.fields import FIELDS, RUNNING, Render, kind_of, renamed, to_sample
from moeconv.calibration.rows import MAX_ROWS, MAX_TEXT_BYTES, PARQUET, READERS, Rows, check_row
from moeconv.calibration.sample import Sample, Splits
from moeconv.errors import CalibrationError

MIN_SAMPLES = 8
ALONE = "give more, or --heldout"


@dataclass(frozen=True)
class Text:
    """Samples of one kind, and where each of them stands."""

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
    """`calib` is a name from calib_data/, a JSONL, CSV, parquet or plain text file, or a data set (`read_dataset`); so
    is `heldout`, else we divide `calib` in halves by `seed`.

    `fields` says what our fields are called there (`{"input": "question"}`), `tokenizer` is the folder of the model's
    tokenizer, whose template turns chat messages into text. Raises CalibrationError naming the file, and the line
    where there is one.
    """
    with ChatTemplate(tokenizer) as chat:
        return _loaded(calib, heldout, seed, fields or {}, chat.render)


def _loaded(calib: str, heldout: str | None, seed: int, fields: Mapping[str, str], render: Render) -> Splits:
    entry = find_entry(calib)
    if entry is not None:
        if heldout is not None or fields:
            what = "--heldout" if heldout is not None else "--fields"
            raise CalibrationError(f"{CATALOGUE / calib}.toml says what is held out and how: leave {what} out")
        parts = [_read(str(path), {}, render) for path in (entry.calibration, entry.heldout)]
        return _pair(calib, parts[0], parts[1], entry.metric)
    text = _read(calib, fields, render)
    if heldout is not None:
        return _pair(calib, text, _read(heldout, fields, render), None)
    _require(text.name, len(text.samples), 2 * MIN_SAMPLES if text.seq2seq else 2, ALONE)
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
    """Raises CalibrationError when samples other than short rows are in both, whatever their white space."""
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
