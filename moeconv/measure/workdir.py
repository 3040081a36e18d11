"""The work directory of a conversion: its journal, its artefacts, its lock."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moeconv.artifacts import SCHEMA, to_json
from moeconv.errors import ConversionError, SettingsError
from moeconv.strict_json import NotJson, bounded, parse
from moert.machine import lock
from moert.pack.documents import brief
from moert.pack.files import write_atomically
from moert.pack.reader import pack_around

# The journal: one line per measurement, on disk before the next measurement starts, read again after a crash.

_PIECE = 1 << 20


def identity(*what: Any) -> str:
    """Returns the name of a measurement in the journal: a hash of everything that it depends on (JSON values)."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


@contextmanager
def believed(wrong: str, advice: str) -> Iterator[None]:
    """Turns the errors of a with block into ConversionError: it takes apart values that another program may have
    written."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ConversionError(f"{wrong} ({reason}): {advice}") from error


class Journal:
    """The journal: append-only JSONL with an entry for each measurement, keyed by its identity. A line cut off by a
    crash is ignored, and removed from the file when the next one is added: reading changes nothing.

    Raises ConversionError for a journal that can't be read, or that is about another subject than `subject`.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self.path = path
        self.subject = subject
        self._known: dict[str, dict[str, Any]] = {}
        self._sealed: set[str] = set()  # names of files
        self._earlier: set[str] = set()  # names that were on disk at the start
        self._reused: set[str] = set()  # those of them that this run has used
        self._cut_at: int | None = None  # where a half line begins
        if path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def reused_seconds(self) -> float:
        """The seconds that earlier runs spent on the measurements which this run has used so far."""
        return sum(_seconds(self._known[name]) for name in self._reused)

    def get(self, name: str) -> dict[str, Any] | None:
        if name in self._earlier:
            self._reused.add(name)
        return self._known.get(name)

    def believed(self) -> AbstractContextManager[None]:
        """Returns `believed` for a with block that takes an entry apart."""
        return believed(f"{self.path} holds a measurement that is none", "move the file away, or give another --work")

    def remember(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the entry of that name; if the journal lacks it, makes and adds it."""
        found = self.get(name)
        if found is None:
            self.add(name, make())
        return self._known[name]

    def entries(self) -> Iterable[dict[str, Any]]:
        return self._known.values()

    def add(self, name: str, record: dict[str, Any]) -> None:
        self.add_all({name: record})

    def add_all(self, records: Mapping[str, dict[str, Any]]) -> None:
        """Adds all entries or none, durable on return. Raises ConversionError if the disk refuses."""
        lines = [json.dumps({"id": name, "subject": self.subject, **record}) + "\n" for name, record in records.items()]
        try:
            if self._cut_at is not None:
                os.truncate(self.path, self._cut_at)
                self._cut_at = None
            with self.path.open("ab", buffering=0) as stream:
                start = stream.tell()
                try:
                    _write("".join(lines).encode(), stream)
                    os.fsync(stream.fileno())
                except OSError:
                    os.truncate(self.path, start)  # half a line would run into the next one
                    raise
        except OSError as error:
            raise ConversionError(f"can't write {self.path}: {error.strerror}; free some space and run again") from None
        self._knows(records)

    def seal(self, *paths: Path) -> None:
        """Notes the digests of finished files of the work directory."""
        self._seal({self._name(path): digest_of(path) for path in paths})

    def write(self, path: Path, body: bytes) -> None:
        """Writes a file of the work directory. Its seal is added before the file is replaced: if the run is killed in
        between, the earlier file is still a sealed one. Raises OSError."""
        self._seal({self._name(path): hashlib.sha256(body).hexdigest()})
        write_atomically(path, body)

    def sealed(self, path: Path) -> bool:
        """Returns whether a file is there and finished. Raises ConversionError if its contents are not the sealed
        ones."""
        name = self._name(path)
        if name not in self._sealed or not path.is_file():
            return False
        if identity("file", name, digest_of(path)) not in self._known:
            raise ConversionError(
                f"{path} was changed since it was made: delete it, and it is made again, or give another --work"
            )
        return True

    def _seal(self, digests: Mapping[str, str]) -> None:
        seals = {identity("file", name, digest): {"file": name} for name, digest in digests.items()}
        if new := {seal: entry for seal, entry in seals.items() if seal not in self._known}:
            self.add_all(new)

    def _name(self, path: Path) -> str:
        """Returns the name of a file within the work directory."""
        return Path(os.path.relpath(path, self.path.parent)).as_posix()

    def _knows(self, records: Mapping[str, dict[str, Any]]) -> None:
        self._known.update(records)
        self._sealed.update(name for entry in records.values() if isinstance(name := entry.get("file"), str))

    def _read(self) -> None:
        try:
            body = self.path.read_bytes()
        except OSError as error:
            raise ConversionError(f"can't read {self.path}: {error.strerror}; give another --work") from None
        whole = body[: body.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = parse(line, finite=False)
                name, subject = record.pop("id"), record.pop("subject")
                hash(name)
            except (NotJson, TypeError, KeyError, AttributeError):
                raise ConversionError(
                    f"{self.path}:{number} is damaged: remove that line, and only it is measured again"
                ) from None
            if subject != self.subject:
                raise ConversionError(
                    f"{self.path}:{number} is about another model, text or quantizer: move the file away, or give "
                    "another --work"
                )
            self._known[name] = record
        self._knows(self._known)
        self._earlier = set(self._known)
        if len(whole) < len(body):
            self._cut_at = len(whole)


def digest_of(path: Path) -> str:
    """Returns the sha256 of a file of a work directory. Raises ConversionError."""
    try:
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest()
    except OSError as error:
        raise ConversionError(f"can't read {path}: {error.strerror}; give another --work") from None


def _seconds(entry: Mapping[str, Any]) -> float:
    """Returns the seconds that an entry took. An evaluation has its own; measurements made together are an entry of
    entries."""
    parts = [entry, *(part for part in entry.values() if isinstance(part, dict))]
    return sum(float(part.get("seconds", 0.0)) for part in parts)


def _write(body: bytes, stream: FileIO) -> None:
    """Writes bytes to a stream, in one call if the system can, so that a crash leaves all of them or none."""
    while body:
        body = body[stream.write(body) :]


# The work directory of one conversion: its artefacts, its journal, and a lock that keeps a second run out.


_MOST_BYTES = 1 << 28  # of an artefact: planning.json of 30,000 experts has a tenth of it
LOCK = "lock"
INPUTS = "planning.json"
RESIDENCES = "residences.json"
"""The artefact with cache-aware routing that was fitted to the plan."""


class WorkDir:
    """A work directory, for use in a with block. Every method raises ConversionError, in one line, if the disk
    refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> WorkDir:
        if (pack := pack_around(self.path)) is not None:
            raise ConversionError(f"{self.path} lies in the pack {pack}: give another --work")
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("w")
        try:
            lock(self._lock.fileno())
        except OSError:
            self._lock.close()
            raise ConversionError(f"another run is using {self.path}: wait for it, or give another --work") from None
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
        """Returns an artefact as it was saved; None if its file is missing. Raises ConversionError for a damaged
        file."""
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
    """Returns the inputs of planning, the journal, and the fitted cache-aware routing of this work directory, or of the
    latest one inside it. Only reads.

    Raises SettingsError if no sweep was finished, or one by another version; ConversionError for a damaged file.
    """
    found = sorted([*path.glob(INPUTS), *path.glob(f"*/{INPUTS}")], key=lambda file: file.stat().st_mtime)
    if not found:
        raise SettingsError(f"{path} holds no finished sweep: give the --work directory of a `moeconv quantize` run")
    inner = WorkDir(found[-1].parent.resolve())  # "." has no name, and the name is the journal's subject
    inputs = inner.load(INPUTS)
    assert inputs is not None
    if inputs.get("schema") != SCHEMA:
        raise SettingsError(
            f"{inner.path / INPUTS} has schema {brief(inputs.get('schema'))}, this version of moeconv reads {SCHEMA}: "
            "run `moeconv quantize` again"
        )
    fitted, journal = (inner.load(RESIDENCES) or {}).get("residences", []), inner.journal(inner.path.name)
    for file in filter(Path.exists, (inner.path / INPUTS, inner.path / RESIDENCES)):
        if not journal.sealed(file):
            raise ConversionError(
                f"{file} has no seal of the sweep that wrote it (an older version, a run that was killed, or another "
                "program): run `moeconv quantize` again, which measures nothing twice"
            )
    return inputs, journal, fitted
