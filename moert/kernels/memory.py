"""Memory of the kernels: large pages, and files that are mapped on purpose."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from moert.kernels import library
from moert.pack.codec import U8

PAGE_BYTES = mmap.PAGESIZE
_SLAB = 64 << 20
_HUGE = 2 << 20
_LINE = 64
_ON_LINUX = sys.platform == "linux"
_UNCOUNTED = 0x4000 if _ON_LINUX else 0  # MAP_NORESERVE: pages that are not touched need no memory
# Shared memory gets no large pages; Windows has no flags.
_ANONYMOUS = (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNCOUNTED,) if hasattr(mmap, "MAP_PRIVATE") else ()


class Arena:
    """An allocator that hands out pieces of large slabs, one after the other, until the arena as a whole is dropped."""

    def __init__(self, align: int = _LINE) -> None:
        """`align`: a power of two; every piece begins on a multiple of it."""
        self._align = align
        self._free: U8 = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> U8:
        """Returns uint8 [nbytes] with undefined contents. Raises MemoryError."""
        if nbytes > len(self._free):
            self._free = _slab(max(nbytes, _SLAB))
        room, self._free = self._free[:nbytes], self._free[nbytes + -nbytes % self._align :]
        return room


def forget(piece: U8) -> None:
    """Gives the whole pages of a piece of an arena back to the system; their contents are lost, the piece may be used
    again.

    From then on it is of small pages: the system would fill holes in large ones again by itself.
    """
    start = piece.ctypes.data + -piece.ctypes.data % PAGE_BYTES
    nbytes = (piece.ctypes.data + len(piece) - start) // PAGE_BYTES * PAGE_BYTES
    if nbytes > 0 and _ON_LINUX:
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_DONTNEED, mmap.MADV_NOHUGEPAGE):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)


def _slab(nbytes: int) -> U8:
    """Returns anonymous memory that begins on a large page; the system is advised to use large pages. Raises
    MemoryError."""
    size = -(-nbytes // _HUGE) * _HUGE
    try:
        region = mmap.mmap(-1, size + _HUGE, *_ANONYMOUS)
    except OSError as error:
        raise MemoryError(error.strerror) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + size]


class FencedMapping(mmap.mmap):
    """A mapping of a file's bytes, where the page cache has them, not to be written. Within its fence bytes that the
    drive does not give read as zeros; the fence stands as long as any array uses the bytes."""

    path: str = ""
    """The path of the file, for messages."""
    lost: list[str] | None = None
    """A list that gets the path when the mapping ends and has broken, since copies of its bytes may be zeros."""
    _fence: int = -1
    _call: Any = None

    def fence(self, call: Any) -> bool:
        """Puts a fence around the mapping; returns False where no fence can be had."""
        self._fence = call.moert_fence(np.frombuffer(self, np.uint8).ctypes.data, len(self))
        self._call = call
        return self._fence >= 0

    @property
    def is_broken(self) -> bool:
        """Returns whether zeros were read within the fence in place of bytes that are not there."""
        return bool(self._call.moert_fence_broken(self._fence))

    def __del__(self) -> None:  # before it is unmapped
        if self._fence < 0:
            return
        if self.lost is not None and self.is_broken:
            self.lost.append(self.path)
        self._call.moert_fence_end(self._fence)
        self._fence = -1


def mapped(fd: int, nbytes: int, offset: int = 0) -> tuple[U8, FencedMapping] | None:
    """Returns bytes of a file, and the mapping that holds them; None where the file is shorter or can't be mapped, or
    without the kernels that have fences."""
    found = library.load()
    if found is None or not hasattr(mmap, "MAP_PRIVATE"):
        return None
    try:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)  # all pages at once
        mapping = FencedMapping(fd, nbytes, flags, mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):  # shorter, or no file that can be mapped
        return None
    return (np.frombuffer(mapping, np.uint8), mapping) if mapping.fence(found.functions) else None


def breaks() -> int:
    """Returns how often any fence has broken in this process."""
    found = library.load()
    return 0 if found is None else int(found.functions.moert_fences_broken())
