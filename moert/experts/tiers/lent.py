"""Experts as the tiers take them out of the cache: for the processor, and as their bytes lie, to be copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from moert.experts.drive.store import ExpertStore
from moert.kernels.backend import Expert, ExpertView
from moert.pack.codec import U8
from moert.pack.errors import PackError
from moert.pack.model_spec import ExpertKey


class Lent(NamedTuple):
    """An expert in memory, both ways."""

    view: ExpertView
    expert: Expert


class LendingStore:
    """A Store of the cache whose experts are Lent."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store

    def nbytes(self, key: ExpertKey) -> int:
        return self._store.nbytes(key)

    def read_all(self, wanted: Sequence[tuple[ExpertKey, U8]]) -> list[U8 | PackError]:
        return self._store.read_all(wanted)

    def expert(self, key: ExpertKey, buffer: U8) -> Expert:
        return cast("Expert", Lent(self._store.view(key, buffer), self._store.expert(key, buffer)))

    def close(self) -> None:
        self._store.close()


def lent(expert: Expert) -> Lent:
    """What such a store gave to the cache."""
    return cast("Lent", expert)
