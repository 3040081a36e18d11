"""Which expert leaves when room is needed: pure policies over columns of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from moert.experts.policy.succession import Succession
from moert.experts.policy.usage import F64, FORGETTING, Candidates, place_of
from moert.pack.model_spec import LayerKey

LayerOrder = Sequence[LayerKey]
"""Every layer with experts, in the order of execution (ModelSpec.moe_layers)."""

Latest = Mapping[int, tuple[int, ...]]
"""See Candidates.latest."""

_RARELY = 1e-9  # stands for the probability of what was never demanded


class Rule(NamedTuple):
    """A policy that the native library knows, by its name (moert.kernels.structs.RULES) and what it needs: `nearness`
    int64 [places of layers], `following` float64 [places, num_experts], not a number where nothing is known."""

    name: str
    nearness: npt.NDArray[np.int64] | None = None
    following: F64 | None = None


_RECENCY, _FREQUENCY = Rule("recency"), Rule("frequency")


class EvictionPolicy(Protocol):
    """Says what each candidate is worth.

    One that the native library knows also has `rule(present, latest)`: the Rule that finds the same, of the present
    layer and what each layer has demanded last.
    """

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        """[n]: the smallest leaves first; of equal ones the least recently used, then by key.

        `present` is the layer being executed; what it still needs is not among the candidates.
        """
        ...


class PaperEviction:
    """EdgeMoE §3.3.3: evict first the expert with the smallest frequency × nearness of its layer.

    With S layers in the decoder, i the expert's layer and I the present one, nearness is (S - i + I) mod S: S - 1 for
    the layer that runs next, 1 for the one that has just run, 0 for the present one (whose experts still needed are
    not candidates). Of two equally frequent experts the one needed sooner stays. The published formula has the sign
    of the rule wrong: read literally it evicts the largest product, which is the expert that the text wants to keep.
    While the decoder runs, experts of the encoder go before all others. While the encoder runs, its
    layers and the decoder's form one cycle: layers just passed are the furthest from their next use.
    """

    def __init__(self, order: LayerOrder) -> None:
        self._nearness = {present: self._row(order, present) for present in order}
        self._rules = {present: Rule("nearness", nearness=row) for present, row in self._nearness.items()}

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        nearness = self._nearness[present][candidates.place]
        return np.where(nearness < 0, -1, candidates.frequency * nearness)

    def rule(self, present: LayerKey, latest: Latest) -> Rule:
        return self._rules[present]

    @staticmethod
    def _row(order: LayerOrder, present: LayerKey) -> npt.NDArray[np.int64]:
        """[places of layers]: how near each layer is to the present one; -1 where the decoder never asks for it."""
        cycle = [layer for layer in order if layer.stack == "decoder"] if present.stack == "decoder" else list(order)
        row = np.full(1 + max(place_of(layer) for layer in order), -1)
        for index, layer in enumerate(cycle):
            row[place_of(layer)] = (len(cycle) - index + cycle.index(present)) % len(cycle)
        return row


class LeastRecentlyUsed:
    """Evicts what was demanded longest ago; what was never demanded counts from when it was loaded."""

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        return np.maximum(candidates.last_used, candidates.loaded_at)

    def rule(self, present: LayerKey, latest: Latest) -> Rule:
        return _RECENCY


class LeastRecentOfLayer:
    """Evicts what stands furthest back in the order in which the experts of its own layer were used, so that each layer
    keeps about as many, the latest. Mixtral-offloading (Eliseev & Mazur 2023) keeps k of each.

    In the present layer those that it needs stand before all candidates.
    """

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        used = np.maximum(candidates.last_used, candidates.loaded_at)
        order = np.lexsort((candidates.expert, -used, candidates.place))
        places = candidates.place[order]
        worth = np.empty(len(order), np.int64)
        worth[order] = np.searchsorted(places, places) - np.arange(len(order))
        at = place_of(present)
        worth[candidates.place == at] -= len(candidates.latest.get(at, ()))
        return worth


class LeastFrequentlyUsed:
    """Evicts what was demanded least often since the start."""

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        return candidates.frequency

    def rule(self, present: LayerKey, latest: Latest) -> Rule:
        return _FREQUENCY


class ExpectedWait:
    """Evicts what is likely to be needed again last: Belady's rule (1966) with an estimate for the future.

    An expert is taken at a visit of its layer with the probability p, half its frequency since the start and half a
    mean that forgets (frequency with recency: LRFU, Lee et al. 2001, but counted in visits of the layer, since
    only then an expert can be used). A succession, where there is one for the layer, has half the
    say in p: it knows which experts follow those that the layer has selected last. If visits are independent, the
    expert is needed after wait + interval · (1/p - 1) steps.
    """

    def __init__(self, order: LayerOrder, succession: Succession | None = None) -> None:
        self._succession = succession
        self._latest: dict[int, tuple[int, ...]] = {}  # by place: what _following was looked up for
        self._following = np.zeros((0, 0))  # [places, num_experts], not a number where nothing is known
        self._n_places = 1 + max(place_of(layer) for layer in order)
        self._rule = Rule("wait")

    def rule(self, present: LayerKey, latest: Latest) -> Rule:
        if self._succession is not None:
            self._follow(self._succession, latest)
        return self._rule

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        visits = self.visits(candidates)
        return -(candidates.wait + candidates.interval * (visits - 1.0))

    def visits(self, candidates: Candidates) -> F64:
        """[n]: after how many visits of its layer each is likely to be needed, at least 1."""
        often = candidates.frequency / np.maximum(candidates.visits, 1)
        lately: F64 = (1.0 - FORGETTING) * candidates.recent * np.exp2(log2(FORGETTING) * candidates.age)
        probability: F64 = 0.5 * (often + lately)
        if self._succession is not None:
            probability = self._with_succession(self._succession, probability, candidates)
        visits: F64 = 1.0 / np.maximum(probability, _RARELY)
        return visits

    def _with_succession(self, succession: Succession, probability: F64, candidates: Candidates) -> F64:
        self._follow(succession, candidates.latest)
        if not self._following.size:
            return probability
        following = self._following[candidates.place, candidates.expert]
        return np.where(np.isnan(following), probability, 0.5 * (probability + following))

    def _follow(self, succession: Succession, latest: Latest) -> None:
        for place, experts in latest.items():
            if self._latest.get(place) is not experts:
                self._latest[place] = experts
                self._look_up(succession.after(place, experts), place)

    def _look_up(self, likely: F64 | None, place: int) -> None:
        if likely is not None:
            if not self._following.size:
                self._following = np.full((self._n_places, len(likely)), np.nan)
                self._rule = Rule("wait", following=self._following)
            self._following[place] = likely


class _Factory(Protocol):
    def __call__(self, order: LayerOrder, succession: Succession | None = None) -> EvictionPolicy: ...


EVICTION: Mapping[str, _Factory] = {
    "paper": lambda order, succession=None: PaperEviction(order),
    "lru": lambda order, succession=None: LeastRecentlyUsed(),
    "layer-lru": lambda order, succession=None: LeastRecentOfLayer(),
    "lfu": lambda order, succession=None: LeastFrequentlyUsed(),
    "expected": ExpectedWait,
}
"""Name → policy, given the order of the layers, and what the pack's trace says of the future if there is one. What
needs the real future (Belady) is in moert.experts.policy.belady."""
