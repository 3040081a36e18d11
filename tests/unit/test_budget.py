"""Sizes as users give them, and what is left of a limit for experts."""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_packs import SWITCH, write_pack

from moert.engine import budget as budget_module
from moert.engine.budget import (
    AUTO_MEMORY,
    BARE_BYTES,
    FIRST_BYTES,
    Budget,
    CacheLimit,
    MemoryLimit,
    budget_of,
    letters_within,
    parse_cache,
    parse_memory,
    room_within,
    spare_bytes,
)
from moert.errors import BudgetTooSmall, InvalidMemory
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack
from moert.pack.tensors import COVERED_BYTES, NOTHING, TEXT_BYTES, TOKENIZER, Bound, Taken, tokenizer_takes
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
    assert AUTO_MEMORY.resolve(100 * MB, 400 * MB) == 370 * MB, "a tenth of what is free is left"
    assert AUTO_MEMORY.resolve(100 * MB, None) is None
    with pytest.raises(InvalidMemory, match="as a size"):
        MemoryLimit(share=0.5).resolve(100 * MB, None)
    assert CacheLimit(share=0.25).resolve(1000) == 250
    assert CacheLimit(nbytes=600).resolve(1000) == 600
    assert CacheLimit().resolve(1000) == 0


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
    assert not BUDGET.fits(smallest - mmap.PAGESIZE, held, 40 * MB)


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
    assert exact.backbone_bytes == manifest.files[BACKBONE].nbytes > 0
    others = {name: entry for name, entry in manifest.files.items() if name != BACKBONE}
    assert Budget.of(replace(manifest, files=others)).backbone_bytes == 0
    assert coarse.left_bytes(10**9, 0, 0) == int(coarse.filled * exact.left_bytes(10**9, 0, 0))
    large = replace(coarse, layer_bytes=30 * MB)
    smallest = large.smallest_memory(10**8, 0)
    assert large.fits(smallest, 10**8, 0)
    assert smallest >= replace(large, filled=1.0).smallest_memory(10**8, 0) + 30 * MB
    threads = Budget.of(manifest, thread_bytes=40 * MB)
    assert exact.left_bytes(10**9, 0, 0) - threads.left_bytes(10**9, 0, 0) == 40 * MB


def test_a_tokenizer_is_counted_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Pack.open(write_pack(tmp_path / "model.pack", SWITCH, paths=False))
    body = pack.file(TOKENIZER).read_bytes()
    expected = tokenizer_takes([body])

    def counted(most_bytes: int) -> Taken:
        monkeypatch.setattr(budget_module, "bound_of", lambda name: Bound(most_bytes))
        return budget_of(pack, False, 5, 7).tokenizer

    assert counted(len(body)) == expected != NOTHING
    assert counted(len(body) - 1) == NOTHING, "it is refused before it is read"
    monkeypatch.setattr(budget_module, "_PART", 100)
    assert counted(len(body)) == expected, "read in parts"
    without, with_text = Budget.of(pack.manifest), budget_of(pack, False, 5, 7)
    assert (with_text.thread_bytes, with_text.opened_bytes) == (5, without.opened_bytes + 7)
    bare = Pack.open(write_pack(tmp_path / "bare.pack", SWITCH, paths=False, tokenizer=False))
    assert budget_of(bare, False, 0, 0).tokenizer == NOTHING


def test_a_refusal_names_its_parts() -> None:
    error = replace(BUDGET, tokenizer=Taken(9 * MB, 7 * MB)).too_small("so much", 250 * MB, 40 * MB, "this needs")
    loaded = BUDGET.loaded_bytes + 7 * MB
    assert error.smallest_bytes == BUDGET.smallest_bytes(250 * MB, loaded + 40 * MB + FIRST_BYTES)
    assert f"memory={error.smallest_bytes} " in str(error)
    for part in ("250.00 MB for the process", "54.19 MB for all weights", "7.00 MB for the tok", "40.00 MB for keys"):
        assert part in str(error)
    parts = [float(part) for part in re.findall(r"([\d.]+) MB (?:for|spare)", str(error))]
    assert len(parts) == 6
    assert sum(parts) == pytest.approx(error.smallest_bytes / MB, abs=0.05)
    assert str(error).startswith("so much is too small: this needs")
    assert f"{size(BARE_BYTES)} for the process without the pack" in str(BUDGET.too_small("so much", 1, 1, "this"))
    with pytest.raises(BudgetTooSmall, match=f"cache={8 * MB}, "):
        BUDGET.check_cache(8 * MB - 1)
    BUDGET.check_cache(8 * MB)


