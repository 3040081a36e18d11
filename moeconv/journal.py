"""The journal of a sweep: one line per measurement, on disk before the next one starts, read again after a crash."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from moeconv.artifacts import Measurement
from moeconv.errors import ConversionError


class Journal:
    """Append-only JSONL keyed by the hash of what was measured. A line cut off by a crash is dropped.

    Raises ConversionError for a journal that can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Measurement] = {}
        if path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, identity: str) -> Measurement | None:
        return self._known.get(identity)

    def add(self, identity: str, measurement: Measurement) -> None:
        """Durable on return. Raises ConversionError when the disk is full."""
        line = json.dumps({"id": identity, **asdict(measurement)}) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise ConversionError(f"can't write {self.path}: {error.strerror}; free some space and run again") from None
        self._known[identity] = measurement

    def _read(self) -> None:
        try:
            body = self.path.read_bytes()
        except OSError as error:
            raise ConversionError(f"can't read {self.path}: {error.strerror}; give another --work") from None
        whole = body[: body.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                identity = record.pop("id")
                self._known[identity] = Measurement(**record)
            except (ValueError, TypeError, KeyError):
                raise ConversionError(
                    f"{self.path}:{number} is damaged: remove that line, and only it is measured again"
                ) from None
        if len(whole) < len(body):
            os.truncate(self.path, len(whole))
