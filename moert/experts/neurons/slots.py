"""Blocks of neurons in memory, each in a slot of its layer, read as they are wanted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from moert.experts.neurons.balance import Balance
from moert.experts.neurons.keeping import I64, Blocks, Keeping
from moert.kernels.arena import PAGE_BYTES, Arena, forget
from moert.pack.codec import U8
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.stats import NeuronCounters

WHOLE = 0.5
"""Where more than this part of an expert's blocks is to be read, all are, in one request."""


class PieceReader(Protocol):
    """What reads of blocks what is kept of them (moert.experts.neurons.store)."""

    def n_blocks(self, key: ExpertKey) -> int: ...

    def nbytes(self, key: ExpertKey) -> int:
        """Of one block."""
        ...

    def all_bytes(self, key: ExpertKey) -> int:
        """That read_all writes."""
        ...

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        """Blocks [n] of an expert, ascending, to their places [n] in `into`. Raises PackError."""
        ...

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        """All of them into uint8 [all_bytes] → their places [n_blocks]. Raises PackError."""
        ...


class Lent(NamedTuple):
    """Block k of an expert begins at base[offsets[k]]; below 0: it is not in memory. Good until others are fetched."""

    base: U8
    offsets: I64  # [n_blocks]


class _Layer:
    """The slots of one layer, `slot_bytes` each; `first`: where the blocks of each of its experts begin."""

    def __init__(
        self, number: int, keys: Sequence[ExpertKey], reader: PieceReader, keeping: Keeping, arena: Arena
    ) -> None:
        self.number = number
        self.slot_bytes = max(map(reader.nbytes, keys))
        self.first = list(accumulate(map(reader.n_blocks, keys), initial=0))
        self.blocks = Blocks(self.first[-1], keeping)
        self.base = arena.allocate(self.first[-1] * self.slot_bytes)
        """Of all blocks: what no slot lies in takes no memory."""
        self.touched = 0
        """Slots that anything has lain in: the first ones."""

    @property
    def holds_all(self) -> bool:
        """Whether there is a slot for every block."""
        return self.blocks.n_slots == len(self.blocks.slot_of)

    @property
    def nbytes(self) -> int:
        """Of its slots."""
        return self.blocks.n_slots * self.slot_bytes

    def resize(self, n_slots: int) -> None:
        if n_slots < self.touched:
            forget(self.base[n_slots * self.slot_bytes : self.touched * self.slot_bytes])
            self.touched = n_slots
        self.blocks.resize(n_slots)


