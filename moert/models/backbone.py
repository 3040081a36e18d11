"""The weights of all parts but the experts: backbone.safetensors, read weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import Floats, Stored
from moert.kernels.library import crc32
from moert.pack.codec import F32, U8
from moert.pack.errors import FileMissing, HashMismatch, HeaderInvalid
from moert.pack.files import OpenedFile
from moert.pack.manifest import BACKBONE, StoredTensors, quantized, stored_tensors
from moert.pack.parts import MOST_TURN
from moert.pack.reader import Pack, all_finite, tables_of
from moert.pack.tensors import Place, header_of

_CHUNK = 1 << 20
_NAME_BYTES = 600  # of a name in the tables of tensors' places (400 measured)


_FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_TYPES: Mapping[str, Any] = {**_FLOATS, "U8": np.uint8}

Allocate = Callable[[int], U8]
"""A function that returns uint8 [nbytes] to read into."""


class StoredWeights(Mapping[str, Stored]):
    """Canonical name → weights as they are stored, each read from the open file at the time of the look-up, into memory
    that is the caller's own. A matrix with a role that is taken out with `pop` is read to memory where it may stay.

    Reading raises FileMissing, FileTruncated or HeaderInvalid.
    """

    def __init__(
        self, pack: Pack, file: OpenedFile, tensors: Mapping[str, Place], names: dict[str, StoredTensors],
        stay: Allocate,
    ) -> None:  # fmt: skip
        """`tensors`: places of the file's tensors; `names`: for each weight the tensors that stand for it."""
        self._spec, self._quantization = pack.manifest.model, pack.manifest.quantization
        self._file, self._tensors, self._names, self._stay = file, tensors, names, stay
        self._tables = tables_of(pack)

    def pop(self, name: str) -> Stored:
        """Returns the weights of this name and takes them out; of a table that stays on the drive, a view whose rows
        are read when they are asked for. Raises KeyError for a name that is not there, or no more."""
        if name in self._tables:
            table: Any = self._tables.pop(name)
            return Floats(table.dtype, table)
        found = self._read(name, self._stay if self._spec.tensors[name].role is not None else _anywhere)
        del self._names[name]
        return found

    def __getitem__(self, name: str) -> Stored:
        return self._read(name, _anywhere)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __del__(self) -> None:
        self._file.close()

    def _read(self, name: str, allocate: Allocate) -> Stored:
        dense = self._quantization.dense
        stored = next(iter(self._names[name]))
        if stored.endswith((".qweight", ".trellis")):
            return quantized(self._spec, self._quantization, name, lambda part: self._tensor(part, allocate)[1])
        dtype, data = self._tensor(stored, allocate)
        numbers = data.reshape(-1).view(np.uint8)
        if not all_finite(dtype, numbers):
            raise HeaderInvalid(f"{BACKBONE}: {name} has numbers that are not finite: convert the model again")
        found = Floats(dtype, data, 0 if dense is None else dense.power(name))
        if name.startswith("rope.") and not np.abs(found.widened()).max() <= MOST_TURN:
            raise HeaderInvalid(
                f"{BACKBONE}: {name} should turn by at most {MOST_TURN:g} a position: convert the model again"
            )
        if name.endswith(".router.table") and not _names_experts(found.widened(), n := self._spec.moe.n):
            raise HeaderInvalid(
                f"{BACKBONE}: {name} should name different experts of {n} for each token: convert the model again"
            )
        return found

    def _tensor(self, name: str, allocate: Allocate) -> tuple[Any, npt.NDArray[Any]]:
        """Returns the dtype of a tensor, and its contents."""
        place = self._tensors[name]
        into = allocate(place.stop - place.start)
        self._file.read_into(into.data, place.start)
        return place.dtype, into.view(_TYPES[place.dtype]).reshape(place.shape)


def load_backbone(pack: Pack, stay: Allocate | None = None) -> StoredWeights:
    """Returns all weights but the experts', to be read from the open file, which has the manifest's checksum. `stay`:
    memory for matrices that are kept where they are read to, as a backend has it.

    Raises FileMissing, FileTruncated, HashMismatch, HeaderInvalid, SizeOverflow, or the error that the pack's room
    raises.
    """
    if BACKBONE not in pack.manifest.files:
        raise FileMissing(f"the pack at {pack.root} lists no {BACKBONE}: convert the model again")
    file = pack.opened(BACKBONE)
    try:
        _check_checksum(file, pack.manifest.files[BACKBONE].crc32)
        tensors = header_of(file, pack.room).tensors
        pack.room(_NAME_BYTES * len(tensors), BACKBONE)
        expected = stored_tensors(pack.manifest.model, pack.manifest.quantization)
        _check(tensors, {name: what for parts in expected.values() for name, what in parts.items()})
        return StoredWeights(pack, file, tensors, expected, stay or _anywhere)
    except BaseException:
        file.close()
        raise


def _names_experts(table: F32, n: int) -> bool:
    """Returns whether each row of a router's table [vocab, top_k] has different numbers of n experts."""
    table = np.sort(table, axis=1)
    whole = bool((table == np.floor(table)).all() and (np.diff(table, axis=1) > 0).all())
    return whole and 0 <= table.min() <= table.max() < n


def _anywhere(nbytes: int) -> U8:
    return np.empty(nbytes, np.uint8)


def _check_checksum(file: OpenedFile, expected: int) -> None:
    """Reads the file once in pieces, so that it is never in memory as a whole beside the weights that are kept of it.
    Raises HashMismatch."""
    checksum = 0
    for start in range(0, file.nbytes, _CHUNK):
        checksum = crc32(file.read(min(_CHUNK, file.nbytes - start), start), checksum)
    if checksum != expected:
        raise HashMismatch(f"{BACKBONE}: checksum differs from the manifest: the file is damaged, copy it again")


def _check(found: Mapping[str, Place], expected: StoredTensors) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0][:80]!a}, which the model has not"
        raise HeaderInvalid(f"{BACKBONE} {what}: it is not that of this model")
    for name, (dtype, shape) in expected.items():
        place = found[name]
        if place.shape != shape:
            raise HeaderInvalid(f"{BACKBONE}: {name} has the shape {place.shape}, expected {shape}")
        if dtype is None and place.dtype not in _FLOATS:
            raise HeaderInvalid(
                f"{BACKBONE}: {name} should hold floating-point numbers, {', '.join(_FLOATS)}, found {place.dtype}"
            )
        if dtype not in (None, place.dtype):
            raise HeaderInvalid(f"{BACKBONE}: {name} is of the type {place.dtype}, expected {dtype}")
