"""Keys and values on a device: pages that are there and in memory too. Attention on the device reads those there; a
sequence goes on in memory where the device has no room for them, and gives back what it took."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moert.devices.device import DeviceFull
from moert.devices.torch_matrices import array_of
from moert.devices.torch_memory import TorchMemory
from moert.kernels.backend import KeptKeys
from moert.kernels.pages import KEYS, Page, PageLayout
from moert.pack.codec import U8

_LEAST, _MOST_HALF = 2.0**-10, 65504.0


class TorchPage(Page):
    """A page in memory that has a copy on the device, once that was asked for. `length`: how many of its first tokens
    are there as they are in memory."""

    def __init__(self, layout: PageLayout, buffer: U8, memory: TorchMemory) -> None:
        super().__init__(layout, buffer)
        self.length = 0
        self._memory = memory
        self._there: Tensor | None = None
        self._parts: list[Tensor] = []

    def copy(self) -> TorchPage:
        """With a copy of what is on the device, if there is room for that."""
        (twin,) = pages(self.layout, 1, self._memory)
        np.copyto(twin.buffer, self.buffer)
        if self._there is not None:
            try:
                twin.parts(0)
            except DeviceFull:
                return twin
            assert twin._there is not None
            twin._there.copy_(self._there)
            twin.length = self.length
        return twin

    def parts(self, tokens: int) -> list[Tensor]:
        """Keys, values, and their steps, with the first `tokens` of them; shapes as in memory. Raises DeviceFull."""
        if self._there is None:
            self._there = self._memory.empty((self.buffer.nbytes,), torch.uint8)
            heads = self._there.view(self.layout.kv, -1)
            self._parts = [
                heads[:, slice(*self.layout.places[at : at + 2])]
                .view(torch.from_numpy(part[:0]).dtype)
                .view(part.shape)
                for at, part in enumerate(self.arrays)
            ]
        if self.length < tokens:
            self._there.copy_(torch.from_numpy(self.buffer))
            self.length = tokens
        return self._parts

    def leave(self) -> None:
        """From now on it is in memory alone, until it is asked for."""
        self._there, self._parts, self.length = None, [], 0

    @property
    def arrays(self) -> list[Any]:
        """What `parts` has copies of."""
        return [self.keys, self.values, self.key_steps, self.value_steps]


def pages(layout: PageLayout, count: int, memory: TorchMemory) -> list[TorchPage]:
    """New ones, in memory alone so far."""
    return [TorchPage(layout, page.buffer, memory) for page in layout.pages(count) if isinstance(page, Page)]


class TorchKept:
    """Keys and values of one attention of one sequence."""

    def __init__(self, kept: KeptKeys) -> None:
        self._kept = kept

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """key [tokens, kv, dim] and value [tokens, kv, value_dim] in float32, from the token `start` on, rounded as
        memory rounds them: on the device and in memory. Raises DeviceFull."""
        given = _rounded(self._kept.layout.bits, key, value)
        arrays = [array_of(part) for part in given]
        for page, within, rows in self._stretches(start, len(key)):
            _put(page.parts(within.start), within, [part[rows] for part in given])
            _put(page.arrays, within, [array[rows] for array in arrays])
            page.length = within.stop

    def read(self) -> tuple[Tensor, Tensor]:
        """All so far in float32, [kv, tokens, dim] and [kv, tokens, value_dim]. Raises DeviceFull."""
        length = self._kept.length
        parts = [
            page.parts(min(length - first, KEYS))
            for first, page in zip(range(0, length, KEYS), self._kept.pages, strict=True)
        ]
        keys, values, *steps = (torch.stack(part) for part in zip(*parts, strict=True))
        wide = [keys.to(torch.float32).transpose(2, 3), values.to(torch.float32)]
        for part, step in zip(wide, steps, strict=True):
            part *= step[..., None]
        whole = [part.transpose(0, 1).flatten(1, 2)[:, :length] for part in wide]
        return whole[0], whole[1]

    def leave(self) -> None:
        """They are in memory alone from now on."""
        for page in self._kept.pages:
            page.leave()

    def _stretches(self, start: int, tokens: int) -> Iterator[tuple[TorchPage, slice, slice]]:
        """The pages that tokens from `start` on lie in, at which places, and which of the tokens."""
        first = 0
        while first < tokens:
            at, within = divmod(start + first, KEYS)
            last = min(tokens, first + KEYS - within)
            yield self._kept.pages[at], slice(within, within + last - first), slice(first, last)
            first = last


def _put(page: list[Any], within: slice, given: list[Any]) -> None:
    """Into a page, on the device or in memory: keys and values [tokens, kv, features], and steps [tokens, kv]."""
    keys, values, *steps = given
    page[0][:, :, within] = keys.swapaxes(0, 1).swapaxes(1, 2)
    page[1][:, within] = values.swapaxes(0, 1)
    for part, step in zip(page[2:], steps, strict=True):
        part[:, within] = step.T


def _rounded(bits: int, key: Tensor, value: Tensor) -> list[Tensor]:
    """Keys and values as pages have them, and their steps."""
    (keys, key_steps), (values, value_steps) = _kept_as(bits, key), _kept_as(bits, value)
    return [keys, values, key_steps, value_steps]


def _kept_as(bits: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """See moert.kernels.reference.kept."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    fits = (largest == 0) | ((largest >= _LEAST) & (largest <= _MOST_HALF)) | ~largest.isfinite()
    power = torch.where(fits, 0, (torch.frexp(largest).exponent - 15).clamp(min=-126))
    numbers = torch.where(largest.isfinite(), x, 0) * _two_to(-power)
    steps = torch.where(largest.isfinite(), _two_to(power), torch.nan)
    if bits == 16:
        return numbers.to(torch.float16), steps[..., 0]
    each = (numbers.abs().amax(dim=-1, keepdim=True) / 127).to(torch.float16).to(torch.float32)
    whole = torch.where(each > 0, numbers / each, 0).round().clamp(-127, 127)
    return whole.to(torch.int8), (steps * each)[..., 0]


def _two_to(power: Tensor) -> Tensor:
    """Exact for -126 to 127, as no device's own power need be."""
    return ((power.to(torch.int32) + 127) << 23).view(torch.float32)