def test_a_budget_is_counted_from_the_files_of_the_experts() -> None:
    """A token needs the largest of each layer of the decoder, an encoder's pass may need more of one layer."""
    files = {
        LayerKey("encoder", 0): [9000, 100],
        LayerKey("decoder", 0): [50, 7000],
        LayerKey("decoder", 2): [5000, 40],
    }
    stored = Budget.sized(SWITCH, 1234, files, thread_bytes=77, page_bytes=10)
    assert (stored.backbone_bytes, stored.scratch_bytes, stored.thread_bytes) == (1234, 0, 77)
    assert (stored.layer_bytes, stored.token_bytes, stored.expert_bytes) == (9000, 12_000, 21_190)
    assert stored.filled == 1.0
    assert Budget.sized(SWITCH, 0, files, page_bytes=60).filled == 40 / 60
    few, more = (Budget.sized(SWITCH, 0, dict(list(files.items())[:count])) for count in (2, 3))
    assert more.opened_bytes * 4 == few.opened_bytes * 6 > 0
    wide, weights = Budget.sized(SWITCH, 1234, files, widened=True), SWITCH.weights_per_expert()
    assert wide.backbone_bytes == 4 * sum(math.prod(tensor.shape) for tensor in SWITCH.tensors.values())
    assert wide.scratch_bytes >= 4 * weights, "one expert in float32"
    assert (Budget.sized(SWITCH, 0, {}).layer_bytes, Budget.sized(SWITCH, 0, {}).filled) == (0, 1.0)
    held = stored.held_as(500, 30_000, "and more")
    assert (held.token_bytes, held.expert_bytes, held.token_beside) == (500, 30_000, "and more")
    assert stored.held_as(500, 20_000).expert_bytes == 21_190


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process holds 100 MB and can have 500 MB in all."""
    monkeypatch.setattr(budget_module, "held_bytes", lambda: 100 * MB)
    monkeypatch.setattr(budget_module, "most_bytes", lambda: 500 * MB)
    return monkeypatch


@pytest.mark.parametrize(
    ("limit", "most", "named"),
    [
        (MemoryLimit(nbytes=300 * MB), 300 * MB, "a memory budget of 300000000 bytes"),
        (MemoryLimit(nbytes=900 * MB), 500 * MB, r"what this process can get \(500.00 MB\)"),
        (MemoryLimit(share=0.5), 250 * MB, r"50% of what this process can get \(250.00 MB\)"),
        (AUTO_MEMORY, 500 * MB, "what this process can get"),
        (CacheLimit(nbytes=1), 500 * MB, "what this process can get"),
        (None, 500 * MB, "what this process can get"),
    ],
)
def test_files_and_texts_have_the_room_that_the_limit_leaves(
    machine: pytest.MonkeyPatch, limit: MemoryLimit | CacheLimit | None, most: int, named: str
) -> None:
    left, room = most - 100 * MB - spare_bytes(most), room_within(limit)
    room(left, "x.json")
    with pytest.raises(BudgetTooSmall, match=rf"^{named}.* is too small to read x\.json of the pack") as refused:
        room(left + 1, "x.json")
    assert refused.value.smallest_bytes == most + MB, "in whole megabytes, not rounded down"
    assert f"memory={most + MB} (" in str(refused.value)
    letters, words = letters_within(limit)
    assert letters == left // TEXT_BYTES
    assert re.match(named, words)


def test_what_every_margin_covers_is_never_refused(machine: pytest.MonkeyPatch) -> None:
    room = room_within(MemoryLimit(nbytes=MB))
    room(COVERED_BYTES, "x.json")
    with pytest.raises(BudgetTooSmall):
        room(COVERED_BYTES + 1, "x.json")
    assert letters_within(MemoryLimit(nbytes=MB))[0] == COVERED_BYTES // TEXT_BYTES


def test_where_nobody_knows_the_memory_nothing_is_refused(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(budget_module, "most_bytes", lambda: None)
    room_within(None)(10**15, "x.json")
    letters, words = letters_within(None)
    assert letters >= 10**12
    assert words == ""
    assert letters_within(MemoryLimit(nbytes=300 * MB))[0] < MB, "the person does"
