from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_packs import DECODER, PROMPTS, SPECS, damage_expert, record_routes, run_greedy, write_pack

from moert.backbone import load_backbone
from moert.budget import MemoryLimit, parse_memory
from moert.engine import Engine
from moert.errors import BudgetTooSmall, InputInvalid, InvalidMemory, PathsMissing, TokenizerMissing
from moert.experts.eviction import EVICTION
from moert.experts.replay import replay
from moert.generation.settings import GenerationSettings
from moert.kernels import open_backend
from moert.kernels.reference import ReferenceBackend
from moert.models.kv import state_bytes
from moert.pack.errors import FileMissing, HashMismatch, HeaderInvalid
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import PATHS, build
from moert.pack.reader import Pack
from moert.pack.writer import add_to_pack
from moert.predict import PREDICTORS
from moert.predict.oracle import Oracle

N_TOKENS = 8
ASKED = PROMPTS[1::2]
KERNELS = ("auto", "reference")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engine")
    return {name: write_pack(root / f"{name}.pack", spec) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def answers(packs: dict[str, Path]) -> dict[tuple[str, str], list[tuple[list[int], torch.Tensor]]]:
    """With everything in memory and nothing predicted, by pack and kernels."""
    out = {}
    for name, path in packs.items():
        for kernels in KERNELS:
            with Engine.open(path, predictor="none", kernels=kernels) as engine:
                out[name, kernels] = [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in ASKED]
    return out


def smallest(path: Path, kernels: str = "auto") -> int:
    """For the longest prompt."""
    with Engine.open(path, predictor="none", kernels=kernels) as engine:
        return engine.smallest_memory(max(len(engine.encode(prompt)) for prompt in PROMPTS), N_TOKENS)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("eviction", EVICTION)
@pytest.mark.parametrize("kernels", KERNELS)
def test_answers_are_bit_identical_whatever_the_policy_budget_and_prediction(
    packs, answers, name, predictor, eviction, kernels
) -> None:
    least = smallest(packs[name], kernels)
    for memory in (least, least + 13_000, least + 60_000, None):
        notes: list[str] = []
        with Engine.open(packs[name], memory, eviction, predictor, notify=notes.append, kernels=kernels) as engine:
            for _ in range(1 if memory else 2):
                for prompt, (tokens, logits) in zip(ASKED, answers[name, kernels], strict=True):
                    got_tokens, got_logits = run_greedy(engine, engine.encode(prompt), N_TOKENS)
                    assert got_tokens == tokens
                    assert torch.equal(got_logits, logits)
                    assert engine.cache.used_bytes <= engine.cache.capacity_bytes
            counters = engine.counters
            assert counters.evictions > 0 if memory == least else memory or counters.evictions == 0
            if predictor != "none" and memory == least + 60_000:
                assert counters.prefetch_used > 0
            if predictor == "none":
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


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_smallest_budget_works_and_a_byte_less_is_refused_with_its_number(packs, name, kernels) -> None:
    settings = GenerationSettings(max_new_tokens=6)
    with Engine.open(packs[name], predictor="none", kernels=kernels) as engine:
        least = engine.smallest_memory(len(engine.encode("hello")), 6)
        expected = engine.generate("hello", settings).result.tokens
    with Engine.open(packs[name], least - 1, kernels=kernels) as engine, pytest.raises(BudgetTooSmall) as error:
        engine.generate("hello", settings)
    assert error.value.smallest_bytes == least
    assert str(least) in str(error.value)
    assert "\n" not in str(error.value)
    with Engine.open(packs[name], least, kernels=kernels) as engine:
        assert engine.generate("hello", settings).result.tokens == expected
        held = sum(engine.pack.entry(key).file_bytes for key in engine.cache.resident())
        assert held + backbone_bytes(engine) + state_bytes(engine.spec, 5, 6) <= least


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_smallest_budget_holds_the_largest_experts_that_one_token_can_ask_one_layer_for(
    packs, name, kernels
) -> None:
    with Engine.open(packs[name], predictor="none", kernels=kernels) as engine:
        top_k, least = engine.spec.moe.top_k, engine.smallest_memory(9, 5)
        sizes: dict[tuple[str, int], list[int]] = {}
        for entry in engine.pack.manifest.experts:
            sizes.setdefault(entry.key[:2], []).append(entry.file_bytes)
        demands = [sum(sorted(layer, reverse=True)[:top_k]) for layer in sizes.values()]
        fixed = backbone_bytes(engine) + state_bytes(engine.spec, 9, 5)
        assert least == fixed + engine.budget.scratch_bytes + max(demands)
        moe, widened = engine.spec.moe, isinstance(engine.backend, ReferenceBackend)
        values = engine.spec.weights_per_expert() if widened else top_k * (engine.spec.d_model + moe.d_ff)
        assert engine.budget.scratch_bytes >= 4 * values


def backbone_bytes(engine: Engine) -> int:
    """What stays in memory: float32 in the reference; as it is stored, with a few kilobytes of header, elsewhere."""
    stored = load_backbone(engine.pack).values()
    if isinstance(engine.backend, ReferenceBackend):
        return sum(4 * tensor.numel() for tensor in stored)
    file_bytes = engine.pack.file("backbone.safetensors").stat().st_size
    assert sum(tensor.nbytes for tensor in stored) <= file_bytes
    return file_bytes


def test_a_cache_below_one_tokens_demand_warns_once(packs) -> None:
    notes: list[str] = []
    least = smallest(packs["decoder"])
    with Engine.open(packs["decoder"], least, notify=notes.append) as engine:
        for prompt in PROMPTS[:2]:
            engine.generate(prompt, GenerationSettings(max_new_tokens=2))
        assert len(notes) == 1
        enough = int(notes[0].split("--memory ")[1].split()[0])
        assert str(engine.budget.token_bytes) in notes[0]
    notes.clear()
    with Engine.open(packs["decoder"], enough, notify=notes.append) as engine:
        engine.generate(PROMPTS[1], GenerationSettings(max_new_tokens=2))
    assert notes == []


def test_a_share_of_the_experts_leaves_room_for_exactly_that(packs) -> None:
    with Engine.open(packs["decoder"], MemoryLimit(share=0.5)) as engine:
        engine.generate("abc", GenerationSettings(max_new_tokens=4))
        assert engine.cache.capacity_bytes == engine.budget.expert_bytes // 2
        stats = engine.stats()
    assert stats.memory_bytes is not None
    with Engine.open(packs["decoder"], stats.memory_bytes) as engine:
        engine.generate("abc", GenerationSettings(max_new_tokens=4))
        assert engine.cache.capacity_bytes == stats.cache_bytes


@pytest.mark.parametrize("name", SPECS)
def test_the_trace_of_a_run_replays_to_the_same_figures(packs, name) -> None:
    trace: list = []
    with Engine.open(packs[name], smallest(packs[name]) + 20_000, "lru", "none", trace=trace) as engine:
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
    trace: list = []
    pack = Pack.open(packs["switch"])
    with Engine.open(packs["switch"], predictor="none", trace=trace) as engine:
        ids = engine.encode(PROMPTS[0])
        tokens, _ = run_greedy(engine, ids, N_TOKENS)
    steps = [(step.stack, step.layer, step.experts) for step in trace]  # all layers of this model have experts
    memory = MemoryLimit(share=0.4)
    with Engine(pack, open_backend(), memory, "paper", Oracle(steps), None, lambda note: None) as engine:
        assert run_greedy(engine, ids, N_TOKENS)[0] == tokens
        engine._prefetcher.close()
        counters = engine.counters
        assert counters.prefetch_issued >= counters.prefetch_used > 0


@pytest.mark.parametrize("name", SPECS)
def test_predictors_are_told_what_the_routers_of_this_pass_selected(packs, name) -> None:
    asked: list[tuple[str, int, list[list[list[int]]]]] = []
    ran: list[tuple[str, int, list[list[int]]]] = []

    class Listener:
        def next_experts(self, stack, layer, history):
            asked.append((stack, layer, [selected.tolist() for selected in history]))
            return []

    pack = Pack.open(packs[name])
    with Engine(pack, open_backend(), MemoryLimit(share=0.5), "paper", Listener(), None, lambda note: None) as engine:
        run, run_one = engine.runner.run, engine.runner.run_one

        def listened(stack, layer, hidden, experts, weights, out):
            if len(hidden) > 1:  # one token goes on to run_one
                ran.append((stack, engine.spec.stack(stack).moe_layers.index(layer), experts.tolist()))
            run(stack, layer, hidden, experts, weights, out)

        def listened_one(stack, layer, hidden, experts, weights, out):
            ran.append((stack, engine.spec.stack(stack).moe_layers.index(layer), [experts]))
            run_one(stack, layer, hidden, experts, weights, out)

        engine.runner.run, engine.runner.run_one = listened, listened_one
        run_greedy(engine, engine.encode(PROMPTS[0]), 3)
        n_layers = len(engine.spec.decoder.moe_layers)
    assert len(asked) == len(ran)
    for at, (stack, layer, history) in enumerate(asked):
        if at + 1 < len(ran):
            assert (stack, layer) == ran[at + 1][:2]
        present_stack, present_layer, _ = ran[at]
        if layer == 0:
            assert history == []
            assert present_stack == "encoder" or present_layer == n_layers - 1
        else:
            assert history == [selected for _, _, selected in ran[at - min(1, present_layer) : at + 1]]


def test_tables_count_what_the_routers_do(packs) -> None:
    routes = record_routes(packs["switch"])
    assert [len(routes[stack]) for stack in ("encoder", "decoder")] == [2, 3]
    assert len({len(layer) for layer in routes["decoder"]}) == 1
    assert (np.concatenate(routes["encoder"]) == -1).any()  # the capacity of 5 drops tokens of the longest prompt
    assert build(6, routes).to_bytes() == Pack.open(packs["switch"]).read_file(PATHS)


def test_without_paths_nothing_is_preloaded_and_that_is_said(tmp_path) -> None:
    path = write_pack(tmp_path / "bare.pack", DECODER, paths=False)
    notes: list[str] = []
    with Engine.open(path, notify=notes.append) as engine:
        engine.generate("abc", GenerationSettings(max_new_tokens=2))
        engine.generate("abc", GenerationSettings(max_new_tokens=2))
    assert len(notes) == 1
    assert PATHS in notes[0]
    with pytest.raises(PathsMissing, match="--predict popularity needs"):
        Engine.open(path, predictor="popularity")
    Engine.open(path, predictor="none", notify=notes.append).close()
    assert len(notes) == 1


def test_tables_of_another_model_are_refused(packs, tmp_path) -> None:
    path = shutil.copytree(packs["decoder"], tmp_path / "other.pack")
    tables = Pack.open(packs["switch"]).read_file(PATHS)
    add_to_pack(path, Pack.open(path).manifest, PATHS, tables)
    with pytest.raises(HeaderInvalid, match="profile the paths"):
        Engine.open(path)
    Engine.open(path, predictor="none").close()


def test_a_damaged_expert_is_an_error_on_demand_and_by_prefetch(packs, tmp_path) -> None:
    path = shutil.copytree(packs["decoder"], tmp_path / "damaged.pack")
    for expert in range(DECODER.moe.num_experts):
        damage_expert(path, ExpertKey("decoder", 1, expert))
    for predictor in PREDICTORS:
        with Engine.open(path, predictor=predictor) as engine, pytest.raises(HashMismatch, match="D01/E"):
            engine.generate("abc", GenerationSettings(max_new_tokens=3))


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"short", HeaderInvalid), (None, FileMissing)],
)
def test_a_wrong_backbone_is_refused(packs, tmp_path, body, error) -> None:
    from safetensors.torch import load, save

    path = shutil.copytree(packs["decoder"], tmp_path / "backbone.pack")
    name = "backbone.safetensors"
    manifest = Pack.open(path).manifest
    if body is None:
        (path / name).unlink()
        with pytest.raises(error):
            Engine.open(path)
        return
    good = load((path / name).read_bytes())
    lacking = {key: tensor for key, tensor in good.items() if key != "decoder.1.router.weight"}
    turned = {**good, "decoder.1.router.weight": good["decoder.1.router.weight"].T.contiguous()}
    extra = {**good, "decoder.9.router.weight": good["decoder.1.router.weight"].clone()}
    whole = {**good, "decoder.norm.weight": good["decoder.norm.weight"].to(torch.int32)}
    for wrong in (body, save(lacking), save(turned), save(extra), save(whole)):
        manifest = add_to_pack(path, manifest, name, wrong)
        with pytest.raises(error, match=name) as found:
            Engine.open(path)
        assert "\n" not in str(found.value)
    manifest = add_to_pack(path, manifest, name, save(good))
    flipped = bytearray((path / name).read_bytes())
    flipped[-1] ^= 1
    (path / name).write_bytes(flipped)
    with pytest.raises(HashMismatch, match=name):
        Engine.open(path)


