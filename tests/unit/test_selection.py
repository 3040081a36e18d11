"""The choice of an eviction policy, on routing recorded from the two reference models (tests/unit/traces)."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tiny_packs import DECODER, DECODER_SHAPE, SWITCH, SWITCH_SHAPE

from moeconv import eviction as replay_module
from moeconv.eviction import CONTESTANTS, best_eviction, hit_rates, replay, with_eviction
from moeconv.routes import record
from moert.experts.policy import EVICTION, EvictionPolicy, Succession, place_of
from moert.experts.replay import DEFAULT, belady, demands_of, recorder_of
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import Trace
from tests.shapes import every

TRACES = Path(__file__).parent / "traces"
SPECS = {
    "g2p": SWITCH_SHAPE.but(encoder=every(4), decoder=every(4), num_experts=16).spec,
    "wiki": DECODER_SHAPE.but(decoder=every(8), num_experts=32, top_k=4).spec,
}
# Name, share of the experts in memory, hit rate that the chosen policy must reach on held-out text.
CASES = [("g2p", 0.25, 0.25), ("g2p", 0.5, 0.49), ("wiki", 0.25, 0.38), ("wiki", 0.5, 0.64)]


def sizes(spec: ModelSpec) -> dict[ExpertKey, int]:
    return dict.fromkeys(spec.expert_keys(), 10)


@cache
def recorded(name: str, split: str) -> Trace:
    trace = Trace.from_bytes(lzma.decompress((TRACES / f"{name}-{split}.safetensors.xz").read_bytes()))
    trace.check(SPECS[name])
    return trace


@pytest.mark.parametrize(("name", "share", "floor"), CASES)
def test_what_is_chosen_on_calibration_text_is_among_the_best_on_other_text(name, share, floor) -> None:
    spec = SPECS[name]
    capacity = int(share * sum(sizes(spec).values()))
    known = recorded(name, "calibration")
    choice = best_eviction(known, spec, sizes(spec), capacity)
    steps = list(islice(demands_of(recorded(name, "heldout"), spec), 3000))
    policies = {policy: make(spec.moe_layers(), Succession.of(known, spec)) for policy, make in EVICTION.items()}
    rates = {name: replay(steps, sizes(spec), capacity, policy).hit_rate for name, policy in policies.items()}
    best = belady(recorder_of(steps), sizes(spec), capacity)[0].hit_rate
    assert rates[choice] >= max(rates.values()) - 0.01, (choice, rates)
    assert best > rates[choice] > floor, (best, rates)


def test_what_judges_policies_has_taught_them_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants are replayed on the first half of a trace, and learn from the second. In the first
    half expert 1 follows 0, in the second expert 2 does."""
    first, second = np.tile([0, 1], 30), np.tile([0, 2], 30)
    trace = record(3, [{"decoder": np.concatenate([first, second]).reshape(-1, 1, 1)}])
    spec = DECODER_SHAPE.but(decoder=every(1), num_experts=3, top_k=1).spec
    likeliest: list[list[int]] = []

    def noted(order: Sequence[LayerKey], succession: Succession) -> EvictionPolicy:
        shares = succession.after(place_of(order[0]), [0])
        assert shares is not None
        likeliest.append([expert for expert in (1, 2) if shares[expert] > 0.2])
        return EVICTION["lru"](order, succession)

    monkeypatch.setattr(replay_module, "EVICTION", dict.fromkeys(EVICTION, noted))
    best_eviction(trace, spec, sizes(spec), 20)
    assert likeliest == [[2]] * len(CONTESTANTS)


