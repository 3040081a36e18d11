"""Rows out of files and data sets, each with the place where it stands, for messages."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moeconv.errors import CalibrationError

Rows = Iterator[tuple[str, Any]]
"""Pairs of a place, such as `words.jsonl:12`, and what stands there: a dict of fields, if the row is well formed."""


def read_text(path: Path) -> str:
    """The file with \\n at the ends of its lines. Raises CalibrationError with the line that is not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: can't be read ({error.strerror})") from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CalibrationError(f"{path}:{line}: not UTF-8 text at byte {error.start} of the file: convert it") from None


def read_jsonl(path: Path) -> Rows:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise CalibrationError(f"{path}:{number}: not JSON ({why})") from None


def read_csv(path: Path) -> Rows:
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            inner = sum(cell.count("\n") for cell in row.values() if isinstance(cell, str))
            place = f"{path}:{reader.line_num - inner}"
            if None in row:
                raise CalibrationError(f"{place}: more cells than the header names: put quotes around commas")
            yield place, row
    except csv.Error as error:
        raise CalibrationError(f"{path}:{reader.line_num + 1}: not CSV from here on ({error})") from None


def read_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def read_paragraphs(path: Path) -> Rows:
    """One row for each paragraph, with the blank lines after it: the rows, joined, are the text again."""
    lines: list[str] = []
    start = 1
    for number, line in enumerate(io.StringIO(read_text(path)), 1):
        if line.strip() and lines and not lines[-1].strip() and any(map(str.strip, lines)):
            yield f"{path}:{start}", {"text": "".join(lines)}
            lines = []
        start = start if lines else number
        lines.append(line)
    if lines:
        yield f"{path}:{start}", {"text": "".join(lines)}


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_paragraphs,
}
