"""Codes of experts on disk, made once and used for every plan: for models whose experts do not fit memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from moeconv.errors import ConversionError
from moert.pack.codec import QuantizedMatrix
from moert.pack.files import write_atomically
from moert.pack.model_spec import ExpertKey

_PARTS = ("qweight", "scale", "minimum")


class Seals(Protocol):
    """A moeconv.measure.journal.Journal."""

    def seal(self, *paths: Path) -> None: ...

    def sealed(self, path: Path) -> bool: ...


class KeptCodes:
    """A file for each expert and width in `folder`. `about` names all that the codes were decided by. Files that others
    have put there are finished when they are `finish`ed. Raises ConversionError, in one line, for what the disk
    refuses, and for a file that was changed since."""

    def __init__(self, folder: Path, about: str, seals: Seals | None = None) -> None:
        """`seals`: None for one who only puts codes there."""
        self.folder, self.about, self._seals = folder, about, seals
        self._last: tuple[Path, dict[str, QuantizedMatrix]] | None = None
        self._finished: set[Path] = set()

    def has(self, key: ExpertKey, bits: int) -> bool:
        return self._has(self._file(key, bits))

    def finish(self, key: ExpertKey, widths: Sequence[int]) -> None:
        """Notes that an expert's codes at these widths are there."""
        files = [self._file(key, bits) for bits in widths]
        if self._seals is not None:
            self._seals.seal(*files)
        self._finished.update(files)

    def get(self, key: ExpertKey, projection: str, bits: int) -> QuantizedMatrix | None:
        file = self._file(key, bits)
        if self._last is not None and self._last[0] == file:
            return self._last[1][projection]
        if not self.has(key, bits):
            return None
        try:
            tensors = load_file(file)
            names = {name.split(".")[0] for name in tensors} - {"seen"}
            found = {name: _matrix(tensors, name, bits) for name in names}
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConversionError(f"{file} can't be read ({error}): delete it, and it is made again") from None
        self._last = file, found
        return found[projection]

    def put(self, key: ExpertKey, bits: int, rows: int, matrices: dict[str, QuantizedMatrix]) -> None:
        """`rows`: tokens that the expert saw."""
        tensors = {f"{name}.{part}": getattr(one, part) for name, one in matrices.items() for part in _PARTS}
        sizes = {
            f"{name}.sizes": np.array([one.in_features, one.group_size, one.power]) for name, one in matrices.items()
        }
        body = save({**tensors, **sizes, "seen.rows": np.array([rows])})
        self._write(self._file(key, bits), body)

    def rows(self, key: ExpertKey) -> int | None:
        """Tokens that the expert saw; None where it was not coded."""
        there = sorted(self.folder.glob(f"{key.at}/E{key.expert:03d}-*.safetensors"))
        return next((int(load_file(file)["seen.rows"][0]) for file in there if self._has(file)), None)

    def _has(self, file: Path) -> bool:
        if file not in self._finished and self._seals is not None and self._seals.sealed(file):
            self._finished.add(file)
        return file in self._finished

    def _write(self, file: Path, body: bytes) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, body)
        except OSError as error:
            raise ConversionError(f"can't write {file}: {error.strerror}; free some space and run again") from None

    def _file(self, key: ExpertKey, bits: int) -> Path:
        return self.folder / str(key.at) / f"E{key.expert:03d}-{bits}.safetensors"


def _matrix(tensors: dict[str, np.ndarray], name: str, bits: int) -> QuantizedMatrix:
    in_features, group_size, power = (int(size) for size in tensors[f"{name}.sizes"])
    codes, scale, minimum = (tensors[f"{name}.{part}"] for part in _PARTS)
    return QuantizedMatrix(bits, in_features, group_size, codes, scale, minimum, power)