def test_a_trace_becomes_one_pass_of_the_encoder_and_one_step_a_token() -> None:
    encoder = [[[2], [0]], [[2], [1]], [[-1], [1]]]  # 3 tokens, 2 layers
    decoder = [[[1], [1], [-1]], [[0], [1], [5]]]  # 2 tokens, 3 layers
    sample = {"encoder": np.array(encoder), "decoder": np.array(decoder)}
    empty = {name: routes[:0] for name, routes in sample.items()}
    assert list(demands_of(record(6, [sample, empty]), SWITCH)) == [
        (("encoder", 0), (2,)), (("encoder", 1), (0, 1)),
        (("decoder", 0), (1,)), (("decoder", 1), (1,)),
        (("decoder", 0), (0,)), (("decoder", 1), (1,)), (("decoder", 2), (5,)),
    ]  # fmt: skip


def test_the_first_tokens_of_a_trace_end_where_they_were_asked_to() -> None:
    sample = {"encoder": np.zeros((2, 2, 1), int), "decoder": np.zeros((3, 3, 1), int)}
    trace = record(6, [sample] * 3)

    def passes(tokens: int | None) -> list[int]:
        steps = list(demands_of(trace, SWITCH, tokens))
        return [sum(step == ((stack, 0), (0,)) for step in steps) for stack in ("encoder", "decoder")]

    assert [passes(tokens) for tokens in (1, 3, 4, 9, None)] == [[1, 1], [1, 3], [2, 4], [3, 9], [3, 9]]


def test_layers_are_those_of_the_stack_and_not_those_with_experts() -> None:
    trace = record(8, [{"decoder": np.array([[[3, 1], [2, 2], [7, 0]]])}])
    steps = list(demands_of(trace, DECODER))
    assert [(step.at.layer, step.experts) for step in steps] == [(0, (1, 3)), (1, (2,)), (3, (0, 7))]


def test_without_a_demand_or_room_for_one_expert_the_default_is_taken() -> None:
    spec, trace = SPECS["g2p"], recorded("g2p", "calibration")
    empty = record(16, [{name: np.zeros((0, 4, 1), int) for name in trace.stacks}])
    for judged, capacity in ((trace, 9), (empty, 99)):
        assert best_eviction(judged, spec, sizes(spec), capacity) == DEFAULT
        assert hit_rates(judged, spec, sizes(spec), capacity) == {}


@pytest.mark.parametrize("name", SPECS)
def test_a_profile_records_the_policy_that_does_best_at_each_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "MOST_LAYERS", 300)
    spec, trace = SPECS[name], recorded(name, "calibration")
    written = with_eviction(trace, spec, sizes(spec))
    total = sum(sizes(spec).values())
    expected = {share: best_eviction(trace, spec, sizes(spec), share * total // 100) for share in (12, 25, 50, 75)}
    assert Trace.from_bytes(written.to_bytes()).eviction == expected == written.eviction


@pytest.mark.parametrize("capacity", [10, 30, 10_000])
def test_any_budget_from_one_expert_on_can_be_judged(monkeypatch, capacity: int) -> None:
    monkeypatch.setattr(replay_module, "MOST_LAYERS", 150)
    spec = SPECS["g2p"]
    rates = hit_rates(recorded("g2p", "calibration"), spec, sizes(spec), capacity)
    assert set(rates) == set(CONTESTANTS)
    best = best_eviction(recorded("g2p", "calibration"), spec, sizes(spec), capacity)
    assert rates[best] == max(rates.values())


def test_what_is_replayed_is_bounded(monkeypatch) -> None:
    seen: list[int] = []

    def spy(steps, nbytes, capacity, policy):
        seen.append(sum(len(step.experts) for step in steps))
        assert len(steps) <= 100
        return replay(steps, nbytes, capacity, policy)

    monkeypatch.setattr(replay_module, "replay", spy)
    monkeypatch.setattr(replay_module, "MOST_LAYERS", 100)
    monkeypatch.setattr(replay_module, "MOST_EXPERTS", 200)
    for name, spec in SPECS.items():
        best_eviction(recorded(name, "calibration"), spec, sizes(spec), 300)
    assert len(seen) == 2 * len(CONTESTANTS)
    assert max(seen) <= 203, "ends with the step that reaches the bound"
