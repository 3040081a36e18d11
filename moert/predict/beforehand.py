"""What the hash function says of prompts that wait, worked out by another thread while others run: the table of batch
j + 1 during batch j (SiDA, Du et al. 2023, §3.1)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from moert.pack.codec import F32
from moert.predict.network import Recalled

_MOST_BYTES = 4 << 20
"""What is kept of prompts that wait; of others nothing is worked out beforehand."""
_NICE = 10  # so that whoever runs comes first
_CLOSE_S = 10.0

Prompt = tuple[int, ...]


class Ready(NamedTuple):
    """Of a prompt: y [tokens, w], and what a decoder recalls of it."""

    made: F32
    recalled: Recalled | None

    @property
    def nbytes(self) -> int:
        return self.made.nbytes + (0 if self.recalled is None else self.recalled.nbytes)


class Beforehand:
    """`work` is called by one other thread, which is started when there is something to do, at a low priority."""

    def __init__(self, work: Callable[[Prompt], Ready]) -> None:
        self.used = 0
        """Prompts that had been worked out when they began."""
        self._work = work
        self._waiting: list[Prompt] = []
        self._ready: dict[Prompt, Ready] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """These wait, the next one first; what was expected before and is not among them is over."""
        with self._lock:
            asked = list(dict.fromkeys(prompts))
            self._ready = {prompt: self._ready[prompt] for prompt in asked if prompt in self._ready}
            self._waiting = [prompt for prompt in asked if prompt not in self._ready]
            if self._waiting and self._thread is None and not self._closed:
                thread = threading.Thread(target=self._serve, name="moert-foresee", daemon=True)
                with suppress(RuntimeError):  # the system allows no more
                    thread.start()
                    self._thread = thread
            self._wake.notify()

    def take(self, prompt: Prompt) -> Ready | None:
        """What was worked out of a prompt that begins now; None where there was no time yet."""
        with self._lock:
            found = self._ready.pop(prompt, None)
            self._waiting = [other for other in self._waiting if other != prompt]
            self.used += found is not None
        return found

    def close(self) -> None:
        """Ends the thread after what it is at."""
        with self._lock:
            self._closed = True
            self._waiting, thread = [], self._thread
            self._wake.notify()
        if thread is not None:
            thread.join(_CLOSE_S)

    def _serve(self) -> None:
        if hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (prompt := self._next()) is not None:
            ready = None
            with suppress(MemoryError):  # whoever runs it will say so, if it is still so then
                ready = self._work(prompt)
            with self._lock:
                if prompt in self._waiting:
                    self._waiting.remove(prompt)
                    if ready is not None:
                        self._ready[prompt] = ready

    def _next(self) -> Prompt | None:
        with self._lock:
            while not self._closed:
                if self._waiting and sum(each.nbytes for each in self._ready.values()) < _MOST_BYTES:
                    return self._waiting[0]
                self._wake.wait()
        return None
