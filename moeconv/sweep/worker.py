"""The part of a sweep that one process does: everything it must know, and answers to the tasks it is given."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from moeconv.artifacts import Probe, uniform
from moeconv.calibration import Sample
from moeconv.errors import ConversionError
from moeconv.measure.evaluation import Evaluation
from moeconv.measure.loaded import LoadedModel
from moeconv.measure.metrics import find_metric
from moeconv.measure.scorers import Scores
from moeconv.measure.scorers.build import Extent, build_scorers, load_tokenizer
from moeconv.measure.scorers.head import ReferenceRows
from moeconv.measure.scorers.text import TextScorer
from moeconv.measure.trial import Trial
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder, batches
from moeconv.quantizers.dense import DenseCoder
from moeconv.quantizers.moments import Moments
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.probes import Prober
from moeconv.sweep.probes.generated import Seq2SeqProber
from moeconv.sweep.probes.text import TextProber
from moert.pack.layout import Neurons
from moert.pack.manifest import Dense
from moert.pack.tensors import TOKENIZER


@dataclass(frozen=True)
class SweepJob:
    """What a worker is made from. Samples are measured in `blocks`, so that what is kept of a base run is bounded.
    `moments` is the file of what the quantizer knows of the experts' inputs, None if it needs nothing. `dense` has the
    widths of all other matrices, `neurons` is as of ExpertCoder."""

    model: Path
    quantizer: str
    group_size: int | None
    moments: Path | None
    samples: tuple[Sample, ...]
    metric: str
    extent: Extent
    blocks: int
    base_bits: int
    dense: Dense | None = None
    neurons: Neurons | None = None


@dataclass(frozen=True)
class Task:
    """Probes of one layer on one block of the samples; without any, the block's own figures are asked for."""

    block: int
    probes: tuple[Probe, ...] = ()

    @property
    def affinity(self) -> str:
        """What a worker prepares for it: the base run of its block."""
        return f"block {self.block}"


class SweepWorker:
    """Holds the model and the base run of one block at a time. `trial` is taken over if there is one already."""

    def __init__(self, job: SweepJob, trial: Trial | None = None) -> None:
        self.job = job
        self.trial = trial or _trial(job)
        checkpoint = self.trial.checkpoint
        tokenizer = load_tokenizer(checkpoint.path / TOKENIZER, checkpoint.spelled)
        self.scorers = build_scorers(
            self.trial, tokenizer, job.samples, find_metric(job.metric), job.extent, job.blocks
        )
        self._references: dict[int, Evaluation] = {}  # by block: scores of the unquantised model
        self._files: dict[int, IO[bytes]] = {}  # by block: what divergences are measured against; kept on disk
        self._block: int | None = None
        self._prober: Prober | None = None
        self._base: Evaluation

    def measure(self, task: Task) -> list[dict[str, Any]]:
        """For each probe an Evaluation as JSON; without probes one entry: reference, base, and rows of every expert."""
        self._enter(task.block)
        assert self._prober is not None
        if not task.probes:
            rows = {str(at): found for at, found in self._prober.rows_of().items()}
            base, reference = self._base.to_json(), self._references[task.block].to_json()
            return [{"reference": reference, "base": base, "rows": rows}]
        started = time.perf_counter()
        self._prepare_layer(task.probes)
        answers = self._prober.probe(task.probes)
        seconds = (time.perf_counter() - started) / len(answers)
        return [
            Evaluation.of(str(one.probe), one.scores, seconds, one.flops, one.near_ties).to_json() for one in answers
        ]

    def _prepare_layer(self, probes: Sequence[Probe]) -> None:
        for batch in batches(self.trial.spec, probes):
            self.trial.coder.prepare(batch)

    def _enter(self, block: int) -> None:
        """Makes this block's base run, in place of another's. A block that is entered for the first time needs the
        unquantised model before: only blocks that lack a measurement cost that."""
        if block == self._block:
            return
        self._leave()
        scorer = self.scorers[block]
        if block in self._files:
            scorer.reference = _read(self._files[block])
        else:
            self.trial.restore()
            self._references[block] = self._timed("unquantised", lambda: scorer.score(as_reference=True))
            if self.job.blocks > 1:
                assert scorer.reference is not None
                self._files[block] = _written(scorer.reference)
        self.trial.assign(uniform(self.trial.spec, self.job.base_bits))
        prober = TextProber(self.trial, scorer) if isinstance(scorer, TextScorer) else Seq2SeqProber(self.trial, scorer)
        self._base = self._timed(f"all at {self.job.base_bits}", prober.prepare)
        self._prober, self._block = prober, block

    def _leave(self) -> None:
        """Lets go of what is kept of a block."""
        self._prober = self._block = None
        for scorer in self.scorers:
            scorer.reference = None

    def _timed(self, what: str, run: Callable[[], Scores]) -> Evaluation:
        started, rows = time.perf_counter(), self.trial.calls.rows
        scores = run()
        flops = self.trial.calls.flops(self.trial.calls.rows - rows)
        return Evaluation.of(what, scores, time.perf_counter() - started, flops)


def _written(rows: ReferenceRows) -> IO[bytes]:
    """A file without a name, so that nothing is left of it when this process ends, however it ends."""
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
