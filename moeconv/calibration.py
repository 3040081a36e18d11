"""Calibration text: read it, refuse what is unusable, split it into parts that share no sample."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeconv.errors import CalibrationError
from moeconv.toml import read_toml

CATALOGUE = Path("calib_data")  # where conversions are started from, as are the paths in its manifests
MIN_SAMPLES = 8
SHORT_LINE = 80  # characters


@dataclass(frozen=True)
class Sample:
    """Sequence to sequence: `source` and `target`. Language model: `source` is the text, `target` is empty."""

    source: str
    target: str = ""


@dataclass(frozen=True)
class Splits:
    """Two disjoint lists of samples, and a hash of each. `metric` is the catalogue's choice, if it has one."""

    name: str
    seq2seq: bool
    calibration: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    metric: str | None = None

    def digest(self, split: str) -> str:
        return samples_digest(self.calibration if split == "calibration" else self.heldout)


def samples_digest(samples: Iterable[Sample]) -> str:
    """sha256 over the samples in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.source, sample.target]).encode() + b"\n")
    return digest.hexdigest()


def load_splits(calib: str, heldout: str | None, *, seed: int) -> Splits:
    """`calib` is a name from calib_data/ or a JSONL, CSV or parquet file; so is `heldout`, else we split it in halves:
    samples of input and target by `seed`, running text in the middle, so that it stays running text.

    Raises CalibrationError naming the file, and the line where there is one.
    """
    if not Path(calib).suffix and (CATALOGUE / f"{calib}.toml").is_file():
        return _from_catalogue(calib, heldout)
    samples, seq2seq = _read_file(Path(calib))
    if heldout is not None:
        other, other_seq2seq = _read_file(Path(heldout))
        if other_seq2seq != seq2seq:
            raise CalibrationError(f"{calib} and {heldout} hold different kinds of samples: give both the same fields")
        return _checked(Splits(calib, seq2seq, samples, other))
    return _checked(Splits(calib, seq2seq, *_split(samples, seq2seq, seed)))


def _from_catalogue(name: str, heldout: str | None) -> Splits:
    if heldout is not None:
        raise CalibrationError(f"calib_data/{name}.toml has its own held-out split: leave --heldout out")
    manifest = read_toml(CATALOGUE / f"{name}.toml")
    parts = {}
    for split in ("calibration", "heldout"):
        entry = manifest["splits"][split]
        path = Path(entry["file"])
        if not path.is_file():
            raise CalibrationError(f"{path} is not there: build it with `python {manifest['builder']}`")
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            raise CalibrationError(
                f"{path} differs from its manifest: build it again with `python {manifest['builder']}`"
            )
        parts[split] = _read_file(path)[0]
    seq2seq = manifest["task"] == "seq2seq"
    return _checked(Splits(name, seq2seq, parts["calibration"], parts["heldout"], manifest.get("metric")))


def _read_file(path: Path) -> tuple[tuple[Sample, ...], bool]:
    readers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    suffix = path.suffix.lower()
    if suffix not in readers:
        known = ", ".join(sorted(p.stem for p in CATALOGUE.glob("*.toml"))) or f"none in {CATALOGUE.absolute()}"
        raise CalibrationError(
            f"calibration text {str(path)!r}: not a .jsonl, .csv or .parquet file, nor a name in calib_data/ ({known})"
        )
    if not path.is_file():
        raise CalibrationError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    samples: list[Sample] = []
    kinds: set[bool] = set()
    try:
        for line, row in readers[suffix](path):
            sample = _sample(row, f"{path}:{line}")
            kinds.add("text" not in row)
            if sample.source.strip() or "text" in row:
                samples.append(sample)
            else:
                raise CalibrationError(f"{path}:{line}: the field 'input' is empty")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 text at byte {error.start}: convert it first") from None
    if not samples:
        raise CalibrationError(f"{path}: holds no samples")
    if len(kinds) > 1:
        raise CalibrationError(f"{path}: some lines have 'text', others 'input' and 'target': use one kind")
    return tuple(samples), kinds.pop()


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(f"{path}:{number}: not JSON ({error})") from None


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        csv.field_size_limit(1 << 30)
        reader = csv.DictReader(stream)
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise CalibrationError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise CalibrationError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    yield from enumerate(rows, 1)


def _sample(row: Any, where: str) -> Sample:
    sample = None
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            sample = Sample(row["text"])
        elif isinstance(row.get("input"), str) and isinstance(row.get("target"), str):
            sample = Sample(row["input"], row["target"])
    if sample is not None:
        try:
            (sample.source + sample.target).encode()
        except UnicodeEncodeError:
            raise CalibrationError(f"{where}: holds half of a character pair, which is not text") from None
        return sample
    raise CalibrationError(f"{where}: expected the fields 'input' and 'target', or 'text', holding text")


def _split(samples: tuple[Sample, ...], seq2seq: bool, seed: int) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """Half for calibration, half held out. Equal samples land in the same half; running text keeps its order."""
    if not seq2seq:
        middle = len(samples) // 2
        first = set(samples[:middle])
        return samples[:middle], tuple(sample for sample in samples[middle:] if sample not in first)
    unique = list(dict.fromkeys(samples))
    random.Random(seed).shuffle(unique)
    return tuple(unique[: len(unique) // 2]), tuple(unique[len(unique) // 2 :])


def _checked(splits: Splits) -> Splits:
    least = MIN_SAMPLES if splits.seq2seq else 1
    for split in ("calibration", "heldout"):
        count = len(getattr(splits, split))
        if count < least:
            raise CalibrationError(
                f"{splits.name}: the {split} split has {count} samples, needs at least {least}: give more, or --heldout"
            )
    shared = {sample for sample in splits.calibration if _tells(sample, splits.seq2seq)} & set(splits.heldout)
    if shared:
        example = next(iter(shared)).source[:40]
        raise CalibrationError(
            f"{splits.name}: calibration and held-out text share {len(shared)} samples, for one {example!r}: "
            "a loss measured on them would prove nothing"
        )
    return splits


def _tells(sample: Sample, seq2seq: bool) -> bool:
    """Lines of running text that are blank or mere headings may stand in both splits."""
    return seq2seq or len(sample.source) >= SHORT_LINE
