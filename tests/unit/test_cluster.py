"""Which task a worker gets next, what becomes of lost ones, and what is said where there is no Ray."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.sweep.cluster import ATTEMPTS, ClusterError, _Pool, next_of, ray_runner


def drain(waiting: list[str], workers: int) -> list[list[str]]:
    """Workers take turns until nothing waits; what each was prepared for, repetitions left out."""
    seen: list[list[str]] = [[""] for _ in range(workers)]
    while waiting:
        for visited in seen[: len(waiting)]:
            affinity = waiting.pop(next_of(waiting, visited[-1]))
            if visited[-1] != affinity:
                visited.append(affinity)
    return [visited[1:] for visited in seen]


def test_a_worker_goes_on_with_its_block_while_others_wait() -> None:
    seen = drain(["block 0"] * 6 + ["block 1"] * 6 + ["block 2"] * 6, workers=2)
    assert [visited[0] for visited in seen] == ["block 0", "block 1"], "two workers made the base run of one block"
    assert sum(len(visited) for visited in seen) == 4, "the last block is shared, and no other"


@given(st.lists(st.sampled_from(["layer 0", "layer 1", "layer 2"]), min_size=1), st.sampled_from(["", "layer 1"]))
def test_the_next_task_is_the_first_of_the_worker_s_own_or_of_the_most(waiting: list[str], own: str) -> None:
    place = next_of(waiting, own)
    chosen = own if own in waiting else waiting[place]
    assert place == waiting.index(chosen)
    assert own in waiting or waiting.count(chosen) == max(Counter(waiting).values())


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"moert\[cluster\]"), ray_runner("auto", dict):
        pass


class ToyTask(NamedTuple):
    affinity: str
    number: int


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass
class FrailCluster:
    """Stands for Ray with some cores. `ends` says of each task that is begun, in turn, whether its process ends then;
    what is behind goes well, or `raises`. An actor whose process ended ATTEMPTS times is not started again."""

    ends: Sequence[bool] = ()
    cores: int = 4
    starts: bool = True
    raises: Exception | None = None
    actors: int = 0
    begun: int = 0
    calls: deque[tuple[int, Any]] = field(default_factory=deque)
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def remote(self) -> Any:
        lives, self.actors = [ATTEMPTS if self.starts else 0], self.actors + 1

        def greet(*_: Any) -> Any:
            return self._call("here" if lives[0] else RayError("its process has ended"))

        def measure(task: Any, *_: Any) -> Any:
            ends = self.begun < len(self.ends) and self.ends[self.begun]
            self.begun, lives[0] = self.begun + 1, lives[0] - ends
            if ends:
                return self._call(RayError("its process has ended"))
            return self._call(RayTaskError(self.raises) if self.raises else task)

        greeting = SimpleNamespace(options=lambda max_task_retries: SimpleNamespace(remote=greet))
        return SimpleNamespace(greet=greeting, measure=SimpleNamespace(remote=measure))

    def _call(self, result: Any) -> tuple[int, Any]:
        self.calls.append((len(self.calls), result))
        return self.calls[-1]

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[:1], calls[1:]

    def get(self, call: Any) -> Any:
        if isinstance(call[1], Exception):
            raise call[1]
        return call[1]

    def put(self, job: Any) -> Any:
        return job

    def kill(self, actor: Any) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cores)}


def run(cluster: FrailCluster, tasks: Sequence[ToyTask]) -> list[tuple[ToyTask, Any]]:
    return list(_Pool(cluster, cluster, lambda job: None, "--tune cluster=here:1", [], 60.0).run(None, tasks))  # type: ignore[arg-type,return-value]


@given(
    layers=st.lists(st.integers(0, 3), max_size=20),
    ends=st.lists(st.booleans(), max_size=ATTEMPTS - 1),
    cores=st.integers(1, 4),
)
def test_every_task_is_done_once_whatever_is_lost(layers: list[int], ends: list[bool], cores: int) -> None:
    tasks = [ToyTask(f"layer {layer}", number) for number, layer in enumerate(layers)]
    cluster = FrailCluster(ends, cores)
    found = run(cluster, tasks)
    assert sorted(found) == sorted((task, task) for task in tasks)
    assert cluster.begun == len(tasks) + sum(ends[: cluster.begun]), "more was done again than what was lost"


def test_another_process_comes_in_the_place_of_one_that_ray_gives_up() -> None:
    tasks = [ToyTask("block 0", number) for number in range(9)]
    cluster = FrailCluster([True, False] * ATTEMPTS, cores=1)
    assert run(cluster, tasks) == [(task, task) for task in tasks]
    assert cluster.actors == 2


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (FrailCluster([True] * ATTEMPTS), f"{ATTEMPTS} processes ended during one task of layer 7, the last on here"),
        (FrailCluster(raises=ValueError("x")), f"a task of layer 7 failed {ATTEMPTS} times, at last on here: Val.*: x"),
        (FrailCluster(starts=False), "--tune cluster=here:1: its processes end as soon as they start"),
    ],
)
def test_a_task_that_can_not_be_done_is_named_by_what_it_belongs_to(cluster: FrailCluster, said: str) -> None:
    with pytest.raises(ClusterError, match=f"^{said}"):
        run(cluster, [ToyTask("layer 7", 0)])
