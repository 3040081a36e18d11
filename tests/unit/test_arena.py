"""Memory in large pages: pieces that lie apart, are aligned, and live as long as they are looked at."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moert.experts.cache import Buffers
from moert.kernels import memory
from moert.kernels.memory import PAGE_BYTES, Arena, forget

SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(1 << 20, 5 << 20)), min_size=1, max_size=20)


@settings(max_examples=30)
@given(sizes=SIZES, align=st.sampled_from([1, 64, 4096, 1 << 16]))
def test_pieces_are_aligned_and_lie_apart(sizes: list[int], align: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_SLAB", 2 << 20)
        source = Arena(align)
        pieces = [source.allocate(size) for size in sizes]
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert (piece.dtype, piece.shape) == (np.uint8, (size,))
        assert not size or piece.ctypes.data % align == 0
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


# Memory of experts: used again, and given back to the system where another size needs it

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to take pages back")


def resident_pages(piece: np.ndarray) -> int:
    """Pages of a piece, which begins on one, that have memory behind them."""
    pages = -(-len(piece) // PAGE_BYTES)
    found = (ctypes.c_ubyte * pages)()
    call = ctypes.CDLL(None, use_errno=True).mincore
    assert call(ctypes.c_void_p(piece.ctypes.data), ctypes.c_size_t(len(piece)), found) == 0, ctypes.get_errno()
    return sum(page & 1 for page in found)


def test_pieces_begin_on_pages_and_lie_apart() -> None:
    buffers = Buffers()
    pieces = [buffers.take(nbytes, 0) for nbytes in (1, 5000, PAGE_BYTES, 3 * PAGE_BYTES, 70 << 20)]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % mmap.PAGESIZE == 0
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))
    assert [len(piece) for piece in pieces] == [1, 5000, PAGE_BYTES, 3 * PAGE_BYTES, 70 << 20]
    assert buffers.warm_bytes == 0


@linux
def test_a_piece_that_comes_back_serves_the_next_of_its_size_with_its_pages() -> None:
    buffers = Buffers()
    piece = buffers.take(8 * PAGE_BYTES, 0)
    assert resident_pages(piece) == 0  # nothing is taken before it is written
    piece[:] = 7
    place = piece.ctypes.data
    buffers.give(piece)
    assert (buffers.warm_bytes, resident_pages(piece)) == (8 * PAGE_BYTES, 8)
    again = buffers.take(8 * PAGE_BYTES, 0)
    assert (again.ctypes.data, buffers.warm_bytes) == (place, 0)
    assert (again == 7).all()  # not cleared: no page was given back


@linux
def test_another_size_gets_the_memory_and_the_address_is_used_again() -> None:
    buffers = Buffers()
    small = [buffers.take(4 * PAGE_BYTES, 0) for _ in range(3)]
    places = {piece.ctypes.data for piece in small}
    for piece in small:
        piece[:] = 1
        buffers.give(piece)
    large = buffers.take(8 * PAGE_BYTES, 4 * PAGE_BYTES)  # beside it one of the small ones may stay
    large[:] = 2
    assert buffers.warm_bytes == 4 * PAGE_BYTES
    assert sorted(resident_pages(piece) for piece in small) == [0, 0, 4]
    buffers.release(0)
    assert sum(resident_pages(piece) for piece in small) == buffers.warm_bytes == 0
    assert (resident_pages(large), set(large)) == (8, {2})
    assert {buffers.take(4 * PAGE_BYTES, 0).ctypes.data for _ in range(3)} == places


@linux
def test_pages_that_share_a_large_one_leave_alone() -> None:
    """The first pieces of a slab lie in one large page; what is lent keeps its bytes when its neighbour goes."""
    buffers = Buffers()
    kept, left, beside = (buffers.take(5 * PAGE_BYTES, 0) for _ in range(3))
    for number, piece in enumerate((kept, left, beside)):
        piece[:] = number + 1
    buffers.give(left)
    buffers.release(0)
    assert (set(kept), set(beside)) == ({1}, {3})
    assert (resident_pages(kept), resident_pages(left), resident_pages(beside)) == (5, 0, 5)


def test_what_is_held_can_be_counted_again() -> None:
    buffers = Buffers()
    for piece in [buffers.take(nbytes, 0) for nbytes in (PAGE_BYTES, 2 * PAGE_BYTES, 2 * PAGE_BYTES)]:
        buffers.give(piece)
    buffers.warm_bytes = 7
    buffers.recount()
    assert buffers.warm_bytes == 5 * PAGE_BYTES


def test_the_largest_pages_are_given_back_first() -> None:
    buffers = Buffers()
    sizes = [PAGE_BYTES, 4 * PAGE_BYTES, 2 * PAGE_BYTES]
    for piece in [buffers.take(nbytes, 0) for nbytes in sizes]:
        buffers.give(piece)
    buffers.release(3 * PAGE_BYTES)
    assert buffers.warm_bytes == 3 * PAGE_BYTES


@linux
@pytest.mark.parametrize("seed", range(5))
def test_what_is_held_stays_in_the_room_whatever_comes_and_goes(seed: int) -> None:
    chance, buffers, limit = random.Random(seed), Buffers(), 40 * PAGE_BYTES
    lent: list[tuple[np.ndarray, int]] = []
    seen: dict[int, np.ndarray] = {}
    for number in range(400):
        nbytes = PAGE_BYTES * chance.choice([1, 2, 3, 5, 8])
        while lent and (sum(len(piece) for piece, _ in lent) + nbytes > limit or chance.random() < 0.3):
            piece, value = lent.pop(chance.randrange(len(lent)))
            assert (piece == value).all()
            buffers.give(piece)
        used = sum(len(piece) for piece, _ in lent) + nbytes
        piece = buffers.take(nbytes, limit - used)
        piece[:] = number % 251
        lent.append((piece, number % 251))
        seen[piece.ctypes.data] = piece
        assert used + buffers.warm_bytes <= limit
        if number % 20 == 0:
            assert PAGE_BYTES * sum(map(resident_pages, seen.values())) == used + buffers.warm_bytes
    assert len({id(piece) for piece, _ in lent}) == len(lent)
