"""A device of torch: a GPU by CUDA, or the processor in its place, which runs all of the same code but for streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from moert.beside.gpu.device import (
    COSTED,
    TRELLIS,
    Device,
    DeviceCosts,
    DeviceMissing,
    Held,
    Roofline,
    Running,
    WallClock,
    least_s,
    remembered_costs,
)
from moert.beside.gpu.torch_backend import (
    TILE,
    PlacedMatrix,
    PlacedNetwork,
    TorchAttention,
    TorchBackend,
    TorchKept,
    TorchNorm,
    TorchPage,
    TorchPositions,
    attend,
    ffn,
    pages,
    product,
)
from moert.beside.gpu.torch_matrices import (
    Copies,
    Fetched,
    Kind,
    TorchMatrix,
    TorchMemory,
    array_of,
    lying,
    sent,
    stream_of,
)
from moert.errors import said
from moert.kernels.backend import I32, Backend, BackendOf, Expert, ExpertView, ProjectionView, opaque
from moert.kernels.pages import PageLayout
from moert.pack.codec import CODES, F32, n_groups, row_bytes, stream_bytes
from moert.pack.parts import Act, Attention, Ffn

_ROWS, _COLS, _GROUP, _TOKENS = 1024, 1024, 64, 64
_COPIED = 8 << 20
_FEATURES = 16


def measured(device: Device, memory: TorchMemory) -> DeviceCosts:
    """Returns the costs of a device with that memory. Each figure is the least of a few tries, after one that does not
    count."""
    widths, place = {}, memory.device
    for bits in COSTED:
        matrix = _matrix(bits, place)
        one, many = (_product_s(matrix, tokens) for tokens in (1, _TOKENS))
        widths[bits] = Roofline(one / (_ROWS * _COLS), many / (_ROWS * _COLS * _TOKENS))
    most = min(_COPIED, device.capacity_bytes // 2)
    small, large = (_copy_s(device, nbytes) for nbytes in (1, most))
    one, two = (_mixture_s(device, experts) for experts in (1, 2))
    launch = max(0.0, two - one)
    speed, step = most / max(1e-9, large - small), _step_s(memory)
    return DeviceCosts(widths, launch, max(0.0, one - launch), small, speed, step, by_caller=True)


def _matrix(bits: int, device: torch.device) -> TorchMatrix:
    """Returns a matrix of zeros, to measure with."""
    if bits == 16:
        return TorchMatrix("BF16", _COLS, _COLS, torch.zeros((_ROWS, _COLS), dtype=torch.bfloat16, device=device))
    if bits == TRELLIS:
        stream = torch.zeros(stream_bytes(2, _ROWS, _COLS), dtype=torch.uint8, device=device)
        scale = torch.zeros((_ROWS, 1), dtype=torch.float16, device=device)
        return TorchMatrix("trellis", _COLS, _COLS, stream, scale, code=CODES[2])
    kind: Kind = bits  # type: ignore[assignment]
    codes = torch.zeros((_ROWS, row_bytes(_COLS, bits)), dtype=torch.uint8, device=device)
    scale = torch.zeros((_ROWS, n_groups(_COLS, _GROUP)), dtype=torch.float16, device=device)
    return TorchMatrix(kind, _COLS, _GROUP, codes, scale, scale)


def _product_s(matrix: TorchMatrix, tokens: int) -> float:
    x = torch.zeros((tokens, _COLS), dtype=torch.float32, device=matrix.data.device)

    def run() -> None:
        product(x, matrix)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    return least_s(run)


def _copy_s(device: Device, nbytes: int) -> float:
    view = ExpertView(np.zeros(nbytes, np.uint8), {})

    def run() -> None:
        held = device.copy(view)
        device.wait(held)
        device.free(held)

    return least_s(run)


def _mixture_s(device: Device, experts: int) -> float:
    """Returns the time of a mixture of experts with one neuron [s]: the part that a mixture of any size takes."""
    part = ProjectionView((1, 1), 16, 0, "BF16", (0,))
    held = device.copy(ExpertView(np.zeros(64, np.uint8), {"up": part, "down": part}))
    x, parts, spec = np.zeros((1, 1), np.float32), np.zeros((experts, 1), np.float32), Ffn(1, Act("relu"), gated=False)

    def run() -> None:
        device.finish(device.begin([held] * experts, [1] * experts, np.zeros(experts, np.int32), x, spec), parts)

    return least_s(run)


@dataclass
class _Kept:
    """See moert.kernels.backend.KeptKeys."""

    layout: PageLayout
    length: int
    place: int
    pages: Sequence[TorchPage]


def _step_s(memory: TorchMemory) -> float:
    """Returns the time of one token's attention with one head of a few features [s]: the part that attention of any
    size takes."""
    part = Attention(1, 1, _FEATURES, 1.0, None, None, rope=None, buckets=None)
    data = torch.ones((_FEATURES, _FEATURES), dtype=torch.bfloat16, device=memory.device)
    matrices = dict.fromkeys("qkvo", TorchMatrix("BF16", _FEATURES, _FEATURES, data))
    norm = TorchNorm(data[0].to(torch.float32), None, 1e-5)
    block = TorchAttention(part, True, True, {"before": norm}, matrices, None)
    layout, x = PageLayout.of(part, 16), np.ones((1, _FEATURES), np.float32)
    kept = TorchKept(_Kept(layout, 1, 0, pages(layout, 1, memory)))

    def run() -> None:
        array_of(attend(block, sent(x, memory.device), kept, 0, TorchPositions()))

    return least_s(run)


PROCESSOR = "torch:cpu"
_ROUNDED = 512  # bytes that torch's allocator counts in


class _Expert:
    """An expert's file on a device, or on its way there: `arrived` is the event of its arrival, None once that is
    known."""

    def __init__(self, buffer: Tensor, projections: Mapping[str, ProjectionView], arrived: Any) -> None:
        self.buffer, self.arrived = buffer, arrived
        self.matrices: dict[str, TorchMatrix] = {name: lying(buffer, part) for name, part in projections.items()}


class TorchDevice:
    """See moert.beside.gpu.device.Device."""

    simulated = False

    def __init__(self, name: str, capacity_bytes: int | None) -> None:
        """`name`: "cuda:0" and so on, or "torch:cpu". Without a capacity it is most of the free memory there. Raises
        DeviceMissing."""
        self._device = _found(name)
        self._memory = TorchMemory(self._device, capacity_bytes)
        self._copies = Copies(self._device)
        self._stream: Any = stream_of(self._device) if self._device.type == "cuda" else None
        self.name, self.clock = name, WallClock()
        self.title = "this processor, by torch" if self._stream is None else torch.cuda.get_device_name(self._device)
        self.capacity_bytes = self._memory.capacity_bytes
        self._backend: Backend | None = None

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes

    def weigh(self, nbytes: int, projections: Mapping[str, ProjectionView]) -> int:
        return -(-nbytes // _ROUNDED) * _ROUNDED

    def scratch_bytes(self, rows: int, d_model: int, d_ff: int) -> int:
        """Returns the bytes for input, output and values between of the rows; and for codes of a tile, their floats,
        scales, and one of these again while they are made."""
        return 4 * rows * (3 * d_model + 4 * d_ff) + 4 * 4 * min(TILE, d_model * d_ff)

    def copy(self, view: ExpertView) -> Held:
        buffer = self._memory.empty((self.weigh(view.buffer.nbytes, view.projections),), torch.uint8)
        arrived = self._copies.send(view.buffer, buffer[: view.buffer.nbytes])
        return cast("Held", _Expert(buffer, view.projections, arrived))

    def wait_left(self, held: Held) -> None:
        """Does nothing: the expert is in a staging buffer once `copy` has returned."""

    def has(self, held: Held) -> bool:
        expert = _expert(held)
        if expert.arrived is not None and expert.arrived.query():
            expert.arrived = None
        return expert.arrived is None

    def wait(self, held: Held) -> None:
        expert = _expert(held)
        if expert.arrived is not None:
            expert.arrived.synchronize()
            expert.arrived = None

    def free(self, held: Held) -> None:
        """Frees an expert; torch's allocator keeps the memory until the streams that use it are through."""
        expert = _expert(held)
        expert.matrices.clear()
        del expert.buffer

    def begin(
        self, experts: Sequence[Held], counts: Sequence[int], tokens: I32, x: F32, spec: Ffn
    ) -> Running:  # fmt: skip
        self._memory.check(self.scratch_bytes(len(tokens), x.shape[1], spec.d_ff))
        with self._computing():
            up, at = sent(x, self._device), sent(tokens, self._device).to(torch.int64)
            parts = torch.empty((len(tokens), x.shape[1]), dtype=torch.float32, device=self._device)
            first = 0
            for held, count in zip(experts, counts, strict=True):
                expert = self._there(held)
                parts[first : first + count] = ffn(expert.matrices, up[at[first : first + count]], spec)
                first += count
            return cast("Running", Fetched(parts))

    def finish(self, running: Running, parts: F32) -> None:
        cast("Fetched", running).into(parts)

    def costs(self) -> DeviceCosts:
        """Returns the costs of this card with this torch, remembered or measured now."""
        return remembered_costs(f"{self.title}, torch {torch.__version__}", partial(measured, self, self._memory))

    def backend(self, host: Backend) -> Backend | None:
        if self._backend is None:
            made: BackendOf[PlacedMatrix, PlacedNetwork | Expert] = TorchBackend(self.name, host, self._memory)
            self._backend = opaque(made)
        return self._backend

    def full(self, give_back: Callable[[], bool]) -> None:
        self._memory.give_back = give_back

    def close(self) -> None:
        self._copies.close()
        self._memory.give_back, self._backend = _nothing, None
        if self._stream is not None:
            self._stream.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Runs a with block on the stream of computations. Raises DeviceFull."""
        with self._memory.shortage():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                yield

    def _there(self, held: Held) -> _Expert:
        """Returns an expert for a computation that begins now, whose stream waits for it by itself."""
        expert = _expert(held)
        if self._stream is not None:
            if expert.arrived is not None:
                self._stream.wait_event(expert.arrived)
            expert.buffer.record_stream(self._stream)
        return expert


def _nothing() -> bool:
    return False


def _expert(held: Held) -> _Expert:
    return cast("_Expert", held)


def _found(name: str) -> torch.device:
    """Returns the device of torch with this name. Raises DeviceMissing."""
    if name == PROCESSOR:
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise DeviceMissing(f"{said('device', name)} is no device of torch: use cuda:0 or {PROCESSOR}")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise DeviceMissing(f"{said('device', name)} is not there: {why}; leave it out to run on the processor")
    if int(number or 0) >= torch.cuda.device_count():
        raise DeviceMissing(f"{said('device', name)} is not there: there are {torch.cuda.device_count()} GPU(s)")
    return torch.device("cuda", int(number or 0))
