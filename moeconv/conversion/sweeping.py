"""The sweep of one conversion: made from its settings, run where they say, kept for later plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeconv.artifacts import FISHER, SensitivityTable, SweepCost
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.coding import Coding
from moeconv.conversion.gradients import swept_by_gradients
from moeconv.conversion.material import Material
from moeconv.conversion.planning import Inputs
from moeconv.conversion.room import Memory
from moeconv.promise.judging import check_reference
from moeconv.promise.standing import unreached_text
from moeconv.sweep.memory import blocks_for
from moeconv.sweep.runners import runner_for
from moeconv.sweep.sensitivity import BASE_BITS, RaceRules, Sweep, probes_for
from moeconv.sweep.worker import SweepJob, SweepWorker
from moert.pack.manifest import in_words

RACING_BLOCKS, RACING_SPAN = 8, 0.1


@dataclass(frozen=True)
class Swept:
    """What plans are made from, and what it took."""

    inputs: Inputs
    cost: SweepCost


def job_of(coding: Coding, material: Material, moments: Path | None, memory: Memory) -> SweepJob:
    """Raises SettingsError for a memory in which no sweep fits."""
    settings = material.settings
    blocks = 1 if memory.layered else blocks_for(coding.spec, material.ranked, memory.sweep_bytes)
    if settings.racing is not None:
        blocks = min(max(blocks, RACING_BLOCKS), material.ranked.samples)
    return SweepJob(
        coding.checkpoint.path.absolute(), settings.coded_by, settings.group_size, moments, material.ranking,
        material.metric_name, material.extent(settings.sweep_samples), blocks, BASE_BITS,
        coding.dense_widths, coding.neurons,
    )  # fmt: skip


def swept(bench: Bench, job: SweepJob, widths: Sequence[int], samples_id: str, account: Account) -> Swept:
    """`samples_id` names the samples that plans are judged on. Raises ConversionError."""
    material, quantizer = bench.material, bench.coding.quantizer
    sweep = _by_gradients if bench.by_gradients(widths) else _exactly
    table, cost = sweep(bench, job, widths, account)
    account.note(unreached_text(table))
    inputs = Inputs(
        str(job.model), quantizer.name, quantizer.group_size, material.metric_name, samples_id, table,
        {} if job.dense is None else job.dense.bits, job.neurons is not None,
    )  # fmt: skip
    return Swept(inputs, cost)


def _by_gradients(
    bench: Bench, _: SweepJob, widths: Sequence[int], account: Account
) -> tuple[SensitivityTable, SweepCost]:
    if bench.settings.signal != FISHER:
        why = "the model does not fit the memory" if bench.memory.layered else "there are many of them"
        account.note(f"experts are ranked by gradients (--signal fisher): {why}")
    with account.step("sweep", bench.journal):
        return swept_by_gradients(bench, widths, account)


def _exactly(
    bench: Bench, job: SweepJob, widths: Sequence[int], account: Account
) -> tuple[SensitivityTable, SweepCost]:
    settings, material = bench.settings, bench.material
    probes = probes_for(bench.spec, widths, settings.per_projection)
    rules = None if settings.racing is None else RaceRules(settings.signal, settings.racing, RACING_SPAN)
    sweep = Sweep(bench.journal, job, material.metric, probes, rules)
    reads = [job.model, *([job.moments] if job.moments else []), *material.metric_file]
    with (
        account.step("sweep", bench.journal),
        account.progress("sweep", sweep.missing()) as bar,
        runner_for(settings.cluster, SweepWorker, reads, lambda job: SweepWorker(job, bench.trial)) as runner,
    ):
        sweep.run(runner, bar)
    if settings.signal == "metric":
        check_reference(in_words(material.metric.name), sweep.reference_value(), "samples of the sweep")
    return sweep.table(), sweep.cost()
