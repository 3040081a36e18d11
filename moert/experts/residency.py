"""The experts that are in memory, in bytes, and those that must leave: pure bookkeeping of the cache and of replays."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from ctypes import addressof, c_char
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.experts.policy import FORGETTING, FORGOTTEN, Demand, EvictionPolicy, Rule, Usage
from moert.kernels import library
from moert.kernels.library import Library
from moert.kernels.structs import RULES, Residents
from moert.pack.model_spec import ExpertKey, LayerKey


class Leaving:
    """The native library's choice of the experts that leave, of those in `usage`; `nbytes`, by row, grows with it."""

    def __init__(self, native: Library, usage: Usage, nbytes: array[int]) -> None:
        self._call: Any = native.functions.moert_leave
        self._usage, self._nbytes = usage, nbytes
        self._size = (-1, -1)
        self._rule: Rule | None = None
        self._all = Residents(
            forgotten=_at(FORGOTTEN), forgotten_n=len(FORGOTTEN), remembered=1.0 - FORGETTING
        )  # fmt: skip
        self._address = addressof(self._all)
        self._scratch = np.zeros(0)
        self._leaving = np.zeros(0, np.int64)

    def rows(self, rule: Rule, free: bytearray, missing: int) -> list[int]:
        """Returns the rows that leave, in order, of those that are `free` ([rows] of 0 or 1): until `missing` bytes are
        free, or none is left."""
        if not free:
            return []
        if self._size != self._usage.size:
            self._look_again()
        everything = self._all
        everything.steps = self._usage.steps
        if rule is not self._rule:
            self._follow(rule)
        count = self._call(
            self._address, addressof(c_char.from_buffer(free)), missing, self._scratch_at, self._leaving_at
        )
        found: list[int] = self._leaving[:count].tolist()
        return found

    def _look_again(self) -> None:
        """Passes on the new addresses of the columns, which have grown."""
        self._size = self._usage.size
        rows = self._size[0]
        if rows > len(self._leaving):
            self._scratch, self._leaving = np.empty(2 * rows), np.empty(2 * rows, np.int64)
            self._scratch_at, self._leaving_at = _at(self._scratch), _at(self._leaving)
        self._all.rows = rows
        for name, column in self._usage.columns().items():
            setattr(self._all, name, column.buffer_info()[0])
        self._all.nbytes = self._nbytes.buffer_info()[0]

    def _follow(self, rule: Rule) -> None:
        self._rule = rule  # which keeps its arrays alive
        self._all.rule = RULES[rule.name]
        self._all.nearness = None if rule.nearness is None else _at(rule.nearness)
        self._all.following = None if rule.following is None else _at(rule.following)
        self._all.experts = 0 if rule.following is None else rule.following.shape[1]


def _at(numbers: npt.NDArray[Any]) -> int:
    """Returns the address of an array's first number."""
    assert numbers.flags.c_contiguous
    return int(numbers.ctypes.data)


