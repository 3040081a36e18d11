"""What work that can be shared out is made of: a job, its tasks, workers, and runners that bring them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Task(Protocol):
    """Anything picklable that knows where it is cheap to do."""

    @property
    def affinity(self) -> str:
        """What a worker prepares for it, in words, like "block 3": a worker goes on with tasks of the same."""
        ...


JobT = TypeVar("JobT")
TaskT = TypeVar("TaskT", bound=Task)
FoundT = TypeVar("FoundT")
_Takes = TypeVar("_Takes", contravariant=True)
_Gives = TypeVar("_Gives", covariant=True)


class Worker(Protocol[_Takes, _Gives]):
    """Made from a job, in the process where it stays; making it may be expensive."""

    def measure(self, task: _Takes) -> _Gives: ...


Runner = Callable[[JobT, Sequence[TaskT]], Iterator[tuple[TaskT, FoundT]]]
"""Yields each task with its result as soon as it is done, in any order."""
