"""Which task a worker gets next, and what is said where there is no Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.sweep.cluster import ATTEMPTS, Backlog, ClusterError, _Crew, ray_runner


def drain(backlog: Backlog, blocks: list[int], workers: int) -> list[list[int]]:
    """Workers take turns until nothing waits; the blocks that each went to, repetitions left out."""
    at: list[int | None] = [None] * workers
    seen: list[list[int]] = [[] for _ in range(workers)]
    while backlog.open:
        for worker in range(workers):
            place = backlog.take(at[worker])
            if place is None:
                continue
            if at[worker] != blocks[place]:
                at[worker] = blocks[place]
                seen[worker].append(blocks[place])
            backlog.finish(place)
    return seen


def test_a_worker_stays_at_its_block_while_others_wait() -> None:
    blocks = [0] * 6 + [1] * 6 + [2] * 6
    seen = drain(Backlog(blocks), blocks, workers=2)
    assert [visited[0] for visited in seen] == [0, 1], "two workers made the base run of one block"
    assert sum(len(visited) for visited in seen) == 4, "the last block is shared, and no other"


def test_a_free_worker_goes_where_most_waits_for_each_worker() -> None:
    backlog = Backlog([0] * 5 + [1] * 4)
    assert backlog.take(None) == 0
    assert backlog.take(None) == 5, "4 wait for one at block 0, 4 for none at block 1"
    assert backlog.take(1) == 6


def test_a_task_given_back_is_the_next_of_its_block() -> None:
    backlog = Backlog([7, 7, 7])
    assert [backlog.take(None), backlog.take(7)] == [0, 1]
    backlog.give_back(0)
    assert backlog.take(7) == 0
    assert backlog.open == 3


@given(
    blocks=st.lists(st.integers(0, 4), max_size=30),
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200),
)
def test_every_task_is_done_once_whatever_is_lost(blocks: list[int], steps: list[tuple[int, bool]]) -> None:
    backlog, done, held = Backlog(blocks), [], {}
    for worker, lost in steps + [(worker, False) for worker in range(4)] * (len(blocks) + 4):
        if worker in held:
            place = held.pop(worker)
            if lost:
                backlog.give_back(place)
            else:
                backlog.finish(place)
                done.append(place)
        elif (place := backlog.take(blocks[0] if blocks else None)) is not None:
            assert place not in held.values()
            held[worker] = place
    assert sorted(done) == list(range(len(blocks)))
    assert backlog.open == 0


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"moert\[cluster\]"), ray_runner("auto", dict):
        pass


class ToyTask(NamedTuple):
    block: int
    number: int


class FrailCluster:
    """Stands for Ray with four cores, where the first processes end before they have greeted.

    A call is a tuple of its number and its result, or None where the process has ended.
    """

    class RayError(Exception):
        pass

    class RayTaskError(RayError):
        pass

    def __init__(self, ends: int) -> None:
        self.ends, self.calls = ends, 0
        self.exceptions = SimpleNamespace(RayError=self.RayError, RayTaskError=self.RayTaskError)

    def remote(self, **options: Any) -> Any:
        return lambda seat: SimpleNamespace(remote=self._start)

    def _start(self, make: Any, job: Any) -> Any:
        lives, self.ends = self.ends <= 0, self.ends - 1
        greet = SimpleNamespace(remote=lambda reads: self._call(("here", ()) if lives else None))
        measure = SimpleNamespace(remote=lambda task: self._call((task,)))
        return SimpleNamespace(greet=greet, measure=measure)

    def _call(self, result: Any) -> tuple[int, Any]:
        self.calls += 1
        return self.calls, result

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[:1], calls[1:]

    def get(self, call: Any) -> Any:
        if call[1] is None:
            raise self.RayError("ended")
        return call[1]

    def put(self, job: Any) -> Any:
        return job

    def kill(self, actor: Any) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}


def crew(ends: int) -> _Crew[Any, Any, Any]:
    return _Crew(FrailCluster(ends), "here:1", lambda job: None, [], 60.0)  # type: ignore[arg-type,return-value]


def test_processes_that_end_together_count_once() -> None:
    tasks = [ToyTask(0, number) for number in range(6)]
    found = dict(crew(ends=4 * (ATTEMPTS - 1)).run(None, tasks))
    assert found == {task: (task,) for task in tasks}


def test_processes_that_end_again_and_again_are_said() -> None:
    with pytest.raises(ClusterError, match="its processes end as soon as they start"):
        list(crew(ends=1000).run(None, [ToyTask(0, 0)]))
