from __future__ import annotations

import time
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_packs import DECODER_SHAPE as SHAPE

from moeconv.routes import record
from moert.experts import policy as policy_module
from moert.experts.policy import (
    EVICTION,
    FORGETTING,
    FORGOTTEN,
    Candidates,
    Demand,
    EvictionPolicy,
    PaperEviction,
    Residency,
    Succession,
    Usage,
    place_of,
)
from moert.pack.model_spec import ExpertKey, LayerKey, StackName
from recipes.bench.controls import FirstInFirstOut, LastInFirstOut
from tests.kernels import needs_native

DECODER = [LayerKey("decoder", layer) for layer in (0, 1, 2, 3)]
BOTH = [LayerKey("encoder", layer) for layer in (1, 3)] + [LayerKey("decoder", layer) for layer in (1, 3, 5)]


def candidates(*rows: dict[str, float], latest: dict[int, tuple[int, ...]] | None = None) -> Candidates:
    """One row for each expert; what is not given is 1."""
    columns = {
        field.name: np.array(
            [row.get(field.name, 1) for row in rows],
            dtype=np.float64 if field.name in ("recent", "wait", "interval") else np.int64,
        )
        for field in fields(Candidates) if field.name != "latest"
    }  # fmt: skip
    return Candidates(**columns, latest=latest or {})


def at(stack: StackName, layer: int, **values: float) -> dict[str, float]:
    return {"place": place_of(LayerKey(stack, layer)), **values}


@pytest.mark.parametrize(
    ("order", "present", "worths"),
    [
        (DECODER, DECODER[1], [1, 0, 3, 2]),  # the next layer is worth most, the present one least
        (DECODER, DECODER[3], [3, 2, 1, 0]),
        (BOTH, BOTH[1], [1, 0, 4, 3, 2]),  # while encoding both stacks are one cycle
        (BOTH, BOTH[2], [-1, -1, 0, 2, 1]),  # while decoding the encoder leaves first
    ],
)
def test_paper_keeps_what_is_needed_sooner(order: list[LayerKey], present: LayerKey, worths: list[int]) -> None:
    rows = [at(*layer) for layer in order]
    assert EVICTION["paper"](order).worth(candidates(*rows), present).tolist() == worths


def test_policies_of_the_bench_follow_the_order_of_loading() -> None:
    loaded = candidates(*(at("decoder", 0, loaded_at=time) for time in (1, 2, 0)))
    assert FirstInFirstOut().worth(loaded, DECODER[0]).argsort().tolist() == [2, 0, 1]
    assert LastInFirstOut().worth(loaded, DECODER[0]).argsort().tolist() == [1, 0, 2]


def test_expected_wait_listens_to_what_follows_the_layers_latest_experts() -> None:
    shares = np.array([[0.75, 0.25, 0.0], [0.0, 0.5, 0.5], [0.25, 0.25, 0.5]])
    place = place_of(LayerKey("decoder", 1))
    policy = EVICTION["expected"](DECODER, Succession({place: shares}))
    rows = [at("decoder", 1, expert=expert, frequency=1, visits=4, recent=0) for expert in range(3)]
    elsewhere = at("decoder", 2, expert=2, frequency=1, visits=4, recent=0)  # a layer that was not counted
    own = 0.5 * (1 / 4)

    def worth(latest: tuple[int, ...]) -> list[float]:
        found = policy.worth(candidates(*rows, elsewhere, latest={place: latest, place + 2: (0,)}), DECODER[0])
        return found.tolist()

    for latest, following in (((0,), [0.75, 0.25, 0.0]), ((0, 1), [0.375, 0.375, 0.25]), ((2,), [0.25, 0.25, 0.5])):
        expected = [-1 / (0.5 * (own + share)) for share in following]
        assert worth(latest) == pytest.approx([*expected, -1 / own]), latest


def test_succession_counts_the_next_token_of_each_layer(monkeypatch) -> None:
    monkeypatch.setattr(policy_module, "_PRIOR", 0.0)
    tokens = [[0, 1], [2, 1], [0, 1], [1, -1], [0, 2]]  # 5 tokens, one layer, top 2
    spec = SHAPE.but(decoder=(False, True)).spec
    trace = record(3, [{"decoder": np.array(tokens[:2])[:, None]}, {"decoder": np.array(tokens[2:])[:, None]}])
    place = place_of(LayerKey("decoder", 1))
    with np.errstate(invalid="ignore"):
        found = Succession.of(trace, spec)
        late = Succession.of(trace, spec, first_token=3)
    after = [found.after(place, (expert,)) for expert in range(3)]
    assert np.allclose(after, [[0, 1, 0.5], [0.5, 0.75, 0.5], [1, 1, 0]], atol=1e-3)
    assert np.allclose(late.after(place, (1,)), [1, 0, 1])
    assert found.after(place_of(LayerKey("decoder", 0)), (1,)) is None
    assert found.after(place, ()) is None
    encoder_only = record(3, [{"encoder": np.array(tokens)[:, None]}])
    assert Succession.of(encoder_only, spec).after(place, (1,)) is None
    monkeypatch.setattr(policy_module, "MOST_BYTES", 2 * 9 - 1)
    assert Succession.of(trace, spec).after(place, (1,)) is None


