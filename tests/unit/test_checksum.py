"""The checksum that the kernels make is zlib's."""

import random
import zlib

import pytest

from moert.kernels import library
from moert.kernels.library import crc32

LENGTHS = [*range(200), *range(1020, 1030), *range(1275, 1285), 4096, 4097, 100_001]


@pytest.mark.parametrize("native", [True, False])
def test_it_is_that_of_zlib_at_every_length_and_place(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(library, "load", lambda: None)
    elif library.load() is None:
        pytest.skip("no native kernels")
    draw = random.Random(5)
    for length in LENGTHS:
        for before in (0, 1, 7):
            for body in (memoryview(draw.randbytes(before + length))[before:], bytes(length)):
                value = draw.getrandbits(32)
                assert crc32(body) == zlib.crc32(body)
                assert crc32(body, value) == zlib.crc32(body, value), "of a piece behind another"
