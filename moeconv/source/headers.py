"""The header of a safetensors file: its tensors and their shapes, believed only if the file has the bytes for them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moeconv.strict_json import NotJson, parse
from moert.pack.documents import MAX_BYTES, brief

MAX_HEADER_BYTES = 100_000_000
"""As the library that reads the tensors has it."""
_MOST_VALUES = 1 << 23
_METADATA = "__metadata__"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip

Shape = tuple[int, ...]


class HeaderWrong(ValueError):
    """What is the matter with a header. The message is a part of a line."""


class _Slot(NamedTuple):
    start: int
    stop: int
    name: str
    shape: Shape


def shapes_of(file: Path) -> Mapping[str, Shape]:
    """Name → shape of each tensor. Reads the header alone. Raises HeaderWrong or OSError."""
    with open(file, "rb") as handle:
        nbytes = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if nbytes < 8 or not 2 <= length <= min(nbytes - 8, MAX_HEADER_BYTES):
            raise HeaderWrong(f"a header of {length} bytes in a file of {nbytes}")
        body = handle.read(length)
    try:
        document = parse(body, most_values=_MOST_VALUES)
    except NotJson as error:
        raise HeaderWrong(f"its header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise HeaderWrong(f"its header should be a JSON object, found {brief(document)}")
    slots = sorted(_slots(document))
    end = 0
    for slot in slots:
        if slot.start != end:
            raise HeaderWrong(f"{slot.name[:80]!r} begins at byte {slot.start}, the tensor before it ends at {end}")
        end = slot.stop
    if end != nbytes - 8 - length:
        raise HeaderWrong(f"its tensors take {end} bytes, {nbytes - 8 - length} are there")
    return {slot.name: slot.shape for slot in slots}


def _slots(document: Mapping[str, Any]) -> Iterator[_Slot]:
    for name, said in document.items():
        if name == _METADATA:
            continue
        fields = said if isinstance(said, dict) else {}
        shape, place, dtype = _counts(fields.get("shape")), _counts(fields.get("data_offsets")), fields.get("dtype")
        if shape is None or place is None or len(place) != 2 or not isinstance(dtype, str):
            raise HeaderWrong(f"{name[:80]!r} should have dtype, shape and data_offsets")
        start, stop = place
        bits = _BITS.get(dtype)
        if start > stop or (bits is not None and math.prod(shape) * bits != 8 * (stop - start)):
            raise HeaderWrong(f"{name[:80]!r} is {dtype[:20]} of {brief(str(shape))} in {stop - start} bytes")
        yield _Slot(start, stop, name, shape)


def _counts(value: Any) -> Shape | None:
    """None for what are none."""
    sound = isinstance(value, list) and all(type(each) is int and 0 <= each <= MAX_BYTES for each in value)
    return tuple(value) if sound else None
