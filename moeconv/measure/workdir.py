"""The work directory of one conversion: its artefacts, its journal, and a lock so that two runs don't share it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moeconv.artifacts import SCHEMA, to_json
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.journal import Journal
from moeconv.strict_json import bounded, parse
from moert.pack.files import write_atomically
from moert.pack.reader import pack_around

try:
    import fcntl
except ImportError:  # not on this system: two runs at once are the user's care
    fcntl = None  # type: ignore[assignment]


_MOST_BYTES = 1 << 28  # of an artefact: planning.json of 30,000 experts has a tenth of it
LOCK = "lock"
INPUTS = "planning.json"
RESIDENCES = "residences.json"
"""Routing that was fitted beside the widths."""


class WorkDir:
    """Use it in a with block. Every method raises ConversionError, in one line, for what the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> WorkDir:
        if (pack := pack_around(self.path)) is not None:
            raise ConversionError(f"{self.path} lies in the pack {pack}: give another --work")
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("w")
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise ConversionError(
                    f"another run is using {self.path}: wait for it, or give another --work"
                ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def journal(self, subject: str) -> Journal:
        return Journal(self.path / "journal.jsonl", subject)

    def save(self, name: str, artifact: Any, journal: Journal | None = None) -> None:
        """Writes an artefact as JSON, whole or not at all; with a journal it is sealed."""
        self.save_bytes(name, (json.dumps(to_json(artifact), indent=1) + "\n").encode(), journal)

    def save_bytes(self, name: str, body: bytes, journal: Journal | None = None) -> None:
        """Writes a file, whole or not at all; with a journal it is sealed."""
        with self._writing():
            (journal.write if journal is not None else write_atomically)(self.path / name, body)

    def load(self, name: str) -> dict[str, Any] | None:
        """An artefact as it was saved; None where there is none. Raises ConversionError for one that is damaged."""
        path = self.path / name
        try:
            found = parse(bounded(path, _MOST_BYTES))
            if not isinstance(found, dict):
                raise ValueError(f"expected an object, found a {type(found).__name__}")
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConversionError(f"{path} can't be read ({error}): delete it, and it is made again") from None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConversionError(
                f"can't use the work directory {self.path}: {error.strerror or error}; free it or give another --work"
            ) from None


def finished_work(path: Path) -> tuple[dict[str, Any], Journal, list[dict[str, Any]]]:
    """What planning takes, the journal, and routing that was fitted: of this work directory, or of the latest one in
    it. Only reads.

    Raises SettingsError where no sweep was finished, or by another version; ConversionError for a damaged file.
    """
    found = sorted([*path.glob(INPUTS), *path.glob(f"*/{INPUTS}")], key=lambda file: file.stat().st_mtime)
    if not found:
        raise SettingsError(f"{path} holds no finished sweep: give the --work directory of a `moeconv quantize` run")
    inner = WorkDir(found[-1].parent.resolve())  # "." has no name, and the name is what the journal is about
    inputs = inner.load(INPUTS)
    assert inputs is not None
    if inputs.get("schema") != SCHEMA:
        raise SettingsError(
            f"{inner.path / INPUTS} has schema {inputs.get('schema')!r}, this version of moeconv reads {SCHEMA}: run "
            "`moeconv quantize` again"
        )
    fitted, journal = (inner.load(RESIDENCES) or {}).get("residences", []), inner.journal(inner.path.name)
    for file in filter(Path.exists, (inner.path / INPUTS, inner.path / RESIDENCES)):
        if not journal.sealed(file):
            raise ConversionError(
                f"{file} has no seal of the sweep that wrote it (an older version, a run that was killed, or another "
                "program): run `moeconv quantize` again, which measures nothing twice"
            )
    return inputs, journal, fitted
