"""Tasks in this process: any worker will do, and it stays as long as the job does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moeconv.sweep.cluster import runner_for


class LayerTask(NamedTuple):
    layer: int

    @property
    def affinity(self) -> str:
        return f"layer {self.layer}"


@dataclass
class Layers:
    """A job of one task for each layer."""

    scale: float


class LayerWorker:
    def __init__(self, job: Layers, made: list[Layers] | None = None) -> None:
        self.job = job
        if made is not None:
            made.append(job)

    def measure(self, task: LayerTask) -> dict[str, float]:
        return {"cost": self.job.scale * task.layer}


TASKS = [LayerTask(2), LayerTask(0)]


def test_a_task_comes_with_whatever_its_worker_gave() -> None:
    with runner_for(None, LayerWorker, []) as run:
        assert list(run(Layers(0.5), TASKS)) == [(TASKS[0], {"cost": 1.0}), (TASKS[1], {"cost": 0.0})]


def test_a_worker_stays_for_the_next_call_and_goes_with_its_job() -> None:
    made: list[Layers] = []
    one, other = Layers(1.0), Layers(2.0)
    with runner_for(None, LayerWorker, [], here=lambda job: LayerWorker(job, made)) as run:
        for job in (one, one, other):
            assert [found["cost"] for _, found in run(job, TASKS)] == [2 * job.scale, 0.0]
    assert made == [one, other]
