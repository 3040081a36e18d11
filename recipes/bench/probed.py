"""A reference model that the exact and the naive sweep of `make bench-sweep` both work on."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from moeconv.artifacts import Probe, uniform
from moeconv.calibration import RANKING_SHARE, divide, load_splits
from moeconv.command.recipe import Recipe
from moeconv.measure.metrics import Metric, default_metric, find_metric
from moeconv.measure.scorers import Scores
from moeconv.measure.scoring import Extent, TextScorer, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.probes import Seq2SeqProber, TextProber
from moeconv.sweep.sensitivity import BASE_BITS
from moert.pack.model_spec import ExpertKey, LayerKey


class Subject:
    """One reference model with all experts at the base's width, and the scorer and prober that both work on."""

    def __init__(self, name: str, samples: int) -> None:
        settings = Recipe.load(Path(f"recipes/{name}.toml"), Path("build")).settings
        path = Path(settings.model)
        self.name, checkpoint = name, Checkpoint.open(path)
        self.coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
        self.trial, self.spec = Trial(LoadedModel(checkpoint), self.coder), checkpoint.spec
        assert settings.calib is not None
        splits = load_splits(settings.calib, None, seed=0)
        self.metric: Metric = find_metric(settings.metric or default_metric(splits.seq2seq, splits.choices))
        text = divide(splits.calibration, splits.seq2seq, RANKING_SHARE, seed=0)[0]
        tokenizer = load_tokenizer(path / "tokenizer.json")
        self.scorer = build_scorer(self.trial, tokenizer, text, self.metric, Extent(samples, 256, None))
        self.reference = self.scorer.score(as_reference=True)
        self.trial.assign(uniform(self.spec, BASE_BITS))
        self.prober: TextProber | Seq2SeqProber
        if isinstance(self.scorer, TextScorer):
            self.prober = TextProber(self.trial, self.scorer)
        else:
            self.prober = Seq2SeqProber(self.trial, self.scorer)
        started, rows = time.perf_counter(), self.trial.calls.rows
        self.base = self.prober.prepare()
        self.base_s = time.perf_counter() - started
        self.base_flops = self.trial.calls.flops(self.trial.calls.rows - rows)

    def probes(self, place: LayerKey, bits: int) -> list[Probe]:
        width = (bits,) * len(self.spec.moe.ffn.projections)
        return [Probe(ExpertKey(*place, expert), width) for expert in range(self.spec.moe.n)]

    def some(self, place: LayerKey, bits: int, count: int) -> list[Probe]:
        """`count` of them, or all there are, from the rarely to the often used."""
        rows = self.prober.rows_of()[place]
        order = np.argsort(rows, kind="stable")
        places = ((np.arange(count) + 0.5) / count * len(rows)).astype(int)
        probes = self.probes(place, bits)
        return [probes[order[at]] for at in sorted(set(places.tolist()))]

    def naive(self, probe: Probe) -> tuple[Scores, float, int]:
        """Scores, seconds, operations in expert rows."""
        started, rows = time.perf_counter(), self.trial.calls.rows
        self.trial.assign({probe.key: probe.bits})
        scores = self.scorer.score()
        took = time.perf_counter() - started, self.trial.calls.flops(self.trial.calls.rows - rows)
        self.trial.assign({probe.key: (BASE_BITS,) * len(probe.bits)})
        return scores, *took
