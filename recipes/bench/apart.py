"""Calls in a process of their own: one that ends with an abort, as C code may, takes nothing else with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Failure(Exception):
    """A call that came to nothing; one line says why."""


class Apart:
    """One process with one thread, started when it is needed and anew after it has ended. Use it as a context."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function` can be pickled, and so can all that goes in and out. Raises Failure for whatever it raises."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_one_thread)
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self.close()
            raise Failure("its process ended") from None
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {' '.join(str(error).split())}") from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_thread() -> None:
    torch.set_num_threads(1)
