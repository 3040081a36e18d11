"""The checksum of a pack's files, zlib's CRC-32: by the native kernels where the processor has instructions for it."""

from __future__ import annotations

import zlib

import numpy as np

from moert.kernels import library

_PART = 1 << 28


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """As zlib.crc32."""
    found = library.load()
    if found is None or not found.functions.moert_crc32_fast():
        return zlib.crc32(data, value)
    array = np.frombuffer(data, np.uint8)
    for at in range(0, len(array), _PART):  # between parts Ctrl-C is heard
        part = array[at : at + _PART]
        value = int(found.functions.moert_crc32(value, part.ctypes.data, part.nbytes))
    return value
