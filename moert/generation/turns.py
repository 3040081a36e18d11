"""One thread at a time: others wait for their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


class Turns:
    """For what several threads may ask and only one may do at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose turn it is

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn of this thread. Raises RuntimeError inside of one: it would wait for itself."""
        if self._is_mine():
            raise RuntimeError("a request runs in this thread: ask for the next one when it has ended")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def last(self) -> Iterator[None]:
        """The turn after which none comes. One that a signal broke off in this thread, before anything could end it, is
        over."""
        with nullcontext() if self._is_mine() else self.turn():
            yield

    def _is_mine(self) -> bool:
        return self._owner == threading.get_ident()
