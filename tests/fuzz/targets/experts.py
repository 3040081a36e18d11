"""Files of experts: whole, in blocks of neurons, and with trellis codes. Their fast checksum is taken to be right."""

from __future__ import annotations

import numpy as np

from moeconv.matrices import biases_of, matrices_of, projection_weights, read_expert
from moert.pack.errors import PackError
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import IN_BLOCKS, IN_TRELLIS, WHOLE, pack_of

_EXPERTS = 3  # of each pack
_KEEPS_HEADER = 128  # in the first byte, beside the number of the expert


def _place(number: int) -> tuple[Pack, ExpertKey]:
    pack = pack_of((WHOLE, IN_BLOCKS, IN_TRELLIS)[number // _EXPERTS % 3])
    return pack, pack.manifest.experts[number % _EXPERTS].key


def read(body: bytes) -> None:
    number, file = body[0] if body else 0, body[1:]
    pack, key = _place(number)
    entry = pack.entry(key)
    header = b"" if not number & _KEEPS_HEADER else pack.layout(key).header
    buffer = np.zeros(entry.file_bytes, np.uint8)
    whole = np.frombuffer((header + file)[: entry.file_bytes], np.uint8)
    buffer[: len(whole)] = whole
    pack.check_expert(key, buffer, lambda _: entry.crc32)
    with np.errstate(all="ignore"):
        for projection in matrices_of(pack, key, buffer).values():
            projection_weights(projection)
    biases_of(pack, key, buffer)


def seeds() -> list[bytes]:
    """Without the zeros at their ends; of each pack one has its header, of that with trellis codes none."""
    found = []
    for number in range(3 * _EXPERTS):
        pack, key = _place(number)
        body, start = read_expert(pack, key).tobytes().rstrip(b"\0"), pack.layout(key).data_offset
        found += [bytes([number]) + body] if number in (0, _EXPERTS) else []
        found.append(bytes([number | _KEEPS_HEADER]) + body[start:])
    return found


TARGET = Target(read, (PackError,), seeds, longest=16384)
