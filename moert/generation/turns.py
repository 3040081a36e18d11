"""One thread at a time: others wait for their turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from moert.errors import Busy, Closed


class Turns:
    """For what several threads may ask and only one may do at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose turn it is
        self._over = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn of this thread. Raises Busy inside of one, which would wait for itself, and Closed after
        the last."""
        if self._is_mine():
            raise Busy("a request runs in this thread: ask for the next one when it has ended")
        with self._lock:
            if self._over:
                raise Closed("the engine is closed: open the pack again with moert.load")
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def last(self) -> Iterator[bool]:
        """The turn after which none comes; False where it has been. One that a signal broke off in this thread, before
        anything could end it, is over."""
        with nullcontext() if self._is_mine() else self._lock:
            first, self._over = not self._over, True
            yield first

    @contextmanager
    def own(self) -> Iterator[None]:
        """The turn that this thread has, or its next."""
        with nullcontext() if self._is_mine() else self.turn():
            yield

    def _is_mine(self) -> bool:
        return self._owner == threading.get_ident()
