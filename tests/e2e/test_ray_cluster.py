"""The sweep's tasks on a real Ray cluster of two nodes on this machine: lost processes, lost nodes, failing tasks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_toy import ToyJob, ToyTask, ToyWorker
from conversions import Unseen, settings_for

from moeconv.artifacts import Target
from moeconv.conversion import room
from moeconv.conversion.conversion import Conversion
from moeconv.source.outline import CheckpointError
from moeconv.sweep.cluster import ClusterError, ray_runner

ray = pytest.importorskip("ray", reason="needs the extra cluster")
PATIENCE_S = 600.0
"""Until a test says that something hangs."""
MARK = "MOECONV_TEST_CLUSTER"
"""In the environment of all processes of a cluster."""
TASKS = [ToyTask(block, 10 * block + number) for block in range(3) for number in range(8)]
HERE = Path(__file__).parent
_slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores and two nodes of one core each. Ray gives a node 30 s to start and 10 s to answer, which a
    busy machine does not keep: here it has as long as it takes."""
    from ray._private import node
    from ray.cluster_utils import Cluster

    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() * 30 / PATIENCE_S})
    patient = {"health_check_timeout_ms": int(PATIENCE_S * 1000)}
    head = {"num_cpus": 0, "object_store_memory": 100 << 20, "_system_config": patient}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "time", clock)
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)  # the nodes must find the toy
        patch.setenv(MARK, str(os.getpid()))
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                made.add_node(num_cpus=1, object_store_memory=100 << 20)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def here(job: ToyJob, tasks: list[ToyTask]) -> dict[ToyTask, list[tuple[int, int]]]:
    worker = ToyWorker(job)
    return {task: worker.measure(task) for task in tasks}


def notes(job: ToyJob) -> list[list[int]]:
    """For each task that was begun: pid, block, number, and whether it began with a base run."""
    path = job.notes / "notes.txt"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_killed_worker_changes_no_result(cluster: Any, tmp_path: Path) -> None:
    job = ToyJob(tmp_path, crew=3)  # nobody goes on before there is one in the killed one's place
    found: dict[ToyTask, list[tuple[int, int]]] = {}
    victim = 0
    with ray_runner(cluster.address, ToyWorker, tmp_path, patience_s=PATIENCE_S) as run:
        for task, result in run(job, TASKS):
            assert task not in found, "a task came twice"
            found[task] = result
            if len(found) == 4:
                victim = notes(job)[-1][0]
                os.kill(victim, signal.SIGKILL)
    begun = notes(job)
    pids = [pid for pid, *_ in begun]
    assert len(set(pids)) == 3, "the killed one, the other, and one in its place"
    assert len(begun) <= len(TASKS) + 1, "more than the task of the killed worker was done again"
    assert sum(base for *_, base in begun) <= 3 + 3, "workers went from block to block"
    (tmp_path / "alone").mkdir()
    assert found == here(ToyJob(tmp_path / "alone", seconds=0), TASKS)


@pytest.mark.slow
def test_a_lost_node_changes_no_result(cluster: Any, tmp_path: Path) -> None:
    job = ToyJob(tmp_path, crew=3)
    node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    found = {}
    with ray_runner(cluster.address, ToyWorker, tmp_path, patience_s=PATIENCE_S) as run:
        for task, result in run(job, TASKS):
            found[task] = result
            if len(found) == 10:
                cluster.remove_node(node, allow_graceful=False)
    cluster.wait_for_nodes(timeout=PATIENCE_S)  # until it is known, the next test may be sent to the lost one
    assert len({pid for pid, *_ in notes(job)}) == 3
    (tmp_path / "alone").mkdir()
    assert found == here(ToyJob(tmp_path / "alone", seconds=0), TASKS)


def test_workers_stay_for_the_next_call_and_go_with_the_block(cluster: Any, tmp_path: Path) -> None:
    job = ToyJob(tmp_path, crew=2)  # nobody goes on before both are there
    with ray_runner(cluster.address, ToyWorker, tmp_path, patience_s=PATIENCE_S) as run:
        for count, _ in enumerate(run(job, TASKS), 1):
            if count == 7:  # from the sixth task on both are at work
                break  # its caller had enough in the middle
        left = {pid for pid, *_ in notes(job)}
        assert dict(run(job, [])) == {}
        assert gone(left), "a worker went on with a call that its caller left"
        (tmp_path / "notes.txt").unlink()  # those that left are not of the next crew
        found = dict(run(job, TASKS[:8]))
        before = {pid for pid, *_ in notes(job)}
        again = dict(run(job, TASKS[8:]))
    assert {pid for pid, *_ in notes(job)} == before
    assert {**found, **again} == here(ToyJob(tmp_path, seconds=0), TASKS)
    assert gone(before), "a worker outlived its runner"


def gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids - {os.getpid()}):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        _slow("exception", ClusterError, "block 1 failed 3 times, at last on .*: ZeroDivisionError: by zero"),
        _slow("death", ClusterError, "3 processes ended during one task of block 1"),
        ("user's mistake", CheckpointError, "^no such model: look again$"),
    ],
)
def test_a_task_that_can_not_be_done_is_one_line(
    cluster: Any, tmp_path: Path, how: str, error: type[Exception], words: str
) -> None:
    job = ToyJob(tmp_path, bad=(13,), how=how, seconds=0.01)
    found = []
    with (
        pytest.raises(error, match=words) as caught,
        ray_runner(cluster.address, ToyWorker, tmp_path, patience_s=PATIENCE_S) as run,
    ):
        found.extend(run(job, TASKS))
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert [number for *_, number, _ in notes(job)].count(13) == (1 if how == "user's mistake" else 3)


class Unborn:
    """What workers are made by, and what instead happens in a process that receives it."""

    def __init__(self, instead: Callable[..., Any], *arguments: Any) -> None:
        self.instead, self.arguments = instead, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.instead, self.arguments

    def __call__(self, job: ToyJob) -> ToyWorker:
        raise AssertionError(f"a worker for {job} was made here")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Unborn(import_module, "moeconv_of_tomorrow"), r"No module named 'moeconv_of_tomorrow'\): check that moeconv"),
        _slow(Unborn(os._exit, 3), r"ActorDiedError: .*: check that moeconv with the extra cluster is installed"),
    ],
    ids=["not installed", "ends"],
)
def test_a_process_that_can_not_start_is_said_at_once(cluster: Any, tmp_path: Path, make: Unborn, words: str) -> None:
    with (
        pytest.raises(ClusterError, match=f"its processes end as soon as they start.*{words}") as caught,
        ray_runner(cluster.address, make, tmp_path, patience_s=PATIENCE_S) as run,
    ):
        list(run(ToyJob(tmp_path), TASKS))
    assert "\n" not in str(caught.value)
    assert not notes(ToyJob(tmp_path))


@pytest.mark.slow
def test_a_file_that_a_node_can_not_read_is_said_at_once(cluster: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"can't read .*/nowhere: it must lie at the same path"),
        ray_runner(cluster.address, ToyWorker, tmp_path, tmp_path / "nowhere", patience_s=PATIENCE_S) as run,
    ):
        list(run(ToyJob(tmp_path), TASKS))
    assert not notes(ToyJob(tmp_path))


@pytest.mark.slow
def test_a_busy_cluster_is_waited_for_and_then_said(cluster: Any, tmp_path: Path) -> None:
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        holder = ray.remote(num_cpus=1)(ToyWorker)
        held = [holder.remote(ToyJob(tmp_path)) for _ in range(2)]
        ray.get([actor.__ray_ready__.remote() for actor in held])
        with (
            pytest.raises(ClusterError, match="no process has started for 2 s") as caught,
            ray_runner(cluster.address, ToyWorker, tmp_path, patience_s=2) as run,
        ):
            list(run(ToyJob(tmp_path), TASKS))
        assert cluster.address in str(caught.value)
        assert ray.is_initialized(), "a connection that was there before is not ours to close"
    finally:
        ray.shutdown()


def test_an_address_without_a_cluster_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"--tune cluster=127\.0\.0\.1:1: nothing answers") as caught,
        ray_runner("127.0.0.1:1", ToyWorker, tmp_path),
    ):
        pass
    assert "\n" not in str(caught.value)


