"""Blocks of neurons: read from the drive in one call, and their slots in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from moert.beside.flash.keeping import I64, Balance, Blocks, Keeping
from moert.experts.store import FAILURES, READ, IoSettings, OpenFiles, Patience, Readers, Table
from moert.kernels.backend import Expert
from moert.kernels.library import address
from moert.kernels.memory import PAGE_BYTES, Arena, forget
from moert.pack.codec import F32, U8
from moert.pack.errors import FileTruncated, HashMismatch, PackError
from moert.pack.layout import NEURONS, NeuronLayout
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.reader import Pack, checksums_from_bytes
from moert.stats import ExpertCounters


@dataclass
class NeuronCounters:
    """Counts of experts whose neurons are read by themselves: `neurons` that were demanded, each for each token, of
    which `fired` gave anything but zero; `blocks` with a neuron that fired, each once for all tokens of a layer, and
    `block_hits` of them that were in memory. `wait_s`: the time that the model waited for blocks. Where neurons are
    predicted, the predictor named `named` of them, and `computed` are all neurons of the blocks with a named one: only
    these blocks are read, and only their neurons can fire. `way`: see RunStats.neurons."""

    neurons: int = 0
    named: int = 0
    computed: int = 0
    fired: int = 0
    blocks: int = 0
    block_hits: int = 0
    block_evictions: int = 0
    wait_s: float = 0.0
    way: str = "exact"

    def figures(self) -> dict[str, Any]:
        """Returns arguments of moert.stats.run_stats."""
        every = max(1, self.neurons)
        return {
            "waited_s": self.wait_s,
            "neurons": self.way,
            "neurons_named": self.named / every,
            "neurons_computed": self.computed / every,
            "neurons_fired": self.fired / every,
            "block_requests": self.blocks,
            "block_hits": self.block_hits,
        }


WHOLE = 0.5
"""Where more than this part of an expert's blocks is to be read, all are, in one request."""


class PieceReader(Protocol):
    """A reader of the part of each block that a cache keeps (moert.beside.flash.store)."""

    def n_blocks(self, key: ExpertKey) -> int: ...

    def nbytes(self, key: ExpertKey) -> int:
        """Returns the bytes of one block."""
        ...

    def all_bytes(self, key: ExpertKey) -> int:
        """Returns the bytes that read_all writes."""
        ...

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        """Reads blocks [n] of an expert, ascending, to their places [n] in `into`. Raises PackError."""
        ...

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        """Reads all blocks into uint8 [all_bytes]; returns their places [n_blocks]. Raises PackError."""
        ...


class Lent(NamedTuple):
    """Blocks in memory: block k of an expert begins at base[offsets[k]]; below 0: it is not in memory. Valid until the
    next fetch."""

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
        """Addresses for all blocks: parts without a slot take no memory."""
        self.touched = 0
        """Slots that were ever used: the first ones."""

    @property
    def holds_all(self) -> bool:
        """Whether there is a slot for every block."""
        return self.blocks.n_slots == len(self.blocks.slot_of)

    @property
    def nbytes(self) -> int:
        """Bytes of its slots."""
        return self.blocks.n_slots * self.slot_bytes

    def resize(self, n_slots: int) -> None:
        if n_slots < self.touched:
            forget(self.base[n_slots * self.slot_bytes : self.touched * self.slot_bytes])
            self.touched = n_slots
        self.blocks.resize(n_slots)


