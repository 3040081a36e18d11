"""Memory for experts: used again, aligned, and given back to the system where another size needs it."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys

import numpy as np
import pytest

from moert.experts.cache import Buffers
from moert.kernels.memory import PAGE_BYTES

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
