"""What the hash function says of prompts that wait, worked out by another thread while others run: the table of batch
j + 1 during batch j (SiDA, Du et al. 2023, §3.1)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

from moert.pack.codec import F32
from moert.predict.network import Recalled

_MOST_BYTES = 4 << 20
"""What is kept of prompts that wait; of others nothing is worked out beforehand."""
_TOGETHER = 256
"""Tokens of prompts that are worked out at once: short ones one by one would keep those who run from Python's lock."""
_NICE = 10  # so that whoever runs comes first, where the system has no order that gives only what is left
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
    """`work` is called by one other thread, which is started when there is something to do and gets what time is
    left."""

    def __init__(self, work: Callable[[Sequence[Prompt]], Sequence[Ready]]) -> None:
        self.used = 0
        """Prompts that had been worked out when they began."""
        self._work = work
        self._waiting: list[Prompt] = []
        self._ready: dict[Prompt, Ready] = {}
        self._told: list[Sequence[int]] | None = None  # since then nothing began
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def expect(self, prompts: Iterable[Sequence[int]]) -> None:
        """These wait, the next one first; what was expected before and is not among them is over. To say the same
        again costs nothing."""
        told = list(prompts)
        with self._lock:
            if told == self._told:
                return
            self._told, asked = told, list(dict.fromkeys(map(tuple, told)))
            self._ready = {prompt: self._ready[prompt] for prompt in asked if prompt in self._ready}
            self._waiting = [prompt for prompt in asked if prompt not in self._ready]
            if self._waiting and self._thread is None and not self._closed:
                thread = threading.Thread(target=self._serve, name="moert-foresee", daemon=True)
                with suppress(RuntimeError):  # the system allows no more
                    thread.start()
                    self._thread = thread
            if self._waiting:  # each waking takes Python's lock from those who run
                self._wake.notify()

    def take(self, prompt: Prompt) -> Ready | None:
        """What was worked out of a prompt that begins now; None where there was no time yet."""
        with self._lock:
            self._told = None
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
        _step_back()
        while prompts := self._next():
            found: dict[Prompt, Ready] = {}
            with suppress(MemoryError):  # whoever runs them will say so, if it is still so then
                found = dict(zip(prompts, self._work(prompts), strict=True))
            with self._lock:
                self._ready.update((prompt, found[prompt]) for prompt in self._waiting if prompt in found)
                self._waiting = [prompt for prompt in self._waiting if prompt not in prompts]

    def _next(self) -> list[Prompt]:
        """The first of those that wait, with as many behind it as go together; none when it is closed."""
        with self._lock:
            while not self._closed:
                if self._waiting and sum(each.nbytes for each in self._ready.values()) < _MOST_BYTES:
                    together = sum(end <= _TOGETHER for end in accumulate(map(len, self._waiting)))
                    return self._waiting[: max(1, together)]
                self._wake.wait()
        return []


def _step_back() -> None:
    """The thread that calls it gets time that nobody else wants; where the system has no such order, little of it."""
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
