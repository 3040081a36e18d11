"""Experts on two devices: answers that depend on nothing of it, memory that is kept, and who lies where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeconv.routes import record
from moeconv.writer import add_to_pack
from moert.beside.fill import popularity
from moert.beside.gpu.device import DeviceCounters, DeviceFull
from moert.beside.gpu.placement import RULES
from moert.beside.gpu.residents import KEEPS, Ranked, Residents
from moert.beside.gpu.simulated import PROFILES, SimulatedDevice
from moert.beside.gpu.tiers import DeviceTier
from moert.engine.engine import Engine
from moert.engine.settings import EngineSettings
from moert.errors import SettingInvalid
from moert.experts.policy import EVICTION, Demand
from moert.kernels import library
from moert.kernels.backend import ExpertView
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.paths import TRACE, Trace
from tests.pairs import thinned
from tests.tiny_packs import DECODER, SPECS, run_greedy, write_pack

OTHERS = 60_000  # of the tiny models on a simulated card, beside experts: all else, and scratch
IDS, NEW = [5, 6, 7, 9, 11], 6
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: write_pack(tmp_path_factory.mktemp("tiers") / f"{name}.pack", spec) for name, spec in SPECS.items()}
    for name, pack in made.items():
        with Engine.open(pack, threads=1) as engine:
            layers = len(SPECS[name].moe_layers())
            rng = np.random.default_rng(0)
            chosen = rng.integers(0, engine.spec.moe.n, (30, layers, engine.spec.moe.router.top_k))
            if name != "switch":
                trace = record(engine.spec.moe.n, [{"decoder": np.sort(chosen, -1)}])
                add_to_pack(pack, engine.pack.manifest, TRACE, trace.to_bytes())
    return made


def expert_bytes(pack: Path) -> int:
    with Engine.open(pack, threads=1) as engine:
        return engine.budget.expert_bytes


def on_card(pack: Path, part: float = 0.4, **changes: Any) -> Engine:
    """With room for this part of the experts on the card."""
    gpu = int(1.2 * part * expert_bytes(pack)) + OTHERS
    return Engine.open(pack, threads=1, device="sim:t4", gpu_memory=gpu, notify=lambda note: None, **changes)


@pytest.fixture(autouse=True)
def cheap_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as tiny as these pay on a card too."""
    of_card = SimulatedDevice.costs
    monkeypatch.setattr(SimulatedDevice, "costs", lambda card: replace(of_card(card), launch_s=0.0))


@pytest.fixture(scope="module")
def plain(packs: dict[str, Path]) -> dict[str, Any]:
    found = {}
    for name, pack in packs.items():
        with Engine.open(pack, threads=1) as engine:
            found[name] = run_greedy(engine, IDS, NEW)
    return found


@thinned("memory, rule, keep, name", [None, "35%"], RULES, KEEPS, SPECS)
def test_answers_are_the_processors(
    packs: dict[str, Path], plain: dict[str, Any], name: str, keep: str, rule: str, memory: str | None
) -> None:
    with on_card(packs[name], cache=memory, device_keep=keep, device_experts=rule) as engine:
        tokens, logits = run_greedy(engine, IDS, NEW)
        use = engine.stats().device
    assert tokens == plain[name][0]
    if library.load() is None:
        assert np.allclose(logits, plain[name][1], atol=1e-4)
    else:
        assert np.array_equal(logits, plain[name][1])
    assert use is not None
    assert use.counters.asked == use.counters.held + use.counters.copied + use.counters.on_host
    assert use.used_bytes <= use.capacity_bytes


def test_the_same_run_gives_the_same_figures(packs: dict[str, Path]) -> None:
    def figures() -> object:
        with on_card(packs["decoder"], cache="35%") as engine:
            answer = engine.generate(IDS, max_new_tokens=NEW, ignore_eos=True)
            return engine.stats().device, answer.total_s, engine.stats().tokens_per_s

    assert figures() == figures()


