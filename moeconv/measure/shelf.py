"""Experts as they are asked for, read by a thread one ahead; of the layer at work as many stay as there is room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moeconv.source.experts import Biases, Weights
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, ModelSpec

Load = Callable[[ExpertKey], Mapping[str, F32]]
"""Key → an expert's matrices or biases, by projection."""


class Shelf:
    """A Supply of moeconv.source.experts. `load` and `biases` run in another thread."""

    def __init__(self, spec: ModelSpec, load: Load, biases: Load, room_bytes: int) -> None:
        self.spec, self._load, self._load_biases, self.room_bytes = spec, load, biases, room_bytes
        self._reader = ThreadPoolExecutor(1, "experts")
        self._kept: dict[ExpertKey, Weights] = {}
        self._held_bytes = 0
        self._coming: deque[ExpertKey] = deque()
        self._next: tuple[ExpertKey, Future[Weights]] | None = None

    def weights(self, key: ExpertKey) -> Weights:
        if key in self._kept:
            return self._kept[key]
        found = self._fetched(key)
        self._read_next()
        nbytes = sum(weight.nbytes for weight in found)
        if self._held_bytes + nbytes <= self.room_bytes:
            self._kept[key] = found
            self._held_bytes += nbytes
        return found

    def biases(self, key: ExpertKey) -> Biases:
        found = self._load_biases(key) if self.spec.moe.ffn.bias else {}
        return tuple(torch.from_numpy(values) for values in found.values())

    def expect(self, keys: Sequence[ExpertKey]) -> None:
        self._coming = deque(key for key in keys if key not in self._kept)
        self._read_next()

    def clear(self) -> None:
        """Another layer, or other weights: nothing of what is here will be asked for."""
        self._kept.clear()
        self._held_bytes = 0
        self._coming.clear()
        self._next = None

    def _fetched(self, key: ExpertKey) -> Weights:
        if self._next is not None and self._next[0] == key:
            (_, found), self._next = self._next, None
            return found.result()
        return self._loaded(key)

    def _read_next(self) -> None:
        while self._coming and self._coming[0] in self._kept:
            self._coming.popleft()
        if self._coming and self._next is None:
            key = self._coming.popleft()
            self._next = key, self._reader.submit(self._loaded, key)

    def _loaded(self, key: ExpertKey) -> Weights:
        found = self._load(key)
        return tuple(torch.from_numpy(found[name]) for name in self.spec.moe.ffn.projections)
