"""What each layer's bonus saves and costs alone, and plans of them: routing for one share of the experts in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moeconv.artifacts import uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.measure.assignments import Preferred
from moeconv.plan.frontier import Frontier
from moeconv.plan.problem import Plan, layout_bytes
from moeconv.plan.residence import Step, ladder, steps_of
from moeconv.quantizers.coder import ORIGINAL
from moert.pack.manifest import Preference
from moert.pack.model_spec import ExpertKey, LayerKey

STEPS = (0.0, 0.2, 0.4, 0.6, 0.9, 1.3, 2.0)
"""Bonuses that each layer is tried with, times its gap (Preferring.gap)."""


class _Tried(NamedTuple):
    found: Preferred
    kl: float


class Bonuses:
    """Of the layers of a decoder, each tried alone at all STEPS, with unquantised experts, on the ranking text."""

    def __init__(self, bench: Bench, share: float, account: Account) -> None:
        self.spec, self.share, self._bench, self._account = bench.spec, share, bench, account
        moe = bench.spec.moe
        self.places = [at for at in bench.spec.moe_layers() if at.stack == "decoder"]
        self.recent = max(moe.router.top_k, int(share * moe.n + 1e-9))
        self.sure = int(moe.router.top_k > 1)
        self._bytes_of = layout_bytes(bench.spec, bench.coding.storage)

    @property
    def exact(self) -> Preference:
        """Without any bonus: what exact routing misses where memory holds as many."""
        return self._with([0.0] * len(self.places))

    def frontier(self, plan: Plan) -> Frontier:
        """Plans of bonuses by what they read of experts with these widths; see ladder."""
        layers = {
            at: [
                Step(number, self._layer_read(plan, at, self._tried[at, number].found), self._tried[at, number].kl)
                for number in range(len(STEPS))
            ]
            for at in self.places
        }
        return ladder(layers)

    def preference(self, routing: Plan) -> Preference:
        """Of a plan of `frontier`."""
        numbers, gaps = steps_of(routing.assignment), self._tried[self.places[0], 0].found.gaps
        return self._with([STEPS[numbers[at]] * gap for at, gap in zip(self.places, gaps, strict=True)])

    def missed(self, routing: Plan) -> dict[ExpertKey, int]:
        """How often each expert of the decoder would be read, as far as layers were measured alone."""
        numbers = steps_of(routing.assignment)
        return {
            at.expert(number): count
            for at in self.places
            for number, count in enumerate(self._tried[at, numbers[at]].found.missed[at])
        }

    def read(self, plan: Plan, found: Preferred) -> float:
        """Bytes that a token reads, all layers together, where memory holds what is preferred."""
        return sum(self._layer_read(plan, at, found) for at in self.places) / max(1, found.tokens)

    @cached_property
    def _tried(self) -> dict[tuple[LayerKey, int], _Tried]:
        settings, material = self._bench.settings, self._bench.material
        measure = self._bench.measure("routing", material.ranking, settings.sweep_samples)
        widths, tried = uniform(self.spec, ORIGINAL), dict[tuple[LayerKey, int], _Tried]()
        exact = measure.preferring(widths, self.exact, "exact routing")
        with self._account.progress("routing", len(self.places) * (len(STEPS) - 1)) as bar:
            for place, at in enumerate(self.places):
                tried[at, 0] = _Tried(exact, measure.summary(exact.evaluation).kl)
                for number, step in enumerate(STEPS[1:], 1):
                    bonus = [0.0] * len(self.places)
                    bonus[place] = step * exact.gaps[place]
                    found = measure.preferring(widths, self._with(bonus), f"{at} prefers by {bonus[place]:.4g}")
                    tried[at, number] = _Tried(found, measure.summary(found.evaluation).kl)
                    bar.update(1)
        return tried

    def _with(self, bonus: Sequence[float]) -> Preference:
        return Preference(self.share, self.recent, self.sure, tuple(float(np.float32(one)) for one in bonus))

    def _layer_read(self, plan: Plan, at: LayerKey, found: Preferred) -> int:
        return sum(
            count * self._nbytes(plan.assignment, at.expert(number)) for number, count in enumerate(found.missed[at])
        )

    def _nbytes(self, assignment: Mapping[ExpertKey, Sequence[int]], key: ExpertKey) -> int:
        names = self.spec.moe.ffn.projections
        return sum(self._bytes_of(name, bits) for name, bits in zip(names, assignment[key], strict=True))
