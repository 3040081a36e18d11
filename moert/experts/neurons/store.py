"""Pieces of experts on the disk: those of the blocks that are wanted, in one call, checked one by one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moert.experts.drive.files import OpenFiles
from moert.experts.drive.io import IoSettings
from moert.experts.drive.patience import FAILURES, Patience
from moert.experts.drive.reads import READ, Readers, Table, address
from moert.experts.neurons.keeping import I64
from moert.kernels.backend import Expert
from moert.pack.checksums import checksums_from_bytes
from moert.pack.codec import F32, U8
from moert.pack.errors import FileTruncated, HashMismatch, PackError
from moert.pack.model_spec import ExpertKey, LayerKey
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


def all_rows_of(layout: NeuronLayout) -> Part:
    """Where they lie together."""
    return Part(layout.rows_at, 0, layout.together_bytes, layout.n_checksums - 1)


def columns_of(layout: NeuronLayout, place: int = 0) -> Part:
    return Part(layout.columns_at, layout.columns_step, layout.columns_bytes, layout.n_blocks, place)


class Pieces:
    """Reads pieces of a pack's experts and counts what it read. Safe to use from several threads."""

    def __init__(self, pack: Pack, counters: ExpertCounters, io: IoSettings) -> None:
        """Raises PackError where neurons.safetensors is damaged."""
        self.io = io
        self._pack, self._counters, self._lock = pack, counters, threading.Lock()
        self._sums = checksums_from_bytes(pack.read_file(NEURONS), pack.manifest)
        self.layouts = {entry.key: pack.neurons(entry.key) for entry in pack.manifest.experts}
        self.layers: dict[LayerKey, list[ExpertKey]] = {}
        """The experts of each."""
        for key in self.layouts:
            self.layers.setdefault(key.at, []).append(key)
        self._patience = Patience(pack, counters, self._lock)
        self._files = OpenFiles(pack.root)  # all of them were looked at when the pack was opened
        self._readers = Readers()

    def biases(self) -> dict[ExpertKey, F32]:
        """Of down, [d_model], of all experts that have some. Raises PackError."""
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
        """These parts of blocks [n] of an expert, ascending, to what begins at their places [n] in `into`. What lies
        side by side in the file is one request. Raises PackError."""
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
        """As of ExpertStore."""
        self._files.expect()

    def close(self) -> None:
        """Closes files that nobody reads from any more."""
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
    """A Store of moert.experts.cache: of each expert gate and up, one request unless they are bundled."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def nbytes(self, key: ExpertKey) -> int:
        layout = self._pieces.layouts[key]
        return layout.together_bytes or layout.n_blocks * layout.rows_bytes

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]:
        """The rows of several experts: the place of each, or why they can't be read."""
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
        """`Rows`, which only FiringExperts looks into."""
        layout = self._pieces.layouts[key]
        return Expert(Rows(layout, buffer, _side_by_side(layout)))


class ColumnReader:
    """A PieceReader of moert.experts.neurons.slots: of each block its columns."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def n_blocks(self, key: ExpertKey) -> int:
        return self._pieces.layouts[key].n_blocks

    def nbytes(self, key: ExpertKey) -> int:
        return self._pieces.layouts[key].columns_bytes

    def all_bytes(self, key: ExpertKey) -> int:
        return self.n_blocks(key) * self._pieces.layouts[key].columns_step

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        self._pieces.read(key, [columns_of(self._pieces.layouts[key])], blocks, into, places)

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        layout = self._pieces.layouts[key]
        parts = [columns_of(layout)]
        if layout.rows_step > layout.rows_bytes:  # bundled: what lies between is read too, in one request
            parts = [rows_of(layout), columns_of(layout, layout.rows_bytes)]
        blocks = np.arange(layout.n_blocks)
        self._pieces.read(key, parts, blocks, into, blocks * layout.columns_step)
        return blocks * layout.columns_step + parts[-1].place


class BlockReader:
    """The same of whole blocks: rows, and right behind them columns. Where they lie so in the file, a block is one
    request."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def n_blocks(self, key: ExpertKey) -> int:
        return self._pieces.layouts[key].n_blocks

    def nbytes(self, key: ExpertKey) -> int:
        layout = self._pieces.layouts[key]
        return layout.rows_bytes + layout.columns_bytes

    def all_bytes(self, key: ExpertKey) -> int:
        return self.n_blocks(key) * self.nbytes(key)

    def read(self, key: ExpertKey, blocks: I64, into: U8, places: I64) -> None:
        self._pieces.read(key, self._parts(key), blocks, into, places)

    def read_all(self, key: ExpertKey, into: U8) -> I64:
        blocks = np.arange(self.n_blocks(key))
        places: I64 = blocks * self.nbytes(key)
        self._pieces.read(key, self._parts(key), blocks, into, places)
        return places

    def _parts(self, key: ExpertKey) -> list[Part]:
        layout = self._pieces.layouts[key]
        return [rows_of(layout), columns_of(layout, layout.rows_bytes)]


def _side_by_side(layout: NeuronLayout) -> I64:
    return np.arange(layout.n_blocks) * layout.rows_bytes
