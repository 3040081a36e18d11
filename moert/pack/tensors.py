"""Small safetensors files of a pack, with numbers as metadata: read strictly; equal content gives equal bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from moert.pack.errors import FormatTooNew, HeaderInvalid
from moert.pack.header import LENGTH_BYTES, HeaderWrong, Place, header_bytes, read_header

_TYPES: Mapping[str, Any] = {
    "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "F16": np.float16, "F32": np.float32,
    "F64": np.float64,
}  # fmt: skip
"""Of the tensors that such files have."""


class TensorFile:
    """What such a file says; its tensors are views of the file's bytes. All methods raise HeaderInvalid where it lacks
    something or has it in another form."""

    def __init__(self, name: str, body: bytes, version: int, again: str = "profile the paths of this pack") -> None:
        """`name` is for messages, `again` what makes such a file anew. Raises HeaderInvalid, SizeOverflow, or
        FormatTooNew for a later version than this one."""
        self.name, self._again, self._body = name, again, body
        try:
            length = header_bytes(body[:LENGTH_BYTES], len(body))
            self._tensors, self._metadata = read_header(body[LENGTH_BYTES : LENGTH_BYTES + length], len(body))
        except HeaderWrong as error:
            raise self.wrong(f"is not a safetensors file ({error})") from None
        if self.number("version", 1 << 16) > version:
            raise FormatTooNew(f"{name} has version {self._metadata['version']}, this program reads {version}")

    def has(self, field: str) -> bool:
        """True if there is metadata of this name."""
        return field in self._metadata

    def text(self, field: str) -> str:
        """Returns the metadata of this name; empty where there is none."""
        return self._metadata.get(field, "")

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Of all tensors."""
        return sorted(self._tensors)

    def only(self, names: Iterable[str]) -> None:
        """That no other tensors are there."""
        if others := sorted(set(self._tensors).difference(names)):
            raise self.wrong(f"has the tensor {others[0][:60]!r}, which does not belong there")

    def number(self, field: str, high: int) -> int:
        """A number from 1 to `high` in the metadata."""
        text = self._metadata.get(field, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= high):
            raise self.wrong(f"{field} should be a number from 1 to {high}, found {text[:40]!r}")
        return int(text)

    def numbers(self, field: str, below: int) -> list[int]:
        """Rising numbers from 0 to `below` - 1 in the metadata, written 1,3,5."""
        text = self._metadata.get(field, "")
        parts = text.split(",")
        if len(parts) <= below and all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            found = [int(part) for part in parts]
            if found[-1] < below and all(one < other for one, other in itertools.pairwise(found)):
                return found
        raise self.wrong(f"{field} should be rising numbers below {below}, found {text[:40]!r}")

    def tensor(self, name: str, dtype: Any, ndim: int = 1) -> npt.NDArray[Any]:
        """The tensor of this name, dtype and number of dimensions; not to be written."""
        place = self._tensors.get(name)
        if place is None:
            raise self.wrong(f"lacks the tensor {name}")
        if _TYPES.get(place.dtype) != dtype or len(place.shape) != ndim:
            found = f"{place.dtype} with {len(place.shape)} dimensions"
            raise self.wrong(f"{name} should be {np.dtype(dtype)} with {ndim}, found {found}")
        return self._view(place)

    def _view(self, place: Place) -> npt.NDArray[Any]:
        dtype = np.dtype(_TYPES[place.dtype])
        count = (place.stop - place.start) // dtype.itemsize
        array = np.frombuffer(self._body, dtype, count, place.start) if count else np.empty(0, dtype)
        return np.require(array.reshape(place.shape), requirements="A")  # kernels get addresses of numbers

    def wrong(self, what: str) -> HeaderInvalid:
        """The error to raise if `what` is the matter with the file."""
        return HeaderInvalid(f"{self.name}: {' '.join(what.split())}: {self._again} again")


def to_bytes(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, object]) -> bytes:
    """The file's content; safetensors itself writes metadata in no fixed order, here they are sorted."""
    body = save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    length = int.from_bytes(body[:8], "little")
    texts = {name: str(value) for name, value in sorted(metadata.items())}
    text = json.dumps({"__metadata__": texts, **json.loads(body[8 : 8 + length])}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body[8 + length :]
