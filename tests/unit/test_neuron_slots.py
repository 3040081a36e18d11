"""Blocks of neurons in memory: what is lent is what the reader has, in never more memory than there is room for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moert.beside.flash.keeping import I64, KEEPING, room_for, shares
from moert.beside.flash.store import BlockCache, Lent, NeuronCounters
from moert.pack.codec import U8
from moert.pack.model_spec import ExpertKey, LayerKey

LAYERS = {LayerKey("decoder", layer): [ExpertKey("decoder", layer, number) for number in range(2)] for layer in (0, 1)}
N_BLOCKS, NBYTES = 8, 512
KEY = ExpertKey("decoder", 1, 1)


class Drive:
    """Block k of an expert is full of one byte that no other block has."""

    def __init__(self, of_layers: tuple[int, int] = (NBYTES, NBYTES)) -> None:
        """`of_layers`: bytes of a block of each."""
        self.blocks_read: list[int] = []
        self.fails = False
        self._nbytes = of_layers

    def n_blocks(self, key: ExpertKey) -> int:
        return N_BLOCKS

    def nbytes(self, key: ExpertKey) -> int:
        return self._nbytes[key.layer]

    def all_bytes(self, key: ExpertKey) -> int:
        return N_BLOCKS * self.nbytes(key)

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        if self.fails:
            raise OSError("a drive that is gone")
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            self.blocks_read.append(block)
            into[place : place + self.nbytes(key)] = mark(key, block)

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        places = np.arange(N_BLOCKS) * self.nbytes(key)
        self.read(key, np.arange(N_BLOCKS), into, places)
        return places


def mark(key: ExpertKey, block: int) -> int:
    return 100 * key.layer + 50 * key.expert + block


def opened(slots_a_layer: int, drive: Drive | None = None) -> tuple[BlockCache, Drive, NeuronCounters]:
    drive, counters = drive or Drive(), NeuronCounters()
    cache = BlockCache(LAYERS, drive, counters, KEEPING["lru"])
    cache.resize(2 * slots_a_layer * NBYTES)
    return cache, drive, counters


def check(lent: Lent, key: ExpertKey, blocks: list[int]) -> None:
    for block in blocks:
        place = lent.offsets[block]
        assert place >= 0
        assert np.unique(lent.base[place : place + NBYTES]).tolist() == [mark(key, block)]


asked = st.lists(
    st.tuples(
        st.sampled_from([key for keys in LAYERS.values() for key in keys]), st.sets(st.integers(0, N_BLOCKS - 1))
    ),
    max_size=20,
)


@given(asked=asked, slots=st.integers(0, 2 * N_BLOCKS))
def test_what_is_lent_is_what_the_drive_has(asked: list[tuple[ExpertKey, set[int]]], slots: int) -> None:
    cache, _, counters = opened(slots)
    for key, blocks in asked:
        check(cache.fetch(key, np.array(sorted(blocks), np.int64)), key, sorted(blocks))
        assert cache.used_bytes <= 2 * slots * NBYTES
        assert cache.held_bytes <= 2 * slots * NBYTES + cache.one_bytes
    assert counters.blocks == sum(len(blocks) for _, blocks in asked)
    assert counters.block_hits <= counters.blocks


def test_what_is_in_memory_is_not_read_again() -> None:
    cache, drive, counters = opened(8)
    cache.fetch(KEY, np.array([1, 3]))
    cache.fetch(KEY, np.array([1, 2, 3]))
    assert drive.blocks_read == [1, 3, 2]
    assert (counters.blocks, counters.block_hits) == (5, 2)


def test_where_most_is_missing_all_is_read_and_the_wanted_stay() -> None:
    cache, drive, _ = opened(8)
    check(cache.fetch(KEY, np.arange(5)), KEY, list(range(5)))
    assert drive.blocks_read == list(range(N_BLOCKS))
    check(cache.fetch(KEY, np.arange(5)), KEY, list(range(5)))
    assert len(drive.blocks_read) == N_BLOCKS


def test_with_too_few_slots_no_more_is_read_than_is_wanted() -> None:
    cache, drive, _ = opened(2)
    check(cache.fetch(KEY, np.array([0, 2, 5])), KEY, [0, 2, 5])
    assert drive.blocks_read == [0, 2, 5]
    check(cache.fetch(KEY, np.array([0, 2, 6])), KEY, [0, 2, 6])
    assert drive.blocks_read == [0, 2, 5, 6]


def test_with_room_for_all_each_block_is_read_once() -> None:
    cache, drive, _ = opened(2 * N_BLOCKS)
    check(cache.fetch_all(KEY), KEY, list(range(N_BLOCKS)))
    check(cache.fetch_all(KEY), KEY, list(range(N_BLOCKS)))
    assert drive.blocks_read == list(range(N_BLOCKS))
    assert cache.held_bytes == N_BLOCKS * NBYTES, "no room beside is taken"


def test_less_room_gives_memory_back() -> None:
    cache, _, _ = opened(2 * N_BLOCKS)
    for keys in LAYERS.values():
        for key in keys:
            cache.fetch_all(key)
    assert cache.held_bytes == 4 * N_BLOCKS * NBYTES
    cache.resize(6 * NBYTES)
    assert cache.held_bytes == cache.used_bytes == 6 * NBYTES
    check(cache.fetch(KEY, np.array([5])), KEY, [5])


@pytest.fixture
def failing() -> Iterator[tuple[BlockCache, Drive]]:
    cache, drive, _ = opened(8)
    cache.fetch(KEY, np.array([1]))
    drive.fails = True
    return cache, drive


@pytest.mark.parametrize("blocks", [[1, 2], list(range(N_BLOCKS))])
def test_what_was_not_read_is_read_the_next_time(failing: tuple[BlockCache, Drive], blocks: list[int]) -> None:
    cache, drive = failing
    with pytest.raises(OSError, match="gone"):
        cache.fetch(KEY, np.array(blocks))
    drive.fails = False
    check(cache.fetch(KEY, np.array(blocks)), KEY, blocks)


room = st.integers(0, 3000)


@given(
    room_bytes=room,
    rows=st.integers(1, 900),
    least=st.integers(1, 100),
    columns=st.integers(1, 900),
    one=st.integers(1, 90),
)
def test_shares_never_come_to_more_than_the_room(
    room_bytes: int, rows: int, least: int, columns: int, one: int
) -> None:
    least = min(least, rows)
    found = shares(room_bytes, rows, least, columns, one)
    assert 0 <= found.blocks_bytes <= columns
    assert least <= found.rows_bytes <= rows
    if room_bytes >= rows + columns:
        assert found == (rows, columns)
    elif room_bytes >= least + one:
        assert found.rows_bytes + found.blocks_bytes + one <= room_bytes
        every = shares(room_bytes, rows, least, columns, one, asked=1.0)
        assert every.rows_bytes == min(rows, room_bytes - one), "what is always asked for comes first"


@given(
    rows=st.integers(1, 900), part=st.floats(0, 1), columns=st.integers(1, 900), one=st.integers(1, 90),
    asked=st.floats(0, 1),
)  # fmt: skip
def test_room_for_the_rows_of_a_token(rows: int, part: float, columns: int, one: int, asked: float) -> None:
    wanted = max(1, int(part * rows))
    room_bytes = room_for(wanted, one, asked)
    assert shares(room_bytes, rows, 1, columns, one, asked).rows_bytes >= wanted
    if room_bytes < rows + columns and columns > room_bytes:
        assert shares(max(0, room_bytes - 3), rows, 0, columns, one, asked).rows_bytes < wanted


def test_layers_that_rest_give_room_to_those_that_run() -> None:
    """As an encoder's, while the decoder writes."""
    cache, drive, _ = opened(8)
    capacity = 16 * NBYTES
    one, other = KEY, ExpertKey("decoder", 1, 0)
    for _ in range(40):
        for key in (one, other):
            for part in (np.arange(0, 3), np.arange(3, 6)):
                lent = cache.fetch(key, part)
                assert all(lent.base[lent.offsets[block]] == mark(key, block) for block in part.tolist())
        assert cache.used_bytes <= capacity
    drive.blocks_read.clear()
    for key in (one, other):
        cache.fetch(key, np.arange(0, 3))
        cache.fetch(key, np.arange(3, 6))
    assert not drive.blocks_read


