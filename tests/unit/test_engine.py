from __future__ import annotations

import gc
import pickle
import shutil
import weakref
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
from memory_store import read_ahead_at_once
from random_hash import add_hash
from tiny_packs import DECODER, PROMPTS, SPECS, damage_expert, record_routes, run_greedy, write_pack

from moeconv.eviction import replay
from moeconv.routes import build
from moeconv.writer import add_to_pack
from moert.engine.budget import Budget, CacheLimit
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.registry import PREDICTS
from moert.engine.settings import EngineSettings
from moert.errors import BudgetTooSmall, InputInvalid, PathsMissing, SettingInvalid, TokenizerMissing
from moert.experts import drive, store
from moert.experts.drive import open_expert
from moert.experts.names import Policies
from moert.experts.policy import EVICTION, Demand
from moert.experts.store import IoSettings
from moert.kernels import library, open_backend
from moert.pack.codec import F32
from moert.pack.errors import FileMissing, HashMismatch, HeaderInvalid
from moert.pack.model_spec import ExpertKey, LayerKey
from moert.pack.paths import PATHS
from moert.pack.reader import Pack
from recipes.bench.controls import Oracle
from tests.alone import alone
from tests.calls import fewest_calls, functions_of_tokens
from tests.little_memory import refused_then_enough
from tests.pairs import each, thinned
from tests.refusing import one_line

