"""Reading ahead: the next part of a checkpoint is brought into memory while work on the present one goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterable[T], touch: Callable[[T], object]) -> Iterator[T]:
    """Each item in turn, while a thread touches the one after it. What `touch` raises is left to the one who reads the
    item itself; an item may be given before its touch has ended."""

    def quietly(item: T) -> None:
        with suppress(Exception):
            touch(item)

    with ThreadPoolExecutor(1, "read ahead") as reader:
        waiting = iter(items)
        for item in waiting:
            present = item
            for following in waiting:
                reader.submit(quietly, following)
                yield present
                present = following
            yield present
