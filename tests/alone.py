"""Runs a piece of a test in a process of its own, where what the tests hold does not count and nothing else comes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def alone(work: Callable[..., Result], *arguments: object) -> Result:
    """What `work` returns or raises. It is a function of a module; its arguments and its result can be pickled."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()
