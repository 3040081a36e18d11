"""Files of tensors: a model's, read lazily, whose headers are checked against their sizes; and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeVar

from moeconv.source.outline import INDEX, SINGLE, CheckpointError, indexed_files, json_object, leads_out, line
from moert.pack.tensors import LENGTH_BYTES, HeaderWrong, header_bytes, read_header

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""The limit of the library that reads the tensors."""
_MOST_MARKS = 1 << 24

Shape = tuple[int, ...]


def shapes_of(file: Path) -> Mapping[str, Shape]:
    """Returns name → shape of each tensor of a safetensors file. Reads the header alone. Raises HeaderWrong or
    OSError."""
    with open(file, "rb") as handle:
        nbytes = os.fstat(handle.fileno()).st_size
        length = header_bytes(handle.read(LENGTH_BYTES), nbytes, MAX_HEADER_BYTES)
        header = read_header(handle.read(length), nbytes, _MOST_MARKS)
    return {name: place.shape for name, place in header.tensors.items()}


# The tensors of a checkpoint in safetensors files, whose headers are read at once, all else when it is needed.

_CHUNK = 1 << 20


class Digest(Protocol):
    """A hash of hashlib."""

    def update(self, data: bytes, /) -> None: ...


class Tensors(Protocol):
    """Tensors by the names that they have in the checkpoint."""

    as_saved: bool = True
    """Whether transformers takes the same tensors when it opens the checkpoint."""
    of_activations: Sequence[str] = ()
    """The names of tensors that say how to round activations, which a pack leaves to moert."""

    @property
    def names(self) -> Collection[str]: ...

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        """Returns one tensor, or one index of its first dimension, in its own dtype. Raises CheckpointError."""
        ...

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yields the rows of a table that stays on the drive, in pieces that fit in memory. Raises CheckpointError."""
        yield self.fetch(name)

    def parts(self, name: str) -> list[str]:
        """Returns the names of the stored tensors that a tensor is made of."""
        return [name]

    def is_coded(self, name: str) -> bool:
        """Returns whether the numbers of a tensor are coded in the checkpoint, so that `fetch` gives float32."""
        return False

    def dtype16(self, name: str) -> torch.dtype:
        """Returns the type of 16 bits that holds a tensor best."""
        return self.fetch(name).dtype

    def digest(self, into: Digest) -> None:
        """Adds every byte that the tensors depend on to a hash."""
        ...


class FileTensors(Tensors):
    """The tensors of a folder in Hugging Face's layout: one file, or several with an index."""

    def __init__(self, path: Path, names_only: bool = False) -> None:
        """`names_only`: files that an index names may be missing. Raises CheckpointError."""
        self.path = path
        listed = _listed(path, names_only)
        self.files: Mapping[str, Path] = listed.files  # name of a tensor → the file that holds it
        self.shapes: Mapping[str, Shape] = listed.shapes
        self.as_saved = listed.as_saved
        """An index has metadata, and no other file holds one of its tensors."""
        self._open: dict[Path, Any] = {}

    @property
    def absent(self) -> list[str]:
        """The names of missing files with tensors."""
        return sorted(str(file.relative_to(self.path)) for file in set(self.files.values()) if not file.is_file())

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
    """Adds a file's name, size and bytes to a hash."""
    digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
    with open(file, "rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)


def has_weights(path: Path) -> bool:
    """Returns whether a directory has weights, and not only a config."""
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


class _Listed(NamedTuple):
    """Name of each tensor → its file, and its shape if the file is there."""

    files: dict[str, Path]
    shapes: dict[str, Shape]
    as_saved: bool = True


def _listed(path: Path, names_only: bool) -> _Listed:
    """Returns the tensors of a folder. Raises CheckpointError."""
    single = path / SINGLE
    if single.is_file():  # as transformers prefers it
        shapes = _shapes(single)
        return _Listed(dict.fromkeys(shapes, single), shapes)
    index = json_object(path / INDEX)
    if index is None:
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read")
    return _indexed(path, index, names_only)


def _indexed(path: Path, index: Mapping[str, Any], names_only: bool) -> _Listed:
    """Returns the tensors of a folder with an index; if several files hold a tensor, the index decides. Raises
    CheckpointError."""
    shapes: dict[str, Shape] = {}
    as_saved, weight_map = isinstance(index.get("metadata"), dict), indexed_files(path, index)
    held: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        held.setdefault(file, []).append(name)
    for file, own in sorted(held.items()):
        if leads_out(path, path / file):
            raise CheckpointError(f"{path / INDEX} names the file {file[:80]!r}, which does not lie inside {path}")
        if not (path / file).is_file():
            if names_only:
                continue
            raise CheckpointError(f"{path / file} is named in {INDEX} but missing: fetch the checkpoint again")
        found = _shapes(path / file)
        if (strange := next((name for name in own if name not in found), None)) is not None:
            raise CheckpointError(
                f"{path / INDEX} says that {file} holds {strange[:120]!r}, and it does not: fetch the checkpoint again"
            )
        shapes.update((name, found[name]) for name in own)
        as_saved = as_saved and all(weight_map.get(name, file) == file for name in found)
    return _Listed({name: path / file for name, file in weight_map.items()}, shapes, as_saved)


def _shapes(file: Path) -> dict[str, Shape]:
    try:
        return dict(shapes_of(file))
    except (HeaderWrong, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({line(error)}): fetch the checkpoint again") from None


# Writing of safetensors files tensor by tensor, so that they are never in memory as a whole.

_TYPES = {
    "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "int16": "I16",
    "float16": "F16", "bfloat16": "BF16", "int32": "I32", "float32": "F32", "float64": "F64", "int64": "I64",
}  # fmt: skip
_LARGEST_FIRST = [*reversed(_TYPES)]  # so that every tensor is aligned, as the library lays them out


class Part(NamedTuple):
    """A tensor of a file: its name, type and shape, and the function that makes it, or pieces of it one after the
    other."""

    name: str
    dtype: torch.dtype
    shape: Shape
    make: Callable[[], torch.Tensor | Iterable[torch.Tensor]]

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def write_tensors(file: BinaryIO, parts: Sequence[Part], about: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, with the same bytes that the library writes for the same tensors; `about` is its
    metadata, in its order here, where the library has none."""
    import torch

    ordered = sorted(parts, key=lambda part: (_LARGEST_FIRST.index(part.kind), part.name))
    header: dict[str, Any] = {} if about is None else {"__metadata__": about}
    end = 0
    for part in ordered:
        start, end = end, end + part.dtype.itemsize * math.prod(part.shape)
        header[part.name] = {"dtype": _TYPES[part.kind], "shape": part.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for part in ordered:
        made = part.make()
        for piece in [made] if isinstance(made, torch.Tensor) else made:
            file.write(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)


# Reading ahead: the next part of a checkpoint is read into memory while work on the present one goes on.

T = TypeVar("T")


def read_ahead(items: Iterable[T], touch: Callable[[T], object]) -> Iterator[T]:
    """Yields each item in turn, while a thread touches the next one. Errors of `touch` are dropped: they will recur
    when the item itself is read. An item may be yielded before its touch has ended."""

    def quietly(item: T) -> None:
        with suppress(Exception):
            touch(item)

    with ThreadPoolExecutor(1, "read ahead") as reader:
        waiting = iter(items)
        for item in waiting:
            present = item
            for following in waiting:
                reader.submit(quietly, following)
                yield present
                present = following
            yield present
