"""What each layer's bonus saves and costs, and plans of them: routing for one share of the experts in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moeconv.artifacts import uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.measure.assignments import Measure, Preferred
from moeconv.plan.frontier import Frontier
from moeconv.plan.problem import Plan, layout_bytes
from moeconv.plan.residence import Step, ladder, steps_of
from moeconv.quantizers.coder import ORIGINAL
from moert.pack.manifest import Preference
from moert.pack.model_spec import ExpertKey, LayerKey

STEPS = (0.0, 0.25, 0.5, 0.8, 1.3, 2.0)
"""Bonuses that each layer is tried with, times its gap (Preferring.gap)."""
_MIDDLE = 3
"""The step of all layers but the one that is tried. Whatever is changed in one layer makes choices in all above it
flip, and that costs about the same however many layers are changed: tried alone, with the others routed exactly, each
step would have to bear it."""
_SAMPLES = 16
"""Of the ranking text at least, where there are as many: steps next to each other differ by a tenth of a percent."""
_LEAST_COST = 1e-6


class _Tried(NamedTuple):
    found: Preferred
    kl: float


class Bonuses:
    """Of the layers of a decoder, each tried at all STEPS, with unquantised experts, on the ranking text."""

    def __init__(self, bench: Bench, share: float, account: Account) -> None:
        self.spec, self.share, self._bench, self._account = bench.spec, share, bench, account
        moe = bench.spec.moe
        self.places = [at for at in bench.spec.moe_layers() if at.stack == "decoder"]
        self.recent = max(moe.router.top_k, int(share * moe.n + 1e-9))
        self.sure = 0 if moe.router.top_k == 1 else max(1, moe.router.top_k // 3)
        self._bytes_of = layout_bytes(bench.spec, bench.coding.storage)

    @property
    def exact(self) -> Preference:
        """Without any bonus: what exact routing misses where memory holds as many."""
        return self._with([0.0] * len(self.places))

    def frontier(self, plan: Plan) -> Frontier:
        """Plans of bonuses by what they read of experts with these widths; see ladder."""
        return ladder({at: [self._step(plan, at, number) for number in range(len(STEPS))] for at in self.places})

    def _step(self, plan: Plan, at: LayerKey, number: int) -> Step:
        """A step costs what it costs more than none, and never nothing, so that plans end with exact routing."""
        tried = self._tried[at, number]
        cost = 0.0 if number == 0 else max(_LEAST_COST, tried.kl - self._tried[at, 0].kl)
        return Step(number, self._layer_read(plan, at, tried.found), cost)

    def preference(self, routing: Plan) -> Preference:
        """Of a plan of `frontier`."""
        numbers = steps_of(routing.assignment)
        return self._at([numbers[at] for at in self.places])

    def missed(self, routing: Plan) -> dict[ExpertKey, int]:
        """How often each expert of the decoder would be read, as far as layers do not change each other's choices."""
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
    def _measure(self) -> Measure:
        settings, ranking = self._bench.settings, self._bench.material.ranking
        samples = None if settings.sweep_samples is None else max(settings.sweep_samples, _SAMPLES)
        return self._bench.measure("routing", ranking, samples)

    @cached_property
    def _gaps(self) -> tuple[float, ...]:
        return self._measure.preferring(uniform(self.spec, ORIGINAL), self.exact, "exact routing").gaps

    @cached_property
    def _tried(self) -> dict[tuple[LayerKey, int], _Tried]:
        middle, tried = [_MIDDLE] * len(self.places), dict[tuple[LayerKey, int], _Tried]()
        with self._account.progress("routing", 1 + len(self.places) * (len(STEPS) - 1)) as bar:
            for place, at in enumerate(self.places):
                for number, step in enumerate(STEPS):
                    if number == _MIDDLE and place:
                        tried[at, number] = tried[self.places[0], number]
                        continue
                    steps = [*middle[:place], number, *middle[place + 1 :]]
                    found = self._measure.preferring(
                        uniform(self.spec, ORIGINAL), self._at(steps), f"{at} prefers by {step:g} gaps"
                    )
                    tried[at, number] = _Tried(found, self._measure.summary(found.evaluation).kl)
                    bar.update(1)
        return tried

    def _at(self, steps: Sequence[int]) -> Preference:
        """With these STEPS of the layers."""
        return self._with([STEPS[step] * gap for step, gap in zip(steps, self._gaps, strict=True)])

    def _with(self, bonus: Sequence[float]) -> Preference:
        return Preference(self.share, self.recent, self.sure, tuple(float(np.float32(one)) for one in bonus))

    def _layer_read(self, plan: Plan, at: LayerKey, found: Preferred) -> int:
        return sum(
            count * self._nbytes(plan.assignment, at.expert(number)) for number, count in enumerate(found.missed[at])
        )

    def _nbytes(self, assignment: Mapping[ExpertKey, Sequence[int]], key: ExpertKey) -> int:
        names = self.spec.moe.ffn.projections
        return sum(self._bytes_of(name, bits) for name, bits in zip(names, assignment[key], strict=True))