class BlockCache:
    """The cache of blocks: never more than `capacity_bytes`, and room for all blocks of one expert beside."""

    def __init__(
        self, layers: Mapping[LayerKey, Sequence[ExpertKey]], reader: PieceReader, counters: NeuronCounters,
        keeping: Keeping,
    ) -> None:  # fmt: skip
        """`layers`: the experts of each layer. The cache has no memory until it is resized."""
        self._reader, self._counters = reader, counters
        arena = Arena(align=PAGE_BYTES)
        self._layers = {
            at: _Layer(number, keys, reader, keeping, arena) for number, (at, keys) in enumerate(layers.items())
        }
        self._balance = Balance(len(layers))
        self.one_bytes = max(reader.all_bytes(key) for keys in layers.values() for key in keys)
        """Most bytes that one expert takes."""
        self._one, self._one_used = arena.allocate(self.one_bytes), False
        self.all_bytes = sum(len(layer.base) for layer in self._layers.values())
        """Bytes of all blocks of all experts."""
        self._capacity_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are taken."""
        slots = sum(layer.touched * layer.slot_bytes for layer in self._layers.values())
        return slots + (self.one_bytes if self._one_used else 0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in slots."""
        return sum(layer.blocks.n_resident * layer.slot_bytes for layer in self._layers.values())

    def resize(self, capacity_bytes: int) -> None:
        """Shares `capacity_bytes` out to the layers: growth in equal parts, a loss in proportion to their bytes."""
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
        """Brings in the blocks [n] of an expert, ascending and each once, and returns their places. Raises
        PackError."""
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
        """Brings in all blocks of an expert; none stays longer than it would have otherwise. Raises PackError."""
        if self._layers[key.at].holds_all:
            return self.fetch(key, np.arange(self._reader.n_blocks(key)))
        self._counters.blocks += self._reader.n_blocks(key)
        return self._all(key, np.arange(0))

    def _held(self) -> I64:
        """Returns the bytes of the slots of each layer [n_layers]."""
        return np.array([layer.nbytes for layer in self._layers.values()])

    def _move(self) -> None:
        """Moves room from layers to others that need it more, and with it bytes that were too few for a slot."""
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
        """Reads all blocks of an expert; of the `wanted` ones as many stay as there are slots for."""
        self._one_used = True
        started = time.perf_counter()
        places = self._reader.read_all(key, self._one)
        self._counters.wait_s += time.perf_counter() - started
        self._keep(key, wanted, places)
        return Lent(self._one, places)

    def _beside(self, key: ExpertKey, wanted: I64, slots_of: I64) -> Lent:
        """Reads the `wanted` blocks that are not in slots, and puts all wanted ones together beside the slots, which
        are too few."""
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
        """Copies `wanted` blocks from the room beside the slots into slots, as many as there are."""
        layer, nbytes = self._layers[key.at], self._reader.nbytes(key)
        first = layer.first[key.expert]
        with self._slots(layer, wanted[: layer.blocks.n_slots] + first) as (blocks, slots):
            for block, slot in zip((blocks - first).tolist(), slots.tolist(), strict=True):
                layer.base[slot * layer.slot_bytes :][:nbytes] = self._one[places[block] :][:nbytes]

    @contextmanager
    def _slots(self, layer: _Layer, blocks: I64) -> Iterator[tuple[I64, I64]]:
        """Yields the blocks of a layer that have no contents yet, and their slots, which they lose if reading the
        contents fails."""
        before = layer.blocks.evictions
        taken = layer.blocks.want(blocks)
        layer.touched = max(layer.touched, int(taken.slots.max(initial=-1)) + 1)
        self._counters.block_evictions += layer.blocks.evictions - before
        try:
            yield taken.blocks, taken.slots
        except BaseException:
            layer.blocks.forget(taken.blocks)
            raise


class Rows(NamedTuple):
    """Gate and up of an expert in memory: the rows piece of block k begins at buffer[offsets[k]]."""

    layout: NeuronLayout
    buffer: U8
    offsets: I64  # [n_blocks]


class Part(NamedTuple):
    """The part of every block that lies in a file as one piece: block k has file[at + k · step:][:nbytes], and the
    checksum numbered check + k. In memory it lies `place` bytes behind the beginning of the block."""

    at: int
    step: int
    nbytes: int
    check: int
    place: int = 0


def rows_of(layout: NeuronLayout) -> Part:
    return Part(layout.rows_at, layout.rows_step, layout.rows_bytes, 0)


def all_rows_of(layout: NeuronLayout) -> Part:
    """Returns the part of all rows, where they lie together."""
    return Part(layout.rows_at, 0, layout.together_bytes, layout.n_checksums - 1)


def columns_of(layout: NeuronLayout, place: int = 0) -> Part:
    return Part(layout.columns_at, layout.columns_step, layout.columns_bytes, layout.n_blocks, place)