N_TOKENS = 8
ASKED = PROMPTS[1::2]
KERNELS = ("auto", "reference")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engine")
    return {name: add_hash(write_pack(root / f"{name}.pack", spec)) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def answers(packs: dict[str, Path]) -> dict[tuple[str, str], list[tuple[list[int], F32]]]:
    """With everything in memory and nothing predicted, by pack and kernels."""
    out = {}
    for name, path in packs.items():
        for kernels in KERNELS:
            with Engine.open(path, predict="none", kernels=kernels) as engine:
                out[name, kernels] = [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in ASKED]
    return out


def smallest_cache(path: Path) -> int:
    return Budget.of(Pack.open(path).manifest).layer_bytes


@thinned("name, predictor, eviction, kernels, spare", SPECS, PREDICTS, EVICTION, KERNELS, [0, 13_000, 60_000, None])
def test_answers_are_bit_identical_whatever_the_policy_budget_and_prediction(
    packs, answers, name, predictor, eviction, kernels, spare
) -> None:
    """`spare`: bytes of room beyond the least; without, there is room for all."""
    room = None if spare is None else smallest_cache(packs[name]) + spare
    notes: list[str] = []
    with Engine.open(
        packs[name], eviction=eviction, predict=predictor, notify=notes.append, kernels=kernels, cache=room
    ) as engine:
        read_ahead_at_once(engine.cache)
        for _ in range(1 if room else 2):
            for prompt, (tokens, logits) in zip(ASKED, answers[name, kernels], strict=True):
                got_tokens, got_logits = run_greedy(engine, engine.encode(prompt), N_TOKENS)
                assert got_tokens == tokens
                assert np.array_equal(got_logits, logits)
                assert engine.cache.used_bytes <= engine.cache.capacity_bytes
        counters = engine.counters
        assert counters.evictions > 0 if spare == 0 else room or counters.evictions == 0
        reads_ahead = predictor not in ("none", "auto")  # the experts are small
        if reads_ahead and spare == 60_000:
            assert counters.prefetch_used > 0
        if not reads_ahead:
            assert counters.prefetch_issued == 0
            assert counters.reads == counters.requests - counters.hits


@pytest.mark.parametrize("name", SPECS)
def test_without_a_limit_every_expert_is_read_once_and_then_always_there(packs, name) -> None:
    with Engine.open(packs[name]) as engine:
        ids = engine.encode(PROMPTS[3])
        run_greedy(engine, ids, N_TOKENS)
        reads, requests, hits = engine.counters.reads, engine.counters.requests, engine.counters.hits
        assert 0 < reads <= len(engine.pack.manifest.experts)
        run_greedy(engine, ids, N_TOKENS)
        assert engine.counters.requests - requests == engine.counters.hits - hits > 0
        assert engine.counters.evictions == 0


@pytest.mark.skipif(library.load() is None, reason=f"{library.missing()}")
def test_a_token_whose_experts_are_in_memory_makes_few_calls(packs) -> None:
    """In a process of its own: what others have loaded or patched makes calls too."""
    layers = len(Pack.open(packs["decoder"]).manifest.model.moe_layers())
    assert alone(fewest_calls, packs["decoder"], {"kernels": "auto"}) <= 71 + 35 * layers


@pytest.mark.skipif(library.load() is None, reason=f"{library.missing()}")
@pytest.mark.parametrize(("cache", "reads", "functions", "files"), [("95%", False, 65, 13), ("50%", True, 106, 14)])
def test_a_token_passes_few_functions_in_few_files(packs, cache, reads, functions, files) -> None:
    """Seven of them, in one file, are of a layer without experts and of an expert that all tokens share."""
    settings = {"kernels": "auto", "predict": "none", "cache": cache}
    passed = alone(functions_of_tokens, packs["decoder"], settings, reads)
    assert passed[0] <= (functions, files)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_smallest_cache_works_and_a_byte_less_is_refused_with_its_number(packs, name, kernels) -> None:
    settings = GenerationSettings(max_new_tokens=6)
    with Engine.open(packs[name], predict="none", kernels=kernels) as engine:
        expected = engine.generate("hello", settings).result.tokens
        top_k, sizes = engine.spec.moe.router.top_k, dict[tuple[str, int], list[int]]()
        for entry in engine.pack.manifest.experts:
            sizes.setdefault(entry.key[:2], []).append(entry.file_bytes)
        least = max(sum(sorted(layer, reverse=True)[:top_k]) for layer in sizes.values())
    with pytest.raises(BudgetTooSmall) as error:
        Engine.open(packs[name], kernels=kernels, cache=least - 1)
    assert error.value.smallest_bytes == least
    assert f"cache={least}" in str(error.value)
    assert "\n" not in str(error.value)
    assert pickle.loads(pickle.dumps(error.value)).smallest_bytes == least
    with Engine.open(packs[name], kernels=kernels, notify=lambda note: None, cache=least) as engine:
        assert engine.generate("hello", settings).result.tokens == expected
        assert sum(engine.pack.entry(key).file_bytes for key in engine.cache.resident()) <= least


@thinned("name, kernels", SPECS, KERNELS, facts=each)
def test_the_memory_that_a_refusal_names_is_enough(packs, name, kernels) -> None:
    alone(refused_then_enough, packs[name], name, kernels)


def test_a_cache_below_one_tokens_demand_warns_once(packs) -> None:
    notes: list[str] = []
    least = smallest_cache(packs["decoder"])
    with Engine.open(packs["decoder"], notify=notes.append, cache=least) as engine:
        for prompt in PROMPTS[:2]:
            engine.generate(prompt, GenerationSettings(max_new_tokens=2))
        assert len(notes) == 1
        enough = int(notes[0].split("cache=")[1].split()[0])
        assert str(engine.budget.token_bytes) in notes[0]
    notes.clear()
    with Engine.open(packs["decoder"], notify=notes.append, cache=enough) as engine:
        engine.generate(PROMPTS[1], GenerationSettings(max_new_tokens=2))
    assert notes == []


def test_what_cannot_be_meant_is_said_at_once(packs) -> None:
    for settings, said in (
        ({"eviction": "belady"}, "eviction 'belady' is none of auto, "),
        ({"predict": "guess"}, "predict 'guess' is none of "),
        ({"memory": 10**9, "cache": 10**6}, "memory and cache exclude each other"),
        ({"kv": 4}, "kv is 4: it should be 8 or 16"),
        ({"threads": 0}, "threads 0 can't compute anything"),
        ({"memroy": 10**9}, "memroy is no setting: did you mean memory\\? There are memory, "),
    ):
        with pytest.raises(SettingInvalid, match=f"^{said}"):
            Engine.open(packs["decoder"], **settings)


@pytest.mark.parametrize(
    ("io", "used"), [(IoSettings(False, 1), "buffered,1"), (IoSettings(True, 3), "direct,3"), (None, "page cache")]
)
def test_a_way_of_reading_that_was_asked_for_is_used_though_all_experts_fit(packs, monkeypatch, io, used) -> None:
    ways = set()

    def opened(path, direct):
        ways.add(direct)
        return open_expert(path, direct)

    for module in (store, drive):
        monkeypatch.setattr(module, "open_expert", opened)
    with Engine.open(packs["decoder"], predict="none", io=io) as engine:
        engine.generate("abc", GenerationSettings(max_new_tokens=2))
        assert engine.stats().io == used
    assert ways == {io.direct} if io else ways


@pytest.mark.parametrize("when", ["foreseen", "met"])
def test_a_cache_that_shrinks_in_the_middle_of_a_request_is_read_for_as_one_that_streams(
    packs, monkeypatch, when
) -> None:
    settings = GenerationSettings(max_new_tokens=8)
    with Engine.open(packs["decoder"], predict="none", eviction="auto") as engine:
        expected = engine.generate(PROMPTS[0], settings).result.tokens
        assert engine.stats().evictions == 0
    with Engine.open(packs["decoder"], predict="none", eviction="auto", notify=lambda note: None) as engine:
        regulator, everything, least = engine._regulator, engine.budget.expert_bytes, engine.budget.layer_bytes
        prepare, steps = engine._streaming.adapt, []

        def before(loads):
            engine._streaming.resize(everything)
            return (least if when == "foreseen" else everything), None

        def after(loads):
            if [load.written for load in loads] == [2]:
                engine._streaming.resize(least)

        monkeypatch.setattr(regulator, "before", before)
        monkeypatch.setattr(regulator, "after", after)
        adapted = lambda room, notify: (prepare(room, notify), steps.append(engine.stats().io))  # noqa: E731
        monkeypatch.setattr(engine._streaming, "adapt", adapted)
        assert engine.generate(PROMPTS[0], settings).result.tokens == expected
        first, second = steps  # when the request begins, and when the room has shrunk
        assert second != "page cache"
        assert first == (second if when == "foreseen" else "page cache")
        assert engine.stats().evictions > 0
        assert engine.eviction != "auto"


def test_a_share_of_the_experts_leaves_room_for_exactly_that(packs) -> None:
    with Engine.open(packs["decoder"], cache=CacheLimit(share=0.5)) as engine:
        engine.generate("abc", GenerationSettings(max_new_tokens=4))
        assert engine.cache.capacity_bytes == engine.budget.expert_bytes // 2
        assert engine.stats().memory_bytes is None


@pytest.mark.parametrize("name", SPECS)
def test_the_trace_of_a_run_replays_to_the_same_figures(packs, name) -> None:
    trace: list[Demand] = []
    room = smallest_cache(packs[name]) + 20_000
    with Engine.open(packs[name], eviction="lru", predict="none", trace=trace, cache=room) as engine:
        engine.reserve(40, N_TOKENS)
        capacity = engine.cache.capacity_bytes
        state, _ = engine.model.prefill(engine.encode(PROMPTS[3]))
        for token in (5, 9, 17, 4):
            engine.model.step(state, token)
        nbytes = {entry.key: entry.file_bytes for entry in engine.pack.manifest.experts}
        again = replay(trace, nbytes, capacity, EVICTION["lru"](engine.spec.moe_layers()))
        counters = engine.counters
    assert (again.demands, again.hits) == (counters.requests, counters.hits)
    assert (again.bytes_read, again.evictions) == (counters.bytes_read, counters.evictions)
    assert again.evictions > 0


def test_a_perfect_prediction_is_never_wasted(packs) -> None:
    trace: list[Demand] = []
    pack = Pack.open(packs["switch"])
    with Engine.open(packs["switch"], predict="none", trace=trace) as engine:
        ids = engine.encode(PROMPTS[0])
        tokens, _ = run_greedy(engine, ids, N_TOKENS)
    settings = EngineSettings(cache="40%", eviction="paper", io="direct,2")
    with Engine(pack, open_backend(), settings, Policies(Oracle(trace), weighed=False)) as engine:
        read_ahead_at_once(engine.cache)
        assert run_greedy(engine, ids, N_TOKENS)[0] == tokens
        counters = engine.counters
        assert counters.prefetch_issued >= counters.prefetch_used > 0


@pytest.mark.parametrize("name", SPECS)
def test_predictors_are_told_what_the_routers_of_this_pass_selected(packs, name) -> None:
    asked: list[tuple[LayerKey, list[list[list[int]]]]] = []
    ran: list[tuple[LayerKey, list[list[int]]]] = []
    order = SPECS[name].moe_layers()
    first = {at.stack: at for at in reversed(order)}

    class Listener:
        def predict(self, situation):
            history = [selected.tolist() for selected in situation.history]
            asked.append((situation.at, history))
            scores = situation.scores()
            assert (scores is None) == (situation.at in first.values())
            if scores is not None:
                assert scores.shape == (SPECS[name].moe.n,)
                assert scores.sum() < 1.01 or SPECS[name].moe.router.score == "sqrt_softplus"
                assert scores.sum() > 0.99 or SPECS[name].experts[situation.at].router.identities
            return []

    pack = Pack.open(packs[name])
    settings = EngineSettings(cache="50%", eviction="paper", io="direct,2")
    with Engine(pack, open_backend(), settings, Policies(Listener(), weighed=False)) as engine:
        run = engine.runner.run

        def listened(at, hidden, experts, weights, out, x):
            one = len(experts) == 1  # of which those that stand for none are not told
            ran.append((at, [[each for each in row if each >= 0 or not one] for row in experts.tolist()]))
            run(at, hidden, experts, weights, out, x)

        engine.runner.run = listened  # type: ignore[method-assign]
        run_greedy(engine, engine.encode(PROMPTS[0]), 3)
    assert len(asked) == len(ran)
    for number, (at, history) in enumerate(asked):
        if number + 1 < len(ran):
            assert at == ran[number + 1][0]
        present, _ = ran[number]
        if at == first[at.stack]:
            assert history == []
            assert present.stack == "encoder" or present == order[-1]
        else:
            known = 1 if present == first[present.stack] else 2
            assert history == [selected for _, selected in ran[number + 1 - known : number + 1]]


def test_tables_count_what_the_routers_do(packs) -> None:
    routes = record_routes(packs["switch"])
    assert list(routes) == SPECS["switch"].moe_layers()
    assert len({len(experts) for at, experts in routes.items() if at.stack == "decoder"}) == 1
    encoder = [experts for at, experts in routes.items() if at.stack == "encoder"]
    assert (np.concatenate(encoder) == -1).any()  # the capacity of 5 drops tokens of the longest prompt
    assert build(6, routes).to_bytes() == Pack.open(packs["switch"]).read_file(PATHS)


def test_a_predictor_that_needs_paths_says_so_where_there_are_none(tmp_path) -> None:
    path = write_pack(tmp_path / "bare.pack", DECODER, paths=False)
    notes: list[str] = []
    with Engine.open(path, notify=notes.append) as engine:
        engine.generate("abc", GenerationSettings(max_new_tokens=2))
    assert notes == []
    with pytest.raises(PathsMissing, match=f"predict='transitions' needs path tables, .* has no {PATHS}"):
        Engine.open(path, predict="transitions")


def test_tables_of_another_model_are_refused(packs, tmp_path) -> None:
    path = shutil.copytree(packs["decoder"], tmp_path / "other.pack")
    tables = Pack.open(packs["switch"]).read_file(PATHS)
    add_to_pack(path, Pack.open(path).manifest, PATHS, tables)
    with pytest.raises(HeaderInvalid, match="profile the paths"):
        Engine.open(path, predict="transitions")
    Engine.open(path, predict="none").close()


def test_a_damaged_expert_is_an_error_on_demand_and_by_prefetch(packs, tmp_path) -> None:
    path = shutil.copytree(packs["decoder"], tmp_path / "damaged.pack")
    for expert in range(DECODER.moe.n):
        damage_expert(path, ExpertKey("decoder", 1, expert))
    for predictor in PREDICTS:
        with Engine.open(path, predict=predictor) as engine, pytest.raises(HashMismatch, match="D01/E"):
            engine.generate("abc", GenerationSettings(max_new_tokens=3))


def test_a_wrong_backbone_is_refused(packs, tmp_path) -> None:
    """test_backbone.py has what else a backbone may lack."""
    path, name = shutil.copytree(packs["decoder"], tmp_path / "backbone.pack"), "backbone.safetensors"
    manifest, good = Pack.open(path).manifest, (path / name).read_bytes()
    manifest = add_to_pack(path, manifest, name, b"short")
    with one_line(HeaderInvalid, name):
        Engine.open(path)
    add_to_pack(path, manifest, name, good)
    (path / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(HashMismatch, match=name):
        Engine.open(path)
    (path / name).unlink()
    with pytest.raises(FileMissing):
        Engine.open(path)


def test_a_pack_without_tokenizer_runs_on_ids_only(tmp_path) -> None:
    path = write_pack(tmp_path / "dumb.pack", DECODER, tokenizer=False, paths=False)
    with Engine.open(path, predict="none") as engine:
        answer = engine.generate([5, 6, 7], GenerationSettings(max_new_tokens=3))
        assert len(answer.result.tokens) == 3
        with pytest.raises(TokenizerMissing, match=r"no tokenizer\.json"):
            engine.generate("abc", GenerationSettings())


def test_prompts_that_cannot_run_are_named_and_leave_the_engine_usable(packs) -> None:
    with Engine.open(packs["decoder"]) as engine:
        for prompt, message in (("", "no tokens"), ("a" * 500, "500 tokens")):
            with pytest.raises(InputInvalid, match=message):
                engine.generate(prompt, GenerationSettings(max_new_tokens=2))
        assert engine.generate("abc", GenerationSettings(max_new_tokens=2)).prompt_tokens == 3


def test_statistics_count_all_requests(packs) -> None:
    pieces: list[str] = []
    with Engine.open(packs["decoder"], predict="none") as engine:
        settings = GenerationSettings(max_new_tokens=5)
        first = engine.generate("abc", settings, pieces.append)
        second = engine.generate("abcd", settings)
        stats = engine.stats()
    assert "".join(pieces) == first.text
    assert stats.prompt_tokens == 7
    assert stats.new_tokens == len(first.result.tokens) + len(second.result.tokens)
    assert (stats.requests, stats.expert_requests) == (2, engine.counters.requests)
    assert stats.hit_rate == engine.counters.hits / engine.counters.requests
    assert stats.time_to_first_token_s > 0
    assert stats.peak_rss_bytes > 10_000_000
    assert len(stats.lines()) > 5


@pytest.mark.parametrize(("lacking", "said"), [(1, 0), (PAGESIZE + 1, 1)])
def test_a_group_that_counts_in_pages_is_as_large_as_was_asked_for(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, lacking: int, said: int
) -> None:
    asked = (1 << 40) + PAGESIZE // 2
    monkeypatch.setattr("moert.engine.engine.most_bytes", lambda: asked - PAGESIZE // 4 - lacking)
    notes: list[str] = []
    with Engine.open(packs["decoder"], notify=notes.append, memory=asked) as engine:
        engine.generate([1, 2], max_new_tokens=1)
    assert sum("is more than" in note for note in notes) == said


@pytest.mark.parametrize("settings", [{}, {"predict": "hash", "eviction": "expected"}], ids=str)
def test_an_engine_that_nobody_has_any_more_is_gone_at_once(tmp_path: Path, settings: dict[str, str]) -> None:
    """Its weights are not left to the garbage collection, which may come much later."""
    pack = add_hash(write_pack(tmp_path / "m.pack", DECODER))
    gc.collect()
    gc.disable()
    try:
        engine = Engine.open(pack, cache="50%", notify=lambda note: None, **settings)
        engine.generate(PROMPTS[0], max_new_tokens=4)
        engine.close()
        parts = [weakref.ref(each) for each in (engine, engine.model, engine.cache)]
        del engine
        assert [each() for each in parts] == [None, None, None]
    finally:
        gc.enable()
