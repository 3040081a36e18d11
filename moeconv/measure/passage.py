"""Text on its way through the layers: what enters each is kept on disk, so that a killed run goes on at its layer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeconv.errors import ConversionError

_FLOAT = 4


class Passage:
    """States [rows, tokens, d_model] in float32, a file for each layer that they enter; they are mapped, so that they
    take memory only as far as there is some. `keeps`: all of them stay, else the latest alone.

    Every method raises ConversionError, in one line, for what the disk refuses.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int], keeps: bool = False) -> None:
        self.folder, self.shape, self.keeps = folder, shape, keeps
        with self._using():
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def reached(self) -> int:
        """The last layer whose input is there; 0 where there is none yet, and tokens enter."""
        there = [int(path.stem) for path in self.folder.glob("*.states") if path.stat().st_size == self.nbytes]
        return max(there, default=0)

    @property
    def nbytes(self) -> int:
        """Of the states between two layers."""
        return states_bytes(*self.shape)

    def entering(self, layer: int) -> Tensor:
        """What enters a layer, read from the file as it is used."""
        with self._using():
            mapped = np.memmap(self._file(layer), np.float32, "c", shape=self.shape)  # "c": never written back
        return torch.from_numpy(mapped)

    @contextmanager
    def leaving(self, layer: int) -> Iterator[Tensor]:
        """Room for what leaves the layer before `layer`; it is there for good when the block has ended well."""
        fresh = self._file(layer).with_suffix(".fresh")
        with self._using():
            with fresh.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.nbytes)  # a full disk is said here, and not by a signal
            mapped = np.memmap(fresh, np.float32, "r+", shape=self.shape)
        yield torch.from_numpy(mapped)
        with self._using():
            mapped.flush()
            os.replace(fresh, self._file(layer))
            if not self.keeps:
                self._file(layer - 1).unlink(missing_ok=True)

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