class BlockCache:
    """Never more than `capacity_bytes` of blocks, and room for all of one expert beside."""

    def __init__(
        self, layers: Mapping[LayerKey, Sequence[ExpertKey]], reader: PieceReader, counters: NeuronCounters,
        keeping: Keeping,
    ) -> None:  # fmt: skip
        """`layers`: the experts of each. Has no memory until it is resized."""
        self._reader, self._counters = reader, counters
        arena = Arena(align=PAGE_BYTES)
        self._layers = {
            at: _Layer(number, keys, reader, keeping, arena) for number, (at, keys) in enumerate(layers.items())
        }
        self._balance = Balance(len(layers))
        self.one_bytes = max(reader.all_bytes(key) for keys in layers.values() for key in keys)
        """What one expert takes at most."""
        self._one, self._one_used = arena.allocate(self.one_bytes), False
        self.all_bytes = sum(len(layer.base) for layer in self._layers.values())
        """What all blocks of all experts take."""
        self._capacity_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Memory that is taken."""
        slots = sum(layer.touched * layer.slot_bytes for layer in self._layers.values())
        return slots + (self.one_bytes if self._one_used else 0)

    @property
    def used_bytes(self) -> int:
        """What lies in slots."""
        return sum(layer.blocks.n_resident * layer.slot_bytes for layer in self._layers.values())

    def resize(self, capacity_bytes: int) -> None:
        """Shares so many bytes out to the layers: what is more than before in equal parts, what is less by what they
        have."""
        if capacity_bytes == self._capacity_bytes:
            return
        self._capacity_bytes = capacity_bytes
        if capacity_bytes >= self.all_bytes and self._one_used:
            forget(self._one)
            self._one_used = False
        self._balance.begin(capacity_bytes)
        layers, total = list(self._layers.values()), int(self._held().sum())
        if capacity_bytes < total:
            for layer in layers:
                layer.resize(layer.nbytes * capacity_bytes // total // layer.slot_bytes)
            return
        left = capacity_bytes - total
        nearly_full_first = sorted(layers, key=lambda layer: len(layer.base) - layer.nbytes)
        for place, layer in enumerate(nearly_full_first):
            share = min(left // (len(layers) - place), len(layer.base) - layer.nbytes)
            more = share // layer.slot_bytes
            layer.resize(layer.blocks.n_slots + more)
            left -= more * layer.slot_bytes

    def fetch(self, key: ExpertKey, wanted: I64) -> Lent:
        """Brings in the blocks [n] of an expert, ascending and each once. Raises PackError."""
        layer = self._layers[key.at]
        if self._balance.is_due():
            self._move()
        first, stop = layer.first[key.expert : key.expert + 2]
        slots_of, n_blocks = layer.blocks.slot_of[first:stop], stop - first
        missing = int(np.count_nonzero(slots_of[wanted] < 0))
        self._counters.blocks += len(wanted)
        self._counters.block_hits += len(wanted) - missing
        if not missing:
            layer.blocks.use(wanted + first)
            return Lent(layer.base, slots_of * layer.slot_bytes)
        if missing > layer.blocks.n_slots - layer.blocks.n_resident:
            self._balance.read(layer.number, missing * layer.slot_bytes)
        if missing > WHOLE * n_blocks and not layer.holds_all:
            return self._all(key, wanted)
        if len(wanted) > layer.blocks.n_slots:
            return self._beside(key, wanted, slots_of)
        with self._slots(layer, wanted + first) as (blocks, slots):
            self._read(key, blocks - first, layer.base, slots * layer.slot_bytes)
        return Lent(layer.base, slots_of * layer.slot_bytes)

    def fetch_all(self, key: ExpertKey) -> Lent:
        """All of them; none stays longer than it would have. Raises PackError."""
        if self._layers[key.at].holds_all:
            return self.fetch(key, np.arange(self._reader.n_blocks(key)))
        self._counters.blocks += self._reader.n_blocks(key)
        return self._all(key, np.arange(0))

    def _held(self) -> I64:
        """Bytes of the slots of each layer."""
        return np.array([layer.nbytes for layer in self._layers.values()])

    def _move(self) -> None:
        """Layers give room to others that need it more, and with it what is too little for a slot of theirs."""
        layers, held = list(self._layers.values()), self._held()
        most = np.array([len(layer.base) for layer in layers])
        left = self._capacity_bytes - int(held.sum())
        for move in self._balance.moves(held, most):
            giver, taker = layers[move.giver], layers[move.taker]
            given = -(-move.nbytes // giver.slot_bytes)
            giver.resize(giver.blocks.n_slots - given)
            left += given * giver.slot_bytes
            more = min(left, len(taker.base) - taker.nbytes) // taker.slot_bytes
            taker.resize(taker.blocks.n_slots + more)
            left -= more * taker.slot_bytes

    def _all(self, key: ExpertKey, wanted: I64) -> Lent:
        """Reads all blocks; of those that are `wanted` as many stay as there are slots for."""
        self._one_used = True
        started = time.perf_counter()
        places = self._reader.read_all(key, self._one)
        self._counters.wait_s += time.perf_counter() - started
        self._keep(key, wanted, places)
        return Lent(self._one, places)

    def _beside(self, key: ExpertKey, wanted: I64, slots_of: I64) -> Lent:
        """Reads those that are not in slots, and puts all that are `wanted` together, since there are too few slots."""
        layer, nbytes = self._layers[key.at], self._reader.nbytes(key)
        self._one_used = True
        places = np.arange(len(slots_of)) * nbytes
        missing = wanted[slots_of[wanted] < 0]
        self._read(key, missing, self._one, places[missing])
        for block in wanted[slots_of[wanted] >= 0].tolist():
            self._one[places[block] :][:nbytes] = layer.base[slots_of[block] * layer.slot_bytes :][:nbytes]
        self._keep(key, wanted, places)
        return Lent(self._one, places)

    def _read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        started = time.perf_counter()
        self._reader.read(key, blocks, into, places)
        self._counters.wait_s += time.perf_counter() - started

    def _keep(self, key: ExpertKey, wanted: I64, places: I64) -> None:
        """Of blocks that lie in the room beside the slots, as many stay in some as there are."""
        layer, nbytes = self._layers[key.at], self._reader.nbytes(key)
        first = layer.first[key.expert]
        with self._slots(layer, wanted[: layer.blocks.n_slots] + first) as (blocks, slots):
            for block, slot in zip((blocks - first).tolist(), slots.tolist(), strict=True):
                layer.base[slot * layer.slot_bytes :][:nbytes] = self._one[places[block] :][:nbytes]

    @contextmanager
    def _slots(self, layer: _Layer, blocks: I64) -> Iterator[tuple[I64, I64]]:
        """Blocks of a layer that have no contents yet, and their slots, which they lose where these can't be had."""
        before = layer.blocks.evictions
        taken = layer.blocks.want(blocks)
        layer.touched = max(layer.touched, int(taken.slots.max(initial=-1)) + 1)
        self._counters.block_evictions += layer.blocks.evictions - before
        try:
            yield taken.blocks, taken.slots
        except BaseException:
            layer.blocks.forget(taken.blocks)
            raise
