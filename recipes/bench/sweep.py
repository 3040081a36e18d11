"""`make bench-sweep`: the exact sweep beside the naive one, on the reference models.

Naive: give one expert the probe's widths and run the same scorer in full, in the same float32 experts. First both are
compared probe by probe at every width, on little text and untimed. Then both are timed in turns at 2 bits, layer by
layer; naive on a few experts of each layer, scaled to all. What both need alike (quantized experts) is made beforehand;
the exact side's base run is counted.

The aims can't be met by every model. A changed expert moves the rows routed to it, and through causal attention all
that follow in their sequence, so that no result is exact unless later layers compute these rows again. How many these
are is read off the base's routing and printed beside the aim. Where each token goes to 4 of 32 experts, as in wiki,
one of the first few tokens of each window is hit, and of L layers those behind the changed one are left to compute:
(L - 1) / 2L on average, 0.44 of eight.

The three signals are compared by rank correlation over all probes: each with itself on the other half of the samples
(which one would rank alike on other text?), each with the metric on the other half (which one foretells it?), and with
each other.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from moeconv.artifacts import Probe
from moeconv.sweep.probes import Found, Seq2SeqProber, TextProber
from moeconv.sweep.sensitivity import BASE_BITS, PROBES_A_TASK
from moert.pack.model_spec import LayerKey
from recipes.bench.conversions import Agreement, Signals, Subject
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized

SAMPLES = sized(
    {"g2p": 240, "wiki": 8, "marks": 40, "wikids": 8}, {"g2p": 24}
)  # that are timed on; windows for wiki and wikids
COMPARED = sized({"g2p": 48, "wiki": 3, "marks": 6, "wikids": 3}, {"g2p": 8})  # that results are compared on
LEAST_PROBES = sized(64, 2)  # that are compared at each width
BITS = 2


@dataclass
class Layer:
    """What both sweeps took for one layer; `naive_*` are means of one probe, `exact_*` sums over all of them."""

    exact_s: float = 0.0
    exact_flops: int = 0
    naive_s: float = 0.0
    naive_flops: float = 0.0


class Contest:
    """Both sweeps over all layers of one model."""

    def __init__(self, subject: Subject, naive_probes: int) -> None:
        self.subject = subject
        self.naive_probes = naive_probes
        self.layers: dict[LayerKey, Layer] = {}
        self.found: dict[Probe, Found] = {}

    def run(self) -> None:
        places, started = self.subject.spec.moe_layers(), time.perf_counter()
        subject = self.subject
        subject.scorer.score()  # warm-up
        for number, place in enumerate(places):
            subject.coder.prepare(subject.probes(place, BITS))
            layer = self.layers[place] = Layer()
            for side in (self._exact, self._naive)[:: 1 if number % 2 == 0 else -1]:
                side(place, layer)
            share = layer.exact_s / (layer.naive_s * subject.spec.moe.n)
            left = (time.perf_counter() - started) / (number + 1) * (len(places) - number - 1)
            said = f"{subject.name}: {place[0]} layer {place[1]}, exact takes {share:.2f} of the naive time"
            print(f"{said}, about {left:.0f} s left", file=sys.stderr, flush=True)

    def _exact(self, place: LayerKey, layer: Layer) -> None:
        probes = self.subject.probes(place, BITS)
        started, rows = time.perf_counter(), self.subject.trial.calls.rows
        for start in range(0, len(probes), PROBES_A_TASK):
            for found in self.subject.prober.probe(probes[start : start + PROBES_A_TASK]):
                self.found[found.probe] = found
        layer.exact_s = time.perf_counter() - started
        layer.exact_flops = self.subject.trial.calls.flops(self.subject.trial.calls.rows - rows)

    def _naive(self, place: LayerKey, layer: Layer) -> None:
        chosen = self.subject.some(place, BITS, self.naive_probes)
        results = [self.subject.naive(probe) for probe in chosen]
        layer.naive_s = statistics.fmean(seconds for _, seconds, _ in results)
        layer.naive_flops = statistics.fmean(flops for _, _, flops in results)

    def rows(self) -> list[Row]:
        subject, layers = self.subject, list(self.layers.values())
        name, count, experts = subject.name, len(self.found), subject.spec.moe.n
        naive_flops = experts * sum(layer.naive_flops for layer in layers)
        naive_s = experts * sum(layer.naive_s for layer in layers)
        exact_flops = sum(layer.exact_flops for layer in layers) + subject.base_flops
        exact_s = sum(layer.exact_s for layer in layers) + subject.base_s
        least = subject.trial.calls.flops(least_rows(subject.prober, subject.spec.moe.router.top_k))
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
        return sum(_causal(call.chosen, real, _later(prober.calls, at) * top_k) for at, call in prober.calls.items())
    total = 0
    for base in prober.bases:
        decoders = sum(at.stack == "decoder" for at in base.calls)
        for at, call in base.calls.items():
            if at.stack == "decoder":
                total += _causal(call.chosen, base.real, _later(base.calls, at) * top_k)
                continue
            mask = base.bucket.mask.bool()
            later = mask.sum(dim=1) * _later(base.calls, at)
            later = later.index_add(0, base.of_row, base.real.sum(dim=1) * decoders)
            for hits in _hits(call.chosen, mask):
                total += int(hits.sum()) + int(later[hits.any(dim=1)].sum()) * top_k
    return total


def _later(layers: Iterable[LayerKey], at: LayerKey) -> int:
    """How many of these layers with experts come behind it in its stack."""
    return sum(other.stack == at.stack and other.layer > at.layer for other in layers)


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


def rows_of(name: str, compared: int, samples: int, naive_probes: int) -> list[Row]:
    """All figures of one model; what is compared and what is timed are each on a subject of its own."""
    agreement = Agreement(Subject(name, compared), LEAST_PROBES)
    agreement.run()
    contest = Contest(Subject(name, samples), naive_probes)
    contest.run()
    return [*agreement.rows(), *contest.rows(), *signals(contest).rows()]


def main() -> None:
    parser = argparse.ArgumentParser(description="The exact sweep beside the naive one.")
    parser.add_argument("--models", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--probes", type=int, default=sized(2, 1), help="naive probes in each layer that are timed")
    parser.add_argument("--samples", type=int, help="timed on, instead of each model's own number")
    parser.add_argument("--compared", type=int, help="compared on, instead of each model's own number")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    started, rows, failures = time.perf_counter(), [], []
    samples = {name: arguments.samples or SAMPLES[name] for name in arguments.models}
    compared = {name: arguments.compared or COMPARED[name] for name in arguments.models}
    for name in arguments.models:
        try:
            rows += rows_of(name, compared[name], samples[name], arguments.probes)
        except Exception as error:  # the other models' figures took long
            failures.append(f"{name}: {type(error).__name__}: {error}")
            print(f"failed: {failures[-1]}", file=sys.stderr, flush=True)
    settings = {"samples timed": samples, "samples compared": compared, "naive probes timed a layer": arguments.probes,
                "bits timed": BITS, "base": BASE_BITS, "quantizer": "channel", "threads": torch.get_num_threads(),
                "failed": failures, "seconds": round(time.perf_counter() - started)}  # fmt: skip
    path = write("sweep", context(settings, ["scipy"]), rows)
    print(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    as_program(main)
