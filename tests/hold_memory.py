"""A plugin of pytest's, `-p tests.hold_memory`: the process of the tests holds 2 GB more, and no test may notice."""

from __future__ import annotations

import mmap

import pytest

HELD_BYTES = 2 * 10**9


def pytest_configure(config: pytest.Config) -> None:
    held = mmap.mmap(-1, HELD_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, HELD_BYTES, mmap.PAGESIZE):
        held[page] = 1
    config.add_cleanup(held.close)
