"""Races on imitated devices: equal room and equal text for everyone, recorded routing, rows. Nothing is timed."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeconv.eviction import replay
from moeconv.matrices import matrices_of, projection_weights, read_expert
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.session import Session
from moert.experts.policy import EVICTION, Demand
from moert.experts.streaming import CachedExperts
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack
from recipes.bench import race as races
from recipes.bench import routing as recorded
from recipes.bench import stream, stream_packs, stream_rows
from recipes.bench.hit_rates import Counted
from recipes.bench.race import USUAL_KB, Contender, Device, Entry, Outcome, of_llama, race, read_ahead
from recipes.bench.result import Row
from recipes.bench.routing import WINDOW, Replaced, ReplayedRouting, like, persistent, record
from recipes.bench.runner import Runner
from recipes.bench.served import ReplayedStreams
from recipes.bench.shaped import DENSE, OLMOE_SHAPE, write_pack
from recipes.bench.stream_packs import Packs
from recipes.bench.stream_rows import prompt_rows, spent_rows
from recipes.bench.streamed import Meter, Segment, Setting, Spent, Streamed
from tests import cgroups, tiny_packs
from tests.shapes import every

# The bench on imitated devices: settings of the baselines, sessions, bounds and rows. Nothing here is timed.

NO_GUESSES = np.zeros((3, 3, 8), np.float16)
SMALL = OLMOE_SHAPE.but(
    vocab_size=96, d_model=64, n_heads=2, n_kv_heads=2, head_dim=32, scale=32**-0.5, decoder=every(2), num_experts=4,
    top_k=2, d_ff=128,
).spec  # fmt: skip
QWEN3 = OLMOE_SHAPE.but(decoder=every(48), num_experts=128).spec


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("packs") / "tiny.pack", tiny_packs.DECODER)


# Packs and settings ---------------------------------------------------------------------------------------------------


def packs_of(pack: Path) -> Packs:
    return Packs("tiny", pack, pack, pack, None, None, 7)


@pytest.mark.parametrize("contender", races.BUDGETED, ids=lambda each: each.name)
def test_a_budget_is_a_share_of_the_mixed_experts_but_never_below_a_layers_demand(
    contender: Contender, pack: Path
) -> None:
    packs, nbytes = packs_of(pack), stream_packs.expert_bytes(pack)
    assert contender.setting(packs, 0.5).cache_bytes == nbytes // 2
    assert contender.setting(packs, 0.0001).cache_bytes == stream_packs.layer_bytes(pack)
    with pytest.raises(ValueError, match="needs a budget"):
        contender.setting(packs, None)


def test_baselines_are_what_the_paper_says(pack: Path) -> None:
    packs, layer = replace(packs_of(pack), half=Path("half")), stream_packs.layer_bytes(pack)
    found = races.IO_QEXP.setting(packs, None)
    assert (found.cache_bytes, found.predict, found.new_tokens) == (layer, "none", 7)
    assert races.IO_FREE.setting(packs, None).cache_bytes is None
    assert races.IO_FREE.setting(packs, None).pack == "half"
    assert races.PRELOAD.setting(packs, None).cache_bytes == 2 * layer
    equal = {each.name: each.setting(packs, 0.5) for each in (races.STI, races.INT4_LRU, races.INT4_LFU)}
    assert {(each.pack, each.cache_bytes) for each in equal.values()} == {
        (str(packs.int4), races.MOERT.setting(packs, 0.5).cache_bytes)
    }
    assert [each.eviction for each in equal.values()] == ["lifo", "lru", "lfu"]
    assert {each.predictor for each in (races.IO_EXP, races.IO_QEXP, races.STI)} == {"none"}


def test_layer_bytes_are_the_largest_demand_of_one_token(pack: Path) -> None:
    sizes: dict[int, list[int]] = {}
    for entry in Pack.open(pack).manifest.experts:
        sizes.setdefault(entry.key.layer, []).append(entry.file_bytes)
    assert stream_packs.layer_bytes(pack) == max(sum(sorted(each, reverse=True)[:2]) for each in sizes.values())


# The session ----------------------------------------------------------------------------------------------------------


def test_a_session_writes_reads_and_knows_what_it_could_not_avoid(pack: Path, tmp_path: Path) -> None:
    routing = tmp_path / "routing.npz"
    np.savez(routing, heldout=np.array([[[0, 1]] * 3, [[2, 3]] * 3], np.uint8), guesses=NO_GUESSES)
    layer = stream_packs.layer_bytes(pack)
    session = Streamed(Setting(str(pack), 2 * layer, "lru", "none", "buffered", str(routing), None, 3))
    first, second = (Segment(**session.run(0.0, 5)) for _ in range(2))
    prompt = Segment(**session.read(4))
    assert (first.tokens, second.tokens, prompt.tokens) == (5, 5, 4)
    assert first.requests == 5 * 3 * 2
    assert first.bytes_read > 0
    unavoidable = session.unavoidable()
    assert len(unavoidable) == 2  # the first warms up
    assert 0 < unavoidable[0] <= second.bytes_read
    assert unavoidable[1] <= prompt.bytes_read
    assert second.in_flight == 0, "nothing is read ahead"
    assert session.facts()["cache_bytes"] == 2 * layer


def test_a_session_goes_on_from_prompts_in_turn(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[5, 6, 7]\n[8]\n")
    session = Streamed(Setting(str(pack), None, "lru", "none", "buffered", None, str(prompts), 2))
    seen: list[list[int]] = []
    add = Session.add
    monkeypatch.setattr(Session, "add", lambda self, ids, **more: (seen.append(ids), add(self, ids, **more))[1])
    session.run(0.0, 6)
    assert seen[:3] == [[5, 6, 7], [8], [5, 6, 7]]


def test_a_session_answers_prompts_to_their_ends(pack: Path, tmp_path: Path) -> None:
    prompts = str(lines(tmp_path, [5, 6, 7], [8], [9]))
    session = Streamed(Setting(str(pack), None, "fifo", "none", "buffered", None, prompts, 4))
    ends = session._engine.generate([8], GenerationSettings(max_new_tokens=4)).result.tokens
    session.answer(1)
    assert Segment(**session.answer(1)).tokens == len(ends)
    assert next(session._prompts) == [9]


@pytest.mark.parametrize("first", [True, False])
def test_present_experts_wait_for_others_only_if_that_is_asked_for(
    first: bool, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moert.experts.streaming.HANDED_OVER_BYTES", 0)
    apart: list[object] = []
    ran = CachedExperts._run_as_they_come
    monkeypatch.setattr(CachedExperts, "_run_as_they_come", lambda *given: (apart.append(given), ran(*given)))
    room = stream_packs.layer_bytes(pack)
    Streamed(Setting(str(pack), room, "lru", "none", "buffered", present_first=first)).run(0.0, 3)
    assert bool(apart) is first


def test_a_given_text_is_written_whatever_the_model_likes(tmp_path: Path) -> None:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    streamed, requests = Streamed(Setting(str(pack), None, texts=str(lines(tmp_path, [3, 5, 4, 5, 6])))), list[Any]()
    add = Session.add

    def watched(self: Session, *arguments: Any, **changes: Any) -> Any:
        requests.append(add(self, *arguments, **changes))
        return requests[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "add", watched)
        streamed.run(0.0, 4)
    assert [each.answer.result.tokens for each in requests] == [[5, 4, 5, 6]]


# Races and rows -------------------------------------------------------------------------------------------------------


def test_a_program_enters_its_group_before_it_starts(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = f"import json\nassert open({str(note)!r}).read() == 'in'\ninput()\nprint(json.dumps(1))"
    with Runner([sys.executable, "-c", program], enter=lambda: note.write_text("in")) as runner:
        assert runner.ask("anything") == 1


def lines(folder: Path, *texts: list[int]) -> Path:
    (folder / "texts.jsonl").write_text("".join(f"{ids}\n" for ids in texts))
    return folder / "texts.jsonl"


def test_llama_writes_the_given_text_as_far_as_its_pace_allows(tmp_path: Path) -> None:
    class Paced:
        counts: list[int] = []  # noqa: RUF012
        pid = os.getpid()

        def ask(self, name: str, ids: list[int], count: int, written: list[int]) -> Any:
            assert (ids, written) == ([7], list(range(64)))
            self.counts.append(count)
            return [0] * count, 0.0, 0.1 * count

    texts = lines(tmp_path, [7, *range(64)])
    entry, runner = of_llama("llama.cpp", Path("python"), Path("model.gguf"), None, texts), Paced()
    entry.warm(runner)  # type: ignore[arg-type]
    segment = entry.turn(runner, 1.0)  # type: ignore[arg-type]
    assert runner.counts == [8, 2, 10]  # its memory is filled first
    assert segment.speed == pytest.approx(10)


def test_a_prompt_of_llama_is_timed_to_its_first_token(tmp_path: Path) -> None:
    class Timed:
        def ask(self, name: str, ids: list[int], count: int) -> Any:
            assert (len(ids), count) == (8, 1)
            return [0], 4.0, 5.0

    found = Outcome()
    texts = lines(tmp_path, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    of_llama("llama.cpp", Path("python"), Path("model.gguf"), None, texts, 8).end(Timed(), found)  # type: ignore[arg-type]
    assert found.prompt is not None
    assert (found.prompt.speed, found.prompt.seconds) == (2.0, 4.0)


def program(answers: str) -> list[str]:
    return [sys.executable, "-c", f"import json, sys\nfor line in sys.stdin: print({answers}, flush=True)"]


def test_a_program_that_dies_costs_its_own_outcome_only(tmp_path: Path) -> None:
    def entry(name: str, answers: str) -> Entry:
        return Entry(
            name, program(answers), tmp_path, None, warm=lambda runner: None,
            turn=lambda runner, seconds: Segment(runner.ask("turn"), 1.0, 0, 0, 0),
            end=lambda runner, outcome: None,
        )  # fmt: skip

    found = race(Device("any", None), [entry("dies", "sys.exit(3)"), entry("lives", "7")], 0.0, 2)
    assert [segment.tokens for segment in found["lives"].segments] == [7, 7]
    assert found["lives"].ended is None
    assert "ended with status 3" in str(found["dies"].ended)
    failed: list[str] = []
    assert list(stream.alive("m", found, failed)) == ["lives"]
    assert failed == ["m: dies"]


def test_a_start_looks_at_the_drive_and_remembers_nothing(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking := cgroups.missing():
        pytest.skip(lacking)
    seen: list[dict[str, str]] = []

    class Watched(Runner):
        def __init__(self, command: list[str], environment: dict[str, str], enter: Any) -> None:
            assert json.loads(command[-1])["io"] is None
            seen.append(environment)
            super().__init__(program("1"), environment, enter)

    monkeypatch.setattr(races, "Runner", Watched)
    assert races.start(Device("any", None), Setting(str(pack), 1, io=None), 10**9) > 0
    assert not Path(seen[0]["XDG_CACHE_HOME"]).exists(), "an empty folder for this start only"


def test_beside_llama_the_share_of_the_experts_is_what_the_process_has(tmp_path: Path) -> None:
    found = outcome(2)
    found.facts = {**found.facts, "cache_bytes": 19, "expert_bytes": 25}
    rows = {row.name: row.value for row in stream_rows.llama_rows("m", {"moert": found})}
    assert rows["m: moert: room for experts"] == 76
    assert rows["m: moert: read for a token"] == 50 / 10 / 1e6


def outcome(*speeds: float, peak: int = 100, model: int = 10) -> Outcome:
    segments = [Segment(tokens=10, seconds=10 / speed, bytes_read=50, requests=20, hits=5) for speed in speeds]
    facts = {"peak_bytes": peak, "cache_bytes": model - 4, "backbone_bytes": 4}
    return Outcome(segments, [30] * len(segments), None, facts)


def test_ratios_are_taken_round_by_round_and_have_the_devices_aims() -> None:
    baselines = {"IO-EXP": outcome(2, 1), "IO-QEXP": outcome(4, 4), "STI-like 50%": outcome(4, 2)}
    outcomes = {"moert 50%": outcome(8, 10), **baselines}
    rows = {row.name: row for row in stream_rows.against_rows("m", Device("ssd", 1), outcomes, (0.5,))}
    assert rows["m: moert 50% to IO-EXP"].value == pytest.approx(7)  # of 4 and 10
    assert rows["m: moert 50% to IO-EXP"].aim == "≥ 4"
    assert rows["m: moert 50% to STI-like"].met
    free = stream_rows.against_rows("m", Device("nvme", None), outcomes, (0.5,))
    assert [row.aim for row in free] == [None, "≥ 1.8", "≥ 2.5"]


def test_memory_counts_the_whole_process_for_the_aim() -> None:
    outcomes = {"moert 25%": outcome(4, peak=200), "moert 50%": outcome(9, peak=300)}
    outcomes["IO-FREE"] = outcome(10, peak=1000, model=100)
    rows = stream_rows.memory_rows("m", outcomes, (0.25, 0.5))
    assert rows[-1].value == pytest.approx(0.4)  # the faster one needs too much
    assert not rows[-1].met
    assert next(row.value for row in rows if row.name == "m: moert 50% to IO-FREE: bytes of the model") == 10


def test_a_part_that_fails_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part_rows(name: str, device: Device, *rest: object) -> list[Row]:
        if (name, device.name) == ("wiki", "ssd"):
            raise RuntimeError("it ended with status -9")
        return [Row(f"row of {name}, {device.name}", 1, "x")]

    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.setattr(stream, "DEMO", tmp_path)
    monkeypatch.setattr(stream, "missing", lambda reads: None)
    monkeypatch.setattr(stream, "part_rows", part_rows)
    monkeypatch.setattr(sys, "argv", ["stream", "--parts", "g2p", "wiki", "llama"])
    with pytest.raises(SystemExit, match="failed: wiki, ssd"):
        stream.main()
    out, progress = capsys.readouterr()
    assert all(f"row of {name}" in out for name in ("g2p, board", "wiki, board", "wiki, nvme", "llama, ssd"))
    assert "[9/9] llama, nvme; about " in progress
    assert "written" not in out  # not all parts ran


def test_without_groups_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "missing", lambda reads: "control groups can only be made as root")
    monkeypatch.setattr(sys, "argv", ["stream"])
    with pytest.raises(SystemExit, match="only be made as root") as ended:
        stream.main()
    assert "\n" not in str(ended.value)


def test_a_place_on_no_disk_has_no_limit_and_leaves_no_group() -> None:
    if lacking := cgroups.missing(reads=Path(__file__)):
        pytest.skip(lacking)
    assert "on no disk" in str(cgroups.missing(reads=Path("/proc")))
    with pytest.raises(OSError, match="No such device"), cgroups.Group(10**9, 10**6, Path("/proc")):
        pass
    assert not list(cgroups.MOUNT.glob(f"**/moert-test-{os.getpid()}-*"))


# The bench of whole models: experts that are alike, where time goes, rows. Nothing here is timed.

THREE_LAYERS = OLMOE_SHAPE.but(
    vocab_size=96, d_model=64, n_heads=2, n_kv_heads=2, head_dim=32, scale=32**-0.5, decoder=every(3), num_experts=4,
    top_k=2, d_ff=128,
).spec  # fmt: skip


def test_experts_alike_have_the_first_layers_numbers(tmp_path: Path) -> None:
    widths = {key: 3 if key.expert == 0 else 2 for key in THREE_LAYERS.expert_keys()}
    write_pack(tmp_path / "alike.pack", widths, DENSE, THREE_LAYERS, alike=True)
    write_pack(tmp_path / "own.pack", widths, DENSE, THREE_LAYERS)
    alike, own = (Pack.open(tmp_path / name) for name in ("alike.pack", "own.pack"))
    for key in THREE_LAYERS.expert_keys():
        first = THREE_LAYERS.moe_layers()[0].expert(key.expert)
        copied, original = (matrices_of(pack, at, read_expert(pack, at)) for pack, at in ((alike, key), (own, first)))
        for name, matrix in copied.items():
            assert (projection_weights(matrix) == projection_weights(original[name])).all()


def test_a_prompt_is_compared_with_the_longer_of_reading_and_computing() -> None:
    mine, resident = Outcome(prompt=Segment(8, 6.0, 0, 0, 0)), Outcome(prompt=Segment(8, 2.0, 0, 0, 0))
    rows = prompt_rows("here", mine, resident, reading_s=5.0)
    assert [row.value for row in rows] == [5.0, 2.0, 1.2]
    assert rows[-1].met
    assert not prompt_rows("here", Outcome(), resident, 5.0)


def test_shares_of_a_token() -> None:
    rows = spent_rows("here", Outcome(spent=Spent(whole=10.0, kernels=6.0, waiting=3.5, deciding=0.2)))
    assert [(row.value, row.met) for row in rows] == [(60.0, None), (35.0, None), (5.0, True), (2.0, True)]


def test_a_meter_divides_the_time_and_changes_no_token(tmp_path: Path) -> None:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    with Engine.open(pack, threads=1, cache="40%") as engine:
        if engine.backend.name == "reference":
            pytest.skip("no compiler: the meter counts calls of the native kernels")
        plain = tiny_packs.run_greedy(engine, [5, 6], 4)
    with Engine.open(pack, threads=1, cache="40%") as engine:
        meter, found = Meter(engine), []
        spent = meter.during(lambda: found.append(tiny_packs.run_greedy(engine, [5, 6], 4)))
    assert all(np.array_equal(one, other) for one, other in zip(found[0], plain, strict=True))
    assert min(spent.kernels, spent.deciding) > 0
    assert spent.python >= spent.deciding
    assert spent.whole >= spent.kernels + spent.waiting


# Routing recorded from one model and replayed in another.


def test_replayed_routing_decides_prompts_and_tokens_and_goes_round(pack: Path) -> None:
    trace: list[Demand] = []
    routing = np.array([[[0, 1]] * 3, [[2, 3]] * 3, [[4, 5]] * 3], np.uint8)  # three tokens, three layers
    with Engine.open(pack, predict="none", threads=1, trace=trace) as engine:
        ReplayedRouting(routing, NO_GUESSES).replace(engine.model.routers, engine.spec.moe_layers())
        tiny_packs.run_greedy(engine, [5, 6], 4)
    passes = [[step.experts for step in trace[at : at + 3]] for at in range(0, len(trace), 3)]
    assert passes == [[(0, 1, 2, 3)] * 3, [(4, 5)] * 3, [(0, 1)] * 3, [(2, 3)] * 3]


def test_replayed_guesses_are_those_of_the_tokens_on_their_way(pack: Path) -> None:
    routing = np.array([[[0, 1]] * 3, [[2, 3]] * 3], np.uint8)
    guesses = np.zeros((2, 3, 8), np.float16)
    guesses[0, :, 6], guesses[1, :, 7] = 1, 1
    with Engine.open(pack, predict="gate", threads=1) as engine:
        routers = engine.model.routers
        ReplayedRouting(routing, guesses).replace(routers, engine.spec.moe_layers())
        seen: list[list[float]] = []

        class Spied(Replaced):
            def guess(self, x: F32) -> F32:
                found = self.router.guess(x)
                seen.append(found[6:].tolist())
                return found

        for at, router in list(routers.items()):
            routers[at] = Spied(at, router)
        engine.cache.resize(0)
        tiny_packs.run_greedy(engine, [5, 6], 2)
    assert seen[0] == [0.5, 0.5]  # the prompt has both tokens
    assert seen[-1] == [1.0, 0.0]  # and the recording has begun anew


def test_replayed_streams_follow_the_sequences_that_run(pack: Path) -> None:
    """Each prompt begins the next recording, whoever runs beside it, and goes on in its own until it ends."""
    routing = np.array([[[[stream, 6 + (at + stream) % 2]] * 3 for at in range(5)] for stream in range(3)], np.uint8)
    streams = ReplayedStreams(routing, np.zeros((3, 5, 3, 8), np.float16))
    passes = [(2,), (1, 2), (1, 1), (1,), (1, 2), (2,)]
    taken = [[streams.take(place, lengths).tolist() for place in range(3)] for lengths in passes]
    assert all(first == second == third for first, second, third in taken)
    rows = [[tuple(row) for row in first] for first, *_ in taken]
    assert rows[0] == [(0, 6), (0, 7)]
    assert rows[1] == [(0, 6), (1, 7), (1, 6)], "the second stream begins beside the first"
    assert rows[2] == [(0, 7), (1, 7)]
    assert rows[3] == [(1, 6)], "the first one has ended"
    assert rows[4] == [(1, 7), (2, 6), (2, 7)]
    assert rows[5] == [(0, 6), (0, 7)], "they come round"


def test_recorded_routing_is_what_the_engine_demands(pack: Path) -> None:
    trace: list[Demand] = []
    with Engine.open(pack, predict="none", threads=1, trace=trace) as engine:
        engine.reserve(3, 1)
        engine.model.prefill([5, 6, 7])
    routing, guesses = record(pack, [[5, 6, 7]])
    assert [set(routing[:, place].ravel().tolist()) for place in range(3)] == [set(step.experts) for step in trace]
    assert guesses.shape == (3, 3, 8)
    assert not guesses[:, 0].any()
    assert np.allclose(guesses[:, 1:].sum(2), 1, atol=0.01)


@pytest.mark.parametrize(("share", "hits"), recorded.QWEN3_HITS)
def test_persistent_routing_is_found_in_memory_as_that_of_the_published_model(share: float, hits: float) -> None:
    """Layers are alike, and LRU keeps as many experts of each: some of the 48 are replayed."""
    routing, layers = qwen3_routing(), [LayerKey("decoder", layer) for layer in (0, 20, 47)]
    demands = [Demand(at, tuple(row[at.layer].tolist())) for row in routing for at in layers]
    counted = Counted(demands, len(demands) // 2)
    nbytes = {at.expert(number): 1 for at in layers for number in range(QWEN3.moe.n)}
    replay(counted, nbytes, round(share * QWEN3.moe.n) * len(layers), EVICTION["layer-lru"](layers), counted.observe)
    assert counted.hit_rate == pytest.approx(hits, abs=0.03)


def test_persistent_routing_chooses_different_experts_in_order_and_follows_from_its_seed() -> None:
    routing = qwen3_routing()
    assert routing.shape == (400, 48, 8)
    assert (np.diff(routing.astype(int)) > 0).all()
    assert len(np.unique(routing)) == 128
    assert (routing[:20] == persistent(QWEN3, 20)).all()
    assert (routing[:20] != persistent(QWEN3, 20, seed=1)).any()
    assert (routing[:, 0] != routing[:, 1]).any()
    with pytest.raises(ValueError, match="more than once"):
        persistent(QWEN3, 1, hits=((0.01, 0.9),))


def test_persistent_routing_is_what_the_engine_demands(pack: Path, tmp_path: Path) -> None:
    spec, routes = Pack.open(pack).manifest.model, tmp_path / "routes.npz"
    routing = persistent(spec, 30, hits=((0.5, 0.8),))
    np.savez(routes, heldout=routing, guesses=np.zeros((30, 3, 8), np.float16))
    room = 4 * stream_packs.layer_bytes(pack)
    session = Streamed(Setting(str(pack), room, "layer-lru", "gate", "buffered", str(routes), None, 10))
    session.run(0.0, 30)
    assert [step.experts for step in session._trace] == [tuple(row) for token in routing.tolist() for row in token]


@cache
def qwen3_routing() -> recorded.Routing:
    return persistent(QWEN3, 400)


def test_routing_for_more_layers_experts_and_choices(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained model has 3 layers of 8 experts; streams differ, and each has half of the experts."""
    monkeypatch.setattr(recorded, "text_of", lambda split: "")
    windows = [[number + 1] * WINDOW for number in range(4)]
    monkeypatch.setattr(recorded, "windows_of", lambda text, tokenizer, count: windows[:count])
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", lambda path: None)
    spec = tiny_packs.DECODER_SHAPE.but(decoder=(True,) * 5, num_experts=16, top_k=6).spec
    routing, guesses = like(pack, "heldout", 1, spec)
    assert routing.shape == (WINDOW, 5, 6)
    assert guesses.shape == (WINDOW, 5, 16)
    first, second = (record(pack, [windows[at]], top_k=3)[0] for at in (0, 1))  # the lower half of the experts
    assert (routing[:, :3, :3] == np.sort(first, -1)).all()
    assert (routing[:, 3:, :3] == np.sort(second, -1)[:, :2]).all()
    upper = np.sort(record(pack, [windows[2]], top_k=3)[0], -1) + 8
    assert (routing[:, :3, 3:] == upper).all()
    with pytest.raises(ValueError, match="no multiple"):
        like(pack, "heldout", 1, spec=tiny_packs.DECODER_SHAPE.but(num_experts=12).spec)


