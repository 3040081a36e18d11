"""The sweep: what the journal lacks is measured, by any runner, in blocks, and within its memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from trials import pairs, questions, running, scorers, trial_of

from moeconv.artifacts import SIGNALS, SensitivityTable
from moeconv.calibration import Sample
from moeconv.errors import SettingsError
from moeconv.measure.metrics import find_metric
from moeconv.measure.scoring import Extent, Volume, volume
from moeconv.measure.trial import Evaluation, Trial
from moeconv.measure.workdir import Journal
from moeconv.sweep.probes import batch_bytes, blocks_for, kept_bytes
from moeconv.sweep.sensitivity import BASE_BITS, Sweep, SweepJob, SweepWorker, Task, probes_for

TinyModel = Callable[[str, str], Path]


class Stopped(Exception):
    pass


class Runner:
    """Does tasks here, and counts what it did; stops after `most` tasks."""

    def __init__(self, trial: Trial, most: int | None = None) -> None:
        self.trial, self.most = trial, most
        self.done: list[Task] = []
        self.worker: SweepWorker | None = None

    def __call__(self, job: SweepJob, tasks: Sequence[Task]) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
        self.worker = self.worker or SweepWorker(job, self.trial)
        for task in tasks:
            if len(self.done) == self.most:
                raise Stopped
            self.done.append(task)
            yield task, self.worker.measure(task)

    def measured(self) -> list[tuple[int, str]]:
        return [(task.block, str(probe)) for task in self.done for probe in task.probes]


class Bar:
    total = 0

    def update(self, n: int) -> None:
        self.total += n


def job_of(trial: Trial, samples: Sequence[Sample], metric: str, blocks: int = 1) -> SweepJob:
    most = None if trial.spec.encoder is None else 5
    return SweepJob(
        trial.checkpoint.path, "channel", None, None, tuple(samples), metric, Extent(None, 16, most), blocks, BASE_BITS
    )


def sweep_of(
    trial: Trial, path: Path, job: SweepJob, *, widths: Sequence[int] = (2, 8), per_projection: bool = False
) -> Sweep:
    probes = probes_for(trial.spec, widths, per_projection)
    return Sweep(Journal(path, "subject"), job, find_metric(job.metric), probes)


@pytest.fixture(scope="module")
def olmoe(tiny_model: TinyModel) -> Trial:
    return trial_of(tiny_model("olmoe", "plain"))


@pytest.fixture(scope="module")
def switch(tiny_model: TinyModel) -> Trial:
    return trial_of(tiny_model("switch_transformers", "all layers sparse"))


def own_words(trial: Trial, count: int) -> list[Sample]:
    """Inputs and what the unquantized model writes to them, so that a metric of the text has something to lose."""
    trial.restore()
    samples = pairs(count)
    [scorer] = scorers(trial, samples, "rouge1", max_new_tokens=5)
    return [Sample(sample.source, text) for sample, text in zip(samples, scorer.score().outputs, strict=True)]


def assert_close(found: SensitivityTable, expected: SensitivityTable, tolerance: float) -> None:
    assert found.costs.keys() == expected.costs.keys()
    assert found.coverage == expected.coverage
    for probe, costs in expected.costs.items():
        assert found.costs[probe] == pytest.approx(costs, abs=tolerance), probe


def test_probes_are_of_every_expert_at_every_other_width(olmoe: Trial) -> None:
    keys = olmoe.spec.expert_keys()
    probes = probes_for(olmoe.spec, [2, 4, 8], False)
    assert len(probes) == len(set(probes)) == 2 * len(keys)
    assert {probe.bits for probe in probes} == {(2, 2, 2), (8, 8, 8)}
    probes = probes_for(olmoe.spec, [3], True)
    assert [probe.bits for probe in probes[:3]] == [(3, 4, 4), (4, 3, 4), (4, 4, 3)]
    assert len(probes) == 3 * len(keys)


def test_a_sweep_that_was_stopped_goes_on_to_the_same_table(switch: Trial, tmp_path: Path) -> None:
    job = job_of(switch, own_words(switch, 6), "rouge1", blocks=2)
    whole, untouched = sweep_of(switch, tmp_path / "whole", job), Runner(switch)
    bar = Bar()
    assert whole.missing() == 2 * len(whole.probes)
    whole.run(untouched, bar)
    assert bar.total == 2 * len(whole.probes)
    assert whole.missing() == 0
    first = Runner(switch, most=5)
    with pytest.raises(Stopped):
        sweep_of(switch, tmp_path / "j", job).run(first, Bar())
    resumed, second = sweep_of(switch, tmp_path / "j", job), Runner(switch)
    # what the fifth task found was yielded and written before the sixth was refused
    assert resumed.missing() == 2 * len(whole.probes) - len(first.measured())
    resumed.run(second, Bar())
    assert sorted(first.measured() + second.measured()) == sorted(untouched.measured())
    assert len(set(untouched.measured())) == len(untouched.measured())
    assert resumed.table() == whole.table()
    assert resumed.reference_value() == whole.reference_value()
    third = Runner(switch)
    resumed.run(third, Bar())
    assert third.done == []
    assert third.worker is None, "a model was loaded for nothing"


def test_other_text_or_blocks_are_other_measurements(olmoe: Trial, tmp_path: Path) -> None:
    job = job_of(olmoe, running(3), "perplexity")
    sweep = sweep_of(olmoe, tmp_path / "j", job)
    sweep.run(Runner(olmoe), Bar())
    assert sweep_of(olmoe, tmp_path / "j", job).missing() == 0
    for other in (
        replace(job, samples=tuple(running(3, 1))), replace(job, blocks=2), replace(job, base_bits=3),
        replace(job, metric="token_perplexity"), replace(job, extent=replace(job.extent, context=8)),
        replace(job, extent=replace(job.extent, limit=2)),
    ):  # fmt: skip
        assert sweep_of(olmoe, tmp_path / "j", other).missing() == len(sweep.probes) * other.blocks
    assert sweep_of(olmoe, tmp_path / "j", job, widths=[2, 3, 8]).missing() == len(olmoe.spec.expert_keys())


@pytest.mark.parametrize("kind", ["rouge1", "choices of switch", "perplexity", "choices of olmoe"])
def test_blocks_change_nothing_but_the_order(kind: str, olmoe: Trial, switch: Trial, tmp_path: Path) -> None:
    trial = switch if kind in ("rouge1", "choices of switch") else olmoe
    samples = {"rouge1": own_words(switch, 6), "perplexity": running(4)}.get(kind, questions(9, 3))
    metric = kind if kind in ("rouge1", "perplexity") else "accuracy"
    tables = []
    for blocks in (1, 3):
        sweep = sweep_of(trial, tmp_path / f"j{blocks}", job_of(trial, samples, metric, blocks), widths=[2])
        sweep.run(Runner(trial), Bar())
        tables.append((sweep.table(), sweep.reference_value()))
    (one, value), (other, same_value) = tables
    assert_close(other, one, 1e-5)
    assert value == pytest.approx(same_value, rel=1e-6)
    assert max(costs[2] for costs in one.costs.values()) > 1e-3
    assert metric == "accuracy" or any(costs[0] for costs in one.costs.values()), "the metric saw nothing"


def test_costs_are_rises_above_the_base(olmoe: Trial, tmp_path: Path) -> None:
    sweep = sweep_of(olmoe, tmp_path / "j", job_of(olmoe, running(4), "perplexity"))
    runner = Runner(olmoe)
    sweep.run(runner, Bar())
    table, cost = sweep.table(), sweep.cost()
    assert runner.worker is not None
    [scorer] = runner.worker.scorers
    olmoe.restore()
    reference = Evaluation.of("", scorer.score(as_reference=True), 0, 0)
    olmoe.assign(dict.fromkeys(olmoe.spec.expert_keys(), (4, 4, 4)))
    rows = olmoe.calls.rows
    base = Evaluation.of("", scorer.score(), 0, 0)
    naive_rows = olmoe.calls.rows - rows
    metric = find_metric("perplexity")
    for probe in sweep.probes[::7]:
        olmoe.assign({probe.key: probe.bits})
        after, before = (
            Evaluation.of("", scorer.score(), 0, 0).summary(metric, reference),
            base.summary(metric, reference),
        )
        olmoe.assign({probe.key: (4, 4, 4)})
        rises = (after.loss - before.loss, after.nll - before.nll, after.kl - before.kl)
        assert table.costs[probe] == pytest.approx(rises, abs=2e-5)
        assert [table.cost(probe, signal) for signal in SIGNALS] == list(table.costs[probe])
    tokens = scorer.texts.ids.numel()
    for layer in range(2):
        assert sum(count for key, count in table.coverage.items() if key.layer == layer) == tokens * 2
    assert (cost.probes, cost.measured_share, cost.near_ties) == (len(sweep.probes), 1.0, 0)
    assert cost.free_probes == 2 * sum(count == 0 for count in table.coverage.values())
    assert cost.naive_flops == len(sweep.probes) * olmoe.calls.flops(naive_rows)
    assert 0 < cost.flops < cost.naive_flops
    assert cost.seconds > 0
    assert table.base_bits == 4
    json.dumps(json.loads((tmp_path / "j").read_text().splitlines()[0]))


# Memory ---------------------------------------------------------------------------------------------------------------


def kept(owner: object) -> int:
    """Bytes of all tensors that an object holds, but for the model's and the text's own."""
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                walk(one)
        elif hasattr(value, "__dict__") and not isinstance(value, (Trial, torch.nn.Module, Tokenizer)):
            for one in vars(value).values():
                walk(one)

    for name, value in vars(owner).items():
        if name not in ("trial", "scorer", "model"):
            walk(value)
    reference = owner.scorer.reference  # type: ignore[attr-defined]
    walk([reference.mean_row, reference.negentropy])
    return sum(seen.values())


@pytest.mark.parametrize("kind", ["rouge1", "targets", "choices of switch", "perplexity", "choices of olmoe"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_base_run_keeps_no_more_than_is_estimated(kind: str, blocks: int, olmoe: Trial, switch: Trial) -> None:
    trial = olmoe if kind in ("perplexity", "choices of olmoe") else switch
    samples = {"rouge1": pairs(40), "targets": pairs(40), "perplexity": running(12)}.get(kind, questions(40))
    metric = {"targets": "perplexity"}.get(kind, kind if kind in ("rouge1", "perplexity") else "accuracy")
    extent = Extent(None, 16, None)
    job = replace(job_of(trial, samples, metric, blocks), extent=extent)
    worker = SweepWorker(job, trial)
    tokenizer = worker.scorers[0].tokenizer if trial is switch else None
    if tokenizer is None:
        tokenizer = Tokenizer.from_file(str(trial.checkpoint.path / "tokenizer.json"))
    found = volume(trial.spec, tokenizer, samples, extent)
    for block in range(blocks):
        worker.measure(Task(block))
        assert kept(worker._prober) <= kept_bytes(trial.spec, found) * 1.1 / blocks  # blocks are not quite equal
    assert kept(worker._prober) > kept_bytes(trial.spec, found) / blocks / 4, "the estimate is far too large"


def test_less_memory_is_more_blocks(olmoe: Trial) -> None:
    text = Volume(200, 0, 2_000_000, np.arange(200), 1.0)
    bounds = [batch_bytes(olmoe.spec) + room for room in (1 << 32, 1 << 28, 1 << 27, 1 << 26)]
    blocks = [blocks_for(olmoe.spec, text, bound) for bound in bounds]
    assert blocks[0] == 1
    assert blocks == sorted(set(blocks))
    for bound, count in zip(bounds, blocks, strict=True):
        assert batch_bytes(olmoe.spec) + kept_bytes(olmoe.spec, text) / count <= bound
    for little in (1, batch_bytes(olmoe.spec), batch_bytes(olmoe.spec) + 1000):
        with pytest.raises(SettingsError, match=r"--memory .*MB is too little.*at least \d") as caught:
            blocks_for(olmoe.spec, text, little)
        assert "\n" not in str(caught.value)
    least = int(str(caught.value).rsplit(" ", 1)[1].replace(",", "").removesuffix("MB")) * 10**6
    assert blocks_for(olmoe.spec, text, least) <= 200, "what the message says is enough must be enough"
