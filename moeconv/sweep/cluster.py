"""Tasks on a Ray cluster: one process for each core that it lends, and no end of the work when one of them dies.

Ray places and watches the processes; which task goes to which, and what happens to the task of a lost process, is
decided here. Results come back to the process that asked, so that a journal is written in one place.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from moeconv.errors import ConversionError

ATTEMPTS = 3
_TICK_S, _ANSWER_S = 1.0, 5.0
_STORE_BYTES = 128 << 20  # what passes through are token ids and scores


class ClusterError(ConversionError):
    """No cluster, no process on it, or a task that it can't do. The message is one line."""


class Task(Protocol):
    """Anything picklable that says which block it belongs to: another block costs a worker a new base run."""

    @property
    def block(self) -> int: ...


JobT = TypeVar("JobT")
TaskT = TypeVar("TaskT", bound=Task)
FoundT = TypeVar("FoundT")


_Takes = TypeVar("_Takes", contravariant=True)


class Worker(Protocol[_Takes, FoundT]):
    """Made from a job, on the process where it stays; making it may be expensive."""

    def measure(self, task: _Takes) -> list[FoundT]: ...


Runner = Callable[[JobT, Sequence[TaskT]], Iterator[tuple[TaskT, list[FoundT]]]]
"""Yields each task with its result as soon as it is done, in any order."""


@contextmanager
def ray_runner(
    address: str, make: Callable[[JobT], Worker[TaskT, FoundT]], *reads: Path, patience_s: float = 120.0
) -> Iterator[Runner[JobT, TaskT, FoundT]]:
    """A runner on the cluster at `address`, in a with block; `make` must be importable on its nodes.

    "auto" is the cluster of RAY_ADDRESS or of `ray start` on this machine, or else one started here, which ends with
    the block; others are host:port of a cluster that this machine is a node of, or ray://host:port. Workers stay from
    one call of the runner to the next as long as the job is the same object. Raises ClusterError for an address that
    does not answer, when no process has been there for `patience_s`, for one of `reads` that a node can't read, and
    for a task that failed ATTEMPTS times; a ConversionError that a worker raises comes back as it is.
    """
    ray, ours = _connect(address)
    crew: _Crew[JobT, TaskT, FoundT] = _Crew(ray, address, make, reads, patience_s)
    try:
        yield crew.run
    finally:
        crew.dismiss()
        if ours:
            ray.shutdown()


def _connect(address: str) -> tuple[Any, bool]:
    """Ray, and whether the connection is ours to close."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # its news of lost processes would go to our stdout
    try:
        import ray
    except ImportError:
        raise ClusterError("--cluster needs Ray: install the extra cluster (pip install 'moert[cluster]')") from None
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    there = _running() if address == "auto" else address
    if there is not None and not _answers(there):  # Ray itself would try for minutes
        raise ClusterError(f"--cluster {address}: nothing answers at {there}: is the cluster up, and the port right?")
    try:
        if there is None:
            ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        else:
            ray.init(address=address, **quiet)  # "auto" as such: only then does Ray look for its token by itself
    except Exception as error:  # Ray has no common error for what can go wrong here
        ray.shutdown()
        raise ClusterError(
            f"--cluster {address}: can't connect ({_line(error)}): its Ray and Python must be those of this machine "
            f"(Ray {ray.__version__}); host:port serves only its own nodes, others need ray://host:port; with token "
            "authentication set RAY_AUTH_MODE=token"
        ) from None
    return ray, True


def _running() -> str | None:
    """The address that the environment names; else the one that `ray start` left on this machine, if it answers."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    with suppress(OSError):
        noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
        address = noted.read_text().strip()
        if _answers(address):
            return address
    return None


def _answers(address: str) -> bool:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


class _Seat:
    """The actor: a process of the cluster, which makes its worker when the first task comes and keeps it."""

    def __init__(self, make: Callable[[Any], Worker[Any, Any]], job: Any) -> None:
        self._make, self._job = make, job
        self._worker: Worker[Any, Any] | None = None

    def greet(self, reads: list[str]) -> tuple[str, list[str]]:
        """The name of the machine, and what can't be read there."""
        return socket.gethostname(), [path for path in reads if not os.access(path, os.R_OK)]

    def measure(self, task: Any) -> list[Any]:
        if self._worker is None:
            self._worker = self._make(self._job)
        return self._worker.measure(task)


@dataclass
class _Member:
    """What is known of one actor. `wave` counts the failed starts before it; `host` is empty until it has greeted;
    `task` is the place of its task in the list."""

    actor: Any
    wave: int
    host: str = ""
    block: int | None = None
    task: int | None = None


