"""Sizes as users give them, and what is left of a limit for experts."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from moert.engine.budget import (
    AUTO_MEMORY,
    BARE_BYTES,
    FIRST_BYTES,
    Budget,
    CacheLimit,
    MemoryLimit,
    parse_cache,
    parse_memory,
)
from moert.errors import BudgetTooSmall, InvalidMemory
from moert.pack.reader import Pack
from moert.pack.tensors import Taken
from moert.stats import size

MB = 10**6
BUDGET = Budget(backbone_bytes=50 * MB, scratch_bytes=0, layer_bytes=8 * MB, token_bytes=30 * MB, expert_bytes=200 * MB)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1.5GB", 1_500_000_000), ("800MB", 800_000_000), ("512MiB", 512 << 20), ("2g", 2 * 10**9), ("123456", 123456),
     ("64 kB", 64_000), ("1TB", 10**12), ("7B", 7), (".5GB", 500_000_000), (" 2 GB ", 2 * 10**9)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_memory(text) == MemoryLimit(nbytes=nbytes)
    assert parse_cache(text) == CacheLimit(nbytes=nbytes)


@pytest.mark.parametrize("text", ["50%", " 50%", "50% ", "50 %", "50.0%"])
def test_shares(text: str) -> None:
    assert parse_memory(text) == MemoryLimit(share=0.5)
    assert parse_cache(text) == CacheLimit(share=0.5)


@pytest.mark.parametrize("text", ["auto", " AUTO "])
def test_auto(text: str) -> None:
    assert parse_memory(text) is AUTO_MEMORY
    with pytest.raises(InvalidMemory, match="cache"):
        parse_cache(text)


@pytest.mark.parametrize(
    "text",
    ["1.5XB", "-1GB", "", "GB", "0", "1e9", "nan", "nan%", "0%", "101%", "-5%", "9" * 40, "1_000", "1_0%",
     "\N{ARABIC-INDIC DIGIT FIVE}GB", "\N{FULLWIDTH DIGIT FIVE}%", ".", "%", "5.GB", "1.5", "50", "1000.5"],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    for parse, option in ((parse_memory, "memory"), (parse_cache, "cache")):
        with pytest.raises(InvalidMemory, match=option):
            parse(text)


def test_a_limit_in_bytes() -> None:
    assert MemoryLimit(nbytes=7).resolve(5, None) == 7
    assert MemoryLimit(nbytes=400 * MB).resolve(100 * MB, 300 * MB) == 300 * MB
    assert AUTO_MEMORY.resolve(400 * MB, 300 * MB) == 300 * MB
    assert MemoryLimit(share=0.5).resolve(100 * MB, 400 * MB) == 200 * MB
    assert 350 * MB < AUTO_MEMORY.resolve(100 * MB, 400 * MB) < 400 * MB
    assert AUTO_MEMORY.resolve(100 * MB, None) is None
    with pytest.raises(InvalidMemory, match="as a size"):
        MemoryLimit(share=0.5).resolve(100 * MB, None)
    assert CacheLimit(share=0.25).resolve(1000) == 250
    assert CacheLimit(nbytes=600).resolve(1000) == 600


def test_a_limit_says_where_it_comes_from() -> None:
    assert MemoryLimit(nbytes=7).named(7) == "a memory budget of 7 bytes"
    assert MemoryLimit(nbytes=7 * MB).named(5 * MB) == "what this process can get (5.00 MB)"
    assert MemoryLimit(share=0.5).named(5 * MB) == "50% of what this process can get (5.00 MB)"
    assert AUTO_MEMORY.named(5 * MB) == "what this process can get (5.00 MB)"


def test_experts_get_what_is_left_but_never_less_than_a_layer_or_more_than_there_are() -> None:
    less, more = (BUDGET.left_bytes(limit, 250 * MB, 40 * MB) for limit in (400 * MB, 500 * MB))
    assert 0 < less < 110 * MB
    assert 90 * MB < more - less <= 100 * MB
    assert [BUDGET.fitting_bytes(left) for left in (-5, 9 * MB, 300 * MB)] == [8 * MB, 9 * MB, 200 * MB]


@pytest.mark.parametrize("held", [3, 250 * MB, 10**12 + 1])
def test_the_smallest_limit_fits_though_the_next_process_is_a_little_larger(held: int) -> None:
    smallest = BUDGET.smallest_memory(held, 40 * MB)
    assert smallest % MB == 0
    assert BUDGET.fits(smallest, held + MB, 40 * MB)
    assert not BUDGET.fits(smallest - 8 * MB - smallest // 64, held, 40 * MB)
    assert BUDGET.left_bytes(smallest, held + BUDGET.loaded_bytes, FIRST_BYTES + 40 * MB) >= BUDGET.layer_bytes


@pytest.mark.parametrize("held", [3, 40 * MB, 49 * MB])
def test_of_a_process_of_the_usual_size_there_is_one_smallest_limit(held: int) -> None:
    smallest = BUDGET.smallest_memory(0, 40 * MB)
    assert BUDGET.smallest_memory(held, 40 * MB) == smallest
    assert BUDGET.fits(smallest, held, 40 * MB)
    assert not BUDGET.fits(smallest - MB, held, 40 * MB)
    assert BUDGET.fits(smallest - mmap.PAGESIZE + 1, held, 40 * MB)  # as a control group has it


def test_a_tokenizer_counts_while_it_is_read_or_with_the_request() -> None:
    plain = BUDGET.smallest_memory(0, 40 * MB)
    kept, read = (replace(BUDGET, tokenizer=Taken(*each)) for each in ((30 * MB, 20 * MB), (200 * MB, 20 * MB)))
    assert kept.smallest_memory(0, 40 * MB) - plain in range(20 * MB, 22 * MB)
    assert kept.smallest_memory(0, 80 * MB) - kept.smallest_memory(0, 40 * MB) in range(40 * MB, 42 * MB)
    assert read.smallest_memory(0, 40 * MB) == read.smallest_memory(0, 80 * MB) > plain + 140 * MB


def test_threads_and_pages_that_experts_do_not_fill_are_counted(pack_dir: Path) -> None:
    manifest = Pack.open(pack_dir).manifest
    sizes = [entry.file_bytes for entry in manifest.experts]
    exact, coarse = Budget.of(manifest, page_bytes=4096), Budget.of(manifest, page_bytes=1 << 16)
    assert (exact.filled, coarse.filled) == (1.0, min(size / (-(-size // 65536) * 65536) for size in sizes))
    assert coarse.filled < 0.5
    assert coarse.left_bytes(10**9, 0, 0) == int(coarse.filled * exact.left_bytes(10**9, 0, 0))
    large = replace(coarse, layer_bytes=30 * MB)
    smallest = large.smallest_memory(10**8, 0)
    assert large.fits(smallest, 10**8, 0)
    assert smallest >= replace(large, filled=1.0).smallest_memory(10**8, 0) + 30 * MB
    threads = Budget.of(manifest, thread_bytes=40 * MB)
    assert exact.left_bytes(10**9, 0, 0) - threads.left_bytes(10**9, 0, 0) == 40 * MB


def test_a_refusal_names_its_parts() -> None:
    error = replace(BUDGET, tokenizer=Taken(9 * MB, 7 * MB)).too_small("so much", 250 * MB, 40 * MB, "this needs")
    loaded = BUDGET.loaded_bytes + 7 * MB
    assert error.smallest_bytes == BUDGET.smallest_bytes(250 * MB, loaded + 40 * MB + FIRST_BYTES)
    assert f"memory={error.smallest_bytes} " in str(error)
    for part in ("250.00 MB for the process", "54.19 MB for all weights", "7.00 MB for the tok", "40.00 MB for keys"):
        assert part in str(error)
    assert str(error).startswith("so much is too small: this needs")
    assert f"{size(BARE_BYTES)} for the process without the pack" in str(BUDGET.too_small("so much", 1, 1, "this"))
    with pytest.raises(BudgetTooSmall, match=f"cache={8 * MB}, "):
        BUDGET.check_cache(8 * MB - 1)
    BUDGET.check_cache(8 * MB)
