"""Pieces of experts on the disk: those of the blocks that are wanted, in one call, checked one by one."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moert.experts.drive.io import IoSettings, open_expert
from moert.experts.drive.patience import patiently
from moert.experts.drive.reads import READ, Reader, Table, address, open_reader
from moert.experts.neurons.keeping import I64
from moert.kernels.backend import Expert
from moert.pack.checksums import checksums_from_bytes
from moert.pack.codec import F32, U8
from moert.pack.errors import FileTruncated, HashMismatch
from moert.pack.model_spec import ExpertKey
from moert.pack.neurons import NEURONS, NeuronLayout
from moert.pack.reader import Pack
from moert.stats import ExpertCounters


class Rows(NamedTuple):
    """Gate and up of an expert in memory: the rows piece of block k begins at buffer[offsets[k]]."""

    layout: NeuronLayout
    buffer: U8
    offsets: I64  # [n_blocks]


class Part(NamedTuple):
    """What of every block lies in a file as one piece: that of block k is file[at + k · step:][:nbytes], its checksum
    the one numbered check + k. It comes `place` bytes behind the beginning of what is kept of the block."""

    at: int
    step: int
    nbytes: int
    check: int
    place: int = 0


def rows_of(layout: NeuronLayout) -> Part:
    return Part(layout.rows_at, layout.rows_step, layout.rows_bytes, 0)


def columns_of(layout: NeuronLayout, place: int = 0) -> Part:
    return Part(layout.columns_at, layout.columns_step, layout.columns_bytes, layout.n_blocks, place)


class Pieces:
    """Reads pieces of a pack's experts and counts what it read. Safe to use from several threads."""

    def __init__(self, pack: Pack, counters: ExpertCounters, io: IoSettings) -> None:
        """Raises PackError where neurons.safetensors is damaged."""
        self.io = io
        self.leaves_page_cache = False
        """As of ExpertStore."""
        self._pack, self._counters, self._lock = pack, counters, threading.Lock()
        self._sums = checksums_from_bytes(pack.read_file(NEURONS), pack.manifest)
        self._layouts = {entry.key: pack.neurons(entry.key) for entry in pack.manifest.experts}
        self._own = threading.local()

    def files(self) -> list[Path]:
        """The files of all experts."""
        return [self._pack.file(path) for path in dict.fromkeys(entry.path for entry in self._pack.manifest.experts)]

    def layout(self, key: ExpertKey) -> NeuronLayout:
        return self._layouts[key]

    def bias(self, key: ExpertKey) -> F32 | None:
        """The biases [d_model] of down; None where there are none. Raises PackError."""
        layout = self._layouts[key]
        if layout.bias_at is None:
            return None
        found = np.zeros(4 * layout.d_model, np.uint8)
        bias = Part(layout.bias_at, 0, found.nbytes, 2 * layout.n_blocks)
        self.read(key, [bias], np.arange(1), found, np.zeros(1, np.int64))
        return found.view(np.float32)

    def read(self, key: ExpertKey, parts: Sequence[Part], blocks: I64, into: U8, places: I64) -> None:
        """These parts of blocks [n] of an expert, ascending, to what begins at their places [n] in `into`. What lies
        side by side in the file is one request. Raises PackError."""
        entry, sums = self._pack.entry(key), self._sums[key]
        reads: Table = np.zeros(len(blocks) * len(parts), READ)
        for first, part in enumerate(parts):
            some = reads[first :: len(parts)]
            some["offset"] = entry.offset + part.at + blocks * part.step
            some["nbytes"], some["place"] = part.nbytes, address(into) + places + part.place
            some["crc"] = sums[part.check + blocks]
        reads["checked"], reads["forget"] = True, not self.leaves_page_cache
        if len(parts) > 1:
            reads = reads[reads["offset"].argsort()]
        nbytes = int(reads["nbytes"].sum())
        patiently(lambda: self._read(entry.path, reads), nbytes, self._counters, self._lock, self._pack, entry.path)

    def _read(self, path: str, reads: Table) -> None:
        handle = open_expert(os.path.join(self._pack.root, path), self.io.direct)  # looked at when the pack was opened
        try:
            reads["fd"] = handle
            if not self._reader.read_many(reads):
                return
        finally:
            os.close(handle)
        if failed := int(reads["error"].max()):
            raise OSError(failed, os.strerror(failed))
        if (reads["found"] < reads["nbytes"]).any():
            raise FileTruncated(f"{path} ends before its neurons do: copy the pack again")
        raise HashMismatch(f"{path}: a checksum differs from {NEURONS}: the file is damaged, copy it again")

    @property
    def _reader(self) -> Reader:
        """Of this thread."""
        if not hasattr(self._own, "reader"):
            self._own.reader = open_reader(self.io.threads)
        reader: Reader = self._own.reader
        return reader


class RowStore:
    """A Store of moert.experts.cache: of each expert gate and up, one read where they lie together."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def nbytes(self, key: ExpertKey) -> int:
        layout = self._pieces.layout(key)
        return layout.n_blocks * layout.rows_bytes

    def read(self, key: ExpertKey, into: U8) -> U8:
        """Raises PackError."""
        layout = self._pieces.layout(key)
        self._pieces.read(key, [rows_of(layout)], np.arange(layout.n_blocks), into, _side_by_side(layout))
        return into

    def expert(self, key: ExpertKey, buffer: U8) -> Expert:
        """`Rows`, which only FiringExperts looks into."""
        layout = self._pieces.layout(key)
        return Expert(Rows(layout, buffer, _side_by_side(layout)))


class ColumnReader:
    """A PieceReader of moert.experts.neurons.slots: of each block its columns."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def n_blocks(self, key: ExpertKey) -> int:
        return self._pieces.layout(key).n_blocks

    def nbytes(self, key: ExpertKey) -> int:
        return self._pieces.layout(key).columns_bytes

    def all_bytes(self, key: ExpertKey) -> int:
        return self.n_blocks(key) * self._pieces.layout(key).columns_step

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        self._pieces.read(key, [columns_of(self._pieces.layout(key))], blocks, into, places)

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        layout = self._pieces.layout(key)
        parts = [columns_of(layout)]
        if layout.rows_step > layout.rows_bytes:  # bundled: what lies between is read too, in one request
            parts = [rows_of(layout), columns_of(layout, layout.rows_bytes)]
        blocks = np.arange(layout.n_blocks)
        self._pieces.read(key, parts, blocks, into, blocks * layout.columns_step)
        return blocks * layout.columns_step + parts[-1].place


def _side_by_side(layout: NeuronLayout) -> I64:
    return np.arange(layout.n_blocks) * layout.rows_bytes
