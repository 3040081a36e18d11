"""Parts that benches of conversions share: opened models, probes, signals of a sweep and their agreement."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from moeconv.artifacts import SIGNALS, Probe, uniform
from moeconv.calibration import RANKING_SHARE, divide, load_splits
from moeconv.conversion.conversion import directory_of, subject_of
from moeconv.conversion.material import Coding, Material
from moeconv.conversion.measuring import Bench
from moeconv.conversion.settings import Settings
from moeconv.measure.metrics import F64, Metric, default_metric, find_metric
from moeconv.measure.scorers import Scores
from moeconv.measure.scoring import Extent, TextScorer, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.measure.workdir import WorkDir
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.probes import Found, Seq2SeqProber, TextProber
from moeconv.sweep.sensitivity import BASE_BITS
from moert.pack.codec import WIDTHS
from moert.pack.model_spec import ExpertKey, LayerKey
from recipes.bench.program import own_recipe
from recipes.bench.result import Row, context, row_of_runs, table, write

# What a conversion measures with, over the journal in its work directory, without the conversion.


@contextmanager
def opened(settings: Settings) -> Iterator[Bench]:
    """Raises ConversionError for what these settings, or the work directory, don't allow."""
    coding = Coding.open(settings)
    material = Material.read(settings, coding.checkpoint)
    directory = directory_of(subject_of(material, coding))
    with WorkDir(settings.work / directory) as work:
        yield Bench(coding, material, work.journal(directory), coding.moments_in(work.path))


def run_models(
    name: str,
    about: str,
    models: Collection[str],
    folder: Path,
    rows_of: Callable[[str], Iterable[Row]],
    packages: Sequence[str] = (),
    **settings: Any,
) -> int:
    """Runs a bench of the models that the command line names, all of `models` by default, in an empty folder, and
    writes its rows as NAME.json. `packages`, `settings`: see context."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--models", nargs="+", choices=models, default=list(models))
    asked = parser.parse_args()
    shutil.rmtree(folder, ignore_errors=True)
    rows = [row for model in asked.models for row in rows_of(model)]
    path = write(name, context({"models": asked.models, **settings}, packages), rows)
    print(table(rows))
    print(f"written to {path}")
    return 0


# How well do the sweep's signals rank experts? From scores of every probe.

HALVINGS = 20

Places = npt.NDArray[np.integer[Any]]


class Signals:
    """The three signals of every probe, on any of the samples."""

    def __init__(self, name: str, metric: Metric, reference: Scores, base: Scores, found: Sequence[Scores]) -> None:
        self.name, self.metric = name, metric
        self.reference, self.base, self.found = reference.scores, base, found
        self.samples = len(base.nats)

    def rises(self, signal: str, samples: Places) -> F64:
        """Above the base, of each probe, on these places of samples. [probes]"""
        if signal != "metric":
            rises: F64 = self._above_base(signal)[:, samples].sum(axis=1)
            return rises
        before = self.metric.value(self.reference[samples])
        base = self.metric.loss(before, self.metric.value(self.base.scores[samples]))
        after = [self.metric.loss(before, self.metric.value(scores.scores[samples])) for scores in self.found]
        return np.array(after) - base

    def _above_base(self, signal: str) -> F64:
        """[probes, samples]"""
        name = {"nll": "nats", "kl": "kls"}[signal]
        above: F64 = np.array([getattr(scores, name) for scores in self.found]) - getattr(self.base, name)
        return above

    def rows(self) -> list[Row]:
        everything = np.arange(self.samples)
        whole = {signal: self.rises(signal, everything) for signal in SIGNALS}
        rows = []
        for signal in SIGNALS:
            alike, foretells = self._halves(signal)
            rows.append(row_of_runs(f"{self.name}: {signal} on other samples", alike, "rank correlation"))
            if signal != "metric":
                rows.append(row_of_runs(f"{self.name}: {signal}, metric on others", foretells, "rank correlation"))
        for one, other in (("metric", "nll"), ("metric", "kl"), ("nll", "kl")):
            rows.append(Row(f"{self.name}: {one} and {other}", correlation(whole[one], whole[other]),
                            "rank correlation"))  # fmt: skip
        return rows

    def _halves(self, signal: str) -> tuple[list[float], list[float]]:
        """By random halves of the samples: the signal against itself, and against the metric."""
        alike, foretells = [], []
        for seed in range(HALVINGS):
            order = np.random.default_rng(seed).permutation(self.samples)
            first, second = order[: self.samples // 2], order[self.samples // 2 :]
            here = self.rises(signal, first)
            alike.append(correlation(here, self.rises(signal, second)))
            foretells.append(correlation(here, self.rises("metric", second)))
        return alike, foretells


def correlation(one: F64, other: F64) -> float:
    """Spearman's; 0 where one of them is the same throughout."""
    ranks = rankdata(one), rankdata(other)
    if min(np.ptp(ranks[0]), np.ptp(ranks[1])) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


