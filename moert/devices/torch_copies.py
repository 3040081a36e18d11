"""Copies to a device of torch that go beside what it computes: out of pinned memory, on a stream of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moert.devices.device import STAGING_BUFFERS
from moert.pack.codec import F32, U8

_PIECE_BYTES = 4 << 20


class Copies:
    """Of bytes in memory to a GPU. They pass STAGING_BUFFERS pieces of pinned memory in turn, whatever their size;
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
        """Begins to copy the source, which may be changed once this returns, into a target of as many bytes; gives the
        event of its arrival, None if it is there already."""
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
        """Waits for what was begun."""
        if self._pieces:
            self._stream.synchronize()
        self._pieces = []


def stream_of(device: torch.device) -> Any:
    """A new stream on a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def event() -> Any:
    """What a stream passes, and others may wait for."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on a device, in its order on the present stream; it may be changed once this returns. On the processor
    it is the array itself."""
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array))
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


class Fetched:
    """What is on its way from a device to memory, behind all that was begun on the present stream."""

    def __init__(self, made: Tensor) -> None:
        self._made = made
        self._event: Any = None
        if made.is_cuda:
            self._made = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
            self._made.copy_(made, non_blocking=True)
            self._event = event()
            self._event.record()

    def into(self, out: F32) -> None:
        """Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        np.copyto(out, self._made.numpy())