# The drive's read-ahead while programs race: the usual one, and afterwards as it was.


def test_the_usual_read_ahead_holds_inside_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "disk_of", lambda path: "8:0")
    setting = tmp_path / "8:0/queue/read_ahead_kb"
    setting.parent.mkdir(parents=True)
    setting.write_text("8192\n")
    with read_ahead(tmp_path, root=tmp_path) as holds:
        assert holds == USUAL_KB
        assert setting.read_text() == f"{USUAL_KB}\n"
    assert setting.read_text() == "8192\n"
    with pytest.raises(KeyboardInterrupt), read_ahead(tmp_path, root=tmp_path):
        raise KeyboardInterrupt
    assert setting.read_text() == "8192\n"


def test_what_can_not_be_changed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Path, text: str) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(races, "disk_of", lambda path: "8:0")
    setting = tmp_path / "8:0/queue/read_ahead_kb"
    setting.parent.mkdir(parents=True)
    setting.write_text("8192\n")
    monkeypatch.setattr(Path, "write_text", refused)
    with read_ahead(tmp_path, root=tmp_path) as holds:
        assert holds == 8192
    assert "stays at 8192 (Read-only file system)" in capsys.readouterr().err


def test_what_lies_on_no_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "disk_of", lambda path: "0:42")
    with read_ahead(tmp_path, root=tmp_path) as holds:
        assert holds is None
        assert not list(tmp_path.iterdir())