class _Crew(Generic[JobT, TaskT, FoundT]):
    """The actors of one connection, and the calls under way on them."""

    def __init__(
        self,
        ray: Any,
        address: str,
        make: Callable[[JobT], Worker[TaskT, FoundT]],
        reads: Sequence[Path],
        patience_s: float,
    ) -> None:
        self._ray, self._address, self._make = ray, address, make
        self._reads, self._patience_s = [os.path.abspath(path) for path in reads], patience_s
        self._actor = ray.remote(num_cpus=1, max_restarts=0)(_Seat)
        self._job: JobT | None = None
        self._job_ref: Any = None
        self._idle: list[_Member] = []
        self._calls: dict[Any, _Member] = {}
        self._failed_waves = 0

    def run(self, job: JobT, tasks: Sequence[TaskT]) -> Iterator[tuple[TaskT, list[FoundT]]]:
        """See `ray_runner`."""
        if job is not self._job or any(member.task is not None for member in self._calls.values()):
            self.dismiss()  # another job, or a call that its caller left in the middle
            self._job, self._job_ref = job, self._ray.put(job)
        backlog = Backlog([task.block for task in tasks])
        failures: Counter[int] = Counter()
        last_seen = time.monotonic()
        while backlog.open:
            self._recruit(backlog.open)
            self._hand_out(tasks, backlog)
            if any(member.host for member in (*self._calls.values(), *self._idle)):
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > self._patience_s:
                raise ClusterError(
                    f"--cluster {self._address}: no process has started for {self._patience_s:.0f} s: check with "
                    "`ray status` that its nodes are up and have a free core"
                )
            done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_TICK_S)
            for call in done:
                member = self._calls.pop(call)
                place, member.task = member.task, None
                if place is None:
                    self._welcome(call, member)
                    continue
                found = self._collect(call, member, tasks[place], failures, place)
                if found is None:
                    backlog.give_back(place)
                else:
                    backlog.finish(place)
                    yield tasks[place], found

    def dismiss(self) -> None:
        """Stops every process. What it was doing is lost."""
        for member in (*self._calls.values(), *self._idle):
            with suppress(Exception):  # it may be gone, and so may the cluster
                self._ray.kill(member.actor)
        self._calls, self._idle, self._job = {}, [], None

    def _recruit(self, wanted: int) -> None:
        """As many actors as the cluster has cores and the work has tasks; at least one, so that it can grow."""
        cores = int(self._ray.cluster_resources().get("CPU", 0))
        for _ in range(len(self._calls) + len(self._idle), max(1, min(cores, wanted))):
            member = _Member(self._actor.remote(self._make, self._job_ref), self._failed_waves)
            self._calls[member.actor.greet.remote(self._reads)] = member

    def _hand_out(self, tasks: Sequence[TaskT], backlog: Backlog) -> None:
        kept: list[_Member] = []
        for member in self._idle:
            place = backlog.take(member.block)
            if place is None:
                kept.append(member)
                continue
            member.task, member.block = place, tasks[place].block
            self._calls[member.actor.measure.remote(tasks[place])] = member
        self._idle = kept

    def _welcome(self, call: Any, member: _Member) -> None:
        try:
            member.host, unread = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            if member.wave == self._failed_waves:  # a lost node takes several with it: they count once
                self._failed_waves += 1
            if self._failed_waves >= ATTEMPTS:
                raise ClusterError(
                    f"--cluster {self._address}: its processes end as soon as they start ({_line(error)}): check that "
                    "moeconv with the extra cluster is installed on every node, in this version"
                ) from None
            return
        if unread:
            raise ClusterError(
                f"--cluster {self._address}: {member.host} can't read {unread[0]}: it must lie at the same path on "
                "every node; a file system that they share will do"
            )
        self._failed_waves = 0
        self._idle.append(member)

    def _collect(
        self, call: Any, member: _Member, task: TaskT, failures: Counter[int], place: int
    ) -> list[FoundT] | None:
        """What the task gave; None if it must be done again. An actor that died is not used again."""
        try:
            found: list[FoundT] = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            self._idle.append(member)
            if isinstance(error.cause, ConversionError):  # the same anywhere: trying again would not help
                raise error.cause from None
            failures[place] += 1
            if failures[place] >= ATTEMPTS:
                raise ClusterError(
                    f"a task of block {task.block} failed {ATTEMPTS} times, at last on {member.host}: "
                    f"{_line(error.cause)}"
                ) from None
            return None
        except self._ray.exceptions.RayError as error:
            failures[place] += 1
            if failures[place] >= ATTEMPTS:
                raise ClusterError(
                    f"{ATTEMPTS} processes ended during one task of block {task.block}, the last on {member.host} "
                    f"({_line(error)}): is there enough memory for a model on each core?"
                ) from None
            with suppress(Exception):  # unreachable is not dead: it must not hold its core
                self._ray.kill(member.actor)
            return None
        self._idle.append(member)
        return found


class Backlog:
    """Which task next (pure). Tasks are places in a list, of which the blocks are given."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self._waiting: dict[int, deque[int]] = {}
        for place, block in enumerate(blocks):
            self._waiting.setdefault(block, deque()).append(place)
        self._at: Counter[int] = Counter()
        self.open = len(blocks)

    def take(self, block: int | None) -> int | None:
        """A task of `block`, the one that the worker is at; else of where the most wait for each worker; else None."""
        if block is None or not self._waiting.get(block):
            load = {at: len(waiting) / (1 + self._at[at]) for at, waiting in self._waiting.items() if waiting}
            block = max(load, key=lambda at: load[at], default=None)
            if block is None:
                return None
        self._at[block] += 1
        return self._waiting[block].popleft()

    def finish(self, place: int) -> None:
        self._at[self._blocks[place]] -= 1
        self.open -= 1

    def give_back(self, place: int) -> None:
        """The task was not done: it waits again, before others of its block."""
        self._at[self._blocks[place]] -= 1
        self._waiting[self._blocks[place]].appendleft(place)


def _line(error: BaseException | None) -> str:
    """The kind of an error and the last line that is not empty of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
