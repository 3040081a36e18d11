"""Eviction: pure policies over columns of numbers that choose the expert that leaves, and the experts in memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from moert.kernels import library
from moert.kernels.library import RULES, Library, Residents, address
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import DROPPED, Trace


class Demand(NamedTuple):
    """The experts that a layer's router has chosen for all tokens of a pass, each once, ascending."""

    at: LayerKey
    experts: tuple[int, ...]

    def expert_keys(self) -> list[ExpertKey]:
        return list(map(self.at.expert, self.experts))


class Arrivals(NamedTuple):
    """How far reading ahead had come at a demand: `begun`, predicted experts whose reading had begun, and `missing`,
    how many demanded experts are still to be read from the beginning."""

    begun: list[ExpertKey]
    missing: int


Listener = Callable[[Demand], object]
"""Is called with every demand, in the order of execution."""


I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

FORGETTING = 0.5**0.125
"""Weight of a demand in `recent` one visit of its layer later: half after eight visits."""
FORGOTTEN = np.exp2(log2(FORGETTING) * np.arange(8700))
"""[visits]: weight of a demand after that many visits; 0 after more."""
_USUAL = 0.05  # weight of the latest interval between two visits of a layer in the mean of them


@dataclass(frozen=True, slots=True)
class Candidates:
    """Experts that may leave: columns [n] with one entry for each, which policies do not change.

    Time is counted in demands (`last_used`, `loaded_at`; `last_used` is -1 for an expert that was not demanded since it
    was loaded), in visits of the expert's own layer (`visits`, `age`), or in steps, which are visits of any layer
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
    """Returns the place of a layer: a number of its own for each layer of either stack."""
    return 2 * at.layer + (at.stack == "decoder")


MOST_DEMANDS = 1 << 18
"""Demands that a recorder keeps: 1 MiB, and a fraction of a second to replay."""


class Recorder:
    """The first MOST_DEMANDS demands of a run, 4 bytes each. `demands` counts all."""

    def __init__(self, most: int = MOST_DEMANDS) -> None:
        self.demands = 0
        self._most = most
        self._codes = array("I")

    def add(self, demand: Demand) -> None:
        """Records a demand, whole or not at all."""
        self.demands += len(demand.experts)
        if self.demands <= self._most:
            self._codes.extend(map((place_of(demand.at) << 16).__or__, demand.experts))

    def codes(self) -> npt.NDArray[np.uint32]:
        """Returns `code_of` each expert [demands], in order."""
        return np.array(self._codes, dtype=np.uint32)


class Usage:
    """The use of every expert so far, a row for each. `clock` counts demands, `steps` visits of layers, `size` the rows
    and places of layers. The caller fills in, by row, `nbytes` and whether an expert is `resident`."""

    def __init__(self) -> None:
        self.clock = self.steps = self.size = 0
        self.keys: list[ExpertKey] = []
        self._rows: dict[ExpertKey, int] = {}
        self._order, self._place = array("q"), array("q")
        self._frequency, self._last_used, self._loaded_at = array("q"), array("q"), array("q")
        self._last_visit, self._recent = array("q"), array("d")
        self.nbytes, self.resident = array("q"), bytearray()
        self._visits, self._visited_at, self._interval = array("q"), array("d"), array("d")  # by place
        self.latest: dict[int, tuple[int, ...]] = {}
        """See Candidates."""

    def row(self, key: ExpertKey) -> int | None:
        """Returns the row of an expert; None if it has no row yet."""
        return self._rows.get(key)

    def load(self, key: ExpertKey) -> int:
        """Records that an expert comes into memory; returns its row."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self.keys)
            self.keys.append(key)
            self.size += 1
            place = place_of(key.at)
            self._know(place)
            self._place.append(place)
            self._order.append(((key.stack == "encoder") << 48) | key.layer << 16 | key.expert)
            for column in (self._frequency, self._last_used, self._loaded_at, self._last_visit, self.nbytes):
                column.append(0)
            self.resident.append(0)
            self._recent.append(0.0)
        self._last_used[row] = -1
        self._loaded_at[row] = self.clock
        return row

    def visit(self, demand: Demand) -> None:
        """Records that a layer begins, with its demand."""
        place = place_of(demand.at)
        if place >= len(self._visits):
            self._know(place)
        self.steps += 1
        since, visits = self.steps - self._visited_at[place], self._visits[place]
        if visits:
            self._interval[place] += (since - self._interval[place]) * (_USUAL if visits > 1 else 1.0)
        self._visited_at[place] = self.steps
        self._visits[place] = visits + 1
        self.latest[place] = demand.experts

    def demand(self, rows: Iterable[int]) -> None:
        """Counts a demand for the expert of each row, in this order."""
        place, recent, last_visit = self._place, self._recent, self._last_visit
        for row in rows:
            visits = self._visits[place[row]]
            self._frequency[row] += 1
            self._last_used[row] = self.clock
            recent[row] = 1.0 + recent[row] * FORGETTING ** (visits - last_visit[row])
            last_visit[row] = visits
            self.clock += 1

    def candidates(self, rows: I64) -> Candidates:
        """Returns the columns of these rows [n]."""
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
            latest=self.latest,
        )

    def columns(self) -> dict[str, array[Any]]:
        """Returns all columns, by row and by place, under the names of moert.kernels.library.Residents. Their memory
        moves when `size` changes."""
        return {
            "place": self._place, "order": self._order, "frequency": self._frequency, "last_used": self._last_used,
            "loaded_at": self._loaded_at, "last_visit": self._last_visit, "recent": self._recent,
            "nbytes": self.nbytes, "visits": self._visits, "visited_at": self._visited_at, "interval": self._interval,
        }  # fmt: skip

    def order(self, rows: I64) -> I64:
        """Returns numbers [n] that sort like the experts' keys."""
        return _view(self._order)[rows]

    def _know(self, place: int) -> None:
        while len(self._visits) <= place:
            self.size += 1
            self._visits.append(0)
            self._visited_at.append(0.0)
            self._interval.append(1.0)


