"""A size means the same to both programs."""

from __future__ import annotations

import pytest

from moeconv.conversion.settings import parse_bytes
from moeconv.errors import SettingsError
from moert.budget.budget import MemoryLimit, parse_memory
from moert.errors import InvalidMemory
from moert.pack.sizes import NotASize, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2G", 2 * 10**9), ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("2 gib", 2 << 30), ("512M", 512 * 10**6),
     ("512MiB", 512 << 20), ("64k", 64_000), ("1.5T", 1_500_000_000_000), ("123456", 123456), ("7B", 7)],
)  # fmt: skip
def test_both_programs_read_the_same(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_bytes(text, "--memory") == nbytes
    assert parse_memory(text) == MemoryLimit(nbytes=nbytes)


@pytest.mark.parametrize(
    "text", ["", "2X", "-2G", "2.", "1e9", "0", "0GB", "50", "1.5", "9" * 40, "\N{FULLWIDTH DIGIT FIVE}GB"]
)
def test_both_programs_refuse_the_same(text: str) -> None:
    with pytest.raises(NotASize):
        parse_size(text)
    with pytest.raises(SettingsError, match=r"^--size "):
        parse_bytes(text, "--size")
    with pytest.raises(InvalidMemory, match=r"^memory .*, or a share like 50% or auto$"):
        parse_memory(text)