SCRIPT = """
import os
import sys
from pathlib import Path
from cluster_toy import ToyJob, ToyTask, ToyWorker
from conversions import Unseen, settings_for
from moeconv.sweep.cluster import ray_runner
if __name__ == "__main__":
    try:
        with ray_runner("auto", ToyWorker, Path({notes!r})) as run:
            for task, found in run(ToyJob(Path({notes!r}), seconds={seconds}), [ToyTask(0, n) for n in range(12)]):
                print(found[0][1], flush=True)
                if task.number == 3 and {kill}:
                    os.kill(int((Path({notes!r}) / "notes.txt").read_text().split()[0]), 9)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True], ids=["with a killed worker", "Ctrl-C"])
def test_auto_starts_a_cluster_quietly_and_leaves_nothing_behind(tmp_path: Path, interrupted: bool) -> None:
    script = tmp_path / "driver.py"
    seconds = 0.5 if interrupted else 0.1
    script.write_text(SCRIPT.format(notes=str(tmp_path), seconds=seconds, kill=not interrupted))
    mark = f"MOECONV_TEST_MARK={tmp_path}"
    alone = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # no other cluster is there; sockets want a short path
    search = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "RAY_TMPDIR": alone, mark.partition("=")[0]: str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        if interrupted:
            assert process.stdout is not None
            first = process.stdout.readline()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        shutil.rmtree(alone, ignore_errors=True)
    assert err == ""
    if interrupted:
        assert process.returncode == 130
        assert len((first + out).splitlines()) < 12
    else:
        assert sorted(int(line) for line in out.splitlines()) == [n**2 for n in range(12)]
    assert gone(marked(mark)), "processes of the cluster were left behind"


def marked(mark: str) -> set[int]:
    """Processes that inherited this entry of their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:  # it ended, or is not ours
            continue
    return found


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


class KillsOne:
    """A bar that kills a process of the cluster when the first probes are done."""

    def __init__(self) -> None:
        self.killed = 0

    def update(self, n: int) -> None:
        if n and not self.killed:
            self.killed = next(pid for pid in marked(f"{MARK}={os.getpid()}") if named(pid).startswith("ray::_Process"))
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.slow
def test_experts_are_coded_layer_by_layer_as_by_one_process(
    cluster: Any, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pack, though one of the two workers is killed in the middle."""
    monkeypatch.setattr("moeconv.sweep.cluster.ray_runner", partial(ray_runner, patience_s=PATIENCE_S))
    monkeypatch.setattr(room, "LEAST_TOKENS", 32)
    bar = KillsOne()
    changes = {"loss": 0.9, "bits": (3, 4), "samples": 8, "sweep_samples": 4, "heldout_samples": 6}
    alone = settings_for(sources, "olmoe", tmp_path / "alone", **changes, memory_bytes=room.PROCESS_BYTES + (2 << 20))
    spread = replace(alone, out=tmp_path / "m.pack", work=tmp_path / "work", cluster=cluster.address)
    Conversion(alone, lambda _: None, lambda *_: nullcontext(Unseen())).run()
    Conversion(
        spread, lambda _: None, lambda label, *_: nullcontext(bar if label.startswith("coding") else Unseen())
    ).run()
    assert bar.killed
    for path in sorted(alone.out.rglob("*.safetensors")):
        assert (spread.out / path.relative_to(alone.out)).read_bytes() == path.read_bytes()


def entries(work: Path) -> list[dict[str, Any]]:
    """All journal entries, by name and without what they took."""
    lines = [json.loads(line) for path in work.rglob("journal.jsonl") for line in path.read_text().splitlines()]
    for line in lines:
        for part in (line, line.get("base", {}), line.get("reference", {})):
            part.pop("seconds", None)
    return sorted(lines, key=lambda line: line["id"])


@pytest.mark.slow
def test_a_sweep_on_the_cluster_is_that_of_one_process(
    cluster: Any, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same journal and the same pack, though one of the two workers is killed in the middle."""
    monkeypatch.setattr("moeconv.sweep.cluster.ray_runner", partial(ray_runner, patience_s=PATIENCE_S))
    bar = KillsOne()
    alone = settings_for(sources, "olmoe", tmp_path / "alone", target=Target("bits", 4.0), bits=(2, 3, 4))
    spread = replace(alone, out=tmp_path / "m.pack", work=tmp_path / "work", cluster=cluster.address)
    Conversion(alone, lambda _: None, lambda *_: nullcontext(Unseen())).run()
    Conversion(spread, lambda _: None, lambda *_: nullcontext(bar)).run()
    assert bar.killed
    assert entries(spread.work) == entries(alone.work)
    for path in sorted(alone.out.rglob("*.safetensors")):
        assert (spread.out / path.relative_to(alone.out)).read_bytes() == path.read_bytes()
