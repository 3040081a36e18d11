"""How fast this machine reads memory: what a decoded token is measured against."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

NBYTES = 512 << 20  # far more than any cache holds
RUNS = 9


def read_bandwidth(threads: int, nbytes: int = NBYTES, runs: int = RUNS) -> float:
    """Bytes per second, the best of `runs`: each thread sums its part of a buffer."""
    parts = np.array_split(np.ones(nbytes // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(runs):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - started)
    return nbytes / min(seconds)
