"""Numbers that are none: whether floats as they are stored are all finite, looked at as bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.codec import U8, QuantizedMatrix
from moert.pack.errors import HeaderInvalid
from moert.pack.header import header_of
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack

_FORMS: Mapping[str, tuple[Any, int, int]] = {
    "F16": (np.uint16, 0x7FFF, 0x7C00), "BF16": (np.uint16, 0x7FFF, 0x7F80), "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}  # fmt: skip
"""Of each form of floats: integers of their size, their bits but the sign, and the smallest of these that is infinity
or no number."""
_PIECE = 256 << 10  # bytes that are looked at at once, so that they stay near the processor


def all_finite(dtype: str, numbers: U8) -> bool:
    """Whether the floats of that form (F16, BF16 or F32) are, whose bytes are given in order."""
    kind, unsigned, least = _FORMS[dtype]
    bits = numbers.view(kind)
    step = _PIECE // bits.itemsize
    return all(int((bits[start : start + step] & kind(unsigned)).max()) < least for start in range(0, len(bits), step))


def check_expert(pack: Pack, key: ExpertKey, buffer: U8) -> None:
    """That all weights of an expert, whose bytes are given, are numbers. Raises HeaderInvalid."""
    arrays: list[npt.NDArray[Any]] = list(pack.biases(key, buffer).values())
    for projection in pack.stored(key, buffer).values():
        if isinstance(projection, QuantizedMatrix):
            arrays += [projection.scale, projection.minimum]
        else:
            arrays.append(projection)
    if not all(np.isfinite(array).all() for array in arrays):
        raise HeaderInvalid(
            f"{pack.entry(key).path}: expert {key} has numbers that are not finite: convert the model again"
        )


def check_backbone(pack: Pack) -> None:
    """The same of all floats outside the experts."""
    with pack.opened(BACKBONE) as file:
        for name, place in header_of(file, pack.room).tensors.items():
            for start in range(place.start, place.stop, _PIECE) if place.dtype in _FORMS else ():
                body = file.read(min(_PIECE, place.stop - start), start)
                if not all_finite(place.dtype, np.frombuffer(body, np.uint8)):
                    raise HeaderInvalid(
                        f"{BACKBONE}: {name[:80]!a} has numbers that are not finite: convert the model again"
                    )
