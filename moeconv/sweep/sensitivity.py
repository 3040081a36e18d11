"""The sensitivity of each expert at each width, from the journal or measured."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from moeconv.artifacts import Bits, Probe, SensitivityTable, SweepCost, uniform
from moeconv.calibration import Sample, samples_digest
from moeconv.errors import ConversionError
from moeconv.measure.metrics import Metric, find_metric
from moeconv.measure.scorers import ReferenceRows, Scores
from moeconv.measure.scoring import Extent, TextScorer, build_scorers, load_tokenizer
from moeconv.measure.trial import Evaluation, LoadedModel, Trial, joined
from moeconv.measure.workdir import Journal, identity
from moeconv.progress import Bar
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder, batches
from moeconv.quantizers.moments import Moments
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.cluster import Runner
from moeconv.sweep.probes import Prober, Seq2SeqProber, TextProber
from moert.pack.codec import Width
from moert.pack.layout import Neurons
from moert.pack.manifest import Dense
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.tensors import TOKENIZER

# The part of a sweep that one process does: its job, and its worker.


@dataclass(frozen=True)
class SweepJob:
    """The job that a worker is made from. Samples are measured in `blocks`, so that the kept states of a base run are
    bounded. `moments` is the file of the moments of the experts' inputs, None if the quantizer needs none. `dense` has
    the widths of all other matrices, `neurons` is as in ExpertCoder."""

    model: Path
    quantizer: str
    group_size: int | None
    moments: Path | None
    samples: tuple[Sample, ...]
    metric: str
    extent: Extent
    blocks: int
    base_bits: Width
    dense: Dense | None = None
    neurons: Neurons | None = None


@dataclass(frozen=True)
class Task:
    """Probes of one layer on one block of the samples; without probes, the figures of the block's base run."""

    block: int
    probes: tuple[Probe, ...] = ()

    @property
    def affinity(self) -> str:
        """The preparation of a worker: the base run of the task's block."""
        return f"block {self.block}"


class SweepWorker:
    """A worker of a sweep, with the model and the base run of one block at a time. `trial`: one that exists already;
    None: a new one is made from the job."""

    def __init__(self, job: SweepJob, trial: Trial | None = None) -> None:
        self.job = job
        self.trial = trial or _trial(job)
        checkpoint = self.trial.checkpoint
        tokenizer = load_tokenizer(checkpoint.path / TOKENIZER, checkpoint.spelled)
        self.scorers = build_scorers(
            self.trial, tokenizer, job.samples, find_metric(job.metric), job.extent, job.blocks
        )
        self._references: dict[int, Evaluation] = {}  # by block: scores of the unquantized model
        self._files: dict[int, IO[bytes]] = {}  # by block: the reference of divergences, kept on disk
        self._block: int | None = None
        self._prober: Prober | None = None
        self._base: Evaluation

    def measure(self, task: Task) -> list[dict[str, Any]]:
        """Returns an Evaluation as JSON for each probe; without probes one entry: reference, base, and rows of every
        expert."""
        self._enter(task.block)
        assert self._prober is not None
        if not task.probes:
            rows = {str(at): found for at, found in self._prober.rows_of().items()}
            base, reference = self._base.to_json(), self._references[task.block].to_json()
            return [{"reference": reference, "base": base, "rows": rows}]
        started = time.perf_counter()
        for batch in batches(self.trial.spec, task.probes):
            self.trial.coder.prepare(batch)
        answers = self._prober.probe(task.probes)
        seconds = (time.perf_counter() - started) / len(answers)
        return [
            Evaluation.of(str(one.probe), one.scores, seconds, one.flops, one.near_ties).to_json() for one in answers
        ]

    def _enter(self, block: int) -> None:
        """Makes this block's base run, in place of another's. A block that is entered for the first time is run
        through the unquantized model first: only blocks that lack a measurement cost that."""
        if block == self._block:
            return
        self._leave()
        scorer = self.scorers[block]
        if block in self._files:
            scorer.reference = _read(self._files[block])
        else:
            self.trial.restore()
            self._references[block] = self._timed("unquantized", lambda: scorer.score(as_reference=True))
            scorer.original = None  # no other head follows
            if self.job.blocks > 1:
                assert scorer.reference is not None
                self._files[block] = _written(scorer.reference)
        self.trial.assign(uniform(self.trial.spec, self.job.base_bits))
        prober = TextProber(self.trial, scorer) if isinstance(scorer, TextScorer) else Seq2SeqProber(self.trial, scorer)
        self._base = self._timed(f"all at {self.job.base_bits}", prober.prepare)
        self._prober, self._block = prober, block

    def _leave(self) -> None:
        """Frees the kept states of a block."""
        self._prober = self._block = None
        for scorer in self.scorers:
            scorer.reference = None

    def _timed(self, what: str, run: Callable[[], Scores]) -> Evaluation:
        started, rows = time.perf_counter(), self.trial.calls.rows
        scores = run()
        flops = self.trial.calls.flops(self.trial.calls.rows - rows)
        return Evaluation.of(what, scores, time.perf_counter() - started, flops)


def _written(rows: ReferenceRows) -> IO[bytes]:
    """Returns the rows in a file without a name, which vanishes when this process ends, however it ends. Raises
    ConversionError."""
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it lives as long as the worker
        for part in (rows.mean_row, rows.negentropy):
            np.save(file, part.numpy())
    except OSError as error:
        raise ConversionError(
            f"can't write what the sweep keeps in temporary files ({error}): free some space, or let TMPDIR name a "
            "folder on a larger disk"
        ) from None
    return file


def _read(file: IO[bytes]) -> ReferenceRows:
    file.seek(0)
    return ReferenceRows(torch.from_numpy(np.load(file)), torch.from_numpy(np.load(file)))