def test_several_requests_at_once(packs: dict[str, Path]) -> None:
    prompts = [[5, 6, 7], [9, 3], [4, 4, 8, 20]]
    with Engine.open(packs["decoder"], threads=1) as engine:
        expected = [each.result.tokens for each in engine.generate_many(prompts, max_new_tokens=NEW)]
    with on_card(packs["decoder"]) as engine:
        assert [each.result.tokens for each in engine.generate_many(prompts, max_new_tokens=NEW)] == expected


def test_a_card_with_less_memory_than_it_said_gives_experts_back(packs: dict[str, Path], plain: dict[str, Any]) -> None:
    with on_card(packs["decoder"], device_experts="copied") as engine:
        assert isinstance(engine.holding, DeviceTier)
        copy, left = engine.holding.device.copy, [8]

        def full(view: ExpertView) -> Any:
            left[0] -= 1
            if left[0] in (0, 1, 4):
                raise DeviceFull("no more")
            return copy(view)

        engine.holding.device.copy = full  # type: ignore[method-assign]
        tokens, _ = run_greedy(engine, IDS, NEW)
        use = engine.stats().device
    assert tokens == plain["decoder"][0]
    assert use is not None
    assert use.counters.given_back > 0


def test_a_card_slower_than_the_processor_gets_no_experts(
    packs: dict[str, Path], plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy would take the processor's time."""
    of_card = SimulatedDevice.costs
    monkeypatch.setattr(SimulatedDevice, "costs", lambda card: replace(of_card(card), launch_s=1.0))
    with on_card(packs["decoder"]) as engine:
        assert run_greedy(engine, IDS, NEW)[0] == plain["decoder"][0]
        use = engine.stats().device
    assert use is not None
    assert (use.counters.copies, use.counters.held, use.counters.on_host) == (0, 0, use.counters.asked)


def test_a_card_that_can_compute_nothing_leaves_it_to_the_processor(
    packs: dict[str, Path], plain: dict[str, Any]
) -> None:
    with on_card(packs["decoder"], device_experts="copied") as engine:
        assert isinstance(engine.holding, DeviceTier)

        def full(*_: Any) -> Any:
            raise DeviceFull("no more")

        engine.holding.device.begin = full  # type: ignore[method-assign]
        tokens, _ = run_greedy(engine, IDS, NEW)
        use = engine.stats().device
    assert tokens == plain["decoder"][0]
    assert use is not None
    assert use.counters.on_host > 0


def test_what_is_copied_ahead_is_used(packs: dict[str, Path]) -> None:
    """Path tables of the pack name what its own prompts ask for."""
    with on_card(packs["decoder"], 0.5, predict="transitions", device_keep="lru", device_experts="copied") as engine:
        engine.generate("one small step", max_new_tokens=30, ignore_eos=True)
        use = engine.stats().device
    assert use is not None
    assert use.counters.ahead_used <= use.counters.ahead <= use.counters.copies


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"device": "gpu"}, "none of"),
        ({"gpu_memory": "6GB"}, "has no effect without"),
        ({"device_keep": "lru"}, "has no effect without"),
        ({"device": "cpu", "device_experts": "copied"}, "has no effect without"),
        ({"device": "sim:t4", "device_keep": "all"}, "none of expected"),
        ({"device": "sim:t4", "device_experts": "all"}, "none of cheapest"),
        ({"device": "sim:t4", "gpu_memory": "much"}, "not a size"),
        ({"device": "sim:t4", "neurons": "predicted"}, "reads none"),
    ],
)
def test_settings_that_can_not_be(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(SettingInvalid, match=wrong) as caught:
        EngineSettings(**settings)
    assert "\n" not in str(caught.value)


def test_too_little_memory_for_an_expert(packs: dict[str, Path]) -> None:
    with pytest.raises(SettingInvalid, match="for experts, one of which takes"):
        Engine.open(packs["decoder"], device="sim:t4", gpu_memory=100)


def test_popularity_is_counted_in_the_trace() -> None:
    spec = DECODER
    layers = spec.moe_layers()
    chosen = np.zeros((10, len(layers), 2), np.int64)
    chosen[..., 1] = 3
    shares = popularity(Trace.from_bytes(record(spec.moe.n, [{"decoder": chosen}]).to_bytes()), spec)
    assert shares[layers[1]].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    first = KEEPS["popular"](shares, layers, None).first
    assert {key.expert for key in first[: 2 * len(layers)]} == {0, 3}
    by_layer = KEEPS["layers"](popularity(None, spec), layers, None).first
    assert {key.at for key in by_layer[: spec.moe.n]} == {layers[-1]}


class Sizes:
    """A device that holds sizes."""

    capacity_bytes = 1000

    def __init__(self) -> None:
        self.freed: list[Any] = []
        self.clock = self

    def now(self) -> float:
        return 0.0

    def copy(self, view: Any) -> Any:
        return view

    def free(self, held: Any) -> None:
        self.freed.append(held)


def residents(policy: Any, count: int) -> tuple[Residents, Sizes]:
    device = Sizes()
    weights = dict.fromkeys(DECODER.expert_keys(), 10)
    return Residents(device, weights, policy, 10 * count, DeviceCounters()), device  # type: ignore[arg-type]


def key(layer: int, expert: int) -> ExpertKey:
    return ExpertKey("decoder", layer, expert)


def bring(found: Residents, *keys: ExpertKey) -> None:
    found.begin(Demand(keys[0].at, tuple(each.expert for each in keys)))
    for each in keys:
        assert found.bring(each, each, 0.0) is not None  # type: ignore[arg-type]
        found.used([each])
    found.settle()


def test_what_a_prompt_copies_does_not_push_out_who_is_worth_more() -> None:
    order = [key(0, 0), key(1, 0), key(1, 1), *(key(0, number) for number in range(1, 8)), key(1, 2), key(1, 3)]
    found, _ = residents(Ranked(order), 4)  # one of which is for newcomers
    bring(found, key(0, 0))
    bring(found, key(1, 0), key(1, 1))
    for number in range(1, 8):
        bring(found, key(0, number))
    assert all(each in found for each in (key(0, 0), key(1, 0), key(1, 1)))
    assert found.used_bytes <= found.capacity_bytes


def test_the_latest_of_each_layer_stay() -> None:
    found, device = residents(KEEPS["lru"](popularity(None, DECODER), DECODER.moe_layers(), None).policy, 5)
    for number in range(4):
        bring(found, key(0, number))
        bring(found, key(1, number))
    held = [each for each in DECODER.expert_keys() if each in found]
    assert held == [key(0, 2), key(0, 3), key(1, 2), key(1, 3)]
    assert len(device.freed) == 4


def test_who_is_worth_more_than_somebody_comes() -> None:
    found, _ = residents(EVICTION["lfu"]([LayerKey("decoder", 0)]), 3)
    bring(found, key(0, 0))
    bring(found, key(0, 1))
    for number, wants in ((2, False), (2, True)):
        found.begin(Demand(LayerKey("decoder", 0), (number,)))
        found.computed_elsewhere([key(0, number)])
        assert found.wants(key(0, number)) is wants


def test_profiles_are_told_on_the_command_line() -> None:
    from moert.command.settings import SETTINGS

    device = next(each for each in SETTINGS if each.name == "device")
    assert all(f"sim:{name}" in device.help for name in PROFILES)


def test_a_closed_engine_holds_no_experts_on_the_card(packs: dict[str, Path]) -> None:
    with on_card(packs["decoder"]) as engine:
        run_greedy(engine, IDS, NEW)
        tier = engine.holding
        assert isinstance(tier, DeviceTier)
        assert tier.tiers is not None
        residents, before = tier.tiers.residents, tier.device.used_bytes
        assert residents.used_bytes > 0
        held = residents.used_bytes
    assert residents.used_bytes == 0
    assert tier.device.used_bytes <= before - held