def _view(column: array[Any]) -> I64:
    return np.frombuffer(column, dtype=np.int64)


def _real(column: array[Any]) -> F64:
    return np.frombuffer(column, dtype=np.float64)


MOST_BYTES = 16 << 20
"""Most bytes of a Succession: where its tables would be larger, none are made."""
_PRIOR = 20.0  # visits that an expert's overall share counts for, beside those that were seen after another expert


class Succession:
    """Which experts follow which. `shares` by place of a layer [num_experts, num_experts]: of the tokens that a layer
    sent to expert a, the share whose next token it sent to expert b. Kept in 16 bits."""

    def __init__(self, shares: Mapping[int, npt.NDArray[np.floating[Any]]]) -> None:
        self._shares = {place: share.astype(np.float16) for place, share in shares.items()}

    @classmethod
    def of(cls, trace: Trace, spec: ModelSpec, first_token: int = 0) -> Succession:
        """Returns the succession counted in a trace's decoder layers, from `first_token` on; an encoder's next pass
        reads an unrelated text.

        The trace must be one of this model (Trace.check).
        """
        if "decoder" not in trace.stacks or 2 * len(spec.moe_layers("decoder")) * trace.num_experts**2 > MOST_BYTES:
            return cls({})
        chosen = trace.stacks["decoder"].experts[first_token:].astype(np.int64)  # [tokens, layers, top_k]
        return cls({
            place_of(at): _shares(chosen[:, index], trace.num_experts)
            for index, at in enumerate(spec.moe_layers("decoder"))
        })  # fmt: skip

    def after(self, place: int, experts: Collection[int]) -> F64 | None:
        """Returns the probability that the layer selects each expert [num_experts] at its next visit, if it selected
        `experts` at this one.

        The mean over `experts`. None for a layer that was not counted.
        """
        if place not in self._shares or not experts:
            return None
        shares, chosen = self._shares[place], list(experts)
        if len(chosen) == 1:
            alone: F64 = shares[chosen[0]].astype(np.float64)
            return alone
        likely: F64 = np.add.reduce(shares[chosen], axis=0, dtype=np.float64)
        likely /= len(chosen)
        return likely


def _shares(chosen: I64, num_experts: int) -> F64:
    """Returns the shares of one layer [num_experts, num_experts], counted in chosen [tokens, top_k]."""
    before, after = np.broadcast_arrays(chosen[:-1, :, None], chosen[1:, None, :])
    real = (before != DROPPED) & (after != DROPPED)
    pairs = np.bincount(before[real] * num_experts + after[real], minlength=num_experts**2)
    selected = [np.bincount(part[part != DROPPED], minlength=num_experts) for part in (chosen[:-1], chosen)]
    overall = selected[1] / max(1, len(chosen))
    shares: F64 = (pairs.reshape(num_experts, num_experts) + _PRIOR * overall) / (selected[0][:, None] + _PRIOR)
    return shares


LayerOrder = Sequence[LayerKey]
"""Every layer with experts, in the order of execution (ModelSpec.moe_layers)."""

Latest = Mapping[int, tuple[int, ...]]
"""See Candidates.latest."""

_RARELY = 1e-9  # stands for the probability of an expert that was never demanded


class Rule(NamedTuple):
    """A policy that the native library knows, by its name (moert.kernels.library.RULES) and its numbers: `nearness`
    int64 [places of layers], `following` float64 [places, num_experts], NaN where nothing is known."""

    name: str
    nearness: npt.NDArray[np.int64] | None = None
    following: F64 | None = None


