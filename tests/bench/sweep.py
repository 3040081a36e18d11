"""`make bench-sweep`: the exact sweep beside the naive one, on the reference models.

Naive: give one expert the probe's widths and run the same scorer in full, in the same float32 experts. Both are run in
turns, layer by layer; naive on a few experts of each layer, scaled to all. What both need alike (quantised experts) is
made beforehand; the exact side's base run is counted.

The aims can't be met by every model. A changed expert moves the rows routed to it, and through causal attention all
that follow in their sequence, so that no result is exact unless later layers compute these rows again. How many these
are is read off the base's routing and printed beside the aim. Where each token goes to 4 of 32 experts, as in wiki,
one of the first few tokens of each window is hit, and of L layers those behind the changed one are left to compute:
(L - 1) / 2L on average, 0.44 of eight.

The three signals are compared by rank correlation over all probes: each with itself on the other half of the samples
(which one would rank alike on other text?), each with the metric on the other half (which one foretells it?), and with
each other. Racing is replayed on the same measurements.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moeconv.artifacts import Probe, uniform
from moeconv.calibration import divide, load_splits
from moeconv.checkpoint import Checkpoint
from moeconv.coder import ExpertCoder
from moeconv.conversion import RANKING_SHARE
from moeconv.metrics import Metric, default_metric, find_metric
from moeconv.probes import Found
from moeconv.probes.generated import Seq2SeqProber
from moeconv.probes.text import TextProber
from moeconv.quantizers import QUANTIZERS
from moeconv.scorers import Scores
from moeconv.scorers.build import build_scorer, load_tokenizer
from moeconv.scorers.experts import Place
from moeconv.scorers.text import TextScorer
from moeconv.sensitivity import BASE_BITS, PROBES_A_TASK
from moeconv.trial import Trial
from moert.pack.model_spec import ExpertKey
from tests.bench.result import Row, context, row_of_runs, table, write
from tests.bench.signals import Signals

SAMPLES = {"g2p": 400, "wiki": 12, "docline": 60}  # windows for wiki
BITS = 2


@dataclass
class Layer:
    """What both sweeps took for one layer; `naive_*` are means of one probe, `exact_*` sums over all of them."""

    exact_s: float = 0.0
    exact_flops: int = 0
    naive_s: float = 0.0
    naive_flops: float = 0.0


class Subject:
    """One reference model with all experts at the base's width, and the scorer and prober that both work on."""

    def __init__(self, name: str, samples: int) -> None:
        path = Path("recipes/models") / name
        self.name, checkpoint = name, Checkpoint.open(path)
        self.coder = ExpertCoder(checkpoint, QUANTIZERS["channel"](None), None)
        self.trial, self.spec = Trial(checkpoint, lambda: self.coder), checkpoint.spec
        splits = load_splits(name, None, seed=0)
        self.metric: Metric = find_metric(splits.metric or default_metric(splits.seq2seq, splits.choices))
        text = divide(splits.calibration, splits.seq2seq, RANKING_SHARE, seed=0)[0]
        self.scorer = build_scorer(
            self.trial, load_tokenizer(path / "tokenizer.json"), text, self.metric, limit=samples, context=256,
            max_new_tokens=None,
        )  # fmt: skip
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

    def probes(self, place: Place) -> list[Probe]:
        width = (BITS,) * len(self.spec.moe.projections)
        return [Probe(ExpertKey(*place, expert), width) for expert in range(self.spec.moe.num_experts)]

    def naive(self, probe: Probe) -> tuple[Scores, float, int]:
        """Scores, seconds, operations in expert rows."""
        started, rows = time.perf_counter(), self.trial.calls.rows
        self.trial.assign({probe.key: probe.bits})
        scores = self.scorer.score()
        took = time.perf_counter() - started, self.trial.calls.flops(self.trial.calls.rows - rows)
        self.trial.assign({probe.key: (BASE_BITS,) * len(probe.bits)})
        return scores, *took


