"""How fast this machine reads memory: what a decoded token is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from recipes.bench.sized import sized

NBYTES = sized(512 << 20, 32 << 20)  # far more than any cache holds
RUNS = sized(9, 1)


def buffer() -> npt.NDArray[np.uint8]:
    """Memory of numpy's, which asks for large pages."""
    return np.ones(NBYTES, np.uint8)


def reader(data: npt.NDArray[np.uint8], threads: int) -> Callable[[], Any]:
    """Reads `data` at each call: every thread sums its part."""
    parts, pool = np.array_split(data.view(np.int64), threads), ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.sum, parts))


def read_bandwidth(threads: int, runs: int = RUNS) -> float:
    """Bytes per second, the best of `runs`."""
    read, seconds = reader(buffer(), threads), []
    for _ in range(runs):
        started = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started)
    return NBYTES / min(seconds)
