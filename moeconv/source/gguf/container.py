"""The container of a GGUF model: its header, metadata and places of tensors, checked before anything is believed."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from moeconv.source.outline import GGUF, MOST_FILES, SPLIT, CheckpointError, split_names
from moert.pack.documents import brief

# The layout of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, of whose versions 2 and 3 are alike.

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 17
_LONGEST_NAME, _LONGEST_TEXT, _LONGEST_ARRAY = 1 << 10, 1 << 24, 1 << 21
_MOST_ITEMS = 1 << 22  # of all arrays of texts together; the largest vocabularies have an eighth, with their merges
_MOST_DIMS, _MOST_NUMBERS = 4, 1 << 44
_ALIGNMENT, _MOST_ALIGNED = 32, 1 << 20
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Type of a value of metadata → its form."""

T = TypeVar("T")


class _Damaged(ValueError):
    """A fault of a GGUF file, as a part of a sentence that begins with "it". Fetch the file again."""


class Place(NamedTuple):
    """The place of a tensor: its file, the start of its bytes there, its type's number, and its shape, the last
    dimension the fastest."""

    file: Path
    start: int
    kind: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Metadata:
    """The metadata of a model: key → a number, a text, or a list of either."""

    file: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Returns a value, or `default` if there is none. Raises CheckpointError for a value of another type."""
        found = self.values.get(key)
        if found is None:
            return default
        if type(found) is int and kind is float:
            found = float(found)
        if type(found) is not kind:
            raise self.wrong(key, f"should be a {kind.__name__}, it is {brief(found)}")
        return found

    def need(self, key: str, kind: type[T]) -> T:
        """Returns a value. Raises CheckpointError if there is none, or one of another type."""
        found = self.get(key, kind)
        if found is None:
            raise CheckpointError(
                f"{self.file} has no {key} in its metadata: it is incomplete, or not a language model"
            )
        return found

    def listed(self, key: str, kind: type[T], length: int | None = None) -> Sequence[T] | None:
        """Returns a list; None if there is none. Raises CheckpointError for a value of another type or `length`."""
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, list) or not all(type(item) is kind for item in found):
            raise self.wrong(key, f"should be a list of {kind.__name__}, it is {brief(found)}")
        if length is not None and len(found) != length:
            raise self.wrong(key, f"should have {length:,} values, it has {len(found):,}")
        return found

    def wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {key} of its metadata {why}")


@dataclass(frozen=True)
class Container:
    """A model in one file or several: `files` in their order, the metadata of the first, and each tensor's place."""

    files: Sequence[Path]
    metadata: Metadata
    tensors: Mapping[str, Place] = field(default_factory=dict)


def read_container(file: Path) -> Container:
    """Returns the container of a model; `file` may be any of its files. Raises CheckpointError."""
    first = _read(file)
    count = first.metadata.get("split.count", int, 1) or 1
    if count == 1:
        return first
    files = _siblings(file, count)
    parts = [first if each == file else _read(each) for each in files]
    tensors: dict[str, Place] = {}
    for number, part in enumerate(parts):
        said = (part.metadata.get("split.no", int), part.metadata.get("split.count", int))
        name = part.metadata.get("general.architecture", str)
        if said != (number, count) or name not in (None, parts[0].metadata.get("general.architecture", str)):
            raise CheckpointError(f"{files[number]} is not part {number + 1} of {count} of {files[0]}: fetch it again")
        if twice := next((name for name in part.tensors if name in tensors), None):
            raise CheckpointError(f"{files[number]} has {twice[:120]!r} once more: it is a part of another model")
        tensors.update(part.tensors)
    wanted = parts[0].metadata.get("split.tensors.count", int)
    if wanted is not None and wanted != len(tensors):
        raise CheckpointError(
            f"{files[0]} says that its {count} files have {wanted:,} tensors, they have {len(tensors):,}: one is a "
            "part of another model"
        )
    return Container(files, parts[0].metadata, tensors)


def _siblings(file: Path, count: int) -> list[Path]:
    """Returns all files of a model in several. Raises CheckpointError."""
    named = SPLIT.fullmatch(file.name)
    if named is None or int(named[3]) != count or not 1 <= count <= MOST_FILES:
        raise CheckpointError(
            f"{file} says that it is one of {count} files, which are known by names that end in -00001-of-"
            f"{min(count, 99999):05}{GGUF}: give it its name back"
        )
    files = [file.with_name(name) for name in split_names(named, count)]
    if (missing := next((each for each in files if not each.is_file()), None)) is not None:
        raise CheckpointError(f"{missing} is missing: the model is in {count} files, which must lie beside each other")
    return files


def _read(file: Path) -> Container:
    try:
        with open(file, "rb") as handle:
            return _parsed(handle, file)
    except (OSError, _Damaged) as error:
        why = f"it {error}" if isinstance(error, _Damaged) else " ".join(str(error).split())
        raise CheckpointError(f"{file} can't be read as a GGUF file ({why}): fetch it again") from None


