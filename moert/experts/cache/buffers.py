"""Memory that experts are read into: aligned pieces, used again and again, never more of it than asked for."""

from __future__ import annotations

from collections import defaultdict

from moert.kernels.memory import PAGE_BYTES, Arena, forget
from moert.pack.codec import U8


class Buffers:
    """Pieces by size. One that comes back keeps its pages for the next expert of the same size; where another size
    needs the memory, the pages go back to the system and only the address is kept."""

    def __init__(self) -> None:
        self._arena = Arena(align=PAGE_BYTES)
        self._warm: dict[int, list[U8]] = defaultdict(list)  # with pages
        self._cold: dict[int, list[U8]] = defaultdict(list)  # without
        self.warm_bytes = 0
        """What is held beside the pieces that are lent."""

    def take(self, nbytes: int, room_bytes: int) -> U8:
        """uint8 [nbytes], beginning on a page, with undefined contents. What stays warm afterwards fits into
        `room_bytes`. Raises MemoryError."""
        if self._warm[nbytes]:
            self.warm_bytes -= nbytes
            piece = self._warm[nbytes].pop()
        else:
            piece = self._cold[nbytes].pop() if self._cold[nbytes] else self._arena.allocate(nbytes)
        self.release(room_bytes)
        return piece

    def give(self, piece: U8) -> None:
        """The piece is not in use any more."""
        self._warm[len(piece)].append(piece)
        self.warm_bytes += len(piece)

    def release(self, room_bytes: int) -> None:
        """Gives pages back until what is held beside the lent pieces fits into `room_bytes`."""
        while self.warm_bytes > room_bytes:
            nbytes = max(size for size, pieces in self._warm.items() if pieces)
            self.warm_bytes -= nbytes  # first: cut short here, it must not count what is not there
            piece = self._warm[nbytes].pop()
            forget(piece)
            self._cold[nbytes].append(piece)

    def recount(self) -> None:
        """Counts again what is warm, after Ctrl-C has cut something short."""
        self.warm_bytes = sum(size * len(pieces) for size, pieces in self._warm.items())
