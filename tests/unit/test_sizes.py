"""A size means the same to both programs."""

from __future__ import annotations

import pytest

from moeconv.conversion.settings import parse_bytes
from moeconv.errors import SettingsError
from moert.engine.budget import CacheLimit, MemoryLimit, parse_cache, parse_memory
from moert.errors import InvalidMemory
from moert.pack.messages import NotASize, parse_size


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
    ("text", "meant"),
    [("4", "4GB"), ("1.5", "1.5GB"), ("100", "100GB"), ("101", "101MB"), ("1500", "1500MB"), ("1500.5", "1500.5MB"),
     ("65536", "65536MB"), ("123456.5", "123456.5GB")],
)  # fmt: skip
def test_a_number_that_no_machine_has_as_bytes_is_asked_about(text: str, meant: str) -> None:
    said = f"'{text}' is a number of bytes: did you mean {meant}"
    for option in ("--memory", "memory"):
        with pytest.raises(SettingsError) as error:
            parse_bytes(text, option)
        assert str(error.value) == f"{option} {said}"
    with pytest.raises(InvalidMemory) as refused:
        parse_memory(text)
    assert str(refused.value) == f"memory {said}, or a share like 50% or auto"


def test_the_experts_of_a_tiny_model_may_have_so_few_bytes() -> None:
    assert (parse_bytes("1500", "--size"), parse_cache("1500")) == (1500, CacheLimit(nbytes=1500))


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