def test_succession_falls_back_on_how_often_an_expert_is_taken_at_all() -> None:
    trace = record(3, [{"decoder": np.array([[[0]], [[0]], [[1]], [[0]]])}])
    found = Succession.of(trace, SHAPE.but(decoder=(True,)).spec)
    assert found.after(place_of(LayerKey("decoder", 0)), (2,)) == pytest.approx([0.75, 0.25, 0], abs=1e-3)


ROWS = st.fixed_dictionaries({
    "place": st.sampled_from([place_of(layer) for layer in BOTH]),
    "frequency": st.integers(0, 9),
    "last_used": st.integers(-1, 9),
    "loaded_at": st.integers(0, 9),
    "visits": st.integers(0, 20),
    "age": st.integers(0, 20),
    "recent": st.floats(0, 6),
    "wait": st.floats(0.5, 9),
    "interval": st.floats(1, 9),
})  # fmt: skip


def paper(row: dict[str, float], present: LayerKey) -> float:
    stack, layer = next(one for one in BOTH if place_of(one) == row["place"])
    if present[0] == "decoder" and stack == "encoder":
        return -1
    cycle = BOTH if present[0] == "encoder" else BOTH[2:]
    return row["frequency"] * ((len(cycle) - cycle.index((stack, layer)) + cycle.index(present)) % len(cycle))


def expected(row: dict[str, float], present: LayerKey) -> float:
    lately = (1 - FORGETTING) * row["recent"] * FORGETTING ** row["age"]
    probability = max(0.5 * (row["frequency"] / max(row["visits"], 1) + lately), 1e-9)
    return -(row["wait"] + row["interval"] * (1 / probability - 1))


RULES = {
    "paper": paper,
    "lru": lambda row, present: max(row["last_used"], row["loaded_at"]),
    "lfu": lambda row, present: row["frequency"],
    "expected": expected,
}


@given(st.lists(ROWS, min_size=1, max_size=8), st.sampled_from(sorted(RULES)), st.sampled_from(BOTH))
def test_columns_give_what_each_rule_says_of_one_expert(rows, name, present) -> None:
    worth = EVICTION[name](BOTH).worth(candidates(*rows), present)
    assert worth.tolist() == pytest.approx([RULES[name](row, present) for row in rows])
    assert {*RULES, "layer-lru"} == {*EVICTION}, "every policy is looked at"


@given(st.lists(ROWS, max_size=8), st.sampled_from(BOTH), st.integers(0, 3))
def test_layer_lru_counts_back_in_each_layer(rows, present, needed) -> None:
    columns = candidates(*rows, latest={place_of(present): tuple(range(needed))})
    worth = EVICTION["layer-lru"](BOTH).worth(columns, present)
    stamps = [(-max(row["last_used"], row["loaded_at"]), row.get("expert", 1)) for row in rows]
    for place in {row["place"] for row in rows}:
        mine = [at for at, row in enumerate(rows) if row["place"] == place]
        ranks = [sum(stamps[other] < stamps[at] for other in mine) for at in mine]
        least = needed if place == place_of(present) else 0
        assert sorted(-worth[mine]) == list(range(least, least + len(mine)))
        for at, rank in zip(mine, ranks, strict=True):
            ties = sum(stamps[other] == stamps[at] for other in mine)
            assert least + rank <= -worth[at] < least + rank + ties


