"""Memory in large pages: pieces that lie apart, are aligned, and live as long as they are looked at."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moert.kernels import arena
from moert.kernels.arena import Arena


@settings(max_examples=30)
@given(sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(1 << 20, 5 << 20)), min_size=1, max_size=20))
def test_pieces_are_aligned_and_lie_apart(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_SLAB", 2 << 20)
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
