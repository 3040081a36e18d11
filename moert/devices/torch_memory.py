"""Memory of a device of torch: never more than was allowed, and a named error where there is no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import finalize

import torch
from torch import Tensor

from moert.devices.device import DeviceFull
from moert.stats import size

_CPU_BYTES = 1 << 30
"""What a device that only stands for one may have where nothing is said."""
_FREE_PART = 10  # of what is free on a GPU, what is left to its driver and others


class TorchMemory:
    """Of one device. On a GPU torch's allocator counts, and holds the limit for all that is done there; what lies on
    the processor is counted here, so that the same limit can be tried without a GPU."""

    def __init__(self, device: torch.device, capacity_bytes: int | None) -> None:
        self.device, self._counted = device, 0
        self.give_back: Callable[[], bool] = lambda: False
        """Asked where matrices, keys and values find no room: whether there is more now."""
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
        """Room that is given back with what it lies in. Raises DeviceFull."""
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        self.check(nbytes)
        with self.shortage():
            found = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.count(found, nbytes)
        return found

    def check(self, nbytes: int) -> None:
        """Raises DeviceFull if so many more bytes are more than it may have."""
        if not self.fits(nbytes):
            left = size(max(0, self.capacity_bytes - self.used_bytes))
            raise DeviceFull(
                f"{self.device} has {left} of {size(self.capacity_bytes)} left, {size(nbytes)} are asked for"
            )

    def count(self, owner: object, nbytes: int) -> None:
        """So many bytes are held until the owner is gone."""
        self._counted += nbytes
        finalize(owner, self._release, nbytes).atexit = False

    @contextmanager
    def shortage(self) -> Iterator[None]:
        """Where the device has no memory for what is done inside: DeviceFull."""
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
