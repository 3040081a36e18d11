"""Lets requests in as far as memory goes, and says what a user may not expect of that."""

from __future__ import annotations

import sys
from collections.abc import Callable

from moert.budget.regulator import Regulator
from moert.experts.ahead import Lookahead
from moert.experts.streaming import Streaming
from moert.models.footprint import Loads
from moert.pack.shown import in_one_line

Notify = Callable[[str], None]
"""Gets one line about something that works, but not as well as a user may think."""


class Admission:
    """A Gate of moert.generation.session."""

    def __init__(self, regulator: Regulator, streaming: Streaming, ahead: Lookahead | None) -> None:
        self.notify: Notify = to_stderr
        self.notes: list[str] = []
        """For the first request that runs."""
        self.smallest_room_bytes = sys.maxsize
        """The least that experts had while anything ran."""
        self._regulator, self._streaming, self._ahead = regulator, streaming, ahead
        self._warned = self._split = False

    def check(self, loads: Loads, beside: Loads = ()) -> None:
        self._regulator.check(loads, beside)

    def together(self, running: Loads, waiting: Loads) -> int:
        count = self._regulator.together(running, waiting)
        if count < len(waiting) and not self._split:
            self._split = True
            self.notes.append(
                f"{len(running) + len(waiting)} prompts at once would take the experts' memory: they run "
                f"{len(running) + count} at a time"
            )
        return count

    def before(self, loads: Loads) -> None:
        room_bytes, warning = self._regulator.before(loads)
        if warning is not None and not self._warned:
            self._warned = True
            self.notes.append(warning)
        while self.notes:
            self.notify(self.notes.pop(0))
        self._streaming.expects()
        self._adapt(room_bytes)
        self._streaming.begins()

    def aside(self, nbytes: int, purpose: str) -> None:
        """Makes room for what is done beside the model, until requests begin or go on. Raises BudgetTooSmall."""
        self._regulator.aside(nbytes, purpose)

    def after(self, loads: Loads) -> None:
        self._regulator.after(loads)
        self._adapt(self._streaming.capacity_bytes)
        self._streaming.cache.settle()

    def idle(self) -> None:
        if self._ahead is not None:
            self._ahead.forget()

    def _adapt(self, room_bytes: int) -> None:
        self.smallest_room_bytes = min(self.smallest_room_bytes, self._streaming.capacity_bytes)
        self._streaming.adapt(room_bytes, self.notify)


def to_stderr(note: str) -> None:
    print(in_one_line(f"moert: {note}"), file=sys.stderr)
