"""The expert cache filled before the first request: which experts, how far, and when it ends."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import Moert
from memory_store import ORDER, PATIENCE_S, begin, key, make, use, wait_until
from tiny_packs import DECODER, PROMPTS, SWITCH, write_pack

from moeconv.routes import record
from moeconv.writer import add_to_pack
from moert.beside.fill import first
from moert.command import chat
from moert.engine.engine import Engine
from moert.engine.settings import EngineSettings
from moert.errors import SettingInvalid
from moert.experts.cache import ExpertCache
from moert.experts.policy import Demand
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import TRACE
from moert.pack.reader import Pack
from moert.serve.host import Host, ServerSettings

ONCE = [Demand(at, (0, 1, 2)) for at in ORDER]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder whose trace knows experts 5 and 2 of each layer alone, and one with an encoder and no trace."""
    root = tmp_path_factory.mktemp("fill")
    decoder, switch = write_pack(root / "decoder.pack", DECODER), write_pack(root / "switch.pack", SWITCH)
    chosen = np.array([[[5, 2]] * len(DECODER.moe_layers())] * 4)
    add_to_pack(decoder, Pack.open(decoder).manifest, TRACE, record(8, [{"decoder": chosen}]).to_bytes())
    return {"decoder": decoder, "switch": switch}


def filled(engine: Engine) -> list[ExpertKey]:
    """Fills an engine's cache, and returns the experts in it once no other one fits."""
    engine.fill()
    nbytes = min(engine.cached_bytes.values())
    wait_until(lambda: engine.cache.used_bytes + nbytes > engine.cache.capacity_bytes)
    wait_until(lambda: len(engine.cache.resident()) == engine.cache.n_resident)
    return engine.cache.resident()


def test_the_most_used_come_first_up_to_the_room() -> None:
    shares = {at: np.array([0.1, 0.4, 0.2 + at.layer / 10]) for at in ORDER}
    ranked = [(0, 1), (1, 1), (2, 1), (2, 2), (1, 2), (0, 2), (0, 0), (1, 0), (2, 0)]
    assert first(shares, ORDER, lambda _: 10, 90) == [key(*each) for each in ranked]
    assert first(shares, ORDER, lambda _: 10, 39) == [key(*each) for each in ranked[:3]]
    larger = {key(*ranked[2]): 25}
    assert first(shares, ORDER, lambda each: larger.get(each, 10), 40) == [key(*each) for each in ranked[:2]]


def test_an_encoder_comes_before_all_else_layer_by_layer() -> None:
    order = [LayerKey("encoder", 1), LayerKey("encoder", 3), LayerKey("decoder", 0)]
    shares = {order[0]: np.array([0.1, 0.2]), order[1]: np.array([0.5, 0.1]), order[2]: np.array([0.9, 0.8])}
    assert first(shares, order, lambda _: 1, 5) == [
        order[0].expert(1), order[0].expert(0), order[1].expert(0), order[1].expert(1), order[2].expert(0),
    ]  # fmt: skip


def test_what_has_no_room_stays_away_and_nothing_leaves() -> None:
    cache, store, counters = make(50, "expected")
    cache.fill([key(0, 1), key(1, 1), key(2, 1)], ONCE)
    wait_until(lambda: cache.resident() == [key(0, 1), key(1, 1)])
    cache.close()
    assert store.reads == [key(0, 1), key(1, 1)]
    assert counters.evictions == 0


def test_a_layer_that_begins_ends_it() -> None:
    cache, store, counters = make(200)
    store.hold(key(0, 0))
    cache.fill([key(0, 0), key(1, 0), key(1, 1)], ONCE)
    assert store.entered[key(0, 0)].wait(PATIENCE_S)
    assert begin(cache, 2, [1]).begun == [], "nothing was predicted"
    with cache.lease([key(2, 1)]) as lease:
        lease.all()  # while the other one is still being read
        assert store.reads == [key(0, 0), key(2, 1)]
        store.gates[key(0, 0)].set()
    use(cache, 0, [0])
    cache.close()
    assert store.reads == [key(0, 0), key(2, 1)]
    assert (counters.hits, counters.prefetch_issued, counters.prefetch_used) == (1, 0, 0)


def test_predictions_after_it_count_as_predictions() -> None:
    cache, _, _ = make(200)
    cache.fill([], ONCE)
    begin(cache, 0, [])
    cache.predict([key(1, 0)])
    wait_until(lambda: cache.resident() == [key(1, 0)])
    assert begin(cache, 1, [0]).begun == [key(1, 0)]
    cache.close()


def test_less_room_ends_it_and_is_kept() -> None:
    cache, _, _ = make(60)
    cache.fill([key(0, 0), key(1, 0), key(2, 0), key(2, 1)], ONCE)
    wait_until(lambda: len(cache.resident()) == 4)
    cache.resize(25)
    assert cache.used_bytes <= 25
    assert cache.held_bytes <= 25
    cache.close()