class Contest:
    """Both sweeps over all layers of one model."""

    def __init__(self, subject: Subject, naive_probes: int) -> None:
        self.subject = subject
        self.naive_probes = naive_probes
        self.layers: dict[Place, Layer] = {}
        self.found: dict[Probe, Found] = {}
        self.naive: dict[Probe, Scores] = {}

    def run(self) -> None:
        places = self.subject.spec.moe_layers()
        subject = self.subject
        subject.scorer.score()  # warm-up
        for number, place in enumerate(places):
            subject.coder.prepare(subject.probes(place))
            layer = self.layers[place] = Layer()
            for side in (self._exact, self._naive)[:: 1 if number % 2 == 0 else -1]:
                side(place, layer)
            share = layer.exact_s / (layer.naive_s * subject.spec.moe.num_experts)
            said = f"{subject.name}: {place[0]} layer {place[1]}, exact takes {share:.2f} of the naive time"
            print(said, file=sys.stderr, flush=True)

    def _exact(self, place: Place, layer: Layer) -> None:
        probes = self.subject.probes(place)
        started, rows = time.perf_counter(), self.subject.trial.calls.rows
        for start in range(0, len(probes), PROBES_A_TASK):
            for found in self.subject.prober.probe(probes[start : start + PROBES_A_TASK]):
                self.found[found.probe] = found
        layer.exact_s = time.perf_counter() - started
        layer.exact_flops = self.subject.trial.calls.flops(self.subject.trial.calls.rows - rows)

    def _naive(self, place: Place, layer: Layer) -> None:
        """Experts from the rarely to the often used."""
        rows = self.subject.prober.rows_of()[place]
        order = np.argsort(rows, kind="stable")
        places = ((np.arange(self.naive_probes) + 0.5) / self.naive_probes * len(rows)).astype(int)
        chosen = [self.subject.probes(place)[order[at]] for at in sorted(set(places.tolist()))]
        results = [self.subject.naive(probe) for probe in chosen]
        self.naive |= {probe: scores for probe, (scores, _, _) in zip(chosen, results, strict=True)}
        layer.naive_s = float(np.mean([seconds for _, seconds, _ in results]))
        layer.naive_flops = float(np.mean([flops for _, _, flops in results]))

    def rows(self) -> list[Row]:
        return [*self._agreement(), *self._costs()]

    def _agreement(self) -> list[Row]:
        pairs = [(self.found[probe], naive) for probe, naive in self.naive.items()]
        nats = max(float((np.abs(one.scores.nats - naive.nats) / naive.tokens).max()) for one, naive in pairs)
        outputs = [(mine, theirs) for one, naive in pairs
                   for mine, theirs in zip(one.scores.outputs, naive.outputs, strict=True)]  # fmt: skip
        differ = sum(mine != theirs for mine, theirs in outputs)
        ties = sum(one.near_ties for one, _ in pairs)
        name = self.subject.name
        rows = [Row(f"{name}: largest difference over {len(pairs)} probes", nats, "nats a token").at_most(1e-5)]
        if outputs:
            rows.append(Row(f"{name}: outputs that differ", differ, f"of {len(outputs)}").at_most(ties))
        return [*rows, Row(f"{name}: near ties", sum(one.near_ties for one in self.found.values()), "outputs")]

    def _costs(self) -> list[Row]:
        subject, layers = self.subject, list(self.layers.values())
        name, count, experts = subject.name, len(self.found), subject.spec.moe.num_experts
        naive_flops = experts * sum(layer.naive_flops for layer in layers)
        naive_s = experts * sum(layer.naive_s for layer in layers)
        exact_flops = sum(layer.exact_flops for layer in layers) + subject.base_flops
        exact_s = sum(layer.exact_s for layer in layers) + subject.base_s
        least = subject.trial.calls.flops(least_rows(subject.prober, subject.spec.moe.top_k))
        free = sum(rows.count(0) for rows in subject.prober.rows_of().values())
        shares = [layer.exact_s / (experts * layer.naive_s) for layer in layers]
        return [
            Row(f"{name}: operations in expert rows", exact_flops / naive_flops, "of naive").at_most(0.10),
            Row(f"{name}: those that no exact sweep can spare", least / naive_flops, "of naive"),
            Row(f"{name}: wall time", exact_s / naive_s, "of naive").at_most(0.20),
            row_of_runs(f"{name}: wall time, median of layers without the base run", shares, "of naive"),
            Row(f"{name}: time of a naive probe", naive_s / count, "s"),
            Row(f"{name}: time of an exact probe", exact_s / count, "s"),
            Row(f"{name}: experts without a row", free, f"of {count}"),
        ]


