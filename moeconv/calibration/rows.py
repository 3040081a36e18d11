"""Rows out of text files, each with the place where it stands, for messages.

Files are read line by line, and no line is longer than MAX_ROW_BYTES: what a row takes in memory is bounded by that.
"""

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

MAX_TEXT_BYTES = 1 << 29
"""Of all text of a file or data set: a hundred million tokens, more than a conversion reads in a month."""
MAX_ROW_BYTES = 1 << 26
MAX_ROWS = 1 << 22
_MOST_VALUES = 1 << 22  # of a row, as JSON
_MARK = b"\xef\xbb\xbf"  # of the order of bytes, which some programs write before UTF-8


def lines_of(path: Path) -> Iterator[str]:
    """The lines of the file, each with its end, which is \\n. Raises CalibrationError with the line that is not UTF-8,
    before it gives any."""
    for _ in _decoded(path):
        pass
    yield from _decoded(path)


def _decoded(path: Path) -> Iterator[str]:
    number, before = 0, 0
    for number, line in enumerate(_raw(path), 1):
        try:
            text = line.removeprefix(_MARK).decode() if number == 1 else line.decode()
        except UnicodeDecodeError as error:
            skipped = len(_MARK) if number == 1 and line.startswith(_MARK) else 0
            at = before + skipped + error.start
            raise CalibrationError(f"{path}:{number}: not UTF-8 text at byte {at} of the file: convert it") from None
        before += len(line)
        yield text[:-2] + "\n" if text.endswith("\r\n") else text


def _raw(path: Path) -> Iterator[bytes]:
    try:
        if (nbytes := path.stat().st_size) > MAX_TEXT_BYTES:
            raise CalibrationError(
                f"{path}: has {nbytes >> 20} MiB, at most {MAX_TEXT_BYTES >> 20} are read: give a part of it"
            )
        with open(path, "rb") as handle:
            number = 0
            while line := handle.readline(MAX_ROW_BYTES + 1):
                number += 1
                check_row(len(line), f"{path}:{number}")
                yield line
    except OSError as error:
        raise CalibrationError(f"{path}: can't be read ({error.strerror})") from None


def check_row(nbytes: int, place: str) -> None:
    """Raises CalibrationError."""
    if nbytes > MAX_ROW_BYTES:
        raise CalibrationError(f"{place}: a row of over {MAX_ROW_BYTES >> 20} MiB: cut the text into shorter ones")


def parsed(text: str) -> Any:
    """JSON of one row. Raises ValueError, whose message is a part of a line."""
    if sum(text.count(mark) for mark in "[{,") > _MOST_VALUES:
        raise ValueError(f"over {_MOST_VALUES} values")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_jsonl(path: Path) -> Rows:
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", parsed(line.removesuffix("\n"))
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: not JSON ({error})") from None


def read_csv(path: Path) -> Rows:
    csv.field_size_limit(MAX_ROW_BYTES)
    feed = _Feed(path)
    reader = csv.DictReader(feed.lines(), strict=True)
    try:
        for row in reader:
            inner = sum(cell.count("\n") for cell in row.values() if isinstance(cell, str))
            place = f"{path}:{reader.line_num - inner}"
            if None in row:
                raise CalibrationError(f"{place}: more cells than the header names: put quotes around commas")
            yield place, row
            feed.taken = 0
    except csv.Error as error:
        raise CalibrationError(f"{path}:{reader.line_num + 1}: not CSV from here on ({error})") from None


class _Feed:
    """Lines for csv, which joins them to rows. `taken`: letters of this row so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, 0

    def lines(self) -> Iterator[str]:
        for number, line in enumerate(lines_of(self.path), 1):
            self.taken += len(line)
            check_row(self.taken, f"{self.path}:{number}")
            if "\r" in line:
                yield from io.StringIO(line, newline="")
            else:
                yield line


def read_paragraphs(path: Path) -> Rows:
    """One row for each paragraph, with the blank lines after it: the rows, joined, are the text again."""
    lines: list[str] = []
    start, taken, full, blank = 1, 0, False, False
    for number, line in enumerate(lines_of(path), 1):
        is_text = bool(line.strip())
        if is_text and full and blank:
            yield f"{path}:{start}", {"text": "".join(lines)}
            lines, taken, full = [], 0, False
        start = start if lines else number
        lines.append(line)
        taken, full, blank = taken + len(line), full or is_text, not is_text
        check_row(taken, f"{path}:{start}")
    if lines:
        yield f"{path}:{start}", {"text": "".join(lines)}


READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": read_jsonl, ".csv": read_csv, ".txt": read_paragraphs}
PARQUET = ".parquet"
"""Read apart."""
