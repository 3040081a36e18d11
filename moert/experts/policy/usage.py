"""What is known about the use of every expert so far, as columns that policies read all at once."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.experts.demand import Demand
from moert.pack.model_spec import ExpertKey, LayerKey

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

FORGETTING = 0.5**0.125
"""What a demand still counts in `recent` one visit of its layer later: half after eight visits."""
FORGOTTEN = np.exp2(log2(FORGETTING) * np.arange(8700))
"""[visits]: what a demand still counts after so many, which is nothing after more."""
_USUAL = 0.05  # weight of the latest interval between two visits of a layer in the mean of them


@dataclass(frozen=True, slots=True)
class Candidates:
    """Experts that may leave, one entry of each column [n] for each. Policies do not change them.

    Time is counted in demands (`last_used`, `loaded_at`; `last_used` is -1 for an expert that was not demanded since
    it was loaded), in visits of the expert's own layer (`visits`, `age`), or in steps, which are visits of any layer
    (`wait`, `interval`).
    """

    place: I64
    """`place_of` the expert's layer."""
    frequency: I64
    """Demands so far, also those before it was last evicted."""
    last_used: I64
    loaded_at: I64
    visits: I64
    """Visits of its layer so far."""
    age: I64
    """Visits of its layer since the one that last demanded it; 0 if that is the latest visit."""
    recent: F64
    """Demands so far, each multiplied by FORGETTING for every visit between it and the last demand."""
    wait: F64
    """Steps until its layer is likely to be visited again."""
    interval: F64
    """Steps between two visits of its layer, a moving mean."""
    expert: I64
    """Its number within the layer."""
    latest: Mapping[int, tuple[int, ...]]
    """Not a column: the experts that each layer (by place) demanded at its latest visit."""


def place_of(at: LayerKey) -> int:
    """A number for each layer of either stack."""
    return 2 * at.layer + (at.stack == "decoder")


class Usage:
    """Grows by a row for each expert that it hears of. `clock` counts demands, `steps` visits of layers."""

    def __init__(self) -> None:
        self.clock = 0
        self.steps = 0
        self.keys: list[ExpertKey] = []
        self._rows: dict[ExpertKey, int] = {}
        self._order, self._place = array("q"), array("q")
        self._frequency, self._last_used, self._loaded_at = array("q"), array("q"), array("q")
        self._last_visit, self._recent = array("q"), array("d")
        self._visits, self._visited_at, self._interval = array("q"), array("d"), array("d")  # by place
        self._latest: dict[int, tuple[int, ...]] = {}

    def row(self, key: ExpertKey) -> int | None:
        """None for an expert that was not heard of."""
        return self._rows.get(key)

    def load(self, key: ExpertKey) -> int:
        """The expert comes into memory; returns its row."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self.keys)
            self.keys.append(key)
            place = place_of(key.at)
            self._know(place)
            self._place.append(place)
            self._order.append(((key.stack == "encoder") << 48) | key.layer << 16 | key.expert)
            for column in (self._frequency, self._last_used, self._loaded_at, self._last_visit):
                column.append(0)
            self._recent.append(0.0)
        self._last_used[row] = -1
        self._loaded_at[row] = self.clock
        return row

    def visit(self, demand: Demand) -> None:
        """A layer begins."""
        place = place_of(demand.at)
        self._know(place)
        self.steps += 1
        since, visits = self.steps - self._visited_at[place], self._visits[place]
        if visits:
            self._interval[place] += (since - self._interval[place]) * (_USUAL if visits > 1 else 1.0)
        self._visited_at[place] = self.steps
        self._visits[place] = visits + 1
        self._latest[place] = demand.experts

    def demand(self, row: int) -> None:
        """The present visit of the expert's layer demands it."""
        visits = self._visits[self._place[row]]
        self._frequency[row] += 1
        self._last_used[row] = self.clock
        self._recent[row] = 1.0 + self._recent[row] * FORGETTING ** (visits - self._last_visit[row])
        self._last_visit[row] = visits
        self.clock += 1

    def candidates(self, rows: I64) -> Candidates:
        """What is known of these rows [n]."""
        place = _view(self._place)[rows]
        visits, interval = _view(self._visits), _real(self._interval)
        wait = np.maximum(_real(self._visited_at) + interval - self.steps, 0.5)
        return Candidates(
            place=place,
            frequency=_view(self._frequency)[rows],
            last_used=_view(self._last_used)[rows],
            loaded_at=_view(self._loaded_at)[rows],
            visits=visits[place],
            age=visits[place] - _view(self._last_visit)[rows],
            recent=_real(self._recent)[rows],
            wait=wait[place],
            interval=interval[place],
            expert=_view(self._order)[rows] & 0xFFFF,
            latest=self._latest,
        )

    @property
    def size(self) -> tuple[int, int]:
        """Experts and places of layers that are known."""
        return len(self.keys), len(self._visits)

    def columns(self) -> dict[str, array[Any]]:
        """All that is known, by row and by place, under the names of moert.kernels.structs.Residents. They lie
        elsewhere once `size` has changed."""
        return {
            "place": self._place, "order": self._order, "frequency": self._frequency, "last_used": self._last_used,
            "loaded_at": self._loaded_at, "last_visit": self._last_visit, "recent": self._recent,
            "visits": self._visits, "visited_at": self._visited_at, "interval": self._interval,
        }  # fmt: skip

    @property
    def latest(self) -> Mapping[int, tuple[int, ...]]:
        """See Candidates."""
        return self._latest

    def order(self, rows: I64) -> I64:
        """Numbers that sort like the experts' keys."""
        return _view(self._order)[rows]

    def _know(self, place: int) -> None:
        while len(self._visits) <= place:
            self._visits.append(0)
            self._visited_at.append(0.0)
            self._interval.append(1.0)


def _view(column: array[Any]) -> I64:
    return np.frombuffer(column, dtype=np.int64)


def _real(column: array[Any]) -> F64:
    return np.frombuffer(column, dtype=np.float64)
