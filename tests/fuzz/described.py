"""safetensors files as inputs: a line of JSON that says what is in them, and bytes. Offsets are worked out, so that a
changed shape or dtype still is a whole file."""

from __future__ import annotations

import json
import math
from typing import Any

_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8,
          "I64": 8, "F64": 8}  # fmt: skip
_MOST_BYTES = 1 << 18


def described(file: bytes) -> bytes:
    """The input that stands for a file. Its tensors lie in the order of their names' places in the header."""
    length = int.from_bytes(file[:8], "little")
    header, data, parts = json.loads(file[8 : 8 + length]), file[8 + length :], []
    for tensor in (what for name, what in header.items() if name != "__metadata__"):
        start, stop = tensor.pop("data_offsets")
        parts.append(data[start:stop])
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + b"".join(parts)


def file_of(body: bytes) -> bytes:
    """The file that an input stands for: itself, where it is no description."""
    head, _, data = body.partition(b"\n")
    header = _object(head)
    if header is None:
        return body
    start, parts = 0, []
    for tensor in header.values():
        nbytes = _nbytes(tensor)
        if nbytes is not None and start + nbytes <= _MOST_BYTES and "data_offsets" not in tensor:
            tensor["data_offsets"] = [start, start + nbytes]
            parts.append(data[start : start + nbytes].ljust(nbytes, b"\0"))
            start += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _object(head: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(head)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _nbytes(tensor: Any) -> int | None:
    """What a tensor takes; None where it is none."""
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return None
    size = _SIZES.get(tensor.get("dtype")) if isinstance(tensor.get("dtype"), str) else None
    return None if size is None else size * math.prod(shape)
