from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.eviction import replay
from moert.experts.policy import EVICTION, MOST_DEMANDS, Demand, Recorder
from moert.experts.replay import belady, recorder_of
from moert.pack.model_spec import ExpertKey, LayerKey

ENCODER, LAYERS, EXPERTS = 2, 3, 5
ORDER = [
    *(LayerKey("encoder", layer) for layer in range(ENCODER)), *(LayerKey("decoder", layer) for layer in range(LAYERS)),
]  # fmt: skip
KEYS = [at.expert(number) for at in ORDER for number in range(EXPERTS)]
NAMES = sorted(EVICTION)


def decoder(layer: int) -> LayerKey:
    return LayerKey("decoder", layer)


@st.composite
def traces(draw, largest_step: int = 2) -> list[Demand]:
    """A few requests: the encoder once, then some tokens through the decoder."""
    steps: list[Demand] = []
    for _ in range(draw(st.integers(1, 3))):
        walk = ORDER[:ENCODER] + ORDER[ENCODER:] * draw(st.integers(1, 6))
        for at in walk:
            most = EXPERTS if at.stack == "encoder" and largest_step > 2 else largest_step
            experts = draw(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=most))
            steps.append(Demand(at, tuple(sorted(experts))))
    return steps


SIZES = st.fixed_dictionaries({key: st.integers(1, 9) for key in KEYS})


@settings(max_examples=60)
@given(traces(5), SIZES, st.integers(9, 120), st.sampled_from(NAMES))
def test_budget_holds_and_counts_add_up(trace, nbytes, budget, name) -> None:
    seen: list[tuple[int, int]] = []

    def check(step, keys, victims, residency) -> None:
        seen.append((len(keys), len(victims)))
        held = sum(nbytes[one] for one in residency)
        assert held == residency.used_bytes <= budget
        assert all(key in residency for key in keys)
        assert not set(keys) & set(victims)

    result = replay(trace, nbytes, budget, EVICTION[name](ORDER), check)
    assert result.hits + result.misses == result.demands == sum(len(step.experts) for step in trace)
    assert tuple(map(sum, zip(*seen, strict=True))) == (result.misses, result.evictions)
    assert result.peak_bytes <= budget
    assert result.bytes_read >= sum(nbytes[key] for key in {key for step in trace for key in step.expert_keys()})
    assert replay(trace, nbytes, budget, EVICTION[name](ORDER)) == result


@settings(max_examples=60)
@given(traces(5), SIZES, st.integers(9, 60), st.sampled_from(NAMES))
def test_what_the_present_layer_needs_leaves_only_when_nothing_else_is_left(trace, nbytes, budget, name) -> None:
    def check(step, keys, victims, residency) -> None:
        later = {one for one in step.expert_keys() if one > keys[-1]}
        if later & set(victims):
            assert set(residency) - set(keys) <= later

    replay(trace, nbytes, budget, EVICTION[name](ORDER), check)


@settings(max_examples=60)
@given(traces(2), SIZES, st.integers(18, 60), st.sampled_from(NAMES))
def test_a_budget_of_one_steps_demand_never_evicts_what_the_present_layer_needs(trace, nbytes, budget, name) -> None:
    def check(step, keys, victims, residency) -> None:
        assert not set(step.expert_keys()) & set(victims)

    replay(trace, nbytes, budget, EVICTION[name](ORDER), check)


@settings(max_examples=80)
@given(traces(3), st.integers(1, 24), st.sampled_from(NAMES))
def test_no_policy_beats_belady_at_equal_sizes(trace, slots, name) -> None:
    nbytes = dict.fromkeys(KEYS, 7)
    best = belady(recorder_of(trace), nbytes, 7 * slots)[0]
    assert best.hits >= replay(trace, nbytes, 7 * slots, EVICTION[name](ORDER)).hits


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 3))
def test_belady_equals_the_best_of_all_possible_evictions(walk, slots) -> None:
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(walk):
            return 0
        if walk[at] in held:
            return 1 + best(at + 1, held)
        if len(held) < slots:
            return best(at + 1, held | {walk[at]})
        return max(best(at + 1, held - {out} | {walk[at]}) for out in held)

    trace = [Demand(decoder(0), (expert,)) for expert in walk]
    nbytes = {ExpertKey("decoder", 0, expert): 3 for expert in range(5)}
    assert belady(recorder_of(trace), nbytes, 3 * slots)[0].hits == best(0, frozenset())


def test_paper_beats_lru_where_a_cycle_is_longer_than_the_cache() -> None:
    layers = 6
    trace = [Demand(decoder(layer), (0,)) for _ in range(20) for layer in range(layers)]
    order = [LayerKey("decoder", layer) for layer in range(layers)]
    nbytes = {ExpertKey("decoder", layer, 0): 1 for layer in range(layers)}
    hits = {name: replay(trace, nbytes, layers - 1, EVICTION[name](order)).hits for name in ("paper", "lru")}
    assert hits["lru"] == 0
    assert hits["paper"] > 0.7 * len(trace)


def test_an_expert_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the budget of 4"):
        replay([Demand(decoder(0), (0,))], {KEYS[0]: 5, ExpertKey("decoder", 0, 0): 5}, 4, EVICTION["lru"](ORDER))


@settings(max_examples=60)
@given(traces(5), SIZES, st.integers(9, 120))
def test_belady_counts_what_it_reads_demand_by_demand(trace, nbytes, budget) -> None:
    """Also with mixed sizes, where it is not exact: never more than reading everything, never less than once each."""
    best, read = belady(recorder_of(trace), nbytes, budget)
    demands = [key for step in trace for key in step.expert_keys()]
    assert len(read) == len(demands) == best.demands
    assert int(read.sum()) == best.bytes_read
    assert int((read > 0).sum()) == best.misses
    assert all(nbytes[key] == size for key, size in zip(demands, read.tolist(), strict=True) if size)
    first = {key: index for index, key in reversed(list(enumerate(demands)))}
    assert all(read[index] for index in first.values())
    assert best.peak_bytes <= budget


def test_belady_of_mixed_sizes_lets_the_largest_go_that_is_never_needed_again() -> None:
    trace = [Demand(decoder(0), (0, 1, 2)), Demand(decoder(1), (0,)), Demand(decoder(0), (1,))]
    sizes = dict.fromkeys(KEYS, 3) | {ExpertKey("decoder", 0, 2): 4, ExpertKey("decoder", 1, 0): 4}
    best = belady(recorder_of(trace), sizes, 10)[0]
    assert (best.hits, best.evictions, best.bytes_read, best.peak_bytes) == (1, 1, 14, 10)


def test_a_recorder_stops_at_a_whole_step_and_counts_on() -> None:
    recorder = Recorder(5)
    for _ in range(3):
        recorder.add(Demand(decoder(2), (0, 3)))
    assert (len(recorder.codes()), recorder.demands) == (4, 6)
    recorder.add(Demand(decoder(2), (1,)))
    assert (len(recorder.codes()), recorder.demands) == (4, 7), "a window without holes"
    found, _ = belady(recorder, dict.fromkeys(KEYS, 1), 2)
    assert (found.demands, found.hits) == (4, 2)
    with pytest.raises(ValueError, match="more than the budget of 0"):
        belady(recorder, dict.fromkeys(KEYS, 1), 0)
    assert belady(Recorder(), {}, 0)[0].hit_rate == 0.0
    assert MOST_DEMANDS * 4 <= 1 << 20
