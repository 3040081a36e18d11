"""Where prompts come from (an argument, a file, stdin, JSON lines) and where answers go."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from moert.errors import InputInvalid

PROMPT_FIELDS = ("prompt", "input", "text")


@dataclass(frozen=True)
class Record:
    """One line of a JSONL input: its prompt, and all its fields as they were."""

    line: int
    prompt: str
    fields: dict[str, Any]


def read_prompt(prompt: str | None, file: Path | None, stdin: TextIO) -> str:
    """One prompt, without the newline that ends a file. Raises InputInvalid."""
    if prompt is not None:
        return prompt
    if file is not None:
        return read_text(file).removesuffix("\n")
    if stdin.isatty():
        raise InputInvalid("no prompt: give one as an argument, with --file or --input, or on stdin")
    return _decoded(stdin).removesuffix("\n")


def read_text(path: Path) -> str:
    """Raises InputInvalid."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputInvalid(f"{path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputInvalid(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_records(path: Path, stdin: TextIO) -> Iterator[Record]:
    """JSON lines; '-' is stdin, read line by line. A file is checked whole before its first line is handed out.

    Raises InputInvalid with the number of a bad line.
    """
    if str(path) == "-":
        return _parse(_lines(stdin), "stdin")
    return iter(list(_parse(read_text(path).split("\n"), str(path))))


def _parse(lines: Iterable[str], name: str) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _record(line, number, f"{name} line {number}")


def _record(line: str, number: int, where: str) -> Record:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputInvalid(f"{where} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputInvalid(f"{where} should be a JSON object, found {type(fields).__name__}")
    found = [name for name in PROMPT_FIELDS if name in fields]
    if not found:
        raise InputInvalid(f"{where} has no prompt: one of the fields {', '.join(PROMPT_FIELDS)} should hold it")
    prompt = fields[found[0]]
    if not isinstance(prompt, str):
        raise InputInvalid(f"{where}: {found[0]} should be text, found {type(prompt).__name__}")
    return Record(number, prompt, fields)


def _lines(stdin: TextIO) -> Iterator[str]:
    try:
        yield from stdin
    except UnicodeDecodeError as error:
        raise InputInvalid(f"stdin is not UTF-8 text ({error.reason})") from None


def _decoded(stdin: TextIO) -> str:
    return "".join(_lines(stdin))


class LineWriter:
    """Writes JSON objects, one a line, each with a single write, so that a stop in between leaves no half line."""

    def __init__(self, path: Path | None) -> None:
        """`path` None is stdout. Raises InputInvalid if the file can't be written."""
        self._path = path
        self._file = None
        if path is not None:
            try:
                self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise InputInvalid(f"{path} can't be written: {error.strerror or error}") from None

    def write(self, fields: dict[str, Any]) -> None:
        line = json.dumps(fields, ensure_ascii=False) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        body = line.encode("utf-8", "surrogatepass")
        try:
            before = self._file.tell()
            if self._file.write(body) != len(body):
                os.ftruncate(self._file.fileno(), before)
                raise OSError("the disk is full")
        except OSError as error:
            raise InputInvalid(f"{self._path} can't be written: {error.strerror or error}") from None

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
