"""Work that can be shared out, and its workers: in this process, or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from moeconv.errors import ConversionError
from moeconv.tuned import said
from moert.pack.files import placed

# The parts of shared work: a job, its tasks, workers, and runners that bring them together.


class Task(Protocol):
    """A picklable piece of work that names the worker on which it is cheap."""

    @property
    def affinity(self) -> str:
        """The preparation that a worker needs for the task, in words, like "block 3": a worker goes on with tasks of
        the same preparation."""
        ...


JobT = TypeVar("JobT")
TaskT = TypeVar("TaskT", bound=Task)
FoundT = TypeVar("FoundT")
_Takes = TypeVar("_Takes", contravariant=True)
_Gives = TypeVar("_Gives", covariant=True)


class Worker(Protocol[_Takes, _Gives]):
    """A worker, made from a job in the process where it stays; making it may be expensive."""

    def measure(self, task: _Takes) -> _Gives: ...


Runner = Callable[[JobT, Sequence[TaskT]], Iterator[tuple[TaskT, FoundT]]]
"""Yields each task with its result as soon as it is done, in any order."""


# The connection to a Ray cluster: one that runs already, or one that is started here.

_ANSWER_S = 5.0
_STORE_BYTES = 128 << 20  # only token ids and scores pass through


class ClusterError(ConversionError):
    """The cluster does not answer, has no process, or can't do a task. See that its nodes are up and have the same
    versions; the same command goes on where it ended."""


def connected(address: str) -> tuple[Any, bool]:
    """Returns Ray, and whether this connection must be closed here. Raises ClusterError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # its news of lost processes would go to our stdout
    try:
        import ray
    except ImportError:
        raise ClusterError(
            f"{said('cluster')} needs Ray: install the extra cluster (pip install 'moert[cluster]')"
        ) from None
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    there = _running() if address == "auto" else address
    if there is not None and not _answers(there):  # Ray itself would try for minutes
        raise ClusterError(
            f"{said('cluster', address)}: nothing answers at {there}: is the cluster up, and the port right?"
        )
    try:
        if there is None:
            ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        else:
            ray.init(address=address, **quiet)  # "auto" unchanged: only then does Ray look for its token by itself
    except Exception as error:  # Ray has no common error for failures here
        ray.shutdown()
        raise ClusterError(
            f"{said('cluster', address)}: can't connect ({last_line(error)}): its Ray and Python must be those of this "
            f"machine (Ray {ray.__version__}); host:port serves only its own nodes, others need ray://host:port; with "
            "token authentication set RAY_AUTH_MODE=token"
        ) from None
    return ray, True


def _running() -> str | None:
    """Returns the address that the environment names; else the one that `ray start` left on this machine, if it
    answers; else None."""
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


def last_line(error: BaseException | None) -> str:
    """Returns the kind of an error and the last line of its message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


# Tasks on a Ray cluster: one process for each core that it lends; the work goes on when one of them dies.
# Ray places the processes and starts them again. Results come back to this process, so that a journal is written in
# one place.

ATTEMPTS = 3


@contextmanager
def ray_runner(
    address: str, make: Callable[[JobT], Worker[TaskT, FoundT]], *reads: Path, patience_s: float = 120.0
) -> Iterator[Runner[JobT, TaskT, FoundT]]:
    """Yields a runner on the cluster at `address`; `make` must be importable on its nodes.

    "auto" is the cluster of RAY_ADDRESS or of `ray start` on this machine, or else one started here, which ends with
    the block; others are host:port of a cluster that this machine is a node of, or ray://host:port. Workers stay from
    one call of the runner to the next as long as the job is the same object. Raises ClusterError for an address that
    does not answer, when no process has been there for `patience_s`, for one of `reads` that a node can't read, and
    for a task that failed ATTEMPTS times; a ConversionError that a worker raises comes back as it is.
    """
    ray, ours = connected(address)
    actor = ray.remote(num_cpus=1, max_restarts=ATTEMPTS - 1)(_Process)
    pool = _Pool(ray, actor, make, said("cluster", address), [str(placed(path)) for path in reads], patience_s)
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
        """Returns the name of the machine. Raises ClusterError for a path that can't be read there, and other errors if
        `make` can't be imported."""
        host = socket.gethostname()
        if unread := [path for path in reads if not os.access(path, os.R_OK)]:
            raise ClusterError(
                f"{cluster}: {host} can't read {unread[0]}: it must lie at the same path on every node; a file system "
                "that they share will do"
            )
        return host

    def measure(self, task: Any, make: Callable[[Any], Worker[Any, Any]], lent: tuple[Any]) -> Any:
        """Returns the result of a task. Each task brings `make` and the job, since a process that was started again
        knows neither: `lent` holds a reference to the job, which only the first task fetches."""
        import ray

        if self._worker is None:
            self._worker = make(ray.get(lent[0]))
        return self._worker.measure(task)


