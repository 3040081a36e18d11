"""What a conversion says on its way, and what its report keeps of that: notes, and what each step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moeconv.artifacts import Step
from moeconv.measure.journal import Journal
from moeconv.progress import Progress


class Account:
    """`say` takes messages for a person, `progress(label, total)` shows how far a sweep is. `notes` are on what the
    promise does not cover."""

    def __init__(self, say: Callable[[str], None], progress: Progress) -> None:
        self.say, self.progress = say, progress
        self.notes: list[str] = []
        self.steps: list[Step] = []
        self._started = time.perf_counter()

    def seconds(self) -> float:
        """What this run has taken until now."""
        return time.perf_counter() - self._started

    def note(self, line: str | None) -> None:
        """Says it now, and in the report."""
        if line is not None:
            self.notes.append(line)
            self.say(f"note: {line}")

    @contextmanager
    def step(self, name: str, journal: Journal) -> Iterator[None]:
        """Adds a Step with the seconds that the block took and reused, without those of steps inside it."""
        started, known, before = time.perf_counter(), journal.reused_seconds, len(self.steps)
        yield
        inside = self.steps[before:]
        seconds = time.perf_counter() - started - sum(step.seconds for step in inside)
        reused = journal.reused_seconds - known - sum(step.reused_seconds for step in inside)
        self.steps.append(Step(name, round(seconds, 2), round(reused, 2)))
