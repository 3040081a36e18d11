"""make bench-flash: what is recorded and replayed, curves and orders of it, and what its tables show."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_predictor import add_predictor, random_predictor
from tiny_packs import PROMPTS, SPECS, write_pack

from moert.experts.demand import Demand
from moert.experts.neurons.keeping import KEEPING, replay
from moert.experts.neurons.naming import PREDICTED
from moert.experts.policy.belady import replay_belady
from moert.pack.model_spec import LayerKey
from moert.pack.neurons import Neurons
from moert.pack.order import NeuronOrder
from moert.pack.predictor import PredictedLoss
from moert.pack.reader import Pack, projection_weights
from recipes.bench.blocks import rendered
from recipes.bench.flash_bytes import Written, opened, write
from recipes.bench.flash_curves import (
    ROOMS,
    best_hits,
    hit_rates,
    hit_rows,
    kept_hits,
    visits_of,
    window_loads,
    window_rows,
)
from recipes.bench.flash_firings import SHIFT, Firings, Recorder, Replay, enforced
from recipes.bench.flash_order import (
    IN_THE_PACK,
    ORDERS,
    as_trained,
    closest_friends,
    order_rows,
    together,
    touched,
)
from recipes.bench.flash_packs import SUBJECTS, Subject
from recipes.bench.flash_rows import (
    Asked,
    asked_rows,
    in_order_rows,
    of_naive_rows,
    predicted_rows,
    predictor_rows,
    raced_rows,
    read_rows,
    steps_rows,
    today_rows,
)
from recipes.bench.race import Outcome
from recipes.bench.result import Result, Row, context
from recipes.bench.shaped import DENSE
from recipes.bench.shaped import write_pack as write_shaped
from recipes.bench.streamed import Segment, Setting, Streamed
from recipes.bench.tables import flash
from recipes.bench.timed import Meter, Spent
from tests.shapes import Shape, every

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


def test_what_fires_is_recorded_token_by_token(pack: Path, texts: list[list[int]], tmp_path: Path) -> None:
    with opened(pack) as engine:
        recorder = Recorder(engine)
        recorder.on = True
        written = write(engine, texts, NEW_TOKENS)
        found = recorder.firings()
    spec = SPECS["switch"]
    assert found.n_layers == len(spec.moe_layers("decoder"))
    assert found.visits == written.tokens + len(texts), "the first token of each answer comes with the prompt"
    assert 0 < found.share < 1
    found.save(tmp_path / "firings.npz")
    again = Firings.load(tmp_path / "firings.npz")
    assert again.share == found.share
    assert (again.experts == found.experts).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_another_shape_fires_as_recorded(layout: str, tmp_path: Path) -> None:
    firings = made_up()
    whole = write_pack(tmp_path / "m.pack", SPECS["switch"], paths=False, bits=(4,), neurons=LAYOUTS[layout])
    with opened(whole, cache="60%") as engine:
        moe = engine.spec.moe
        Replay(firings, engine.spec.moe_layers(), moe.n, moe.ffn.d_ff).replace(engine)
        recorder = Recorder(engine)
        recorder.on = True
        write(engine, [[5, 6, 7]], NEW_TOKENS)
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
        write(engine, [[5, 6, 7]], NEW_TOKENS)
        found = recorder.firings()
    expected = Replay(firings, spec.moe_layers(), spec.moe.n, spec.moe.ffn.d_ff)
    for place, at in enumerate(spec.moe_layers("decoder")):
        assert (found.fired(place) == expected.pattern(at, expected.begin(at, found.visits))).all()


def test_copies_beside_are_of_other_tokens() -> None:
    firings = made_up(d_ff=20)
    at = LayerKey("decoder", 0)
    replayed = Replay(firings, [at], 2, 50)
    pattern, fired = replayed.pattern(at, np.array([3])), firings.fired(0)
    assert pattern.shape == (1, 50)
    assert (pattern[0, :20] == fired[3]).all()
    assert (pattern[0, 20:40] == fired[(3 + SHIFT) % firings.visits]).all()
    assert (pattern[0, 40:] == fired[(3 + 2 * SHIFT) % firings.visits][:10]).all()
    assert replayed.begin(at, 3).tolist() == [0, 1, 2]
    assert replayed.begin(at, 2).tolist() == [3, 4]


def test_only_what_differs_is_changed() -> None:
    fired = np.array([[0, 2, 0, 3]], np.float32)
    found = enforced(fired, np.array([[True, True, False, False]]))
    assert (found != 0).tolist() == [[True, True, False, False]]
    assert found[0, 1] == 2
    assert found.dtype == np.float32


def test_a_session_replays_what_a_file_says(pack: Path, tmp_path: Path) -> None:
    firings = made_up()
    firings.save(tmp_path / "firings.npz")
    session = Streamed(Setting(str(pack), None, predict="none", firings=str(tmp_path / "firings.npz")))
    session.run(0.0, 40)
    counted = session._engine._streaming.firing
    assert counted is not None
    assert counted.counters.fired / counted.counters.neurons == pytest.approx(firings.share, abs=0.05)
    session._engine.close()


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_the_same_tokens_are_read_in_any_room(pack: Path, texts: list[list[int]]) -> None:
    with opened(pack) as engine:
        alone = write(engine, texts, NEW_TOKENS)
    with opened(pack, cache="60%") as engine:
        little = write(engine, texts, NEW_TOKENS, alone.answers)
    assert little.answers == alone.answers
    assert little.tokens == alone.tokens > 0
    assert (little.neurons, little.fired, little.blocks) == (alone.neurons, alone.fired, alone.blocks)
    assert alone.holds_rows
    assert little.bytes_read > 0


def test_whole_packs_have_no_blocks(tmp_path: Path) -> None:
    whole = write_pack(tmp_path / "m.pack", SPECS["switch"], paths=False, bits=(4,))
    with opened(whole) as engine:
        found = write(engine, [[5, 6, 7]], 3)
    assert (found.neurons, found.blocks, found.holds_rows) == (0, 0, False)
    assert found.requests == found.tokens * len(SPECS["switch"].moe_layers("decoder"))


@pytest.mark.parametrize("neurons", ["exact", "predicted"])
def test_time_of_neurons_is_divided_too(pack: Path, texts: list[list[int]], neurons: str, tmp_path: Path) -> None:
    path = add_predictor(Path(shutil.copytree(pack, tmp_path / "m.pack")))
    with opened(path, cache="60%", threads=1, neurons=neurons) as engine:
        if engine.backend.name == "reference":
            pytest.skip("no compiler: the meter counts calls of the native kernels")
        meter = Meter(engine)
        spent = meter.during(lambda: write(engine, texts, NEW_TOKENS))
    assert min(spent.kernels, spent.waiting, spent.deciding) > 0
    assert spent.whole >= spent.kernels + spent.waiting + spent.deciding


def test_packs_of_a_shape_have_the_same_weights_by_neurons(tmp_path: Path) -> None:
    dense = {role: DENSE.get(role, 4) for role in WIDE.roles()}
    write_shaped(tmp_path / "whole.pack", 16, dense, WIDE, alike=True)
    write_shaped(tmp_path / "columns.pack", 16, dense, WIDE, alike=True, neurons=LAYOUTS["columns"])
    whole, columns = (Pack.open(tmp_path / name) for name in ("whole.pack", "columns.pack"))
    for key in WIDE.expert_keys():
        one, other = (each.projections(key, each.read_expert(key)) for each in (whole, columns))
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


def test_blocks_are_asked_for_where_a_neuron_fires() -> None:
    fired = np.array([[1, 0, 0, 0, 1], [0, 0, 1, 1, 0]], np.bool_)
    visits, n_blocks = visits_of(np.array([0, 2]), fired, 2)
    assert n_blocks == 3
    assert [visit.tolist() for visit in visits] == [[0, 2], [2 * 3 + 1]]


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


@given(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=1), max_size=12), st.integers(1, 3))
def test_the_best_of_single_demands_is_what_evicting_by_the_future_hits(asked: list[set[int]], slots: int) -> None:
    """Where a token asks for one block, a policy that has to keep it loses nothing by that but a slot."""
    at = LayerKey("decoder", 0)
    visits = [np.array(sorted(each)) for each in asked]
    trace = [Demand(at, tuple(visit.tolist())) for visit in visits]
    kept = replay_belady(trace, dict.fromkeys(map(at.expert, range(5)), 1), slots).hits
    more = replay_belady(trace, dict.fromkeys(map(at.expert, range(5)), 1), slots + 1).hits
    assert kept <= best_hits(visits, 5, slots).hits <= more


def test_more_room_hits_more() -> None:
    rates = [hit_rates(made_up(), 2, room) for room in (0.25, 0.5, 1.0)]
    for way in rates[0]:
        values = [rate[way] for rate in rates]
        assert values == sorted(values)


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
    rows = {row.name: row.value for row in order_rows("opt", recorded, order)}
    assert {name: rows[name] for name in (row.name for row in order_rows("opt", trained))} == {
        row.name: row.value for row in order_rows("opt", trained)
    }
    lying = {row.name: row.value for row in order_rows("opt", recorded)}
    assert rows[f"opt, blocks of 4: {IN_THE_PACK}"] == lying["opt, blocks of 4: as given"]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_an_order_has_each_neuron_once(name: str, size: int) -> None:
    fired = made_up().fired(0)
    order = ORDERS[name](fired, size)
    assert sorted(order.tolist()) == list(range(fired.shape[1]))
    assert 0 < touched(fired, order, size) <= 1


def test_neurons_that_fire_together_are_put_together() -> None:
    rng = np.random.default_rng(3)
    groups = rng.random((200, 6)) < 0.3
    fired = np.repeat(groups, 4, axis=1)[:, (order := rng.permutation(24))]
    assert touched(fired, together(fired, 4), 4) == pytest.approx(groups.mean())
    assert touched(fired, np.arange(24), 4) > groups.mean()
    friends = closest_friends(fired)
    assert (friends != np.arange(24)).all()
    assert (order[friends] // 4 == order // 4).all()


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
        *order_rows("opt", firings, random_order(firings)),
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


def test_what_reads_nothing_is_no_number(tmp_path: Path) -> None:
    asked, nothing = Asked(0.1, 1e6, 7e4), Written(tokens=10)
    rows = read_rows(subject("opt"), 0.75, asked, nothing, nothing, 0)
    assert not all(np.isfinite(row.value) for row in rows)


def test_tables_show_part_of_a_run() -> None:
    result = Result(context({}), all_rows())
    text = "\n".join(rendered(parts(result), result) for parts in (flash.nbytes, flash.speeds, flash.curves))
    assert "| opt | 500 MB/s | + window | 5 ± 0.5 | 5.00 ± 0.50 | 0.001 |" in text
    assert "aim" not in text
    assert "| OPT-1.3B like opt |" in text
    assert "| opt | 0.80 | 0.75 | | |" in text
    assert "| opt, in the pack | " in text
    assert f"| opt, blocks of 2 | {ROOMS[0]:.0%} |" in text
    for parts in (flash.nbytes, flash.speeds):
        rendered(parts(Result(context({}), [])), Result(context({}), []))
