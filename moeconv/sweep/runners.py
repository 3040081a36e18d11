"""Who does a sweep's tasks: this process, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeconv.measure.trial import Trial
from moeconv.sweep.sensitivity import Runner
from moeconv.sweep.worker import SweepJob, SweepWorker, Task


@contextmanager
def runner_for(cluster: str | None, trial: Callable[[], Trial], reads: Sequence[Path]) -> Iterator[Runner]:
    """`cluster` is the address of a Ray cluster whose nodes can all read `reads`; None runs tasks here, on the model
    that `trial` has in memory. Raises ClusterError."""
    if cluster is None:
        yield _here(trial)
        return
    from moeconv.sweep.cluster import ray_runner

    with ray_runner(cluster, SweepWorker, *reads) as runner:
        yield runner


def _here(trial: Callable[[], Trial]) -> Runner:
    workers: list[SweepWorker] = []

    def run(job: SweepJob, tasks: Sequence[Task]) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
        if not workers:
            workers.append(SweepWorker(job, trial()))
        for task in tasks:
            yield task, workers[0].measure(task)

    return run