# A reference model that the exact and the naive sweep of `make bench-sweep` both work on.


class Subject:
    """One reference model with all experts at the base's width, and the scorer and prober that both work on."""

    def __init__(self, name: str, samples: int) -> None:
        settings = own_recipe(name, Path("build")).settings
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


# Does the exact sweep give what a full evaluation of each changed expert gives? Probe by probe, at every width.

LIMIT = 1e-5  # nats a token


@dataclass(frozen=True)
class Pair:
    """One probe by both sweeps, on the same samples."""

    exact: Found
    naive: Scores

    def apart(self, signal: str) -> float:
        """The largest difference of "nats" or "kls" of a sample, a token."""
        return float(
            (np.abs(getattr(self.exact.scores, signal) - getattr(self.naive, signal)) / self.naive.tokens).max()
        )

    @property
    def outputs_differ(self) -> int:
        return sum(mine != theirs for mine, theirs in zip(self.exact.scores.outputs, self.naive.outputs, strict=True))


class Agreement:
    """`probes` or a few more at each width but the base's, as many in each layer; all experts where they are fewer."""

    def __init__(self, subject: Subject, probes: int) -> None:
        self.subject = subject
        self.a_layer = math.ceil(probes / len(subject.spec.moe_layers()))
        self.pairs: dict[int, list[Pair]] = {bits: [] for bits in WIDTHS if bits != BASE_BITS}

    def run(self) -> None:
        started, places = time.perf_counter(), self.subject.spec.moe_layers()
        for done, place in enumerate(places, 1):
            for bits, pairs in self.pairs.items():
                probes = self.subject.some(place, bits, self.a_layer)
                self.subject.coder.prepare(probes)
                exact = {found.probe: found for found in self.subject.prober.probe(probes)}
                pairs += [Pair(exact[probe], self.subject.naive(probe)[0]) for probe in probes]
            left = (time.perf_counter() - started) / done * (len(places) - done)
            said = f"{self.subject.name}: {place[0]} layer {place[1]} compared at every width"
            print(f"{said}, about {left:.0f} s left", file=sys.stderr, flush=True)

    def rows(self) -> list[Row]:
        return [row for bits, pairs in self.pairs.items() for row in self._rows(bits, pairs)]

    def _rows(self, bits: int, pairs: list[Pair]) -> list[Row]:
        about, ties = f"{self.subject.name}, {bits} bits", sum(pair.exact.near_ties for pair in pairs)
        nats, kls = (max(pair.apart(signal) for pair in pairs) for signal in ("nats", "kls"))
        rows = [
            Row(f"{about}: probes compared", len(pairs), f"of {len(self.subject.spec.expert_keys())} experts"),
            Row(f"{about}: largest difference", nats, "nats a token").at_most(LIMIT),
            Row(f"{about}: largest difference of the divergence", kls, "nats a token").at_most(LIMIT),
        ]
        outputs = sum(len(pair.naive.outputs) for pair in pairs)
        if outputs:
            differ = sum(pair.outputs_differ for pair in pairs)
            rows.append(Row(f"{about}: outputs that differ", differ, f"of {outputs}").at_most(ties))
            rows.append(Row(f"{about}: near ties", ties, f"of {outputs} outputs"))
        return rows