def test_room_that_grows_and_shrinks_keeps_what_layers_gave_each_other() -> None:
    cache, _, _ = opened(8)
    for _ in range(40):
        for part in (np.arange(0, 3), np.arange(3, 6)):
            cache.fetch(KEY, part)
            cache.fetch(ExpertKey("decoder", 1, 0), part)
    before = cache.used_bytes
    for slots in (15, 16, 20):
        cache.resize(slots * NBYTES)
        assert before - 2 * NBYTES <= cache.used_bytes <= slots * NBYTES
    cache.resize(2 * NBYTES)
    assert cache.used_bytes <= 2 * NBYTES
    cache.resize(cache.all_bytes)
    assert len(cache.fetch_all(KEY).offsets) == N_BLOCKS


def use(cache: BlockCache, layer: int, times: int) -> None:
    for _ in range(times):
        for number in range(2):
            for part in (np.arange(0, 4), np.arange(4, 8)):
                cache.fetch(ExpertKey("decoder", layer, number), part)


def test_room_that_goes_to_and_fro_between_layers_of_other_widths_is_not_lost() -> None:
    drive, capacity = Drive((1536, 512)), 12 * 1536
    cache = BlockCache(LAYERS, drive, NeuronCounters(), KEEPING["lru"])
    cache.resize(capacity)
    for _ in range(20):
        for layer in (0, 1):
            use(cache, layer, 60)
            assert cache.used_bytes <= capacity
    use(cache, 0, 60)
    assert cache.used_bytes > capacity - 1536


def test_a_layer_gets_no_more_slots_than_it_has_blocks() -> None:
    """Where one slot that another gives is worth several of its own."""
    drive = Drive((1536, 512))
    cache = BlockCache(LAYERS, drive, NeuronCounters(), KEEPING["lru"])
    cache.resize(2 * (2 * N_BLOCKS - 1) * 512)
    use(cache, 1, 60)
    drive.blocks_read.clear()
    for number in range(2):
        cache.fetch_all(ExpertKey("decoder", 1, number))
    assert not drive.blocks_read, "all are there"


def test_the_room_of_an_expert_beside_is_given_back_when_all_fits() -> None:
    cache, _, _ = opened(4)
    cache.fetch_all(KEY)
    assert cache.held_bytes >= cache.one_bytes
    cache.resize(cache.all_bytes)
    for keys in LAYERS.values():
        for key in keys:
            cache.fetch_all(key)
    assert cache.held_bytes == cache.all_bytes
