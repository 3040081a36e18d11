"""Files that are mapped on purpose, inside a fence: one that becomes shorter meanwhile reads as zeros, and says so,
where the system would end the process."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from moert.kernels import library
from moert.pack.codec import U8


class FencedMapping(mmap.mmap):
    """Bytes of a file where the page cache has them, not to be written. The fence stands as long as anything uses
    them."""

    path: str = ""
    """Of the file, for messages."""
    lost: list[str] | None = None
    """Gets the path when the mapping ends and has broken, since what was copied of it may be zeros."""
    _fence: int = -1
    _call: Any = None

    def fence(self, call: Any) -> bool:
        """Puts one around it; False where that can't be had."""
        self._fence = call.moert_fence(np.frombuffer(self, np.uint8).ctypes.data, len(self))
        self._call = call
        return self._fence >= 0

    @property
    def is_broken(self) -> bool:
        """Whether a part of it was asked for and not there."""
        return bool(self._call.moert_fence_broken(self._fence))

    def __del__(self) -> None:  # before it is unmapped
        if self._fence < 0:
            return
        if self.lost is not None and self.is_broken:
            self.lost.append(self.path)
        self._call.moert_fence_end(self._fence)
        self._fence = -1


def mapped(fd: int, nbytes: int, offset: int = 0) -> tuple[U8, FencedMapping] | None:
    """Bytes of a file, and what holds them; None where the file is shorter or can't be mapped, or without the kernels
    that have fences."""
    found = library.load()
    if found is None:
        return None
    try:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once
        mapping = FencedMapping(fd, nbytes, flags, mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):  # shorter, or no file that can be mapped
        return None
    return (np.frombuffer(mapping, np.uint8), mapping) if mapping.fence(found.functions) else None


def breaks() -> int:
    """How often any fence has broken in this process."""
    found = library.load()
    return 0 if found is None else int(found.functions.moert_fences_broken())
