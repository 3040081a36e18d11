"""Single neurons, the hash function and two devices: what is replayed, counted and shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_hash import add_hash
from random_predictor import add_predictor, random_predictor
from tiny_packs import PROMPTS, SPECS, write_pack

from moeconv.matrices import matrices_of, projection_weights, read_expert
from moeconv.order import NeuronOrder
from moert.beside.flash.keeping import KEEPING, replay
from moert.beside.flash.runner import PREDICTED
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.experts.policy import Demand
from moert.pack.layout import Neurons
from moert.pack.learnt import PredictedLoss
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack
from recipes.bench import fiddler, sida
from recipes.bench.blocks import rendered
from recipes.bench.cards import (
    EXPERT_BYTES,
    EXPERTS,
    LAYERS,
    TOP_K,
    Bench,
    Routes,
    Setup,
    offloading,
    ours,
    processor,
    split,
)
from recipes.bench.cards import replay as replay_on_cards
from recipes.bench.flash_firings import (
    IN_THE_PACK,
    ROOMS,
    Firings,
    Recorder,
    Replay,
    SideBySide,
    as_trained,
    best_hits,
    hit_rows,
    kept_hits,
    managed_rows,
    order_rows,
    visits_of,
    window_loads,
    window_rows,
)
from recipes.bench.flash_measures import (
    SUBJECTS,
    Asked,
    Subject,
    Written,
    asked_rows,
    in_order_rows,
    of_naive_rows,
    opened,
    predicted_rows,
    predictor_rows,
    raced_rows,
    read_rows,
    steps_rows,
    today_rows,
    write_texts,
)
from recipes.bench.hash_measures import BELADY, Compared, Found, Perfect, eviction_rows
from recipes.bench.hash_measures import Subject as HashSubject
from recipes.bench.hash_measures import hit_rates as hash_hit_rates
from recipes.bench.hashed import BEST, DEFAULT, NONE, ON_DEMAND, called, race_rows
from recipes.bench.race import Outcome
from recipes.bench.result import Result, Row, context
from recipes.bench.shaped import DENSE
from recipes.bench.shaped import write_pack as write_shaped
from recipes.bench.stream_packs import expert_bytes
from recipes.bench.streamed import Segment, Spent
from recipes.bench.tables import mechanisms
from tests.shapes import Shape, every

# make bench-flash: what is recorded and replayed, curves and orders of it, and what its tables show.

NEW_TOKENS = 6
LOST = PredictedLoss(0.02, 0.01, 0.03)
LAYOUTS = {"columns": Neurons(512, bundled=False), "neuron": Neurons(512, bundled=True)}
WIDE = Shape(
    64, d_model=64, n_heads=2, n_kv_heads=2, head_dim=32, encoder=every(1), decoder=every(2), num_experts=3, top_k=1,
    d_ff=50, activation="relu", gated=False, capacity=64, scale=1.0, tied=True, eos=(1,), pad=0, start=0,
    family="switch",
).spec  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flash") / "columns.pack"
    return write_pack(out, SPECS["switch"], paths=False, bits=(4,), neurons=LAYOUTS["columns"])


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flash") / "neuron.pack"
    return add_predictor(write_pack(out, SPECS["switch"], paths=False, bits=(4,), neurons=LAYOUTS["neuron"]))


@pytest.fixture(scope="module")
def texts(pack: Path) -> list[list[int]]:
    with opened(pack) as engine:
        return [engine.encode(prompt) for prompt in PROMPTS]


def made_up(visits: int = 160, layers: int = 2, experts: int = 2, d_ff: int = 20) -> Firings:
    """Few neurons fire, and some far more often than others."""
    rng = np.random.default_rng(5)
    often = rng.beta(0.5, 2, size=d_ff)
    packed = np.packbits(rng.random((layers, visits, d_ff)) < often, axis=2)
    return Firings(rng.integers(0, experts, (layers, visits)), packed, experts, d_ff)


# Recorded and replayed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_another_shape_fires_as_recorded(layout: str, tmp_path: Path) -> None:
    firings = made_up()
    whole = write_pack(tmp_path / "m.pack", SPECS["switch"], paths=False, bits=(4,), neurons=LAYOUTS[layout])
    with opened(whole, cache="60%") as engine:
        moe = engine.spec.moe
        Replay(firings, engine.spec.moe_layers(), moe.n, moe.ffn.d_ff).replace(engine)
        recorder = Recorder(engine)
        recorder.on = True
        write_texts(engine, [[5, 6, 7]], NEW_TOKENS)
        found = recorder.firings()
    expected = Replay(firings, SPECS["switch"].moe_layers(), found.n_experts, found.d_ff)
    for place, at in enumerate(SPECS["switch"].moe_layers("decoder")):
        rows = expected.begin(at, found.visits)
        assert (found.fired(place) == expected.pattern(at, rows)).all()
        assert found.experts[place].tolist() == expected.experts(at, rows)[:, 0].tolist()


def test_what_a_predictor_names_is_replayed_too(predicted: Path) -> None:
    firings, spec = made_up(), SPECS["switch"]
    with opened(predicted, neurons=PREDICTED, cache="60%") as engine:
        replayed = Replay(firings, spec.moe_layers(), spec.moe.n, spec.moe.ffn.d_ff)
        replayed.replace(engine)
        recorder = Recorder(engine)
        recorder.on = True
        write_texts(engine, [[5, 6, 7]], NEW_TOKENS)
        found = recorder.firings()
    expected = Replay(firings, spec.moe_layers(), spec.moe.n, spec.moe.ffn.d_ff)
    for place, at in enumerate(spec.moe_layers("decoder")):
        assert (found.fired(place) == expected.pattern(at, expected.begin(at, found.visits))).all()


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_the_same_tokens_are_read_in_any_room(pack: Path, texts: list[list[int]]) -> None:
    with opened(pack) as engine:
        alone = write_texts(engine, texts, NEW_TOKENS)
    with opened(pack, cache="60%") as engine:
        little = write_texts(engine, texts, NEW_TOKENS, alone.answers)
    assert little.answers == alone.answers
    assert little.tokens == alone.tokens > 0
    assert (little.neurons, little.fired, little.blocks) == (alone.neurons, alone.fired, alone.blocks)
    assert alone.holds_rows
    assert little.bytes_read > 0


def test_packs_of_a_shape_have_the_same_weights_by_neurons(tmp_path: Path) -> None:
    dense = {role: DENSE.get(role, 4) for role in WIDE.roles()}
    write_shaped(tmp_path / "whole.pack", 16, dense, WIDE, alike=True)
    write_shaped(tmp_path / "columns.pack", 16, dense, WIDE, alike=True, neurons=LAYOUTS["columns"])
    whole, columns = (Pack.open(tmp_path / name) for name in ("whole.pack", "columns.pack"))
    for key in WIDE.expert_keys():
        one, other = (matrices_of(each, key, read_expert(each, key)) for each in (whole, columns))
        assert (projection_weights(one["up"]) == projection_weights(other["up"])).all()
        assert (projection_weights(one["down"]) == projection_weights(other["down"])).all()


# Curves ---------------------------------------------------------------------------------------------------------------

tokens = st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 6), max_size=4)), min_size=1, max_size=20)


@given(tokens, st.integers(1, 8))
def test_windows_load_what_did_not_fire_lately(asked: list[tuple[int, set[int]]], k: int) -> None:
    experts = np.array([expert for expert, _ in asked])
    fired = np.array([[neuron in those for neuron in range(7)] for _, those in asked])
    [found] = window_loads(experts, fired, [k])
    named = [{(expert, neuron) for neuron in those} for expert, those in asked]
    loaded = kept = 0
    for visit, mine in enumerate(named):
        before = set().union(*named[max(0, visit - k) : visit])
        loaded += len(mine - before)
        kept += len(set().union(*named[max(0, visit - k + 1) : visit + 1]))
    assert found.loaded == pytest.approx(loaded / len(named))
    assert found.kept == pytest.approx(kept / len(named))


@pytest.mark.parametrize("name", KEEPING)
def test_hits_are_those_of_the_runtime_and_at_most_the_best(name: str) -> None:
    firings = made_up()
    visits, of_expert = visits_of(firings.experts[0], firings.fired(0), 2)
    n_blocks = 2 * of_expert
    slots = max(map(len, visits))
    found = kept_hits(visits, n_blocks, slots, KEEPING[name])
    assert found == replay(visits, n_blocks, slots, KEEPING[name])
    for n_slots in (1, 3, slots, n_blocks):
        best = best_hits(visits, n_blocks, n_slots)
        found = kept_hits(visits, n_blocks, n_slots, KEEPING[name])
        assert found.asked == best.asked
        assert found.hits <= best.hits


# Memory ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=12))
def test_neurons_side_by_side_keep_their_contents(changes: list[tuple[set[int], set[int]]]) -> None:
    beside, there = SideBySide(10, 10, 1), set[int]()
    for leave, come in changes:
        leaving, coming = sorted(leave & there), sorted(come - there)
        stay, before = there - leave, beside.moved_bytes
        places = {neuron: int(beside.place_of[neuron]) for neuron in stay}
        beside.change(np.array(leaving, int), np.array(coming, int))
        moved = sum(int(beside.place_of[neuron]) != place for neuron, place in places.items())
        assert beside.moved_bytes - before == moved == sum(place >= len(stay) for place in places.values())
        beside.room[beside.place_of[coming], 0] = coming
        there = stay | set(coming)
        assert beside.count == len(there)
        assert set(beside.room[: beside.count, 0].tolist()) == there
        assert beside.room[beside.place_of[sorted(there)], 0].tolist() == sorted(there)


def test_copies_move_what_slots_leave_where_it_is() -> None:
    rows = {row.name: row.value for row in managed_rows("opt", made_up(experts=6), SPECS["switch"])}
    assert list(rows) == ["opt: managing slots", "opt: copying the last neurons", "opt: bytes of copies"]
    assert rows["opt: bytes of copies"] > 0


# Orders ---------------------------------------------------------------------------------------------------------------


def random_order(firings: Firings) -> NeuronOrder:
    rng, shape = np.random.default_rng(7), (firings.n_experts, firings.d_ff)
    rows = np.tile(np.arange(shape[1], dtype=np.uint32), (shape[0], 1))
    places = [LayerKey("encoder", 0), *(LayerKey("decoder", 2 * layer) for layer in range(firings.n_layers))]
    return NeuronOrder({at: rng.permuted(rows, axis=1) for at in places})


def test_orders_of_a_pack_are_judged_on_the_same_firings_as_others() -> None:
    trained = made_up()
    order = random_order(trained)
    layers = [rows for at, rows in order.layers.items() if at.stack == "decoder"]
    packed = np.stack([
        np.packbits(np.take_along_axis(trained.fired(layer), rows[trained.experts[layer]].astype(int), 1), axis=1)
        for layer, rows in enumerate(layers)
    ])  # fmt: skip
    recorded = replace(trained, packed=packed)
    assert (as_trained(recorded, order).packed == trained.packed).all()
    others = {IN_THE_PACK: lambda size: order}
    rows = {row.name: row.value for row in order_rows("opt", recorded, order, others)}
    assert {name: rows[name] for name in (row.name for row in order_rows("opt", trained))} == {
        row.name: row.value for row in order_rows("opt", trained)
    }
    lying = {row.name: row.value for row in order_rows("opt", recorded)}
    assert rows[f"opt, blocks of 4: {IN_THE_PACK}"] == lying["opt, blocks of 4: as given"]


# Rows and tables ------------------------------------------------------------------------------------------------------


def subject(name: str) -> Subject:
    return SUBJECTS[name]


def raced(speeds: list[float], read: int, deciding: float) -> Outcome:
    segments = [Segment(10, 10 / speed, read, 0, 0) for speed in speeds]
    spent = Spent(whole=1.0, kernels=0.5, waiting=0.3, deciding=deciding)
    return Outcome(segments, facts={"peak_bytes": 50_000_000}, spent=spent)


def all_rows() -> list[Row]:
    asked = Asked(activity=0.1, experts_bytes=1e6, columns_bytes=7e4)
    rows = asked_rows(subject("opt"), asked)
    experts, neurons = Written(tokens=10, bytes_read=1_000_000), Written(tokens=10, bytes_read=90_000, holds_rows=True)
    for share in (0.25, 0.5, 0.75):
        rows += read_rows(subject("opt"), share, asked, experts, neurons, 0)
        rows += predicted_rows(subject("opt"), share, asked, experts, neurons)
    more = Written(tokens=10, bytes_read=120_000, blocks=300)
    rows += in_order_rows(subject("opt"), (replace(more, blocks=240), more), {0.25: (neurons, more)})
    rows += predictor_rows(subject("opt"), random_predictor(SPECS["switch"], loss=LOST), 10**6)
    outcomes = {
        "naive": raced([1.0, 1.0], 100, 0.2), "whole experts, half kept": raced([2.0, 2.0], 50, 0.2),
        "+ window": raced([6.0, 4.0], 10, 0.2),
    }  # fmt: skip
    rows += [
        *raced_rows("opt, ssd, steps", outcomes, 10**8),
        *steps_rows("opt, ssd, steps", "ssd", outcomes, "+ window"),
    ]
    outcomes = {"whole experts 50%": raced([2.0, 2.0], 50, 0.2), "neurons 50%": raced([3.0, 2.0], 10, 0.05)}
    rows += [*raced_rows("g2p, ssd", outcomes, 10**7), *today_rows("g2p, ssd", outcomes, [" 50%"], 1.5)]
    outcomes = {name: raced([1.0, 2.0], 10, 0.05) for name in ("whole experts", "neurons", "predicted neurons")}
    outcomes["naive"] = raced([1.0, 2.0], 1000, 0.05)
    where = "OPT-1.3B like opt, ssd, 50%"
    rows += [*raced_rows(where, outcomes, 10**8), *steps_rows(where, "ssd", outcomes, "neurons")]
    rows += of_naive_rows(where, outcomes, sparse=True)
    rows += [*today_rows(where, outcomes, [""], None), Row("OPT-1.3B like opt: neurons that fire", 9.4, "%")]
    firings = made_up()
    return [
        *rows,
        *window_rows("opt", firings),
        *hit_rows("opt", firings, 2),
        *order_rows("opt", firings, random_order(firings), {IN_THE_PACK: lambda size: random_order(firings)}),
    ]


def test_aims_stand_where_they_belong() -> None:
    rows = {row.name: row for row in all_rows()}
    assert rows["opt: columns, of whole experts"].met
    assert rows["opt, 50%: neurons, of whole experts"].met
    assert rows["opt, 50%: predicted, of what whole experts ask for"].met
    assert rows["opt, 25%: predicted, of what whole experts ask for"].aim is None
    assert rows["opt: loss by the predictor"].met is False
    assert rows["opt, ssd, steps: + window to naive"].value == 5.0
    assert rows["opt, ssd, steps: + window to naive"].met
    assert rows["opt, ssd, steps: whole experts, half kept to naive"].aim is None
    assert rows["opt, ssd, steps: naive: deciding"].aim is None
    assert rows["opt, ssd, steps: + window: deciding"].met is False
    assert rows["OPT-1.3B like opt, ssd, 50%: predicted neurons: read, of naive"].met
    assert rows["OPT-1.3B like opt, ssd, 50%: neurons: read, of naive"].aim is None
    assert rows["g2p, ssd: neurons 50% to whole experts"].met is False
    assert rows["g2p, ssd: neurons 50%: deciding"].met
    assert rows["g2p, ssd: neurons 50%: peak memory of the process"].met is False


def test_tables_show_part_of_a_run() -> None:
    result = Result(context({}), all_rows())
    shown = (mechanisms.nbytes, mechanisms.flash_speeds, mechanisms.curves)
    text = "\n".join(rendered(parts(result), result) for parts in shown)
    assert "| opt | 500 MB/s | + window | 5 ± 0.5 | 5.00 ± 0.50 | 0.001 |" in text
    assert "aim" not in text
    assert "| OPT-1.3B like opt |" in text
    assert "| opt | 0.80 | 0.75 | | |" in text
    assert "| opt, in the pack | " in text
    assert f"| opt, blocks of 2 | {ROOMS[0]:.0%} |" in text
    for parts in (mechanisms.nbytes, mechanisms.flash_speeds):
        rendered(parts(Result(context({}), [])), Result(context({}), []))


# make bench-hash: what it counts, and what its tables show of part of a run.

TEXTS = [[3, 5, 7, 9, 11], [4, 6, 8]]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hashed")
    return {name: add_hash(write_pack(root / f"{name}.pack", SPECS[name])) for name in ("decoder", "switch")}


def test_hits_of_both_stacks_are_all_hits(packs: dict[str, Path]) -> None:
    compared = hash_hit_rates(packs["switch"], TEXTS, NEW_TOKENS, 0.5)
    found = compared.found
    asked = {policy: each.asked for policy, each in found.items()}
    assert asked["auto"] == asked["foreseen"] == asked[BELADY]
    assert found[BELADY].rate() >= max(found["auto"].rate(), found["foreseen"].rate(), compared.perfect)


def counted(hits: int) -> Found:
    found = Found()
    found.asked, found.hits = Counter({"decoder": 100}), Counter({"decoder": hits})
    return found


def test_what_is_won_is_a_share_of_what_is_lacking() -> None:
    compared = Compared({"auto": counted(40), "foreseen": counted(55), BELADY: counted(60)}, 0.57)
    rows = list(eviction_rows("m", 0.5, compared))
    won = next(row for row in rows if "won" in row.name)
    assert (won.value, won.met) == (pytest.approx(75), True)


def test_who_foresees_without_error_knows_the_present_pass_alone() -> None:
    layers = [LayerKey("decoder", layer) for layer in range(3)]
    trace = [Demand(at, (number,)) for number in range(2) for at in layers]
    perfect, told = Perfect(trace, 4), []
    for _ in perfect:
        coming, likely = perfect.coming()
        told.append([(at.layer, row.nonzero()[0].tolist()) for at, row in zip(coming, likely, strict=True)])
    assert told == [[(1, [0]), (2, [0])], [(2, [0])], [], [(1, [1]), (2, [1])], [(2, [1])], []]


def test_a_part_of_a_run_can_be_shown() -> None:
    outcomes = {
        called(side, 0.5): Outcome([Segment(10, seconds, 0, 0, 0)])
        for side, seconds in ((ON_DEMAND, 4.0), (BEST, 1.0), (NONE, 2.0), (DEFAULT, 2.1))
    }
    rows = [Row("m: hash function", 1.0, "MB"), *race_rows("m, ssd", outcomes, [0.5])]
    result = Result(context({}), rows)
    assert {row.name: row.met for row in rows if row.aim} == {
        "m, ssd: hash, foreseen 50% to on demand": True, "m, ssd: auto 50% to none": False,
    }  # fmt: skip
    for parts in (mechanisms.names, mechanisms.routing, mechanisms.hits, mechanisms.hash_speeds, mechanisms.beforehand):
        assert rendered(parts(result), result)
    assert "0.95" in rendered(mechanisms.hash_speeds(result), result)


# make bench-sida: what it counts, and its sides.


@given(st.integers(1, 30), st.data())
def test_critical_tokens_are_those_that_equation_2_has(others: int, data: st.DataObject) -> None:
    gone, c = data.draw(st.integers(1, others)), data.draw(st.integers(0, others))
    among = 1 - comb(others - c, gone) / comb(others, gone)
    assert sida.found_critical(c, others, gone) == pytest.approx(among)
    assert sida.critical(among, [(others, gone)]) <= c + 1e-6
    if c <= others - gone:
        assert sida.critical(among, [(others, gone)]) == pytest.approx(c, abs=1e-6)


def test_changed_tokens_are_others_and_changed_places_are_not() -> None:
    ids, rng = [5, 6, 7, 8, 1], np.random.default_rng(0)
    for _ in range(20):
        found = sida.corrupted(ids, 0, [1, 3], np.array([5, 6, 8, 9]), rng)
        assert found[0::2] == ids[0::2]
        assert found[1] in (8, 9)
        assert found[3] in (6, 9)
    assert sida.corrupted(ids, 0, [1, 2, 3], None, rng) == [5, 7, 8, 6, 1]


def test_three_experts_of_the_function_take_the_place_of_one(packs: dict[str, Path]) -> None:
    trace: list[Demand] = []
    with Engine.open(packs["switch"], routing="hash", predict="none", trace=trace, notify=lambda line: None) as engine:
        for count, change in ((1, lambda engine: None), (3, sida.routed_to_three)):
            change(engine)
            trace.clear()
            engine.generate([5], GenerationSettings(max_new_tokens=3))
            assert {len(demand.experts) for demand in trace if demand.at.stack == "decoder"} == {count}


def test_the_function_s_memory_goes_to_experts_where_there_is_no_function(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = HashSubject("switch", "g2p", (7, 10), 4, 8, "rouge2")
    monkeypatch.setattr(HashSubject, "pack", property(lambda self: packs["switch"]))
    every = expert_bytes(packs["switch"])
    for function, room in ((every, None), (every // 10, every // 2 + every // 10)):
        monkeypatch.setattr(sida, "function_bytes", lambda subject, function=function: function)
        whole, ours, equal = sida.sides(subject, Path("prompts")).values()
        assert (whole.cache_bytes, ours.cache_bytes, equal.cache_bytes) == (every // 2, every // 2, room)
        assert (whole.eviction, whole.predict, whole.prefers) == ("fifo", "hash", "hash")
        assert {each.prefers for each in (ours, equal)} == {"exact"}


# The bench of two devices: what its routing, its rig and its tables make of small examples. Nothing here is timed.

TOKENS = 12


@pytest.fixture(scope="module")
def routes() -> Routes:
    """Of experts of which some are popular, and of guesses that are always right."""
    rng = np.random.default_rng(0)
    scores = rng.random((TOKENS, LAYERS, EXPERTS)) + np.linspace(0, 0.7, EXPERTS)
    chosen = np.sort(np.argsort(-scores, -1)[..., :TOP_K], -1).astype(np.uint8)
    guesses = np.zeros(scores.shape, np.float16)
    np.put_along_axis(guesses, chosen.astype(np.int64), np.float16(0.5), -1)
    return Routes(chosen, guesses)


@pytest.mark.parametrize("setup", [ours("t4"), processor("t4"), offloading("t4"), split("t4")])
def test_the_same_run_gives_the_same_figures(routes: Routes, setup: Setup) -> None:
    first, second = (replay_on_cards(setup, routes.chosen, routes, 1, 4, 2) for _ in range(2))
    assert first == second
    counters = first.counters
    assert counters.asked == 4 * LAYERS * TOP_K == counters.held + counters.copied + counters.on_host
    assert len(first.passes) == 4
    assert first.error < 0.1


def test_where_experts_are_computed(routes: Routes) -> None:
    counters = {
        name: replay_on_cards(setup("t4"), routes.chosen, routes, 1, 3, 1).counters
        for name, setup in {"processor": processor, "offloading": offloading, "split": split}.items()
    }
    assert counters["processor"].on_host == counters["processor"].asked
    assert counters["offloading"].on_host == 0
    assert counters["split"].copied == 0


def test_the_most_popular_experts_are_found_most_often_and_the_least_popular_ones_least(routes: Routes) -> None:
    room = 128 * EXPERT_BYTES + 5 * 10**9
    setups = [
        Setup("a100", room, keep, "resident", guesses=False) for keep in ("least popular", "at random", "popular")
    ]
    least, some, most = (replay_on_cards(setup, routes.chosen, routes, 1, 4, 0).hit_rate for setup in setups)
    assert least < some < most


def test_memory_for_half_of_the_experts_takes_longer(routes: Routes) -> None:
    whole = replay_on_cards(processor("t4"), routes.chosen, routes, 1, 3, 3)
    setup = Setup("t4", 1, "layers", "resident", "host", guesses=False, memory_bytes=100 * 10**8)
    half = replay_on_cards(setup, routes.chosen, routes, 1, 3, 3)
    assert half.mean_s > 1.2 * whole.mean_s


def test_tables() -> None:
    names = ["two devices", "all on the processor", "LRU offloading", "layers split"]
    rows = [Row(f"t4, one request: {name}", 1.0, "tokens/s") for name in names]
    rows.append(Row(f"t4, one request: {mechanisms.OTHERS[-1]}", 1.2, "tokens/s"))
    rows.append(Row("t4, one request: by the best of the others", 1.5, "×").at_least(1.3))
    rows.append(Row("deciding a layer, 2 of 8 experts", 1.0, "µs").at_most(20))
    rows.append(Row("hits on the card with room for 10%: lru", 19.0, "%"))
    rows += [Row(f"t4, experts at 2 bits: {name}", 1.0, "tokens/s") for name in ("their method", "two devices")]
    raced, aimed, hits, published = mechanisms.devices_parts(Result({}, rows))
    assert raced[1][0] == "t4, one request"
    assert raced[1][-1] == "0.83 ×", "a best of the others that was measured once is among them"
    assert [line[0] for line in aimed[1:]] == ["deciding a layer, 2 of 8 experts"]
    assert hits[1] == ("10%", "{hits on the card with room for 10%: lru}%")
    assert published[1][0] == "t4, experts at 2 bits"


# Fiddler's figures. The processor's times are not measured here.


def test_a_request_takes_a_prompt_and_then_a_token_at_a_time(routes: Routes) -> None:
    bench = Bench.__new__(Bench)
    bench.calibration, bench.heldout = routes.chosen, routes
    short, long, read = (fiddler.request_seconds(bench, ours("t4"), *each) for each in ((4, 3), (4, 5), (8, 3)))
    assert (long[:3] == short).all()
    assert (np.diff(long) > 0).all()
    assert read[0] > short[0], "a longer prompt takes longer"
    assert short[0] > np.diff(long).max(), "and longer than a token"


def test_nothing_is_copied_ahead_by_fiddlers_own_method(routes: Routes) -> None:
    theirs, mine = (replay_on_cards(each("t4"), routes.chosen, routes, 1, 4, 2) for each in (fiddler.fiddler, ours))
    assert theirs.counters.copies == theirs.counters.copied
    assert mine.counters.copies > mine.counters.copied
    assert 0 < theirs.counters.held < theirs.counters.asked


def test_popularity_is_beside_the_most_popular_expert() -> None:
    bench = Bench.__new__(Bench)
    bench.calibration = np.zeros((4, LAYERS, TOP_K), np.uint8)
    bench.calibration[..., 1] = [[1], [1], [2], [3]]
    mean, _, least = (row.value for row in fiddler.popularity_rows(bench))
    assert (mean, least) == (100 * (4 + 2 + 1 + 1) / 4 / EXPERTS, 0)


def test_a_line_is_fitted_to_all_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fiddler, "TOKENS", (1, 4, 64))
    assert fiddler.line(np.array([[3.0, 9.0, 129.0]] * 2)) == pytest.approx((1.0, 2.0))
    base, slope = fiddler.line(np.array([[3.0, 9.0, 200.0]]))
    assert abs((base + slope) / 3 - 1) < 0.1, "a few tokens count as much as many"


def test_the_projections_of_a_measured_expert_lie_beside_each_other() -> None:
    class Seen:
        """A backend that returns the view it is given."""

        def expert(self, view: object) -> object:
            return view

    view = fiddler.laid_out(Seen())  # type: ignore[arg-type]
    ends = [place for each in view.projections.values() for place in each.places]  # type: ignore[attr-defined]
    assert ends == sorted(set(ends))
    assert ends[-1] < len(view.buffer) <= EXPERT_BYTES  # type: ignore[attr-defined]


def test_rows_of_one_unit_and_the_same_columns_share_a_table() -> None:
    rows = [Row(f"t4, {what}: {way}", 1.0, "tokens/s") for what in ("4 beams", "8 beams") for way in ("ours", "theirs")]
    first, second = mechanisms.fiddler_parts(
        Result({}, [rows[0], rows[1], Row("popularity: mean", 1.0, "%"), *rows[2:]])
    )
    assert [line[0] for line in first] == ["tokens/s", "t4, 4 beams", "t4, 8 beams"]
    assert second == [("%", "mean"), ("popularity", "{popularity: mean}")]