def test_a_pack_without_tokenizer_runs_on_ids_only(tmp_path) -> None:
    path = write_pack(tmp_path / "dumb.pack", DECODER, tokenizer=False, paths=False)
    with Engine.open(path, predictor="none") as engine:
        answer = engine.generate_ids([5, 6, 7], GenerationSettings(max_new_tokens=3))
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
    with Engine.open(packs["decoder"], predictor="none") as engine:
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


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1.5GB", 1_500_000_000), ("800MB", 800_000_000), ("512MiB", 512 << 20), ("2g", 2 * 10**9), ("1234", 1234),
     ("64 kB", 64_000), ("1TB", 10**12), ("7B", 7), (".5GB", 500_000_000), (" 2 GB ", 2 * 10**9)],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_memory(text) == MemoryLimit(nbytes=nbytes)


@pytest.mark.parametrize("text", ["50%", " 50%", "50% ", "50 %", "50.0%"])
def test_shares(text: str) -> None:
    assert parse_memory(text) == MemoryLimit(share=0.5)


@pytest.mark.parametrize(
    "text",
    [
        "1.5XB",
        "-1GB",
        "",
        "GB",
        "0",
        "1e9",
        "nan",
        "nan%",
        "0%",
        "101%",
        "-5%",
        "9" * 40,
        "1_000",
        "1_0%",
        "\N{ARABIC-INDIC DIGIT FIVE}GB",
        "\N{FULLWIDTH DIGIT FIVE}%",
        ".",
        "%",
        "5.GB",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidMemory, match="--memory"):
        parse_memory(text)
