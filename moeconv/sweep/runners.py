"""Who does tasks: this process, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moeconv.sweep.tasks import FoundT, JobT, Runner, TaskT, Worker


@contextmanager
def runner_for(
    cluster: str | None,
    make: Callable[[JobT], Worker[TaskT, FoundT]],
    reads: Sequence[Path],
    here: Callable[[JobT], Worker[TaskT, FoundT]] | None = None,
) -> Iterator[Runner[JobT, TaskT, FoundT]]:
    """`cluster` is the address of a Ray cluster whose nodes can all import `make` and read `reads`; None does tasks in
    this process, by what `here` makes of a job, if it is given, from what is in memory already. Raises ClusterError."""
    if cluster is None:
        yield _local(here or make)
        return
    from moeconv.sweep.cluster import ray_runner

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
