"""The memory and the turns of engines in one process: needs of packs, their shares, and the bytes that engines hold."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from moert.chat.renderer import Renderer, chat_of
from moert.engine.budget import BARE_BYTES, MemoryLimit, budget_of, room_within
from moert.engine.engine import threads_of
from moert.engine.regulator import TYPICAL, Others
from moert.engine.settings import EngineSettings
from moert.engine.text import Text
from moert.errors import ChatImpossible
from moert.kernels import REFERENCE, library
from moert.machine import held_bytes, most_bytes, return_early, return_freed, thread_bytes
from moert.models.footprint import Footprint
from moert.pack.reader import Pack

_LETTERS = 1024  # of a usual conversation


class Need(NamedTuple):
    """The memory of a pack beside the process itself [bytes]: the least that a usual request runs in, while a
    conversation is rendered beside it, and the most that all experts take then."""

    least: int
    most: int


def need_of(path: Path, settings: EngineSettings, base_bytes: int) -> Need:
    """Returns the need of a pack in a process that holds `base_bytes` without any. Raises PackError, or BudgetTooSmall
    for a pack whose manifest or tokenizer can't be read in the limit."""
    pack = Pack.open(path, room_within(settings.limit))
    widened = settings.kernels == REFERENCE or library.missing() is not None
    budget = budget_of(pack, widened, thread_bytes(threads_of(settings.threads)[0]), 0)
    footprint = Footprint(pack.manifest.model, widened, settings.kv, bool(pack.manifest.preferences))
    request = footprint.request([TYPICAL])
    with suppress(ChatImpossible):
        renderer = Renderer(chat_of(pack, Text(pack), settings.template))
        said = [{"role": "user", "content": "a" * _LETTERS}]
        request += renderer.takes(renderer.request(said, None, None, True))
    least = budget.smallest_memory(base_bytes, request) - max(base_bytes, BARE_BYTES)
    return Need(least, least + math.ceil((budget.expert_bytes - budget.layer_bytes) / budget.filled))


def shares(room_bytes: int, needs: Mapping[str, Need]) -> dict[str, int] | None:
    """Returns the share of each pack in a room: its least, and of the rest a part in proportion to the room of its
    experts; None where not all have their least."""
    rest = room_bytes - sum(need.least for need in needs.values())
    if rest < 0:
        return None
    wanted = {name: 1 + need.most - need.least for name, need in needs.items()}
    return {name: need.least + rest * wanted[name] // sum(wanted.values()) for name, need in needs.items()}


class Queue:
    """A queue of threads for one thing: who comes first has it first, which a lock does not promise."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._now = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn of this thread."""
        with self._changed:
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._now == mine)
        try:
            yield
        finally:
            with self._changed:
                self._now += 1
                self._changed.notify_all()


class Sharing:
    """The memory limit of engines in one process. While one of them has its turn, the memory of the others stays as
    it is, and all that changes belongs to this one."""

    def __init__(self, settings: EngineSettings) -> None:
        held, asked = held_bytes(), settings.limit
        self.queue = Queue()
        self.limit_bytes = asked.resolve(held, most_bytes()) if isinstance(asked, MemoryLimit) else None
        self.base_bytes = max(held, BARE_BYTES)
        self.shares: dict[str, int] = {}
        self._held: dict[str, int] = {}
        if self.limit_bytes is not None:
            return_early()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Waits for the turn of an engine, and measures its memory at the end."""
        if self.limit_bytes is None:
            yield
            return
        with self.queue.turn():
            try:
                yield
            finally:
                self._held[name] = max(0, held_bytes() - self.base_bytes - self._others_bytes(name))

    def others(self, name: str) -> Others:
        """Returns the other engines, as an engine sees them."""
        return Others(lambda: self._others_bytes(name), self.promised_bytes(name))

    def promised_bytes(self, name: str) -> int:
        """Returns the bytes of the limit that are the shares of other engines."""
        return sum(share for other, share in self.shares.items() if other != name)

    def plan(self, needs: Mapping[str, Need]) -> dict[str, int] | None:
        """Returns the shares of packs that are in memory together; None where there is no room for all. Without a limit
        they need room for all their experts in the memory that this machine has free, if it says how much."""
        if self.limit_bytes is not None:
            return shares(self.limit_bytes - self.base_bytes, needs)
        most = most_bytes()
        fits = most is None or sum(need.most for need in needs.values()) <= most - self.base_bytes
        return dict.fromkeys(needs, 0) if fits else None

    def leave(self, name: str, close: Callable[[], None]) -> None:
        """Closes an engine, and returns its memory to the system: some of it lies in cycles of references."""
        with self.queue.turn():
            close()
            gc.collect()
            return_freed()
            self.shares.pop(name, None)
            self._held.pop(name, None)

    def _others_bytes(self, name: str) -> int:
        return sum(held for other, held in list(self._held.items()) if other != name)