@pytest.mark.parametrize(("past", "stays"), [(ONCE, key(2, 1)), ([], key(0, 0))], ids=["counted once", "unknown"])
def test_experts_of_the_next_layers_stay_where_a_layer_needs_room(past: list[Demand], stays: ExpertKey) -> None:
    cache, _, _ = make(40, "expected")
    cache.fill([key(1, 0), key(2, 1)], past)
    wait_until(lambda: len(cache.resident()) == 2)
    use(cache, 0, [0])
    use(cache, 1, [1])  # 20 more: its own other expert has 10
    assert {stays, key(1, 1)} <= {*cache.resident()}
    cache.close()


@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_answers_are_the_same(packs: dict[str, Path], name: str) -> None:
    found = list[list[int]]()
    for way in ("none", "used"):
        with Engine.open(packs[name], cache="50%", fill=way, kernels="reference") as engine:
            if way == "used":
                assert filled(engine)
            found += [engine.generate(engine.encode(PROMPTS[1]), max_new_tokens=12, ignore_eos=True).tokens]
            assert engine.cache.used_bytes <= engine.cache.capacity_bytes
    assert found[0] == found[1]


def of_layers(spec: ModelSpec, *numbers: int) -> set[ExpertKey]:
    return {at.expert(number) for at in spec.moe_layers() for number in numbers}


def test_a_trace_names_the_experts(packs: dict[str, Path]) -> None:
    with Engine.open(packs["decoder"], cache="50%") as engine:
        keys = filled(engine)
        assert of_layers(engine.spec, 2, 5) < {*keys}
        read = engine.counters.bytes_read
        engine.fill()
        assert engine.counters.bytes_read == read
    with Engine.open(packs["switch"], cache="50%") as engine:
        keys = filled(engine)
        assert {at: sum(each.at == at for each in keys) for at in engine.spec.moe_layers("encoder")} == {
            LayerKey("encoder", 0): 6, LayerKey("encoder", 1): 6,
        }  # fmt: skip


def test_memory_has_room_for_the_tokenizer_before_experts_take_it(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(packs["decoder"]) as engine:
        smallest = engine.smallest_memory(300, 90) + (24 << 20)
    there = list[bool]()
    with Engine.open(packs["decoder"], memory=smallest) as engine:
        fill = engine.cache.fill
        monkeypatch.setattr(
            engine.cache, "fill", lambda *given: (there.append("tokenizer" in vars(engine.text)), fill(*given))
        )
        assert filled(engine)
        engine.reserve(300, 90)
        engine.generate([3, 4, 5], max_new_tokens=4)
        assert engine.cache.held_bytes <= engine.cache.capacity_bytes
    assert there == [True]


def test_a_damaged_trace_is_a_note(packs: dict[str, Path], tmp_path: Path) -> None:
    damaged = write_pack(tmp_path / "damaged.pack", DECODER)
    add_to_pack(damaged, Pack.open(damaged).manifest, TRACE, (packs["decoder"] / TRACE).read_bytes())
    (damaged / TRACE).write_bytes(bytes(len((damaged / TRACE).read_bytes())))
    notes = list[str]()
    with Engine.open(damaged, cache="50%", eviction="lru", fill="used", notify=notes.append) as engine:
        assert engine.cache.n_resident == 0
        assert [note for note in notes if note.startswith("no experts are read before the first request: ")]


def test_nothing_is_filled_unasked(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    notes = list[str]()
    monkeypatch.setattr(ExpertCache, "fill", lambda *_: pytest.fail("nobody asked"))
    for settings in (EngineSettings(fill="none"), EngineSettings(device="sim:t4", gpu_memory="1GB", fill="used")):
        with Engine.open(packs["decoder"], settings, notify=notes.append) as engine:
            engine.fill()
            assert engine.cache.n_resident == 0
            engine.reserve(1, 1)
    assert [note for note in notes if "fill='used' has no effect here" in note]
    with Engine.open(packs["decoder"], cache="50%") as engine:
        assert engine.cache.n_resident == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_chat_and_a_server_fill_and_run_does_not(
    packs: dict[str, Path], moert: Moert, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = list[str]()
    monkeypatch.setattr(Engine, "fill", lambda engine: filled.append(engine.pack.root.name))
    monkeypatch.setattr(chat, "converse", lambda *_: None)
    monkeypatch.setattr(Engine, "conversation", lambda *_: None)
    assert moert("run", packs["decoder"], "hello", "--max-new-tokens", "1") == 0
    assert filled == []
    assert moert("chat", packs["decoder"], stdin="") == 0
    assert filled == [], "its first message may be there already"
    monkeypatch.setattr("sys.stdin", Terminal())
    assert moert("chat", packs["decoder"]) == 0
    assert filled == ["decoder.pack"]
    host = Host(ServerSettings({"switch": packs["switch"]}))
    host.open("switch")
    host.close()
    assert filled == ["decoder.pack", "switch.pack"]


def test_another_value_is_refused(packs: dict[str, Path], moert: Moert) -> None:
    assert "all" in moert.refuses("run", packs["decoder"], "hello", "--tune", "fill=all")
    with pytest.raises(SettingInvalid, match="'all' is none of auto, none, used"):
        EngineSettings(fill="all")


def test_a_run_does_not_load_it(packs: dict[str, Path]) -> None:
    code = (
        "import sys; from moert.engine.engine import Engine\n"
        f"with Engine.open({str(packs['decoder'])!r}) as engine: engine.generate([3], max_new_tokens=1)\n"
        "assert 'moert.beside.fill' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
