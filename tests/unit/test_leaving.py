"""Who leaves by the native library is who leaves by the policies' numpy, in the same order."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moert.experts.policy import (
    EVICTION,
    FORGETTING,
    FORGOTTEN,
    Demand,
    EvictionPolicy,
    Residency,
    Succession,
    place_of,
)
from moert.kernels import library
from moert.pack.model_spec import ExpertKey, LayerKey

ORDER = [LayerKey("encoder", layer) for layer in (0, 2)] + [LayerKey("decoder", layer) for layer in (0, 1, 3)]
EXPERTS = 6
KNOWN = ("paper", "lru", "lfu", "expected")
needs_native = pytest.mark.skipif(library.load() is None, reason="no native library")


def policies(name: str, rng: np.random.Generator) -> list[EvictionPolicy]:
    """Two that know the same."""
    shares = {place_of(at): rng.dirichlet(np.ones(EXPERTS), EXPERTS) for at in ORDER if rng.random() < 0.7}
    return [EVICTION[name](ORDER, Succession(shares) if shares else None) for _ in range(2)]


class Both:
    """A residency that asks the library, one that does not, and what comes of the same events."""

    def __init__(self, name: str, capacity: int, rng: np.random.Generator) -> None:
        one, other = policies(name, rng)
        self.sides = [Residency(capacity, one, native=True), Residency(capacity, other, native=False)]
        self.left: list[ExpertKey] = []

    def visit(self, at: LayerKey, experts: list[int], sizes: dict[ExpertKey, int], rng: np.random.Generator) -> None:
        demand = Demand(at, tuple(experts))
        for side in self.sides:
            side.begin(demand)
        keys = demand.expert_keys()
        missing = sum(sizes[key] for key in keys if key not in self.sides[0])
        others = sorted(self.sides[0])
        locked = [key for key in others if rng.random() < 0.1]
        likely = [key for key in others if rng.random() < 0.1]
        for force in (False, True):
            one, other = (side.victims(missing, locked, likely, force) for side in self.sides)
            assert one == other
        for key in one or ():
            self.left.append(key)
            for side in self.sides:
                side.remove(key)
        for key in keys:
            for side in self.sides:
                if key not in side and side.used_bytes + sizes[key] <= side.capacity_bytes:
                    side.add(key, sizes[key])
                if key in side:
                    side.demand(key)
                    side.done(key)


def run(name: str, seed: int, visits: int, mixed: bool) -> Both:
    rng = np.random.default_rng(seed)
    sizes = {at.expert(number): int(rng.integers(1, 9)) if mixed else 4 for at in ORDER for number in range(EXPERTS)}
    both = Both(name, int(rng.integers(10, 60)), rng)
    popular = rng.dirichlet(np.full(EXPERTS, 0.5))
    for turn in range(visits):
        at = ORDER[turn % len(ORDER)] if rng.random() < 0.9 else ORDER[int(rng.integers(len(ORDER)))]
        count = int(rng.integers(1, 4))
        experts = sorted(set(rng.choice(EXPERTS, count, p=popular).tolist()))
        both.visit(at, experts, sizes, rng)
    return both


@needs_native
@pytest.mark.parametrize("name", EVICTION)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), mixed=st.booleans())
def test_the_same_experts_leave_in_the_same_order(name: str, seed: int, mixed: bool) -> None:
    run(name, seed, 60, mixed)


@needs_native
@pytest.mark.parametrize("name", EVICTION)
def test_they_do_after_thousands_of_visits_as_well(name: str) -> None:
    """Long after an expert was used last it is as if it never had been."""
    both = run(name, 5, 2000, mixed=True)
    assert len(both.left) > 200
    asked = hasattr(EVICTION[name](ORDER), "rule")
    assert asked == (name in KNOWN)


@needs_native
@pytest.mark.parametrize("name", KNOWN)
def test_the_library_is_what_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residency, "_choose_slowly", None)
    residency = Residency(10, EVICTION[name](ORDER))
    residency.begin(Demand(ORDER[0], ()))
    assert residency.victims(11) is None
    for number in range(5):
        residency.add(ORDER[0].expert(number), 2)
    assert residency.victims(3) == [ORDER[0].expert(0), ORDER[0].expert(1)]
    assert residency.victims(10) == [ORDER[0].expert(number) for number in range(5)]
    assert residency.victims(11) is None
    assert residency.victims(2, locked=[ORDER[0].expert(number) for number in range(5)]) is None


@needs_native
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", KNOWN)
def test_thousands_of_experts(name: str, native: bool) -> None:
    """All leave at once, the columns grow on the way."""
    order = [LayerKey("decoder", layer) for layer in range(48)]
    rng = np.random.default_rng(0)
    residency = Residency(128 * 48 * 3, EVICTION[name](order), native)
    for _ in range(3):
        for at in order:
            experts = sorted(rng.choice(128, 40, replace=False).tolist())
            residency.begin(Demand(at, tuple(experts)))
            for number in experts:
                if at.expert(number) not in residency:
                    residency.add(at.expert(number), 3)
                residency.demand(at.expert(number))
                residency.done(at.expert(number))
    leaving = residency.victims(residency.capacity_bytes)
    assert leaving is not None
    assert len(leaving) == len(set(leaving)) == residency.used_bytes // 3
    other = residency.victims(residency.capacity_bytes - residency.used_bytes + 3 * 1000)
    assert other == leaving[:1000]


def test_what_is_forgotten_is_what_the_policies_compute() -> None:
    ages = np.random.default_rng(0).integers(0, 20_000, 1001)
    expected = np.exp2(np.log2(FORGETTING) * ages)
    assert (np.where(ages < len(FORGOTTEN), FORGOTTEN[np.minimum(ages, len(FORGOTTEN) - 1)], 0.0) == expected).all()


@needs_native
def test_a_choice_takes_microseconds() -> None:
    """The best of many, so that a busy machine does not matter; 64 experts in memory of 256."""
    order = [LayerKey("decoder", layer) for layer in range(8)]
    times = {}
    for native in (True, False):
        residency = Residency(64, EVICTION["expected"](order), native)
        rng, best = np.random.default_rng(0), 1.0
        for turn in range(400):
            at = order[turn % 8]
            experts = sorted(rng.choice(32, 4, replace=False).tolist())
            residency.begin(Demand(at, tuple(experts)))
            missing = [at.expert(number) for number in experts if at.expert(number) not in residency]
            started = time.perf_counter()
            leaving = residency.victims(len(missing))
            best = min(best, time.perf_counter() - started) if leaving else best
            for key in leaving or ():
                residency.remove(key)
            for key in missing:
                residency.add(key, 1)
            for number in experts:
                residency.demand(at.expert(number))
                residency.done(at.expert(number))
        times[native] = best
    assert times[True] < times[False] / 3
