"""Memory in large pages: pieces that lie apart, are aligned, and live as long as they are looked at."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moert.kernels import memory
from moert.kernels.memory import PAGE_BYTES, Arena, forget


@settings(max_examples=30)
@given(sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(1 << 20, 5 << 20)), min_size=1, max_size=20))
def test_pieces_are_aligned_and_lie_apart(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_SLAB", 2 << 20)
        source = Arena()
        pieces = [source.allocate(size) for size in sizes]
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert (piece.dtype, piece.shape) == (np.uint8, (size,))
        assert not size or piece.ctypes.data % 64 == 0
        assert piece.flags.writeable
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))


def test_a_slab_begins_on_a_large_page_and_larger_pieces_get_their_own() -> None:
    source = Arena()
    assert source.allocate(1).ctypes.data % (2 << 20) == 0
    large = source.allocate((64 << 20) + 1)
    assert large.ctypes.data % (2 << 20) == 0
    assert len(large) == (64 << 20) + 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mappings")
def test_it_is_memory_of_this_process_alone() -> None:
    """Systems give large pages to that, and hardly ever to memory that could be shared."""
    piece = Arena().allocate(1000)
    address = piece.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        (start, stop), rights = (int(end, 16) for end in line.split()[0].split("-")), line.split()[1]
        if start <= address < stop:
            assert rights == "rw-p"
            return
    raise AssertionError("no such mapping")


def test_pieces_outlive_the_arena() -> None:
    source = Arena()
    piece = source.allocate(5000)
    piece[:] = 7
    del source
    gc.collect()
    assert (piece == 7).all()


def test_systems_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    piece = Arena().allocate(100)
    piece[:] = 1
    assert piece.ctypes.data % 64 == 0


@pytest.mark.parametrize("align", [1, 64, 4096, 1 << 16])
def test_pieces_begin_where_asked(align: int) -> None:
    source = Arena(align)
    for size in (1, 63, 64, 4097, 3, (64 << 20) - 1, 5):
        assert source.allocate(size).ctypes.data % align == 0


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is given back")
@pytest.mark.parametrize("first", [0, 64, PAGE_BYTES])
def test_whole_pages_are_forgotten_and_what_lies_beside_them_is_not(first: int) -> None:
    source = Arena()
    before, piece, after = source.allocate(max(first, 64)), source.allocate(5 * PAGE_BYTES), source.allocate(300)
    for value, each in enumerate((before, piece, after), 1):
        each[:] = value
    forget(piece)
    assert (set(before), set(after)) == ({1}, {3})
    start = -piece.ctypes.data % PAGE_BYTES
    whole = (len(piece) - start) // PAGE_BYTES * PAGE_BYTES
    assert not piece[start : start + whole].any()
    assert (piece[:start] == 2).all()
    assert (piece[start + whole :] == 2).all()
    piece[:] = 4
    assert (set(before), set(after)) == ({1}, {3})


def test_less_than_a_page_is_kept() -> None:
    source = Arena()
    source.allocate(64)
    piece = source.allocate(PAGE_BYTES)  # holds no whole page
    piece[:] = 5
    forget(piece)
    forget(source.allocate(0))
    assert (piece == 5).all()
