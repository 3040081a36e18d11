"""Calibration text: read it, refuse what is unusable, split it into parts that share no sample."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeconv.errors import CalibrationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CATALOGUE = Path("calib_data")
MIN_SAMPLES = 8


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
    """`calib` is a name from calib_data/ or a JSONL, CSV or parquet file; so is `heldout`, else we split by `seed`.

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
    manifest = tomllib.loads((CATALOGUE / f"{name}.toml").read_text(encoding="utf-8"))
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
    readers = {".jsonl": _jsonl, ".json": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        known = ", ".join(sorted(p.stem for p in CATALOGUE.glob("*.toml"))) or "none here"
        raise CalibrationError(
            f"--calib {path}: not a .jsonl, .csv or .parquet file, nor a name in calib_data/ ({known})"
        )
    if not path.is_file():
        raise CalibrationError(f"{path}: no such file")
    samples: list[Sample] = []
    kinds: set[bool] = set()
    try:
        for line, row in readers[path.suffix](path):
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
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise CalibrationError(f"{path}:{number}: not JSON ({error})") from None


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            yield reader.line_num, row


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise CalibrationError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    yield from enumerate(rows, 1)


def _sample(row: Any, where: str) -> Sample:
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return Sample(row["text"])
        if isinstance(row.get("input"), str) and isinstance(row.get("target"), str):
            return Sample(row["input"], row["target"])
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
    for split in ("calibration", "heldout"):
        count = len(getattr(splits, split))
        if splits.seq2seq and count < MIN_SAMPLES:
            raise CalibrationError(
                f"{splits.name}: the {split} split has {count} samples, needs at least {MIN_SAMPLES}"
            )
    if splits.seq2seq:
        shared = set(splits.calibration) & set(splits.heldout)
        if shared:
            example = next(iter(shared)).source[:40]
            raise CalibrationError(
                f"{splits.name}: calibration and held-out text share {len(shared)} samples, for one {example!r}: "
                "a loss measured on them would prove nothing"
            )
    return splits
