"""Reads ahead from memory to the device: while a layer computes, likely experts of the next are copied if it pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moert.experts.cache.cache import ExpertCache
from moert.experts.tiers.lent import lent
from moert.experts.tiers.residents import Residents
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.placement import Placement
from moert.predict.predictor import Prediction
from moert.stats import DeviceCounters

_MEMORY = 64  # predictions after which older ones begin to be forgotten
_LEAST = 0.2  # of a copy's time, what it must be expected to save
_WINDOW_RATE = 0.1


class CopyAhead:
    """Copies what is predicted while the stream of copies has nothing else to do. A copy pays where the probability
    that it is asked for times what the device saves is a fair part of what the copy takes; how probable what is claimed
    really is, is learned."""

    def __init__(
        self, cache: ExpertCache, residents: Residents, placement: Placement, kind_of: Mapping[ExpertKey, int],
        counters: DeviceCounters, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache, self._residents, self._placement = cache, residents, placement
        self._kind_of, self._counters, self._now = kind_of, counters, now
        self._right, self._claimed = 1.0, 1.0
        self._asked: list[tuple[ExpertKey, float]] = []
        self._window_s = 0.0  # between two layers
        self._last_s: float | None = None

    def wants(self) -> bool:
        """Whether anything is left that could be copied."""
        return len(self._residents) < len(self._kind_of)

    def demanded(self, keys: set[ExpertKey]) -> None:
        """A layer needs these: how good were the claims, and how much time lies between two layers?"""
        now = self._now()
        if self._last_s is not None:
            self._window_s += _WINDOW_RATE * (now - self._last_s - self._window_s)
        self._last_s = now
        for key, claim in self._asked:
            self._claimed += claim
            self._right += key in keys
            self._counters.ahead_used += key in keys and key in self._residents
        if self._claimed > _MEMORY:
            self._right, self._claimed = self._right / 2, self._claimed / 2
        self._asked = []

    def expect(self, at: LayerKey, prediction: Prediction, n_tokens: int) -> None:
        """Copies those of a layer that are not there, most probable first, as long as they come in time."""
        trust, busy = min(1.0, self._right / self._claimed), self._residents.copying_s
        copied: list[ExpertKey] = []
        for number, claim in prediction:
            key = at.expert(number)
            kind = self._kind_of[key]
            takes, gain = self._placement.copy_s(kind), self._placement.gain_s(kind)
            if claim * trust * gain < _LEAST * takes or busy + takes > self._window_s + gain:
                break
            if key in self._residents:
                copied.append(key)
                continue
            if self._cache.absent([key])[0]:
                continue
            with self._cache.lease([key]) as lease:
                held = self._residents.bring(key, lent(lease.expert(0)).view, takes, ahead=True)
            if held is None:
                break
            busy += takes
            copied.append(key)
            self._asked.append((key, claim))
            self._counters.ahead += 1
        self._residents.expect(copied)
