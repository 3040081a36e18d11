"""Where the tensors of a checkpoint come from: safetensors files, whose headers are read at once, all else when it is
needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from moeconv.source.headers import HeaderWrong, Shape, shapes_of
from moeconv.source.outline import CheckpointError, json_object, line
from moeconv.source.places import is_plain, leads_out

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_CHUNK = 1 << 20


class Digest(Protocol):
    """What hashlib gives."""

    def update(self, data: bytes, /) -> None: ...


class Tensors(Protocol):
    """Tensors by the names that they have in the checkpoint."""

    @property
    def names(self) -> Collection[str]: ...

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        """One tensor, or one index of its first dimension, in its own dtype. Raises CheckpointError."""
        ...

    def digest(self, into: Digest) -> None:
        """Adds every byte that decides them."""
        ...


class FileTensors:
    """Those of a folder as Hugging Face lays it out: one file, or several with an index."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path = path
        files, shapes = _tensor_files(path)
        self.files: Mapping[str, Path] = files  # name of a tensor → the file that holds it
        self.shapes: Mapping[str, Shape] = shapes
        self._open: dict[Path, Any] = {}

    @property
    def as_saved(self) -> bool:
        """Whether transformers finds what it looks for beside the tensors: an index of it has metadata."""
        index = json_object(self.path / INDEX)
        return index is None or isinstance(index.get("metadata"), dict)

    @property
    def names(self) -> Collection[str]:
        return self.files.keys()

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        file = self.files.get(name)
        if file is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}: the checkpoint is incomplete")
        try:
            return self._read(file, name, index)
        except Exception as error:
            if self._reads_well(file, name, index):  # Ctrl-C inside the library comes out as some error of its own
                raise KeyboardInterrupt from None
            raise CheckpointError(f"{file} is missing or damaged ({line(error)}): fetch the checkpoint again") from None

    def digest(self, into: Digest) -> None:
        for file in sorted(set(self.files.values())):
            add_file(into, file)

    def _read(self, file: Path, name: str, index: int | None) -> torch.Tensor:
        if file not in self._open:
            from safetensors import safe_open

            self._open[file] = safe_open(file, framework="pt")
        opened = self._open[file]
        tensor: torch.Tensor = opened.get_tensor(name) if index is None else opened.get_slice(name)[index]
        return tensor

    def _reads_well(self, file: Path, name: str, index: int | None) -> bool:
        self._open.pop(file, None)
        with suppress(Exception):
            self._read(file, name, index)
            return True
        return False


def add_file(digest: Digest, file: Path) -> None:
    """Its name, size and bytes."""
    digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
    with open(file, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)


def has_weights(path: Path) -> bool:
    """Whether a directory has more than a config."""
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


def _tensor_files(path: Path) -> tuple[dict[str, Path], dict[str, Shape]]:
    """Name of each tensor → its file, and its shape. Raises CheckpointError."""
    index = json_object(path / INDEX)
    if index is not None:
        return _indexed(path, index)
    single = path / SINGLE
    if not single.is_file():
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read")
    shapes = _shapes(single)
    return dict.fromkeys(shapes, single), shapes


def _indexed(path: Path, index: Mapping[str, Any]) -> tuple[dict[str, Path], dict[str, Shape]]:
    """Where several files hold a tensor, it could be read from either; so none is."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path / INDEX} lacks its weight_map: fetch the checkpoint again")
    shapes: dict[str, Shape] = {}
    holder: dict[str, str] = {}
    for file in sorted(set(weight_map.values())):
        if not is_plain(file) or leads_out(path, path / file):
            raise CheckpointError(f"{path / INDEX} names the file {file[:80]!r}, which does not lie inside {path}")
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file} is named in {INDEX} but missing: fetch the checkpoint again")
        found = _shapes(path / file)
        if twice := next((name for name in found if name in holder), None):
            raise CheckpointError(
                f"{path}: {holder[twice]} and {file} both hold the tensor {twice[:120]!r}: which is it?"
            )
        holder.update(dict.fromkeys(found, file))
        shapes.update(found)
    if strange := next((name for name, file in weight_map.items() if holder.get(name) != file), None):
        raise CheckpointError(
            f"{path / INDEX} says that {weight_map[strange]} holds {strange[:120]!r}, and it does not: fetch the "
            "checkpoint again"
        )
    return {name: path / file for name, file in weight_map.items()}, shapes


def _shapes(file: Path) -> dict[str, Shape]:
    try:
        return dict(shapes_of(file))
    except (HeaderWrong, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({line(error)}): fetch the checkpoint again") from None