class Pieces:
    """The pieces of a pack's experts: reads them, and counts reads and bytes. Safe to use from several threads."""

    def __init__(self, pack: Pack, counters: ExpertCounters, io: IoSettings) -> None:
        """Raises PackError where neurons.safetensors is damaged."""
        self.io = io
        self._pack, self._counters, self._lock = pack, counters, threading.Lock()
        self._sums = checksums_from_bytes(pack.read_file(NEURONS), pack.manifest)
        self.layouts = {entry.key: pack.neurons(entry.key) for entry in pack.manifest.experts}
        self.layers: dict[LayerKey, list[ExpertKey]] = {}
        """The experts of each layer."""
        for key in self.layouts:
            self.layers.setdefault(key.at, []).append(key)
        self._patience = Patience(pack, counters, self._lock)
        self._files = OpenFiles(pack.root)  # all of them were looked at when the pack was opened
        self._readers = Readers()

    def biases(self) -> dict[ExpertKey, F32]:
        """Returns the biases of down [d_model] of all experts that have one. Raises PackError."""
        return {key: bias for key in self.layouts if (bias := self._bias(key)) is not None}

    def _bias(self, key: ExpertKey) -> F32 | None:
        layout = self.layouts[key]
        if layout.bias_at is None:
            return None
        found = np.zeros(4 * layout.d_model, np.uint8)
        bias = Part(layout.bias_at, 0, found.nbytes, 2 * layout.n_blocks)
        self.read(key, [bias], np.arange(1), found, np.zeros(1, np.int64))
        return found.view(np.float32)

    def read(self, key: ExpertKey, parts: Sequence[Part], blocks: I64, into: U8, places: I64) -> None:
        """Reads these parts of blocks [n] of an expert, ascending, to their places [n] in `into`. Pieces that lie side
        by side in the file are one request. Raises PackError."""
        entry, sums = self._pack.entry(key), self._sums[key]
        reads: Table = np.zeros(len(blocks) * len(parts), READ)
        for first, part in enumerate(parts):
            some = reads[first :: len(parts)]
            some["offset"] = entry.offset + part.at + blocks * part.step
            some["nbytes"], some["place"] = part.nbytes, address(into) + places + part.place
            some["crc"] = sums[part.check + blocks]
        reads["checked"] = reads["forget"] = True
        if parts[-1].at > parts[0].at + parts[0].step:  # they lie apart
            reads = reads[reads["offset"].argsort()]
        try:
            self._read(entry.path, reads)
        except FAILURES as error:
            self._patience.again(lambda: self._read(entry.path, reads), entry.path, error)

    def expect(self) -> None:
        """See ExpertStore.expect."""
        self._files.expect()

    def close(self) -> None:
        """Closes the files that are not being read."""
        self._files.close()
        self._readers.close()

    def _read(self, path: str, reads: Table) -> None:
        started, file, failed = time.perf_counter(), self._files.take(path, self.io.direct), True
        try:
            reads["fd"] = file.fd
            failed = self._readers.read_many(reads, self.io.threads) > 0
        finally:
            self._files.give(file, failed=failed)
        if not failed:
            with self._lock:
                self._counters.reads += 1
                self._counters.bytes_read += int(reads["nbytes"].sum())
                self._counters.read_s += time.perf_counter() - started
            return
        if number := int(reads["error"].max()):
            raise OSError(number, os.strerror(number))
        if (reads["found"] < reads["nbytes"]).any():
            raise FileTruncated(f"{path} ends before its neurons do: copy the pack again")
        raise HashMismatch(f"{path}: a checksum differs from {NEURONS}: the file is damaged, copy it again")


class RowStore:
    """A Store of moert.experts.cache for gate and up of experts: one request for each, unless rows and columns are
    bundled."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def nbytes(self, key: ExpertKey) -> int:
        layout = self._pieces.layouts[key]
        return layout.together_bytes or layout.n_blocks * layout.rows_bytes

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]:
        """Reads the rows of several experts; returns the place of each, or the error that stopped its reading."""
        return [self._read(key, into) for key, into in wanted]

    def _read(self, key: ExpertKey, into: U8) -> U8 | PackError:
        layout = self._pieces.layouts[key]
        try:
            if layout.together_bytes:
                self._pieces.read(key, [all_rows_of(layout)], np.arange(1), into, np.zeros(1, np.int64))
            else:
                self._pieces.read(key, [rows_of(layout)], np.arange(layout.n_blocks), into, _side_by_side(layout))
        except PackError as error:
            return error
        return into

    def close(self) -> None:
        self._pieces.close()

    def expert(self, key: ExpertKey, buffer: U8) -> Expert:
        """Returns `Rows`, which only FiringExperts looks into."""
        layout = self._pieces.layouts[key]
        return Expert(Rows(layout, buffer, _side_by_side(layout)))


class BlockReader:
    """A PieceReader of the columns of each block, or with `whole` of its rows and, right behind them, its columns. A
    block that lies so in the file is one request."""

    def __init__(self, pieces: Pieces, whole: bool) -> None:
        self._pieces, self._whole = pieces, whole

    def n_blocks(self, key: ExpertKey) -> int:
        return self._pieces.layouts[key].n_blocks

    def nbytes(self, key: ExpertKey) -> int:
        return self._step(key, self._whole)

    def all_bytes(self, key: ExpertKey) -> int:
        return self.n_blocks(key) * self._step(key, self._with_rows(key))

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        self._pieces.read(key, self._parts(key, self._whole), blocks, into, places)

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        blocks, with_rows = np.arange(self.n_blocks(key)), self._with_rows(key)
        parts, places = self._parts(key, with_rows), blocks * self._step(key, with_rows)
        self._pieces.read(key, parts, blocks, into, places)
        return places if self._whole else places + parts[-1].place

    def _with_rows(self, key: ExpertKey) -> bool:
        """Returns whether rows are read where all blocks are: bundled rows too, which lie between the columns."""
        layout = self._pieces.layouts[key]
        return self._whole or layout.rows_step > layout.rows_bytes

    def _step(self, key: ExpertKey, with_rows: bool) -> int:
        layout = self._pieces.layouts[key]
        return layout.columns_bytes + (layout.rows_bytes if with_rows else 0)

    def _parts(self, key: ExpertKey, with_rows: bool) -> list[Part]:
        layout = self._pieces.layouts[key]
        return [rows_of(layout), columns_of(layout, layout.rows_bytes)] if with_rows else [columns_of(layout)]


def _side_by_side(layout: NeuronLayout) -> I64:
    return np.arange(layout.n_blocks) * layout.rows_bytes