@dataclass
class _Member:
    """An actor, the machine that it last greeted from, and the affinity of its last task."""

    actor: Any
    host: str = ""
    affinity: str = ""


@dataclass
class _Pool:
    """The actors of one connection: free, or in a call of a task (known by its place in the list) or of a greeting.

    Ray starts a lost process again as soon as a core is free for it, and repeats the greeting until then. The lost
    task does not wait for this, since cores are lost with a node: the first free actor does it.
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
        """Yields each task with its result; see `ray_runner`."""
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
        """Stops every process. The tasks at work are lost."""
        for member in (*self.free, *(member for member, _ in self.calls.values())):
            with suppress(Exception):  # it may be gone, and so may the cluster
                self.ray.kill(member.actor)
        self.calls, self.free = {}, []

    def _at_work(self) -> bool:
        return any(place is not None for _, place in self.calls.values())

    def _recruit(self, wanted: int) -> None:
        """Starts actors: one for each core of the cluster and at most one for each task; at least one, since a cluster
        may still grow."""
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
        """Returns the next call that ends. Raises ClusterError if no process starts."""
        while True:
            if ended := self.ray.wait(list(self.calls), num_returns=1, timeout=self.patience_s)[0]:
                return ended[0]
            if not self.free and not self._at_work():
                raise ClusterError(
                    f"{self.cluster}: no process has started for {self.patience_s:.0f} s: check with `ray status` that "
                    "its nodes are up and have a free core"
                )

    def _mend(self, error: Any, member: _Member, task: Any = None, failures: int = 0) -> None:
        """Puts a member to use again after a greeting or a task that failed. Raises errors that another try would not
        help."""
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
    """Returns the place of the task that a worker takes, by the affinities of the waiting ones: its own affinity, or
    else the one with most waiting tasks. Pure."""
    if affinity not in waiting:
        affinity = Counter(waiting).most_common(1)[0][0]
    return waiting.index(affinity)


# The runner of tasks: in this process, or on a cluster.


@contextmanager
def runner_for(
    cluster: str | None,
    make: Callable[[JobT], Worker[TaskT, FoundT]],
    reads: Sequence[Path],
    here: Callable[[JobT], Worker[TaskT, FoundT]] | None = None,
) -> Iterator[Runner[JobT, TaskT, FoundT]]:
    """Yields a runner. `cluster` is the address of a Ray cluster; all its nodes must import `make` and read `reads`.
    With None, tasks run in this process, by a worker that `here` makes, if given, from the model in memory. Raises
    ClusterError."""
    if cluster is None:
        yield _local(here or make)
        return

    with ray_runner(cluster, make, *reads) as runner:
        yield runner


def _local(make: Callable[[JobT], Worker[TaskT, FoundT]]) -> Runner[JobT, TaskT, FoundT]:
    made: list[tuple[JobT, Worker[TaskT, FoundT]]] = []  # the last one; it stays as long as the job is the same object

    def run(job: JobT, tasks: Sequence[TaskT]) -> Iterator[tuple[TaskT, FoundT]]:
        if not made or made[0][0] is not job:
            made[:] = [(job, make(job))]
        worker = made[0][1]
        for task in tasks:
            yield task, worker.measure(task)

    return run
