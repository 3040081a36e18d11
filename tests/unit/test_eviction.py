from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_packs import DECODER_SHAPE as SHAPE

from moert.experts import policy as succession
from moert.experts.policy import (
    EVICTION,
    FORGETTING,
    Candidates,
    Demand,
    PaperEviction,
    Residency,
    Succession,
    Usage,
    place_of,
)
from moert.pack.model_spec import ExpertKey, LayerKey, StackName
from moert.pack.paths import record
from recipes.bench.controls import FirstInFirstOut, LastInFirstOut

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


def first_to_leave(name: str, order: list[LayerKey], rows: list[dict[str, float]], present: LayerKey) -> list[int]:
    """All rows in the order in which they leave; ties by least recently used."""
    columns = candidates(*rows)
    worth = EVICTION[name](order).worth(columns, present)
    return sorted(range(len(rows)), key=lambda row: (worth[row], columns.last_used[row]))


def test_paper_keeps_what_is_needed_sooner_among_equally_frequent_experts() -> None:
    rows = [at(*layer) for layer in DECODER]
    assert first_to_leave("paper", DECODER, rows, DECODER[1]) == [1, 0, 3, 2]  # present, just passed, ..., next
    assert first_to_leave("paper", DECODER, rows, DECODER[3]) == [3, 2, 1, 0]  # from the last layer to the first


@pytest.mark.parametrize(("frequency", "first"), [(1, 1), (2, 1), (3, 0), (9, 0)])
def test_paper_weighs_frequency_against_nearness(frequency: int, first: int) -> None:
    # Layer 2 is next: 1 demand * nearness 3. Layer 0 has just run: `frequency` * nearness 1. The tie goes by recency.
    rows = [at("decoder", 2, frequency=1, last_used=0), at("decoder", 0, frequency=frequency, last_used=1)]
    assert first_to_leave("paper", DECODER, rows, DECODER[1])[0] == first


@pytest.mark.parametrize("kept", [at("decoder", 1, frequency=3), at("decoder", 3, frequency=0, last_used=-1)])
def test_paper_evicts_the_encoder_first_while_decoding_and_by_recency(kept: dict[str, float]) -> None:
    """Even before experts that are worth nothing: of the present layer, or preloaded and not demanded yet."""
    rows = [kept, at("encoder", 1, frequency=50, last_used=8), at("encoder", 3, frequency=90, last_used=7)]
    assert first_to_leave("paper", BOTH, rows, ("decoder", 1)) == [2, 1, 0]


def test_paper_while_encoding_treats_both_stacks_as_one_cycle() -> None:
    rows = [at(*layer) for layer in BOTH]
    assert first_to_leave("paper", BOTH, rows, ("encoder", 3)) == [1, 0, 4, 3, 2]


def test_simple_policies_each_follow_their_own_column() -> None:
    rows = [
        at("decoder", 0, frequency=5, last_used=1, loaded_at=1),
        at("decoder", 0, frequency=1, last_used=8, loaded_at=2),
        at("decoder", 0, frequency=9, last_used=7, loaded_at=0),
    ]
    order = {name: first_to_leave(name, DECODER, rows, DECODER[0]) for name in ("lru", "lfu")}
    assert order == {"lru": [0, 2, 1], "lfu": [1, 0, 2]}
    loaded = candidates(*rows)
    assert FirstInFirstOut().worth(loaded, DECODER[0]).argsort().tolist() == [2, 0, 1]
    assert LastInFirstOut().worth(loaded, DECODER[0]).argsort().tolist() == [1, 0, 2]


def test_lru_does_not_evict_what_has_just_been_preloaded() -> None:
    rows = [at("decoder", 0, last_used=3, loaded_at=1), at("decoder", 1, last_used=-1, loaded_at=5)]
    assert first_to_leave("lru", DECODER, rows, DECODER[0]) == [0, 1]


def test_expected_wait_prefers_likely_experts_recent_ones_and_layers_that_run_soon() -> None:
    likely = at("decoder", 0, frequency=40, visits=100, recent=2.0, age=1, wait=4, interval=4)
    for worse in ({"frequency": 20}, {"recent": 1.0}, {"age": 5}, {"wait": 5}, {"interval": 9}):
        assert first_to_leave("expected", DECODER, [likely, likely | worse], DECODER[0]) == [1, 0], worse


def test_expected_wait_is_exact_for_an_expert_that_every_visit_demands() -> None:
    lasting = at("decoder", 0, frequency=7, visits=7, recent=1 / (1 - FORGETTING), age=0, wait=3, interval=4)
    assert EVICTION["expected"](DECODER).worth(candidates(lasting), DECODER[0]) == pytest.approx([-3.0])


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
    monkeypatch.setattr(succession, "_PRIOR", 0.0)
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
    monkeypatch.setattr(succession, "MOST_BYTES", 2 * 9 - 1)
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


def test_every_policy_is_looked_at() -> None:
    assert {*RULES, "layer-lru"} == {*EVICTION}


def test_usage_counts_demands_visits_and_intervals() -> None:
    usage = Usage()
    keys = [ExpertKey("decoder", 0, 0), ExpertKey("encoder", 0, 1)]
    usage.visit(Demand(DECODER[0], (0,)))
    rows = np.array([usage.load(key) for key in keys])
    usage.demand(0)
    for _ in range(2):
        usage.visit(Demand(DECODER[1], ()))
        usage.visit(Demand(DECODER[2], (2,)))
        usage.visit(Demand(DECODER[0], (0, 1)))
    usage.demand(0)
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
            residency.demand(key)
            residency.done(key)
        residency.begin(Demand(LayerKey("decoder", 0), ()))
        return residency.victims(nbytes)

    shuffled = list(keys)
    random.shuffle(shuffled)
    victims = leaving(keys)
    assert victims == leaving(shuffled)
    if victims is not None:
        freed = [4 + key.expert for key in victims]
        assert sum(freed) >= nbytes > sum(freed[:-1])


def test_paper_policy_knows_only_layers_with_experts() -> None:
    with pytest.raises(KeyError):
        PaperEviction(BOTH).worth(candidates(at("decoder", 1)), ("decoder", 2))