_RECENCY, _FREQUENCY = Rule("recency"), Rule("frequency")


class EvictionPolicy(Protocol):
    """An eviction policy: gives each candidate a worth.

    One that the native library knows also has `rule(present, latest)`, which returns the Rule of the same choice, from
    the present layer and each layer's latest demand.
    """

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        """Returns the worth of each candidate [n]: the smallest leaves first; of equal ones the least recently used,
        then by key.

        `present` is the layer being executed; experts that it still needs are not among the candidates.
        """
        ...


class PaperEviction:
    """The policy of EdgeMoE §3.3.3: evicts first the expert with the smallest frequency × nearness of its layer.

    With S layers in the decoder, i the expert's layer and I the present one, nearness is (S - i + I) mod S: S - 1 for
    the layer that runs next, 1 for the one that has just run, 0 for the present one (whose experts still needed are not
    candidates). Of two equally frequent experts the one needed sooner stays. The published formula has the sign of the
    rule wrong: read literally it evicts the largest product, which is the expert that the text wants to keep. While the
    decoder runs, experts of the encoder go before all others. While the encoder runs, its layers and the decoder's form
    one cycle: layers just passed are the furthest from their next use.
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
        """Returns the nearness of each layer to the present one [places of layers]; -1 for the encoder's while the
        decoder runs."""
        cycle = [layer for layer in order if layer.stack == "decoder"] if present.stack == "decoder" else list(order)
        row = np.full(1 + max(place_of(layer) for layer in order), -1)
        for index, layer in enumerate(cycle):
            row[place_of(layer)] = (len(cycle) - index + cycle.index(present)) % len(cycle)
        return row


class LeastRecentlyUsed:
    """LRU: evicts the expert that was demanded longest ago; one that was never demanded counts from its loading."""

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        return np.maximum(candidates.last_used, candidates.loaded_at)

    def rule(self, present: LayerKey, latest: Latest) -> Rule:
        return _RECENCY


class LeastRecentOfLayer:
    """LRU by layer: evicts the expert that stands furthest back in the order in which the experts of its own layer were
    used, so that each layer keeps about as many, the latest. Mixtral-offloading (Eliseev & Mazur 2023) keeps k of each
    layer.

    In the present layer the experts that it needs stand before all candidates.
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
    """LFU: evicts the expert that was demanded least often since the start."""

    def worth(self, candidates: Candidates, present: LayerKey) -> npt.NDArray[Any]:
        return candidates.frequency

    def rule(self, present: LayerKey, latest: Latest) -> Rule:
        return _FREQUENCY


class ExpectedWait:
    """Belady's rule (1966) with an estimate for the future: evicts the expert that is likely to be needed again last.

    An expert is demanded at a visit of its layer with the probability p, half its frequency since the start and half a
    mean that forgets (frequency with recency: LRFU, Lee et al. 2001, but counted in visits of the layer, since only
    then an expert can be used). Where a succession has counted the layer, it makes up half of p: it knows which experts
    follow those that the layer has selected last. If visits are independent, the expert is needed after wait + interval
    · (1/p - 1) steps.
    """

    def __init__(self, order: LayerOrder, succession: Succession | None = None) -> None:
        self._succession = succession
        self._latest: dict[int, tuple[int, ...]] = {}  # by place: the experts that _following was looked up for
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
        """Returns the number of visits of its layer after which each candidate is likely to be needed [n], at least
        1."""
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
            if self._latest.get(place) is experts:
                continue
            self._latest[place] = experts
            if (likely := succession.after(place, experts)) is None:
                continue
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
"""Name → policy, made from the order of the layers and, if the pack has a trace, the succession in it. Belady's rule,
which needs the real future, is in moert.experts.replay."""


