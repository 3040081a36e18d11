"""Tasks on a Ray cluster: one process for each core that it lends, and no end of the work when one of them dies.

Ray places the processes and starts them again. Results come back to the process that asked, so that a journal is
written in one place.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeconv.errors import ConversionError
from moeconv.sweep.connection import ClusterError, connected, last_line
from moeconv.sweep.tasks import FoundT, JobT, Runner, TaskT, Worker
from moert.pack.files import placed

ATTEMPTS = 3


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
    ray, ours = connected(address)
    actor = ray.remote(num_cpus=1, max_restarts=ATTEMPTS - 1)(_Process)
    pool = _Pool(ray, actor, make, f"--cluster {address}", [str(placed(path)) for path in reads], patience_s)
    try:
        yield pool.run
    finally:
        pool.dismiss()
        if ours:
            ray.shutdown()


class _Process:
    """The actor: a process of the cluster, which makes its worker when the first task comes and keeps it."""

    _worker: Worker[Any, Any] | None = None

    def greet(self, make: Callable[[Any], Worker[Any, Any]], cluster: str, reads: list[str]) -> str:
        """The name of the machine. Raises ClusterError for what can't be read there, and other errors if `make` can't
        be imported."""
        host = socket.gethostname()
        if unread := [path for path in reads if not os.access(path, os.R_OK)]:
            raise ClusterError(
                f"{cluster}: {host} can't read {unread[0]}: it must lie at the same path on every node; a file system "
                "that they share will do"
            )
        return host

    def measure(self, task: Any, make: Callable[[Any], Worker[Any, Any]], lent: tuple[Any]) -> Any:
        """Each task brings what a worker is made from, since a process that was started again knows nothing: `lent`
        holds a reference of the job, which only the first task fetches."""
        import ray

        if self._worker is None:
            self._worker = make(ray.get(lent[0]))
        return self._worker.measure(task)


@dataclass
class _Member:
    """An actor, the machine that it last greeted from, and what it is prepared for."""

    actor: Any
    host: str = ""
    affinity: str = ""


@dataclass
class _Pool:
    """The actors of one connection: free, or in a call of a task (known by its place in the list) or of a greeting.

    Ray starts a lost process again as soon as there is a core for it, and repeats the greeting until then. Its task
    does not wait for that, since cores are lost with a node: whoever is free first does it.
    """

    ray: Any
    actor: Any
    make: Callable[[Any], Worker[Any, Any]]
    cluster: str
    reads: list[str]
    patience_s: float
    job: Any = field(default_factory=object)
    job_ref: Any = None
    free: list[_Member] = field(default_factory=list)
    calls: dict[Any, tuple[_Member, int | None]] = field(default_factory=dict)

    def run(self, job: Any, tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """See `ray_runner`."""
        if job is not self.job or self._at_work():  # another job, or a call that its caller left in the middle
            self.dismiss()
            self.job, self.job_ref = job, self.ray.put(job)
        waiting, left = list(range(len(tasks))), len(tasks)
        failures: Counter[int] = Counter()
        while left:
            self._recruit(left)
            while self.free and waiting:
                self._begin(self.free.pop(0), tasks, waiting)
            call = self._ended()
            member, place = self.calls.pop(call)
            try:
                found = self.ray.get(call)
            except self.ray.exceptions.RayError as error:
                if place is None:
                    self._mend(error, member)
                else:
                    failures[place] += 1
                    self._mend(error, member, tasks[place], failures[place])
                    waiting.insert(0, place)
                continue
            self.free.append(member)
            if place is None:
                member.host = found
            else:
                left -= 1
                yield tasks[place], found

    def dismiss(self) -> None:
        """Stops every process. What it was doing is lost."""
        for member in (*self.free, *(member for member, _ in self.calls.values())):
            with suppress(Exception):  # it may be gone, and so may the cluster
                self.ray.kill(member.actor)
        self.calls, self.free = {}, []

    def _at_work(self) -> bool:
        return any(place is not None for _, place in self.calls.values())

    def _recruit(self, wanted: int) -> None:
        """As many actors as the cluster has cores and the work has tasks; at least one, so that it can grow."""
        cores = int(self.ray.cluster_resources().get("CPU", 0))
        for _ in range(len(self.calls) + len(self.free), max(1, min(cores, wanted))):
            self._greet(_Member(self.actor.remote()))

    def _greet(self, member: _Member) -> None:
        greet = member.actor.greet.options(max_task_retries=-1)
        self.calls[greet.remote(self.make, self.cluster, self.reads)] = member, None

    def _begin(self, member: _Member, tasks: Sequence[Any], waiting: list[int]) -> None:
        place = waiting.pop(next_of([tasks[place].affinity for place in waiting], member.affinity))
        member.affinity = tasks[place].affinity
        self.calls[member.actor.measure.remote(tasks[place], self.make, (self.job_ref,))] = member, place

    def _ended(self) -> Any:
        """The next call that ends."""
        while True:
            if ended := self.ray.wait(list(self.calls), num_returns=1, timeout=self.patience_s)[0]:
                return ended[0]
            if not self.free and not self._at_work():
                raise ClusterError(
                    f"{self.cluster}: no process has started for {self.patience_s:.0f} s: check with `ray status` that "
                    "its nodes are up and have a free core"
                )

    def _mend(self, error: Any, member: _Member, task: Any = None, failures: int = 0) -> None:
        """After a greeting or a task that failed. Raises what trying again would not help."""
        cause = error.cause if isinstance(error, self.ray.exceptions.RayTaskError) else None  # else its process ended
        if isinstance(cause, ConversionError):  # the same anywhere
            raise cause from None
        if task is None and (cause or not member.host):
            raise ClusterError(
                f"{self.cluster}: its processes end as soon as they start ({last_line(cause or error)}): check that "
                "moeconv with the extra cluster is installed on every node, in this version"
            ) from None
        if failures == ATTEMPTS and cause:
            raise ClusterError(
                f"a task of {task.affinity} failed {failures} times, at last on {member.host}: {last_line(cause)}"
            ) from None
        if failures == ATTEMPTS:
            raise ClusterError(
                f"{failures} processes ended during one task of {task.affinity}, the last on {member.host} "
                f"({last_line(error)}): is there enough memory for a model on each core?"
            ) from None
        if cause:
            self.free.append(member)
        elif task is not None:
            self._greet(member)  # else Ray has started it as often as it may: another comes in its place


def next_of(waiting: Sequence[str], affinity: str) -> int:
    """Which task a worker takes, by what those that wait are cheap at: its own, or else where the most wait (pure)."""
    if affinity not in waiting:
        affinity = Counter(waiting).most_common(1)[0][0]
    return waiting.index(affinity)
