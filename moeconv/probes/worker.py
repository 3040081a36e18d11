"""The part of a sweep that one process does: everything it must know, and answers to the tasks it is given."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moeconv.artifacts import Probe, uniform
from moeconv.calibration import Sample
from moeconv.checkpoint import Checkpoint
from moeconv.coder import ExpertCoder
from moeconv.material import TOKENIZER
from moeconv.metrics import find_metric
from moeconv.moments import Moments
from moeconv.probes import Prober
from moeconv.probes.generated import Seq2SeqProber
from moeconv.probes.text import TextProber
from moeconv.quantizers import QUANTIZERS
from moeconv.records import Record
from moeconv.scorers.build import build_scorers, load_tokenizer
from moeconv.scorers.head import ReferenceRows
from moeconv.scorers.text import TextScorer
from moeconv.trial import Trial


@dataclass(frozen=True)
class SweepJob:
    """What a worker is made from. Samples are measured in `blocks`, so that what is kept of a base run is bounded.
    `moments` is the file of what the quantizer knows of the experts' inputs, None if it needs nothing."""

    model: Path
    quantizer: str
    group_size: int | None
    moments: Path | None
    samples: tuple[Sample, ...]
    metric: str
    limit: int | None
    context: int
    max_new_tokens: int | None
    blocks: int
    base_bits: int


@dataclass(frozen=True)
class Task:
    """Probes of one layer on one block of the samples; without any, the block's own figures are asked for."""

    block: int
    probes: tuple[Probe, ...] = ()


class SweepWorker:
    """Holds the model and the base run of one block at a time. `trial` is taken over if there is one already."""

    def __init__(self, job: SweepJob, trial: Trial | None = None) -> None:
        self.job = job
        self.trial = trial or _trial(job)
        self.scorers = build_scorers(
            self.trial, load_tokenizer(self.trial.checkpoint.path / TOKENIZER), job.samples, find_metric(job.metric),
            limit=job.limit, context=job.context, max_new_tokens=job.max_new_tokens, blocks=job.blocks,
        )  # fmt: skip
        self._block: int | None = None
        self._prober: Prober
        self._base: Record
        self._disk = tempfile.TemporaryDirectory(prefix="moeconv-")
        self.trial.restore()
        self._references = [self._reference(block) for block in range(job.blocks)]
        self.trial.assign(uniform(self.trial.spec, job.base_bits))

    def measure(self, task: Task) -> list[dict[str, Any]]:
        """For each probe a Record as JSON; without probes one entry: reference, base, and rows of every expert."""
        self._enter(task.block)
        if not task.probes:
            rows = {f"{stack[0].upper()}{layer:02d}": found for (stack, layer), found in self._prober.rows_of().items()}
            base, reference = self._base.to_json(), self._references[task.block].to_json()
            return [{"reference": reference, "base": base, "rows": rows}]
        self._prepare_layer(task.probes)
        answers = self._prober.probe(task.probes)
        return [
            Record.of(str(one.probe), one.scores, one.seconds, one.flops, one.near_ties).to_json() for one in answers
        ]

    def _prepare_layer(self, probes: Sequence[Probe]) -> None:
        for bits in {width for probe in probes for width in probe.bits if width < 16}:
            self.trial.coder().prepare(probes[0].key.stack, probes[0].key.layer, bits)

    def _reference(self, block: int) -> Record:
        """Scores of the unquantised model; what divergences are measured against goes to disk until it is needed."""
        record = self._timed("unquantised", block, reference=True)
        rows = self.scorers[block].reference
        torch.save((rows.mean_row, rows.negentropy), self._file(block))  # type: ignore[union-attr]
        self.scorers[block].reference = None
        return record

    def _enter(self, block: int) -> None:
        if block == self._block:
            return
        if self._block is not None:
            self.scorers[self._block].reference = None
            del self._prober
        scorer = self.scorers[block]
        scorer.reference = ReferenceRows(*torch.load(self._file(block)))
        if isinstance(scorer, TextScorer):
            self._prober = TextProber(self.trial, scorer)
        else:
            self._prober = Seq2SeqProber(self.trial, scorer)
        self._block = block
        self._base = self._timed(f"all at {self.job.base_bits}", block, reference=False)

    def _timed(self, what: str, block: int, *, reference: bool) -> Record:
        started, rows = time.perf_counter(), self.trial.calls.rows
        scores = self.scorers[block].score(as_reference=True) if reference else self._prober.prepare()
        flops = self.trial.calls.flops(self.trial.calls.rows - rows)
        return Record.of(what, scores, time.perf_counter() - started, flops)

    def _file(self, block: int) -> Path:
        return Path(self._disk.name) / f"reference-{block}.pt"


def _trial(job: SweepJob) -> Trial:
    checkpoint = Checkpoint.open(job.model)
    moments = None if job.moments is None else Moments.load(job.moments)
    coder = ExpertCoder(checkpoint, QUANTIZERS[job.quantizer](job.group_size), moments)
    return Trial(checkpoint, lambda: coder)