def _trial(job: SweepJob) -> Trial:
    checkpoint = Checkpoint.open(job.model)
    moments = None if job.moments is None else Moments.load(job.moments)
    coder = ExpertCoder(checkpoint, QUANTIZERS[job.quantizer](job.group_size), moments, neurons=job.neurons)
    return Trial(LoadedModel(checkpoint, DenseCoder(checkpoint, job.dense)), coder)


# The sweep: the cost of each expert when it alone has another width than the base (EdgeMoE §3.2, Fig. 7a).

BASE_BITS = 4
PROBES_A_TASK = 16

SweepRunner = Runner[SweepJob, Task, list[dict[str, Any]]]


def probes_for(spec: ModelSpec, widths: Sequence[Width], per_projection: bool) -> list[Probe]:
    """Returns the probes of every expert at each width but the base's: whole, or one of its projections at a time."""
    n = len(spec.moe.ffn.projections)
    parts = [(place,) for place in range(n)] if per_projection else [tuple(range(n))]
    patterns: list[Bits] = [
        tuple(bits if place in part else BASE_BITS for place in range(n))
        for bits in widths
        if bits != BASE_BITS
        for part in parts
    ]
    return [Probe(key, pattern) for key in spec.expert_keys() for pattern in patterns]


class Sweep:
    """The measurements of one list of probes: those that the journal lacks are run, then all are read from it."""

    def __init__(self, journal: Journal, job: SweepJob, metric: Metric, probes: Sequence[Probe]) -> None:
        self.journal, self.job, self.metric, self.probes = journal, job, metric, probes
        about = [*astuple(job.extent), job.blocks, job.base_bits]
        self._about = identity(samples_digest(job.samples), job.metric, *about)

    def missing(self) -> int:
        """Returns the number of measurements of a full sweep that the journal lacks."""
        return sum(self._get(block, probe) is None for probe in self.probes for block in range(self.job.blocks))

    def run(self, runner: SweepRunner, bar: Bar) -> None:
        """Makes the measurements that the journal lacks."""
        tasks = [task for block in range(self.job.blocks) for task in self._tasks(block)]
        for task, found in runner(self.job, tasks) if tasks else ():
            names = [self._name(task.block, probe) for probe in task.probes] or [self._name(task.block)]
            self.journal.add_all(dict(zip(names, found, strict=True)))
            bar.update(len(task.probes))

    def _tasks(self, block: int) -> list[Task]:
        """Returns the tasks for those of the probes, and of the block's own figures, that the journal lacks.

        Probes are bundled in the same way each time, and a bundle that lacks one is done again as a whole: the last
        digits of a result may depend on the rest of its batch, and a resumed run should end in the same bytes.
        """
        kinds: dict[tuple[str, int, Bits], list[Probe]] = {}
        for probe in self.probes:
            kinds.setdefault((probe.key.stack, probe.key.layer, probe.bits), []).append(probe)
        bundles = [
            tuple(found[start : start + PROBES_A_TASK])
            for _, found in sorted(kinds.items())
            for start in range(0, len(found), PROBES_A_TASK)
        ]
        own = [] if self._get(block) is not None else [Task(block)]
        return own + [Task(block, bundle) for bundle in bundles if any(self._get(block, one) is None for one in bundle)]

    # Results ----------------------------------------------------------------------------------------------------------

    def table(self) -> SensitivityTable:
        reference = joined(self._evaluations("reference"))
        base = joined(self._evaluations("base")).summary(self.metric, reference)
        costs = {}
        for probe in self.probes:
            found = joined(self._evaluations(probe)).summary(self.metric, reference)
            costs[probe] = (found.loss - base.loss, found.nll - base.nll, found.kl - base.kl)
        return SensitivityTable(self.job.base_bits, base, costs, self._coverage())

    def cost(self) -> SweepCost:
        """Returns the cost of the sweep, in this run and before, beside full evaluations of every probe on all
        samples."""
        spent = [record for probe in self.probes for record in self._evaluations(probe)] + self._evaluations("base")
        coverage = self._coverage()
        return SweepCost(
            probes=len(self.probes),
            free_probes=sum(coverage[probe.key] == 0 for probe in self.probes),
            measured_share=1.0,
            flops=sum(record.flops for record in spent),
            naive_flops=len(self.probes) * sum(record.flops for record in self._evaluations("reference")),
            seconds=sum(record.seconds for record in spent),
            near_ties=sum(record.near_ties for record in spent),
        )

    def reference_value(self) -> float:
        """Returns the metric of the unquantized model on the sweep's samples."""
        return self.metric.value(joined(self._evaluations("reference")).columns())

    def _coverage(self) -> dict[ExpertKey, int]:
        totals = {probe.key: 0 for probe in self.probes}
        for block in range(self.job.blocks):
            with self.journal.believed():
                rows = self._measured(block)["rows"]
                for key in totals:
                    totals[key] += int(rows[str(key.at)][key.expert])
        return totals

    def _evaluations(self, of: Probe | str) -> list[Evaluation]:
        """Returns an evaluation for each block: of a probe, or the block's own "base" or "reference"."""
        with self.journal.believed():
            return [
                Evaluation.from_json(self._measured(block)[of] if isinstance(of, str) else self._measured(block, of))
                for block in range(self.job.blocks)
            ]

    def _measured(self, block: int, probe: Probe | None = None) -> dict[str, Any]:
        entry = self._get(block, probe)
        assert entry is not None, f"{probe} was not measured on block {block}"
        return entry

    def _get(self, block: int, probe: Probe | None = None) -> dict[str, Any] | None:
        return self.journal.get(self._name(block, probe))

    def _name(self, block: int, probe: Probe | None = None) -> str:
        return identity(self._about, block, None if probe is None else str(probe))
