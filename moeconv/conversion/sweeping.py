"""The sweep of one conversion: made from its settings, run where they say, kept for later plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moeconv.artifacts import SweepCost
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.coding import Coding
from moeconv.conversion.material import Material
from moeconv.conversion.planning import Inputs
from moeconv.promise.judging import check_reference
from moeconv.promise.standing import unreached_text
from moeconv.sweep.memory import blocks_for
from moeconv.sweep.runners import runner_for
from moeconv.sweep.sensitivity import BASE_BITS, RaceRules, Sweep, probes_for
from moeconv.sweep.worker import SweepJob

RACING_BLOCKS, RACING_SPAN = 8, 0.1


@dataclass(frozen=True)
class Swept:
    """What plans are made from, and what it took."""

    inputs: Inputs
    cost: SweepCost


def job_of(coding: Coding, material: Material, moments: Path | None) -> SweepJob:
    """Raises SettingsError for a --memory in which no sweep fits."""
    settings = material.settings
    blocks = blocks_for(coding.spec, material.ranked, settings.memory_bytes)
    if settings.racing is not None:
        blocks = min(max(blocks, RACING_BLOCKS), material.ranked.samples)
    return SweepJob(
        coding.checkpoint.path.absolute(), settings.coded_by, settings.group_size, moments, material.ranking,
        material.metric_name, material.extent(settings.sweep_samples), blocks, BASE_BITS,
        coding.dense_widths,
    )  # fmt: skip


def swept(bench: Bench, job: SweepJob, widths: Sequence[int], samples_id: str, account: Account) -> Swept:
    """`samples_id` names the samples that plans are judged on. Raises ConversionError."""
    settings, material, quantizer = bench.settings, bench.material, bench.coding.quantizer
    probes = probes_for(bench.spec, widths, settings.per_projection)
    rules = None if settings.racing is None else RaceRules(settings.signal, settings.racing, RACING_SPAN)
    sweep = Sweep(bench.journal, job, material.metric, probes, rules)
    reads = [job.model, *([job.moments] if job.moments else []), *material.metric_file]
    with (
        account.step("sweep", bench.journal),
        account.progress("sweep", sweep.missing()) as bar,
        runner_for(settings.cluster, lambda: bench.trial, reads) as runner,
    ):
        sweep.run(runner, bar)
    if settings.signal == "metric":
        check_reference(material.metric.name, sweep.reference_value(), "samples of the sweep")
    table = sweep.table()
    account.note(unreached_text(table))
    inputs = Inputs(
        str(job.model), quantizer.name, quantizer.group_size, material.metric_name, samples_id, table,
        {} if job.dense is None else job.dense.bits,
    )  # fmt: skip
    return Swept(inputs, sweep.cost())