def test_usage_counts_demands_visits_and_intervals() -> None:
    usage = Usage()
    keys = [ExpertKey("decoder", 0, 0), ExpertKey("encoder", 0, 1)]
    usage.visit(Demand(DECODER[0], (0,)))
    rows = np.array([usage.load(key) for key in keys])
    usage.demand([0])
    for _ in range(2):
        usage.visit(Demand(DECODER[1], ()))
        usage.visit(Demand(DECODER[2], (2,)))
        usage.visit(Demand(DECODER[0], (0, 1)))
    usage.demand([0])
    usage.visit(Demand(DECODER[1], (3,)))
    found = usage.candidates(rows)
    assert (usage.clock, usage.steps) == (2, 8)
    assert found.frequency.tolist() == [2, 0]
    assert found.last_used.tolist() == [1, -1]
    assert found.visits.tolist() == [3, 0]
    assert found.age.tolist() == [0, 0]
    assert found.recent.tolist() == pytest.approx([1 + FORGETTING**2, 0])
    assert found.interval[0] == 3
    assert found.wait[0] == 2  # visited at step 7, so again at step 10
    assert found.expert.tolist() == [0, 1]
    assert found.latest == {place_of(DECODER[0]): (0, 1), place_of(DECODER[1]): (3,), place_of(DECODER[2]): (2,)}
    assert usage.load(keys[0]) == 0
    assert usage.candidates(rows).last_used[0] == -1
    assert usage.candidates(rows).frequency[0] == 2, "what is loaded again is known already"
    assert usage.order(rows).argsort().tolist() == [0, 1], "like the keys: decoder before encoder"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=15, unique=True),
    st.lists(st.integers(0, 14), max_size=20),
    st.randoms(),
    st.sampled_from(sorted(EVICTION)),
    st.integers(1, 60),
)
def test_who_leaves_does_not_depend_on_the_order_of_arrival(names, used, random, name, nbytes) -> None:
    keys = [ExpertKey("decoder", *name) for name in names]

    def leaving(arrival: list[ExpertKey]) -> list[ExpertKey] | None:
        residency = Residency(sum(4 + key.expert for key in keys), EVICTION[name](DECODER))
        for key in arrival:
            residency.add(key, 4 + key.expert)
        for index in used:
            key = keys[index % len(keys)]
            residency.begin(Demand(key.at, (key.expert,)))
            residency.used([key])
        residency.begin(Demand(LayerKey("decoder", 0), ()))
        return residency.victims(nbytes)

    shuffled = list(keys)
    random.shuffle(shuffled)
    victims = leaving(keys)
    assert victims == leaving(shuffled)
    if victims is not None:
        freed = [4 + key.expert for key in victims]
        assert sum(freed) >= nbytes > sum(freed[:-1])


def passed_by(residency: Residency, key: ExpertKey, times: int) -> None:
    for _ in range(times):
        residency.begin(Demand(key.at, (key.expert,)))
        residency.pass_by(key)


def test_an_expert_that_was_passed_by_outlasts_only_what_is_worth_less() -> None:
    """Of the residents that the present layer does not need, of which one was demanded three times, one twice."""
    residency, (often, twice, other, unknown) = Residency(9, EVICTION["lfu"](DECODER)), map(DECODER[0].expert, range(4))
    residency.pass_by(other)
    residency.add(often, 3)
    assert not residency.outlasts(other), "no layer has begun"
    residency.remove(often)
    residency.begin(Demand(DECODER[1], ()))
    assert not residency.outlasts(other), "nothing would leave for it"
    for key, times in ((often, 3), (twice, 2)):
        residency.add(key, 3)
        for _ in range(times):
            residency.used([key])
    assert not residency.outlasts(unknown)
    assert not residency.outlasts(other)
    passed_by(residency, other, 1)
    residency.begin(Demand(DECODER[1], ()))
    assert not residency.outlasts(other), "as often is no more often"
    passed_by(residency, other, 1)
    residency.begin(Demand(DECODER[1], ()))
    assert residency.outlasts(other)
    residency.begin(Demand(DECODER[0], (twice.expert,)))
    assert not residency.outlasts(other), "what the layer needs does not leave"


@pytest.mark.parametrize("native", [True, False])
def test_what_was_only_passed_by_is_not_what_leaves(native: bool) -> None:
    residency = Residency(6, EVICTION["lfu"](DECODER), native)
    residency.learn([Demand(DECODER[0], (0, 1)), Demand(DECODER[1], (0,))])
    residency.begin(Demand(DECODER[2], ()))
    for expert in (2, 3):
        residency.add(DECODER[0].expert(expert), 3)
        for _ in range(2):  # more often than what is not there
            residency.used([DECODER[0].expert(expert)])
    assert not residency.owes()
    assert residency.victims(6) == [DECODER[0].expert(2), DECODER[0].expert(3)]
    assert residency.victims(7) is None


def test_paper_policy_knows_only_layers_with_experts() -> None:
    with pytest.raises(KeyError):
        PaperEviction(BOTH).worth(candidates(at("decoder", 1)), ("decoder", 2))


# Who leaves by the native library is who leaves by numpy, in the same order

ORDER = [LayerKey("encoder", layer) for layer in (0, 2)] + [LayerKey("decoder", layer) for layer in (0, 1, 3)]
EXPERTS = 6
KNOWN = ("paper", "lru", "lfu", "expected")


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
                    side.used([key])


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
                residency.used([at.expert(number)])
    leaving = residency.victims(residency.capacity_bytes)
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
                residency.used([at.expert(number)])
        times[native] = best
    assert times[True] < times[False] / 3
