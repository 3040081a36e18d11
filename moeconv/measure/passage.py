"""Text on its way through the layers: what enters each is kept on disk, so that a killed run goes on at its layer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moert.kernels.library import crc32

_FLOAT = 4
_SUM = np.dtype("<u4")


class Leaving:
    """Room for states [rows, tokens, d_model] on the disk, and a checksum of each row, made as the row is written. Rows
    that nobody writes are zeros."""

    def __init__(self, states: Tensor, begin: int) -> None:
        """`begin`: the checksum before the first byte of a row."""
        self._states, self._begin = states, begin
        zeros = crc32(np.zeros(states[:1].numel(), np.float32).view(np.uint8).data, begin)
        self.sums = np.full(len(states), zeros, _SUM)

    def __setitem__(self, rows: Tensor, states: Tensor) -> None:
        """Writes rows, each once. rows [n]; states [n, tokens, d_model]."""
        states = states.detach().float().contiguous()
        self._states[rows] = states
        for row, values in zip(rows.tolist(), states.numpy(), strict=True):
            self.sums[row] = crc32(values.reshape(-1).view(np.uint8).data, self._begin)


class Passage:
    """States [rows, tokens, d_model] in float32, a file for each layer that they enter, with a checksum of each row
    behind them; they are mapped, so that they take memory only as far as there is some. `keeps`: all of them stay, else
    the latest alone.

    Every method raises ConversionError, in one line, for what the disk refuses, and for a file that was changed since
    it was made.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int], keeps: bool = False) -> None:
        self.folder, self.shape, self.keeps = folder, shape, keeps
        self._believed: set[int] = set()  # layers whose file this object has written, or checked
        with self._using():
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def reached(self) -> int:
        """Returns the last layer whose input is there, with all before it where these stay; 0 where there is none yet,
        and tokens enter."""
        there = {int(path.stem) for path in self.folder.glob("*.states") if path.stat().st_size == self.nbytes}
        if not self.keeps:
            return max(there, default=0)
        return next(layer for layer in count() if layer + 1 not in there)

    @property
    def nbytes(self) -> int:
        """Returns the size of a file: the states between two layers, and their checksums."""
        return states_bytes(*self.shape) + self.shape[0] * _SUM.itemsize

    def entering(self, layer: int) -> Tensor:
        """Returns the states that enter a layer, read from the file as they are used."""
        with self._using():
            mapped = np.memmap(self._file(layer), np.float32, "c", shape=self.shape)  # "c": never written back
            if layer not in self._believed:
                self._check(layer, mapped)
        return torch.from_numpy(mapped)

    @contextmanager
    def leaving(self, layer: int) -> Iterator[Leaving]:
        """Gives room for the states that leave the layer before `layer`; they are there for good when the block has
        ended well."""
        fresh = self._file(layer).with_suffix(".fresh")
        with self._using():
            with fresh.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)  # a full disk is said here, and not by a signal
            mapped = np.memmap(fresh, np.float32, "r+", shape=self.shape)
        left = Leaving(torch.from_numpy(mapped), self._begin(layer))
        yield left
        with self._using():
            mapped.flush()
            with fresh.open("rb+") as file:
                file.seek(states_bytes(*self.shape))
                file.write(left.sums.tobytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._file(layer))
            self._believed.add(layer)
            if not self.keeps:
                self._file(layer - 1).unlink(missing_ok=True)

    def _check(self, layer: int, states: np.ndarray) -> None:
        """Raises ConversionError unless every row has its checksum."""
        path, begin = self._file(layer), self._begin(layer)
        sums = np.fromfile(path, _SUM, offset=states_bytes(*self.shape))
        found = [crc32(row.reshape(-1).view(np.uint8).data, begin) for row in states]
        if found != sums.tolist():
            raise ConversionError(f"{path} was changed since it was made: delete it, and it is made again")
        self._believed.add(layer)

    def _begin(self, layer: int) -> int:
        """Returns the checksum that rows begin with, so that a file in another's place is seen."""
        return crc32(f"{self.folder.name}/{layer}".encode())

    def aside(self, rows: int, width: int, file: Path | None = None) -> Tensor:
        """Room on the disk for states [rows, width] that nobody needs when this tensor is gone, or that stay in a
        `file`."""
        stays, file = file is not None, file or self.folder / "aside"
        with self._using():
            with file.open("wb") as made:
                os.posix_fallocate(made.fileno(), 0, max(1, states_bytes(1, rows, width)))
            mapped = np.memmap(file, np.float32, "r+", shape=(rows, width))
            if not stays:
                file.unlink()
        return torch.from_numpy(mapped)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, layer: int) -> Path:
        return self.folder / f"{layer:03}.states"

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConversionError(
                f"can't use {self.folder}: {error.strerror or error}; free some space there"
            ) from None


def states_bytes(rows: int, tokens: int, d_model: int) -> int:
    """On the disk, between two layers."""
    return rows * tokens * d_model * _FLOAT
