"""The work directory of one conversion: its artefacts, its journal, and a lock so that two runs don't share it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from moeconv.artifacts import to_json
from moeconv.errors import ConversionError
from moeconv.journal import Journal
from moeconv.scorers import Scores

try:
    import fcntl
except ImportError:  # not on this system: two runs at once are the user's care
    fcntl = None  # type: ignore[assignment]


class WorkDir:
    """Use it in a with block. Every method raises ConversionError, in one line, for what the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> WorkDir:
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("w")
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

    def journal(self) -> Journal:
        return Journal(self.path / "journal.jsonl")

    def save(self, name: str, artifact: Any) -> None:
        """Writes an artefact as JSON, whole or not at all."""
        body = (json.dumps(to_json(artifact), indent=1) + "\n").encode()
        self._replace(name, lambda stream: stream.write(body))

    def save_scores(self, name: str, scores: Scores) -> None:
        outputs = np.array(scores.outputs, dtype=str)
        values: dict[str, Any] = {"per_sample": scores.per_sample, "nll": scores.nll, "outputs": outputs}
        self._replace(name, lambda stream: np.savez(stream, **values))

    def load_scores(self, name: str) -> Scores | None:
        """None where there are none, or none that can be read: then they are measured again."""
        try:
            with np.load(self.path / name) as stored:
                outputs = tuple(str(text) for text in stored["outputs"])
                return Scores(stored["per_sample"], float(stored["nll"]), outputs)
        except Exception:  # numpy has a different error for each kind of damage
            return None

    def _replace(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        with self._writing():
            descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}.")
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    write(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, self.path / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConversionError(
                f"can't use the work directory {self.path}: {error.strerror or error}; free it or give another --work"
            ) from None
