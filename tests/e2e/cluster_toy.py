"""A stand-in for the sweep's worker: importable by the processes of a cluster, and able to fail on demand."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from moeconv.source.outline import CheckpointError


@dataclass(frozen=True)
class ToyJob:
    """Before each task the worker leaves its pid in `notes`. `bad` are tasks that fail, in the way of `how`.

    From the sixth note on each task waits until `crew` processes have left one.
    """

    notes: Path
    bad: tuple[int, ...] = ()
    how: str = ""
    seconds: float = 0.05
    crew: int = 1


@dataclass(frozen=True)
class ToyTask:
    block: int
    number: int

    @property
    def affinity(self) -> str:
        return f"block {self.block}"


class ToyWorker:
    def __init__(self, job: ToyJob) -> None:
        self.job = job
        self.block: int | None = None

    def measure(self, task: ToyTask) -> list[tuple[int, int]]:
        base_run = task.block != self.block
        self.block = task.block
        line = f"{os.getpid()} {task.block} {task.number} {int(base_run)}\n"
        with (self.job.notes / "notes.txt").open("a") as stream:
            stream.write(line)
        if task.number in self.job.bad:
            self._fail()
        time.sleep(self.job.seconds)
        self._wait_for_the_crew()
        return [(task.number, task.number**2 + part) for part in range(2)]

    def _wait_for_the_crew(self) -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            lines = (self.job.notes / "notes.txt").read_text().splitlines()
            if len(lines) < 6 or len({line.split()[0] for line in lines}) >= self.job.crew:
                return
            time.sleep(0.02)

    def _fail(self) -> None:
        if self.job.how == "exception":
            raise ZeroDivisionError("one\nby zero")
        if self.job.how == "user's mistake":
            raise CheckpointError("no such model: look again")
        if self.job.how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