class Residency:
    """The set of resident experts under a limit of bytes.

    Experts that the present layer needs are never evicted before they were used, unless everything else has left
    already (a long prompt can need more of one layer than fits; the experts that it needs last go first then).
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy, native: bool = True) -> None:
        """`native`: the native library finds the experts that leave, where there is one that knows the policy."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.policy = policy
        self._usage = Usage()
        self._present: LayerKey | None = None
        self.needed: set[ExpertKey] = set()
        """Experts that the present layer has still to use."""
        self._resident: dict[ExpertKey, int] = {}  # key → row of the usage
        self._is_resident = bytearray()  # by row
        self._nbytes = array("q")  # by row
        self._smallest = 1 << 62  # of all experts so far
        found = library.load() if native else None
        self._leaving = None if found is None else Leaving(found, self._usage, self._nbytes)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._resident

    def __iter__(self) -> Iterator[ExpertKey]:
        return (self._usage.keys[row] for row in self._resident.values())

    def begin(self, demand: Demand) -> None:
        """Begins a layer: its demand is guarded until it was used."""
        self._present = demand.at
        self._usage.visit(demand)
        self.needed = set(demand.expert_keys())

    def owes(self) -> bool:
        """Returns whether an expert that the present layer has still to use is not resident."""
        return any(key not in self._resident for key in self.needed)

    def demand(self, key: ExpertKey) -> None:
        """Counts a demand for `key`, which is resident."""
        self._usage.demand(self._resident[key])

    def used(self, keys: Sequence[ExpertKey]) -> None:
        """Counts a demand for each of `keys`, which are resident; the present layer has used them, in this order."""
        self._usage.demand_all(map(self._resident.__getitem__, keys))
        self.needed.difference_update(keys)

    def done(self, key: ExpertKey) -> None:
        """Ends the guard of `key`, which the present layer has used: it may be evicted again."""
        self.needed.discard(key)

    def add(self, key: ExpertKey, nbytes: int) -> None:
        """Takes `key` in; there must be room. Raises ValueError if there is not."""
        if key in self._resident or self.used_bytes + nbytes > self.capacity_bytes:
            raise ValueError(f"no room for {key}: {self.used_bytes} + {nbytes} of {self.capacity_bytes} bytes")
        row = self._row(key)
        self.used_bytes += nbytes
        self._nbytes[row] = nbytes
        self._is_resident[row] = 1
        self._resident[key] = row
        self._smallest = max(1, min(self._smallest, nbytes))

    def learn(self, demands: Iterable[Demand]) -> None:
        """Counts demands of the past, before anything is resident, as if each expert had been loaded for its demand
        alone."""
        for demand in demands:
            self.begin(demand)
            for key in demand.expert_keys():
                self.pass_by(key)
        self.needed = set()

    def pass_by(self, key: ExpertKey) -> None:
        """Counts a demand for an expert that is not resident, as if it had been loaded for that alone."""
        row = self._usage.row(key)
        self._usage.demand(self._row(key) if row is None else row)

    def outlasts(self, key: ExpertKey) -> bool:
        """Returns whether an expert that was passed by, if it came now, would not be the first to leave."""
        row, present = self._usage.row(key), self._present
        free = [at for resident, at in self._resident.items() if resident not in self.needed]
        if row is None or present is None or not free:
            return False
        worth = self.policy.worth(self._usage.candidates(np.array([*free, row])), present)
        return bool(worth[-1] > worth[:-1].min())

    def _row(self, key: ExpertKey) -> int:
        row = self._usage.load(key)
        if row == len(self._nbytes):
            self._nbytes.append(0)
            self._is_resident.append(0)
        return row

    def remove(self, key: ExpertKey) -> None:
        """Removes a resident expert. Raises KeyError if it is not resident."""
        row = self._resident.pop(key)
        self._is_resident[row] = 0
        self.used_bytes -= self._nbytes[row]

    def victims(
        self,
        nbytes: int,
        locked: Collection[ExpertKey] = (),
        predicted: Sequence[ExpertKey] = (),
        force: bool = False,
    ) -> list[ExpertKey] | None:
        """Returns the experts that must leave, in order, so that `nbytes` more fit; None if that can't be done.

        `locked` experts never leave. `predicted` ones (most probable first) and those that the present layer needs
        leave only with `force`, in that order and last in first out.
        """
        missing = self.used_bytes + nbytes - self.capacity_bytes
        if missing <= 0:
            return []
        if self._present is None:
            return None
        chosen, missing = self._choose(missing, (locked, predicted, self.needed), self._present)
        if missing > 0 and force:
            for key in self._last_resort(locked, predicted):
                if missing > 0:
                    missing -= self._nbytes[self._resident[key]]
                    chosen.append(key)
        return chosen if missing <= 0 else None

    def _choose(
        self, missing: int, guarded: Sequence[Collection[ExpertKey]], present: LayerKey
    ) -> tuple[list[ExpertKey], int]:
        """Returns the experts that the policy lets go first, and the bytes that are missing then (none if 0 or
        less)."""
        free = bytearray(self._is_resident)
        for keys in guarded:
            for key in keys:
                row = self._resident.get(key)
                if row is not None:
                    free[row] = 0
        rule_of = getattr(self.policy, "rule", None)
        if self._leaving is not None and rule_of is not None:
            found = self._leaving.rows(rule_of(present, self._usage.latest), free, missing)
            return self._named(found, missing)
        return self._choose_slowly(free, missing, present)

    def _choose_slowly(self, free: bytearray, missing: int, present: LayerKey) -> tuple[list[ExpertKey], int]:
        """Returns the same, found by numpy."""
        rows = np.frombuffer(free, dtype=np.bool_).nonzero()[0]
        most = min(len(rows), -(-missing // self._smallest))  # that may have to leave
        if not most:
            return [], missing
        candidates = self._usage.candidates(rows)
        worth = self.policy.worth(candidates, present)
        least = (worth <= np.partition(worth, most - 1)[most - 1]).nonzero()[0]
        sorted_by = (self._usage.order(rows[least]), candidates.last_used[least], worth[least])
        leaving = rows[least[np.lexsort(sorted_by)]]
        freed = np.frombuffer(self._nbytes, dtype=np.int64)[leaving].cumsum()
        count = min(int(freed.searchsorted(missing)) + 1, len(leaving))
        return self._named(leaving[:count].tolist(), missing)

    def _named(self, rows: list[int], missing: int) -> tuple[list[ExpertKey], int]:
        """Returns the experts of these rows, and the bytes that are missing once they have left."""
        keys, nbytes = self._usage.keys, self._nbytes
        return [keys[row] for row in rows], missing - sum([nbytes[row] for row in rows])

    def _last_resort(self, locked: Collection[ExpertKey], predicted: Sequence[ExpertKey]) -> list[ExpertKey]:
        unlikely_first = [key for key in reversed(predicted) if key not in self.needed]
        needed_last_first = sorted(self.needed, reverse=True)
        return [key for key in (*unlikely_first, *needed_last_first) if key in self and key not in locked]