# What must be computed ------------------------------------------------------------------------------------------------


def least_rows(prober: TextProber | Seq2SeqProber, top_k: int) -> int:
    """Expert rows that differ from the base's when each expert in turn is changed, summed over all experts: rows
    routed to it, and in later layers all rows that attend to those, in texts that the base run knows. What is written
    anew is not counted."""
    if isinstance(prober, TextProber):
        real = prober.texts.real
        return sum(
            _causal(call.chosen, real, (prober.n_layers - layer - 1) * top_k)
            for (_, layer), call in prober.calls.items()
        )
    spec, total = prober.trial.spec, 0
    assert spec.encoder is not None
    for base in prober.bases:
        for (stack, layer), call in base.calls.items():
            if stack == "decoder":
                total += _causal(call.chosen, base.real, (spec.decoder.n_layers - layer - 1) * top_k)
                continue
            mask = base.bucket.mask.bool()
            later = mask.sum(dim=1) * (spec.encoder.n_layers - layer - 1)
            later = later.index_add(0, base.of_row, base.real.sum(dim=1) * spec.decoder.n_layers)
            for hits in _hits(call.chosen, mask):
                total += int(hits.sum()) + int(later[hits.any(dim=1)].sum()) * top_k
    return total


def _causal(chosen: torch.Tensor, real: torch.Tensor, rows_a_token: int) -> int:
    """chosen [sequences × tokens, top_k], real [sequences, tokens]; what is behind the first hit differs too."""
    total = 0
    for hits in _hits(chosen, real):
        total += int(hits.sum()) + int(((hits.cumsum(dim=1) > 0) & real).sum()) * rows_a_token
    return total


def _hits(chosen: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
    """For each expert, up to the last that was chosen, at which real tokens: [sequences, tokens]."""
    return [(chosen == expert).any(dim=1).view(real.shape) & real for expert in range(int(chosen.max()) + 1)]


def signals(contest: Contest) -> Signals:
    subject = contest.subject
    found = [one.scores for one in contest.found.values()]
    return Signals(subject.name, subject.metric, subject.reference, subject.base, found)


def main() -> None:
    parser = argparse.ArgumentParser(description="The exact sweep beside the naive one.")
    parser.add_argument("--models", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--probes", type=int, default=2, help="naive probes in each layer")
    parser.add_argument("--samples", type=int, help="instead of each model's own number")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    started, rows = time.perf_counter(), []
    for name in arguments.models:
        subject = Subject(name, arguments.samples or SAMPLES[name])
        contest = Contest(subject, arguments.probes)
        contest.run()
        rows += [*contest.rows(), *signals(contest).rows()]
    samples = {name: arguments.samples or SAMPLES[name] for name in arguments.models}
    settings = {"samples": samples, "naive probes a layer": arguments.probes, "bits": BITS, "base": BASE_BITS,
                "quantizer": "channel", "threads": torch.get_num_threads(),
                "seconds": round(time.perf_counter() - started)}  # fmt: skip
    path = write("sweep", context(settings, ["scipy"]), rows)
    print(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
