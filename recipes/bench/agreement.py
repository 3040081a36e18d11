"""Does the exact sweep give what a full evaluation of each changed expert gives? Probe by probe, at every width."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import numpy as np

from moeconv.measure.scorers import Scores
from moeconv.sweep.probes import Found
from moeconv.sweep.sensitivity import BASE_BITS
from moert.pack.codec import WIDTHS
from recipes.bench.probed import Subject
from recipes.bench.result import Row

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
