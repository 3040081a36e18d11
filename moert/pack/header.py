"""The header of a safetensors file: which tensors it has, and where. Read strictly, and bounded before it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from moert.pack.bounds import HEADER_BYTES, HEADER_MARKS, Room, json_bytes
from moert.pack.documents import parsed
from moert.pack.errors import HeaderInvalid
from moert.pack.opened import OpenedFile

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
LENGTH_BYTES = 8
_MOST_DIMS = 8
_METADATA = "__metadata__"


class HeaderWrong(ValueError):
    """It is no such header; the message is one short line."""


class Place(NamedTuple):
    """A tensor: `start` and `stop` count bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The tensors of a file by name, in the order of the header, and what it says beside."""

    tensors: dict[str, Place]
    metadata: dict[str, str]


def header_of(file: OpenedFile, room: Room) -> Header:
    """The header of an open file. Raises HeaderInvalid, SizeOverflow, FileTruncated, FileMissing, or what `room`
    does."""
    try:
        length = header_bytes(file.read(min(LENGTH_BYTES, file.nbytes)), file.nbytes)
        room(length, file.relative)
        text = file.read(length, LENGTH_BYTES)
        room(json_bytes(file.relative, text, HEADER_MARKS), file.relative)
        return read_header(text, file.nbytes)
    except HeaderWrong as error:
        raise HeaderInvalid(f"{file.relative} is not a safetensors file ({error}): copy the pack again") from None


def header_bytes(prefix: bytes, file_bytes: int) -> int:
    """Bytes of the JSON that follows the first 8 of a file. Raises HeaderWrong where there are not so many, or more
    than any header has."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES:
        raise HeaderWrong(f"its header should have {length} bytes, the file has {file_bytes}")
    if length > HEADER_BYTES:
        raise HeaderWrong(f"its header has {length} bytes, none is larger than {HEADER_BYTES}")
    return length


def read_header(text: bytes, file_bytes: int) -> Header:
    """The header whose JSON is `text`, of a file of so many bytes. Its tensors have to fill the rest of the file, one
    behind the other. Raises HeaderWrong, or SizeOverflow for more values than any header has."""
    json_bytes("a safetensors header", text, HEADER_MARKS)
    try:
        document = parsed(text)
    except ValueError as error:
        raise HeaderWrong(f"its header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise HeaderWrong("its header is no JSON object")
    metadata = document.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderWrong("its metadata should be text by name")
    first = LENGTH_BYTES + len(text)
    tensors = {name: _place(name, entry, first) for name, entry in document.items()}
    end = first
    for name, place in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if place.start != end:
            raise HeaderWrong(f"{_brief(name)} begins at byte {place.start - first}, expected {end - first}")
        end = place.stop
    if end != file_bytes:
        raise HeaderWrong(f"its tensors end at byte {end}, the file at {file_bytes}")
    return Header(tensors, metadata)


def _place(name: str, entry: Any, first: int) -> Place:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderWrong(f"{_brief(name)} should have a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise HeaderWrong(f"{_brief(name)} has a dtype that is none")
    if not _whole(shape) or len(shape) > _MOST_DIMS or not _whole(offsets) or len(offsets) != 2:
        raise HeaderWrong(f"{_brief(name)} has a shape or data_offsets that are none")
    start, stop = offsets
    if stop - start != DTYPE_BYTES[dtype] * math.prod(shape):
        raise HeaderWrong(f"{_brief(name)} has {stop - start} bytes, its shape needs others")
    return Place(dtype, tuple(shape), first + start, first + stop)


def _whole(values: Any) -> bool:
    """A list of whole numbers that a file's bytes may be counted with."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _brief(name: str) -> str:
    return repr(name[:60])