def _parsed(handle: BinaryIO, file: Path) -> Container:
    """Returns the content of one file. Raises _Damaged or OSError."""
    header = _Header(handle)
    if bytes(header.take(len(_MAGIC))) != _MAGIC:
        raise _Damaged("does not begin as GGUF files do")
    version = header.whole("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise _Damaged("was written for processors of the other byte order" if swapped else f"has version {version}")
    tensors, keys = header.count("tensors", _MOST_TENSORS, 24), header.count("keys", _MOST_KEYS, 13)
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = header.text("a key", _LONGEST_NAME)
        if key in values:
            raise _Damaged(f"has the key {key[:80]!r} twice")
        values[key] = header.value(key)
    alignment = values.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNED or alignment & (alignment - 1):
        raise _Damaged(f"has the alignment {brief(alignment)}")
    found: dict[str, Place] = {}
    for _ in range(tensors):
        name = header.text("a tensor's name", _LONGEST_NAME)
        if name in found or not name:
            raise _Damaged(f"has the tensor {name[:120]!r} twice" if name else "has a tensor without a name")
        found[name] = header.place(name, file, alignment)
    begin = -(-header.at // alignment) * alignment
    placed = {name: place._replace(start=begin + place.start) for name, place in found.items()}
    _check_apart(placed, header.nbytes)
    return Container([file], Metadata(file, values), placed)


def _check_apart(placed: Mapping[str, Place], nbytes: int) -> None:
    """Raises _Damaged if a tensor lies outside the file or on another one."""
    before, end = "", 0
    for name, place in sorted(placed.items(), key=lambda item: item[1].start):
        if place.start < end and before:
            raise _Damaged(f"has {name[:120]!r} where {before[:120]!r} is")
        before, end = name, place.start + bytes_of(place.kind, place.shape)
        if end > nbytes:
            raise _Damaged(f"ends before its tensor {name[:120]!r} does")


def bytes_of(kind: int, shape: Sequence[int]) -> int:
    """Returns the bytes of a tensor of this type. Raises _Damaged for a type that is not known, or for rows that are no
    whole number of the type's blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise _Damaged(f"has a tensor of the type {kind}, which is not known") from None
    if shape[-1] % block:
        raise _Damaged(f"has rows of {shape[-1]} numbers in blocks of {block}")
    return math.prod(shape) // block * nbytes


def data_of(place: Place, first: int, count: int) -> npt.NDArray[np.uint8]:
    """Returns the bytes [count, bytes of a row] of a tensor's rows from `first` on. Raises OSError or ValueError."""
    row = bytes_of(place.kind, place.shape[-1:])
    wanted, start = count * row, place.start + first * row
    found = np.fromfile(place.file, np.uint8, wanted, offset=start)
    if found.size != wanted:
        raise ValueError("it ends too early")
    return found.reshape(-1, row)


class _Header:
    """A header that is read from its beginning on. All methods raise _Damaged."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle, self.nbytes, self.at, self._items = handle, os.fstat(handle.fileno()).st_size, 0, 0

    def take(self, nbytes: int) -> bytes:
        found = self._handle.read(nbytes) if nbytes <= self.nbytes - self.at else b""
        if len(found) < nbytes:
            raise _Damaged("ends within its header")
        self.at += nbytes
        return found

    def whole(self, form: str) -> int:
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """Returns a number of things that take at least `least_bytes` each in the rest of the file."""
        found = self.whole("<Q")
        if found > min(most, (self.nbytes - self.at) // least_bytes):
            raise _Damaged(f"claims {found:,} {what}, which it has no room for, or which are over {most:,}")
        return found

    def text(self, what: str, longest: int) -> str:
        nbytes = self.count(f"bytes of {what}", longest, 1)
        try:
            return self.take(nbytes).decode("utf-8")
        except UnicodeDecodeError:
            raise _Damaged(f"has {what} that is not UTF-8") from None

    def value(self, key: str) -> Any:
        """Returns a number, a text, or a list of either."""
        kind = self.whole("<I")
        if kind == _TEXT:
            return self.text(f"{key[:80]!r}", _LONGEST_TEXT)
        if kind != _ARRAY:
            return self._numbers(kind, 1, key)[0]
        kind = self.whole("<I")
        if kind == _ARRAY:
            raise _Damaged(f"has lists inside the list {key[:80]!r}")
        if kind != _TEXT:
            return self._numbers(kind, self.count(f"values of {key[:80]!r}", _LONGEST_ARRAY, 1), key)
        texts = self.count(f"texts of {key[:80]!r}", _LONGEST_ARRAY, 8)
        self._items += texts
        if self._items > _MOST_ITEMS:
            raise _Damaged(f"has over {_MOST_ITEMS:,} texts in lists")
        return [self.text(f"a text of {key[:80]!r}", _LONGEST_NAME * 4) for _ in range(texts)]

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _NUMBERS:
            raise _Damaged(f"has a value of the type {kind} for {key[:80]!r}, which is not known")
        form = np.dtype(_NUMBERS[kind])
        found = np.frombuffer(self.take(count * form.itemsize), np.uint8 if kind == _BOOL else form)
        if kind == _BOOL:
            return [bool(each) for each in found]
        if kind == 6:  # as it was written: the shortest number that gives these 32 bits
            return [float(str(each)) for each in found]
        return [*map(int if form.kind in "iu" else float, found)]

    def place(self, name: str, file: Path, alignment: int) -> Place:
        """Returns a tensor's place, which starts where the tensors do."""
        dims = self.whole("<I")
        if not 1 <= dims <= _MOST_DIMS:
            raise _Damaged(f"has {dims} dimensions for {name[:120]!r}")
        shape = tuple(self.whole("<Q") for _ in range(dims))[::-1]
        if not 1 <= math.prod(shape) <= _MOST_NUMBERS:
            raise _Damaged(f"has the shape {shape} for {name[:120]!r}")
        kind, start = self.whole("<I"), self.whole("<Q")
        bytes_of(kind, shape)
        if start % alignment:
            raise _Damaged(f"has {name[:120]!r} at {start}, which is no multiple of {alignment}")
        return Place(file, start, kind, shape)
