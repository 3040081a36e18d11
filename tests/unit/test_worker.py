"""What a sweep's worker makes and keeps: no more than its tasks ask for, in files without names, all or nothing."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trials import running, trial_of

from moeconv.errors import ConversionError
from moeconv.measure.scoring import Extent
from moeconv.measure.trial import Trial
from moeconv.sweep.probes import TextProber
from moeconv.sweep.sensitivity import BASE_BITS, SweepJob, SweepWorker, Task, probes_for

TinyModel = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def olmoe(tiny_model: TinyModel) -> Trial:
    return trial_of(tiny_model("olmoe", "plain"))


def job_of(trial: Trial, blocks: int) -> SweepJob:
    samples = tuple(running(12))
    return SweepJob(
        trial.checkpoint.path, "channel", None, None, samples, "perplexity", Extent(None, 16, None), blocks, BASE_BITS
    )  # fmt: skip


def runs_counted(worker: SweepWorker) -> list[tuple[int, bool]]:
    """(block, as reference) of each full run of a scorer from now on."""
    runs: list[tuple[int, bool]] = []
    for block, scorer in enumerate(worker.scorers):
        score = scorer.score

        def counted(*, as_reference: bool = False, block: int = block, score: Any = score) -> Any:
            runs.append((block, as_reference))
            return score(as_reference=as_reference)

        scorer.score = counted  # type: ignore[method-assign]
    return runs


def test_a_block_that_lacks_nothing_costs_nothing(olmoe: Trial) -> None:
    worker = SweepWorker(job_of(olmoe, 3), olmoe)
    runs = runs_counted(worker)
    first = worker.measure(Task(2))[0]
    assert runs == [(2, True)]
    worker.measure(Task(0))
    again = worker.measure(Task(2))[0]
    assert runs == [(2, True), (0, True)], "a reference that is there was made again"
    assert again["reference"] == first["reference"]
    assert {**again["base"], "seconds": 0} == {**first["base"], "seconds": 0}


def test_a_worker_leaves_no_file_with_a_name(olmoe: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for blocks in (1, 3):
        worker = SweepWorker(job_of(olmoe, blocks), olmoe)
        for block in range(blocks):
            worker.measure(Task(block))
        assert list(tmp_path.iterdir()) == []
        assert len(worker._files) == (blocks if blocks > 1 else 0)


def test_a_full_disk_is_one_line_and_can_be_tried_again(olmoe: Trial) -> None:
    worker = SweepWorker(job_of(olmoe, 2), olmoe)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(ConversionError, match=r"can't write .*free some space") as caught:
                worker.measure(Task(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    fresh = SweepWorker(worker.job, olmoe).measure(Task(0))[0]
    assert worker.measure(Task(0))[0]["base"]["nats"] == fresh["base"]["nats"]


def test_a_base_run_that_failed_is_made_again(olmoe: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(olmoe, 2)
    worker = SweepWorker(job, olmoe)
    worker.measure(Task(0))
    probes = tuple(probes_for(olmoe.spec, [2], False)[:4])
    expected = [found["nats"] for found in worker.measure(Task(1, probes))]
    worker.measure(Task(0))
    prepare = TextProber.prepare

    def failing(self: TextProber) -> None:
        prepare(self)
        raise MemoryError

    monkeypatch.setattr(TextProber, "prepare", failing)
    with pytest.raises(MemoryError):
        worker.measure(Task(1, probes))
    monkeypatch.undo()
    assert [found["nats"] for found in worker.measure(Task(1, probes))] == expected
