"""Matrices in the bytes of a pack on a device of torch, copies to it, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moert.beside.gpu.device import STAGING_BUFFERS, DeviceFull
from moert.kernels.backend import Floats, ProjectionView, Stored
from moert.pack.codec import (
    CODES,
    E2M1,
    EVEN_ROWS,
    F32,
    MX_GROUP,
    ROWS,
    TAIL,
    U8,
    WINDOW,
    QuantizedMatrix,
    TrellisCode,
    TrellisMatrix,
    block_bytes,
    n_groups,
    row_bytes,
    rows_of_blocks,
    signs,
    stream_bytes,
    turned,
    turned_together,
)
from moert.stats import size

_PIECE_BYTES = 4 << 20


class Copies:
    """Copies from memory to a GPU. They pass STAGING_BUFFERS pieces of pinned memory in turn, whatever their size;
    where the device is the processor they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._pieces: list[tuple[Tensor, Any]] = []
        if device.type == "cuda":
            self._stream: Any = stream_of(device)
            self._pieces = [
                (torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True), event()) for _ in range(STAGING_BUFFERS)
            ]

    def send(self, source: U8, target: Tensor) -> Any:
        """Begins to copy the source, which may be changed once this returns, into a target of as many bytes; returns
        the event of its arrival, None if it is there already."""
        if not self._pieces:
            np.copyto(target.numpy(), source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which may use the target's memory yet
        for first in range(0, len(source), _PIECE_BYTES):
            some = source[first : first + _PIECE_BYTES]
            piece, left = self._pieces[self._next]
            self._next = (self._next + 1) % len(self._pieces)
            left.synchronize()
            np.copyto(piece.numpy()[: len(some)], some)
            with torch.cuda.stream(self._stream):
                target[first : first + len(some)].copy_(piece[: len(some)], non_blocking=True)
                left.record(self._stream)
        target.record_stream(self._stream)
        arrived = event()
        arrived.record(self._stream)
        return arrived

    def close(self) -> None:
        """Waits for the copies that were begun."""
        if self._pieces:
            self._stream.synchronize()
        self._pieces = []


def stream_of(device: torch.device) -> Any:
    """Returns a new stream on a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def event() -> Any:
    """Returns an event that a stream passes, and others may wait for."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns the array on a device, copied in its order on the present stream; the array may be changed once this
    returns. On the processor it is the array itself."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array))
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


class Fetched:
    """A result on its way from a device to memory, behind all work that was begun on the present stream."""

    def __init__(self, made: Tensor) -> None:
        self._made = made
        self._event: Any = None
        if made.is_cuda:
            self._made = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
            self._made.copy_(made, non_blocking=True)
            self._event = event()
            self._event.record()

    def into(self, out: F32) -> None:
        """Waits for the result, and writes it to `out`."""
        if self._event is not None:
            self._event.synchronize()
        np.copyto(out, self._made.numpy())


_CPU_BYTES = 1 << 30
"""Capacity of the processor in place of a device, where none is given."""
_FREE_PART = 10  # one part in this many of a GPU's free memory is left to its driver and others


class TorchMemory:
    """The memory of one device. On a GPU torch's allocator counts, and holds the limit for all work there; bytes on the
    processor are counted here, so that the same limit can be tried without a GPU."""

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device, self._counted = device, 0
        self.give_back: Callable[[], bool] = lambda: False
        """Called where matrices, keys and values find no room: returns whether there is more now."""
        if device.type != "cuda":
            self.capacity_bytes = _CPU_BYTES if capacity_bytes is None else capacity_bytes
            return
        free, total = torch.cuda.mem_get_info(device)
        self.capacity_bytes = min(free - free // _FREE_PART if capacity_bytes is None else capacity_bytes, total)
        torch.cuda.set_per_process_memory_fraction(self.capacity_bytes / total, device)

    @property
    def used_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return self._counted

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.capacity_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor with undefined contents, whose room is given back with it. Raises DeviceFull."""
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        self.check(nbytes)
        with self.shortage():
            found = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.count(found, nbytes)
        return found

    def check(self, nbytes: int) -> None:
        """Raises DeviceFull if `nbytes` more do not fit into the capacity."""
        if not self.fits(nbytes):
            left = size(max(0, self.capacity_bytes - self.used_bytes))
            raise DeviceFull(
                f"{self.device} has {left} of {size(self.capacity_bytes)} left, {size(nbytes)} are asked for"
            )

    def count(self, owner: object, nbytes: int) -> None:
        """Counts `nbytes` as held until the owner is gone."""
        self._counted += nbytes
        finalize(owner, self._release, nbytes).atexit = False

    @contextmanager
    def shortage(self) -> Iterator[None]:
        """Raises DeviceFull where the device has no memory for a with block."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
        else:
            return
        torch.cuda.empty_cache()
        raise DeviceFull(f"{self.device} is out of memory: {reason}")

    def _release(self, nbytes: int) -> None:
        self._counted -= nbytes


Kind = Literal[2, 3, 4, 8, "trellis", "MXFP4", "F16", "BF16", "F32"]
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_MX_BIAS = 127


@dataclass(frozen=True, eq=False)
class TorchMatrix:
    """A matrix [rows, cols]. `kind`: the bits of its codes, or how its numbers are stored. `data`: these numbers [rows,
    cols], or the bytes of codes [rows, row_bytes]; `scale` and `minimum` float16 [rows, groups], where of MXFP4 `scale`
    has the exponents, uint8. Trellis codes have their `code`, one stream [bytes] and a scale a row. `bias` float32
    [rows] is added to its products. Weights are multiplied with two to the `power`."""

    kind: Kind
    cols: int
    group: int
    data: Tensor
    scale: Tensor | None = None
    minimum: Tensor | None = None
    bias: Tensor | None = None
    power: int = 0
    code: TrellisCode | None = None

    @property
    def rows(self) -> int:
        return len(self.data) if self.scale is None else len(self.scale)

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scale, self.minimum, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def biased(self, bias: F32) -> TorchMatrix:
        """Returns the same matrix, not copied, with this bias."""
        return replace(self, bias=copied(bias, self.data.device))

    def stored(self) -> tuple[Stored, F32 | None]:
        """Returns copies in memory of the stored matrix and the bias that it was made of."""
        bias = None if self.bias is None else array_of(self.bias)
        if isinstance(self.kind, int):
            codes, scale, minimum = (
                array_of(part) for part in (self.data, self.scale, self.minimum) if part is not None
            )
            return QuantizedMatrix(self.kind, self.cols, self.group, codes, scale, minimum, self.power), bias
        if self.kind == "trellis":
            assert self.code is not None
            assert self.scale is not None
            stream, scale = array_of(self.data), array_of(self.scale)
            return TrellisMatrix(self.code.step / 2, self.cols, stream, scale, self.power), bias
        assert self.kind != "MXFP4", "matrices outside of experts are not stored so"
        data = self.data.view(torch.int16) if self.kind == "BF16" else self.data
        found = array_of(data)
        return Floats(self.kind, found.view(np.uint16) if self.kind == "BF16" else found, self.power), bias


def placed(stored: Stored, bias: F32 | None, device: torch.device) -> TorchMatrix:
    """Returns a copy on the device of a matrix outside of experts."""
    on = None if bias is None else copied(bias, device)
    if isinstance(stored, TrellisMatrix):
        (stream, scale), cols = (copied(part, device) for part in (stored.stream, stored.scale)), stored.in_features
        return TorchMatrix("trellis", cols, cols, stream, scale, None, on, stored.power, CODES[stored.bits])
    if isinstance(stored, QuantizedMatrix):
        codes, scale, minimum = (copied(part, device) for part in (stored.qweight, stored.scale, stored.minimum))
        parts = (stored.in_features, stored.group_size, codes, scale, minimum, on, stored.power)
        return TorchMatrix(_kind(stored.bits), *parts)
    cols = stored.data.shape[1]
    if stored.dtype == "BF16":
        data = copied(stored.data.view(np.int16), device).view(torch.bfloat16)
    else:
        data = copied(stored.data, device)
    return TorchMatrix(stored.dtype, cols, cols, data, bias=on, power=stored.power)


def lying(buffer: Tensor, part: ProjectionView) -> TorchMatrix:
    """Returns a matrix of an expert whose file lies in the buffer, uint8 [bytes]: not copied."""
    rows, cols = part.shape
    bias = None if part.bias_place is None else _piece(buffer, part.bias_place, torch.float32, rows)
    if part.code is not None:
        stream = _piece(buffer, part.places[0], torch.uint8, stream_bytes(part.bits, rows, cols))
        scale = _piece(buffer, part.places[1], torch.float16, rows, 1)
        return TorchMatrix("trellis", cols, cols, stream, scale, None, bias, part.power, part.code)
    if part.form is None:
        bits = int(part.bits)
        groups, size = n_groups(cols, part.group_size), row_bytes(cols, bits)
        codes = _piece(buffer, part.places[0], torch.uint8, rows, size)
        scale, minimum = (_piece(buffer, at, torch.float16, rows, groups) for at in part.places[1:])
        return TorchMatrix(_kind(bits), cols, part.group_size, codes, scale, minimum, bias, part.power)
    if part.form == "MXFP4":
        codes = _piece(buffer, part.places[0], torch.uint8, rows, row_bytes(cols, 4))
        exponents = _piece(buffer, part.places[1], torch.uint8, rows, n_groups(cols, MX_GROUP))
        return TorchMatrix("MXFP4", cols, MX_GROUP, codes, exponents, None, bias)
    data = _piece(buffer, part.places[0], _FLOATS[part.form], rows, cols)
    return TorchMatrix(part.form, cols, cols, data, bias=bias, power=part.power)


def weights(matrix: TorchMatrix, first: int = 0, stop: int | None = None) -> Tensor:
    """Returns rows first to stop - 1 in float32, [rows, cols]: the reference's values bit for bit."""
    if matrix.code is not None:
        return _times_two(_trellis(matrix, matrix.code, first, stop), matrix.power)
    data = matrix.data[first:stop]
    if matrix.scale is None:
        return _times_two(data.to(torch.float32), matrix.power)
    scale = matrix.scale[first:stop]
    if matrix.minimum is None:
        return _mxfp4(data, scale, matrix.cols)
    assert isinstance(matrix.kind, int)
    values = _codes(data, matrix.kind, matrix.cols).to(torch.float32, memory_format=torch.contiguous_format)
    values, grouped = _grouped(values, matrix.group)
    for part, join in ((scale, Tensor.mul_), (matrix.minimum[first:stop], Tensor.add_)):
        join(grouped, _each(part.to(torch.float32), matrix.group, grouped))
    return _times_two(values, matrix.power)


def _times_two(values: Tensor, power: int) -> Tensor:
    return values * 2.0**power if power else values


def chosen_rows(matrix: TorchMatrix, ids: Sequence[int]) -> Tensor:
    """Returns some rows of a matrix as they are, [len(ids), cols] in float32."""
    at = torch.tensor(ids, dtype=torch.int64).to(matrix.data.device)
    if matrix.code is not None:
        return _times_two(_turned_back(matrix, _numbers_of_rows(matrix, matrix.code, at), at), matrix.power)
    scale, minimum = (None if part is None else part[at] for part in (matrix.scale, matrix.minimum))
    return weights(replace(matrix, data=matrix.data[at], scale=scale, minimum=minimum, bias=None))


def copied(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Returns a copy on the device, which later changes of the array do not reach."""
    own = np.array(array, order="C")
    return torch.from_numpy(own).to(device)


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Returns the tensor as an array in memory; on the processor without a copy."""
    found: npt.NDArray[Any] = tensor.cpu().numpy()
    return found


def _kind(bits: int) -> Kind:
    """Returns the kind of codes of that many bits."""
    return cast("Kind", bits)


def _piece(buffer: Tensor, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
    nbytes = dtype.itemsize * int(np.prod(shape))
    return buffer[at : at + nbytes].view(dtype).view(shape)


def _codes(packed: Tensor, bits: int, cols: int) -> Tensor:
    """Returns codes uint8 [rows, cols] of packed rows; see moert.pack.codec."""
    if bits == 8:
        return packed[:, :cols]
    if bits != 3:
        return _plane(packed, bits, cols)
    low = row_bytes(cols, 2)
    return _plane(packed[:, :low], 2, cols) | (_plane(packed[:, low:], 1, cols) << 2)


def _plane(packed: Tensor, width: int, cols: int) -> Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    codes = (packed[:, :, None] >> shifts) & ((1 << width) - 1)
    return codes.flatten(1)[:, :cols]


def _grouped(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns the values, and where rows are whole groups the same as [rows, groups, group], not copied."""
    rows, cols = values.shape
    return values, values.view(rows, cols // group, group) if cols % group == 0 else values


def _each(by_group: Tensor, group: int, values: Tensor) -> Tensor:
    """Returns by_group [rows, groups] in the shape that meets `values` of _grouped."""
    if values.dim() == 3:
        return by_group[:, :, None]
    return by_group.repeat_interleave(group, dim=1)[:, : values.shape[1]]


def _mxfp4(packed: Tensor, exponents: Tensor, cols: int) -> Tensor:
    """Returns the numbers of MXFP4 rows; see moert.pack.codec.Mxfp4Matrix. The power of two is multiplied in two
    halves, neither of which leaves the range of float32."""
    codes = _plane(packed, 4, cols)
    values = _magnitudes(packed.device)[codes.to(torch.int32)]
    power = exponents.to(torch.int32) - _MX_BIAS
    half = power >> 1
    values, grouped = _grouped(values, MX_GROUP)
    for part in (half, power - half):
        grouped.mul_(_each(((part + _MX_BIAS) << 23).view(torch.float32), MX_GROUP, grouped))
    return values


@cache
def _magnitudes(device: torch.device) -> Tensor:
    """Returns the value of each code of MXFP4, [16]."""
    return torch.from_numpy(np.concatenate([E2M1, -E2M1])).to(device)


def _trellis(matrix: TorchMatrix, code: TrellisCode, first: int, stop: int | None) -> Tensor:
    """Returns rows first to stop - 1 of trellis codes [rows, cols]; see moert.pack.codec.dequantize_trellis."""
    rows, skipped = range(matrix.rows)[first:stop], first // ROWS * ROWS
    numbers = _numbers(matrix, code, skipped, first + len(rows))[first - skipped :][: len(rows)]
    return _turned_back(matrix, numbers, slice(first, stop))


def _turned_back(matrix: TorchMatrix, numbers: Tensor, rows: slice | Tensor) -> Tensor:
    """Returns the weights [rows, cols] that these numbers of the table stand for, [rows, an even number of inputs]:
    turned by a product, which is exact."""
    assert matrix.scale is not None
    cols, together = matrix.cols, turned_together(matrix.cols)
    signs_of, hadamard = turning(cols, together, matrix.data.device)
    values = (numbers[:, :cols].reshape(-1, together) @ hadamard).view(-1, cols).mul_(signs_of)
    return values.mul_(matrix.scale[rows].to(torch.float32) * together**-0.5)


def _numbers_of_rows(matrix: TorchMatrix, code: TrellisCode, at: Tensor) -> Tensor:
    """Returns the numbers that the codes of some rows [n] name, [n, an even number of inputs]."""
    first, filled = at // ROWS * ROWS, -(-matrix.rows // EVEN_ROWS) * EVEN_ROWS
    rows, pairs = (filled - first).clamp(max=ROWS), torch.arange(-(-matrix.cols // 2), device=at.device)
    bit = (pairs * rows[:, None] + (at - first)[:, None]) * code.step
    byte = (first // ROWS * block_bytes(ROWS, matrix.cols, code.step))[:, None] + bit // 8
    low, middle, high = (matrix.data[byte + i].to(torch.int32) for i in range(3))
    windows = (low | middle << 8 | high << 16) >> (bit % 8).to(torch.int32) & ((1 << WINDOW) - 1)
    return _windows(code, at.device)[2][windows].flatten(1)


def _numbers(matrix: TorchMatrix, code: TrellisCode, first: int, stop: int) -> Tensor:
    """Returns the numbers that the codes name, [rows, an even number of inputs]: from row `first`, which begins a
    block, to the end of the block of row stop - 1."""
    pairs, found, at = -(-matrix.cols // 2), list[Tensor](), first // ROWS * block_bytes(ROWS, matrix.cols, code.step)
    rows = rows_of_blocks(matrix.rows)[first // ROWS : -(-stop // ROWS)]
    for each in sorted(set(rows), reverse=True):
        blocks, nbytes = rows.count(each), block_bytes(each, matrix.cols, code.step)
        streams = matrix.data[at : at + blocks * nbytes].view(blocks, nbytes)
        named = _named(streams, code).view(blocks, pairs, each, 2).transpose(1, 2)
        found.append(named.reshape(blocks * each, 2 * pairs))
        at += blocks * nbytes
    return torch.cat(found) if found else torch.empty((0, 2 * pairs), device=matrix.data.device)


def _named(streams: Tensor, code: TrellisCode) -> Tensor:
    """Returns the pairs of numbers that the streams [blocks, bytes] name, [blocks, ..., 2]: eight steps begin with a
    byte, and a window lies in three."""
    near, (places, shifts, pairs) = streams.unfold(1, code.step + TAIL, code.step), _windows(code, streams.device)
    words = near[..., places].to(torch.int32)  # [blocks, steps / 8, 3, 8]
    windows = (words[..., 0, :] | words[..., 1, :] << 8 | words[..., 2, :] << 16) >> shifts & ((1 << WINDOW) - 1)
    return pairs[windows]


@cache
def _windows(code: TrellisCode, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the places of eight windows' bytes [3, 8], how far each begins behind its first byte [8], and the pair of
    numbers of each window [2**WINDOW, 2]."""
    begins = np.arange(8) * code.step
    pairs = code.values(np.arange(1 << WINDOW, dtype=np.uint32))
    parts = begins // 8 + np.arange(3)[:, None], (begins % 8).astype(np.int32), pairs
    places, shifts, values = (torch.from_numpy(part).to(device) for part in parts)
    return places, shifts, values


@cache
def table_of(code: TrellisCode, device: torch.device) -> Tensor:
    """Returns the numbers of the code's table in float32, [2**index]."""
    return torch.from_numpy(code.table.astype(np.float32)).to(device)


@cache
def turning(cols: int, together: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the signs of inputs [cols] and the transform of those that are turned `together`, a square matrix."""
    hadamard = turned(np.eye(together, dtype=np.float32))
    return torch.from_numpy(signs(cols)).to(device), torch.from_numpy(hadamard).to(device)