class Leaving:
    """The native library's choice of the experts that leave, of those in `usage`."""

    def __init__(self, native: Library, usage: Usage) -> None:
        self._call: Any = native.functions.moert_leave
        self._usage, self._size = usage, -1
        self._rule: Rule | None = None
        self._all = Residents(
            forgotten=address(FORGOTTEN), forgotten_n=len(FORGOTTEN), remembered=1.0 - FORGETTING
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
        count = self._call(self._address, free, missing, self._scratch, self._leaving)
        found: list[int] = self._leaving[:count].tolist()
        return found

    def _look_again(self) -> None:
        """Passes on the new addresses of the columns, which have grown."""
        self._size, rows = self._usage.size, len(self._usage.keys)
        if rows > len(self._leaving):
            self._scratch, self._leaving = np.empty(2 * rows), np.empty(2 * rows, np.int64)
        self._all.rows = rows
        for name, column in self._usage.columns().items():
            setattr(self._all, name, column.buffer_info()[0])

    def _follow(self, rule: Rule) -> None:
        self._rule = rule  # which keeps its arrays alive
        self._all.rule = RULES[rule.name]
        self._all.nearness = None if rule.nearness is None else address(rule.nearness)
        self._all.following = None if rule.following is None else address(rule.following)
        self._all.experts = 0 if rule.following is None else rule.following.shape[1]


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
        self._smallest = 1 << 62  # of all experts so far
        found = library.load() if native else None
        self._leaving = None if found is None else Leaving(found, self._usage)

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

    def used(self, keys: Collection[ExpertKey]) -> None:
        """Counts a demand for each of `keys`, which are resident; the present layer has used them, in this order."""
        self._usage.demand(map(self._resident.__getitem__, keys))
        self.needed.difference_update(keys)

    def add(self, key: ExpertKey, nbytes: int) -> None:
        """Takes `key` in; there must be room. Raises ValueError if there is not."""
        if key in self._resident or self.used_bytes + nbytes > self.capacity_bytes:
            raise ValueError(f"no room for {key}: {self.used_bytes} + {nbytes} of {self.capacity_bytes} bytes")
        row = self._resident[key] = self._usage.load(key)
        self._usage.nbytes[row], self._usage.resident[row] = nbytes, 1
        self.used_bytes += nbytes
        self._smallest = max(1, min(self._smallest, nbytes))

    def learn(self, demands: Iterable[Demand]) -> None:
        """Counts demands of the past, before anything is resident, as if each expert had been loaded for its demand
        alone."""
        for demand in demands:
            self.begin(demand)
            for key in demand.expert_keys():
                self.pass_by(key)

    def pass_by(self, key: ExpertKey) -> None:
        """Counts a demand for an expert that is not resident, as if it had been loaded for that alone; the present
        layer needs it no longer."""
        row = self._usage.row(key)
        self._usage.demand((self._usage.load(key) if row is None else row,))
        self.needed.discard(key)

    def outlasts(self, key: ExpertKey) -> bool:
        """Returns whether an expert that was passed by, if it came now, would not be the first to leave."""
        row, present = self._usage.row(key), self._present
        free = [at for resident, at in self._resident.items() if resident not in self.needed]
        if row is None or present is None or not free:
            return False
        worth = self.policy.worth(self._usage.candidates(np.array([*free, row])), present)
        return bool(worth[-1] > worth[:-1].min())

    def remove(self, key: ExpertKey) -> None:
        """Removes a resident expert. Raises KeyError if it is not resident."""
        row = self._resident.pop(key)
        self._usage.resident[row] = 0
        self.used_bytes -= self._usage.nbytes[row]

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
        rows = self._choose(missing, (locked, predicted, self.needed), self._present)
        keys, sizes = self._usage.keys, self._usage.nbytes
        chosen, missing = [keys[row] for row in rows], missing - sum([sizes[row] for row in rows])
        if missing > 0 and force:
            for key in self._last_resort(locked, predicted):
                if missing > 0:
                    missing -= sizes[self._resident[key]]
                    chosen.append(key)
        return chosen if missing <= 0 else None

    def _choose(self, missing: int, guarded: Sequence[Collection[ExpertKey]], present: LayerKey) -> list[int]:
        """Returns the rows of the experts that the policy lets go first, until `missing` bytes are free or none is
        left."""
        free = bytearray(self._usage.resident)
        for keys in guarded:
            for key in keys:
                row = self._resident.get(key)
                if row is not None:
                    free[row] = 0
        rule_of = getattr(self.policy, "rule", None)
        if self._leaving is not None and rule_of is not None:
            return self._leaving.rows(rule_of(present, self._usage.latest), free, missing)
        return self._choose_slowly(free, missing, present)

    def _choose_slowly(self, free: bytearray, missing: int, present: LayerKey) -> list[int]:
        """Returns the same, found by numpy."""
        rows = np.frombuffer(free, dtype=np.bool_).nonzero()[0]
        most = min(len(rows), -(-missing // self._smallest))  # that may have to leave
        if not most:
            return []
        candidates = self._usage.candidates(rows)
        worth = self.policy.worth(candidates, present)
        least = (worth <= np.partition(worth, most - 1)[most - 1]).nonzero()[0]
        sorted_by = (self._usage.order(rows[least]), candidates.last_used[least], worth[least])
        leaving = rows[least[np.lexsort(sorted_by)]]
        freed = _view(self._usage.nbytes)[leaving].cumsum()
        count = min(int(freed.searchsorted(missing)) + 1, len(leaving))
        found: list[int] = leaving[:count].tolist()
        return found

    def _last_resort(self, locked: Collection[ExpertKey], predicted: Sequence[ExpertKey]) -> list[ExpertKey]:
        unlikely_first = [key for key in reversed(predicted) if key not in self.needed]
        needed_last_first = sorted(self.needed, reverse=True)
        return [key for key in (*unlikely_first, *needed_last_first) if key in self and key not in locked]
