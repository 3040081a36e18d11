from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moert.experts.eviction import EVICTION, Belady, EvictionPolicy, Moment, PaperEviction, Resident
from moert.pack.model_spec import ExpertKey, Stack

DECODER = [("decoder", layer) for layer in (0, 1, 2, 3)]
BOTH: list[tuple[Stack, int]] = [("encoder", 1), ("encoder", 3), ("decoder", 1), ("decoder", 3), ("decoder", 5)]


def resident(stack: Stack, layer: int, expert: int, frequency: int = 1, used: int = 0, loaded: int = 0) -> Resident:
    return Resident(ExpertKey(stack, layer, expert), 10, frequency, used, loaded)


def eviction_order(policy: EvictionPolicy, residents: list[Resident], now: Moment) -> list[tuple[str, int, int]]:
    left, order = list(residents), []
    while left:
        key = policy.victim(left, now)
        order.append(tuple(key))
        left = [one for one in left if one.key != key]
    return order


def test_paper_keeps_what_is_needed_sooner_among_equally_frequent_experts() -> None:
    policy = PaperEviction([("decoder", layer) for layer in range(4)])
    residents = [resident("decoder", layer, 0) for layer in range(4)]
    order = [layer for _, layer, _ in eviction_order(policy, residents, Moment("decoder", 1, 9))]
    assert order == [1, 0, 3, 2]  # the present layer, the one just passed, ..., the next one last


def test_paper_wraps_from_the_last_layer_to_the_first() -> None:
    policy = PaperEviction([("decoder", layer) for layer in range(4)])
    residents = [resident("decoder", layer, 0) for layer in range(4)]
    order = [layer for _, layer, _ in eviction_order(policy, residents, Moment("decoder", 3, 9))]
    assert order == [3, 2, 1, 0]


@pytest.mark.parametrize(("frequency", "first"), [(1, 0), (2, 0), (3, 2), (9, 2)])
def test_paper_weighs_frequency_against_nearness(frequency: int, first: int) -> None:
    policy = PaperEviction([("decoder", layer) for layer in range(4)])
    # Layer 2 is next: 1 demand * nearness 3. Layer 0 has just run: `frequency` * nearness 1. The tie goes by recency.
    residents = [resident("decoder", 2, 0, 1, used=0), resident("decoder", 0, 0, frequency, used=1)]
    assert policy.victim(residents, Moment("decoder", 1, 9)).layer == first


def test_paper_evicts_the_encoder_first_while_decoding_and_by_recency() -> None:
    policy = PaperEviction(BOTH)
    residents = [
        resident("decoder", 3, 0, frequency=1, used=1),
        resident("encoder", 1, 0, frequency=50, used=8),
        resident("encoder", 3, 1, frequency=90, used=7),
    ]
    order = eviction_order(policy, residents, Moment("decoder", 1, 9))
    assert order == [("encoder", 3, 1), ("encoder", 1, 0), ("decoder", 3, 0)]


@pytest.mark.parametrize("kept", [resident("decoder", 1, 0, 3, used=2), resident("decoder", 3, 0, 0, used=-1)])
def test_paper_evicts_the_encoder_before_decoder_experts_that_are_worth_nothing(kept: Resident) -> None:
    """One of the layer being executed, whose nearness is 0, and one that was preloaded but not yet demanded."""
    residents = [kept, resident("encoder", 1, 0, frequency=50, used=8)]
    assert PaperEviction(BOTH).victim(residents, Moment("decoder", 1, 9)).stack == "encoder"


def test_paper_while_encoding_treats_both_stacks_as_one_cycle() -> None:
    policy = PaperEviction(BOTH)
    residents = [resident(stack, layer, 0) for stack, layer in BOTH]
    order = [(stack, layer) for stack, layer, _ in eviction_order(policy, residents, Moment("encoder", 3, 9))]
    assert order == [("encoder", 3), ("encoder", 1), ("decoder", 5), ("decoder", 3), ("decoder", 1)]


def test_lru_lfu_fifo_each_follow_their_own_field() -> None:
    now = Moment("decoder", 0, 9)
    residents = [
        resident("decoder", 0, 0, frequency=5, used=1, loaded=1),
        resident("decoder", 0, 1, frequency=1, used=8, loaded=2),
        resident("decoder", 0, 2, frequency=9, used=7, loaded=0),
    ]
    first = {name: EVICTION[name](DECODER).victim(residents, now).expert for name in ("lru", "lfu", "fifo")}
    assert first == {"lru": 0, "lfu": 1, "fifo": 2}


def test_lru_does_not_evict_what_has_just_been_preloaded() -> None:
    residents = [resident("decoder", 0, 0, used=3, loaded=1), resident("decoder", 1, 0, 0, used=-1, loaded=5)]
    assert EVICTION["lru"](DECODER).victim(residents, Moment("decoder", 0, 6)).layer == 0


def test_belady_evicts_what_is_needed_last_or_never() -> None:
    keys = [ExpertKey("decoder", 0, expert) for expert in range(4)]
    policy = Belady([keys[3], keys[1], keys[0], keys[1], keys[2]])
    residents = [resident("decoder", 0, expert) for expert in range(3)]
    assert policy.victim(residents, Moment("decoder", 0, 0)) == keys[2]
    assert policy.victim(residents[:2], Moment("decoder", 0, 0)) == keys[0]
    assert policy.victim(residents[:2], Moment("decoder", 0, 3)) == keys[0]  # never again


@given(
    st.lists(
        st.builds(
            lambda layer, expert, frequency, used, loaded: resident("decoder", layer, expert, frequency, used, loaded),
            st.integers(0, 3), st.integers(0, 5), st.integers(0, 9), st.integers(-1, 9), st.integers(0, 9),
        ),
        min_size=1, max_size=12, unique_by=lambda one: one.key,
    ),
    st.randoms(),
    st.sampled_from(sorted(EVICTION)),
    st.integers(0, 3),
)  # fmt: skip
def test_every_policy_picks_a_candidate_whatever_their_order(residents, random, name, layer) -> None:
    policy, now = EVICTION[name]([("decoder", index) for index in range(4)]), Moment("decoder", layer, 10)
    victim = policy.victim(residents, now)
    shuffled = list(residents)
    random.shuffle(shuffled)
    assert victim in {one.key for one in residents}
    assert policy.victim(shuffled, now) == victim
