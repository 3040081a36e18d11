"""Benches beside peers: the same weights, bits and prompts in turns; a peer that fails costs its own rows only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moeconv.calibration.load import read_toml
from moeconv.source.checkpoint import Checkpoint
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.kernels import library
from moert.pack.codec import QuantizedMatrix, dequantize
from moert.pack.model_spec import ExpertKey
from recipes.bench import card, kernel_cases, kernels, llama, quant, smoke, speed
from recipes.bench.ggml_products import I_QUANTS, K_QUANTS
from recipes.bench.kernel_cases import Case, Kernels, Material, Olmoe, nbytes_of, vector
from recipes.bench.ours import Ours
from recipes.bench.quant import duels
from recipes.bench.quantizers import (
    AUTOROUND_GROUP,
    FOLDER,
    SPLITS,
    Apart,
    Failure,
    Ggml,
    Likelihoods,
    Result,
    Text,
    autoround,
    import_peers,
    judge,
)
from recipes.bench.result import Row
from recipes.bench.runner import ProgramEnded, Runner
from recipes.bench.shaped import OLMOE, OLMOE_SHAPE, write_pack
from recipes.bench.speed import OURS, alternate, compared, process_rows
from tests.shapes import every, shapes_of
from tests.tiny import tiny_olmoe

# The bench beside llama.cpp and transformers: the model it makes, how its processes talk, what its rows say.

TINY = OLMOE_SHAPE.but(
    vocab_size=96, d_model=64, n_heads=2, n_kv_heads=2, head_dim=32, scale=32**-0.5, decoder=every(2), num_experts=4,
    top_k=2, d_ff=128,
).spec  # fmt: skip
HALF = {"attention": 16, "router": 16, "head": 16, "embed": 16}
ECHO = """
import os, signal, sys
from recipes.bench.runner import serve
class Echo:
    def __init__(self):
        print("loading")
    def generate(self, ids, new_tokens):
        print("noise")
        return [ids[0]] * new_tokens, 0.5, 0.5 + (new_tokens - 1) / 8
    def read(self, ids, room):
        self.room = room
    def go_on(self, new_tokens):
        self.room -= new_tokens
        assert self.room >= 0
        return new_tokens / 4
    def forget(self):
        del self.room
    def variables(self):
        return sorted(name for name in os.environ if "OMP" in name)
    def fail(self):
        sys.exit(3)
    def fill(self):
        pass
    def logits(self, ids):
        return [float(i % 7) for i in ids]
    def expert_bits(self):
        return 4.5
    def bytes_per_token(self):
        return 1000
class Mortal(Echo):  # ends with a signal at a prompt of many tokens
    def generate(self, ids, new_tokens):
        if len(ids) > 100:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().generate(ids, new_tokens)
serve(Mortal if "mortal" in sys.argv else Echo)
"""


def test_the_pack_is_the_model(tmp_path: Path) -> None:
    """At 8 bits the logits of the pack are nearly those of another set of the same weights, and not of others."""
    for bits in (4, 8):
        write_pack(tmp_path / f"{bits}.pack", bits, HALF, TINY)
    fine, coarse = (Ours(tmp_path / f"{bits}.pack") for bits in (8, 4))
    ids = [5, 17, 80, 3]
    assert np.corrcoef(fine.logits(ids), coarse.logits(ids))[0, 1] > 0.9
    assert np.corrcoef(fine.logits(ids), fine.logits(ids[::-1]))[0, 1] < 0.9
    assert coarse.bytes_per_token() < fine.bytes_per_token()
    tokens, first_s, total_s = fine.generate(ids, 5)
    with Engine.open(tmp_path / "8.pack", predict="none") as engine:
        assert tokens == engine.generate(ids, GenerationSettings(max_new_tokens=5)).result.tokens
    assert 0 < first_s < total_s


def test_the_peers_file_has_every_tensor_in_order() -> None:
    listed = list(llama._listed(TINY, "Q2_K"))
    kinds = {name: kind for name, _, kind in listed}
    assert len(kinds) == len(listed)
    assert kinds["token_embd.weight"] == kinds["output.weight"] == kinds["blk.1.attn_q.weight"] == "Q4_K"
    assert kinds["blk.1.attn_q_norm.weight"] is kinds["blk.1.ffn_gate_inp.weight"] is None
    shapes = {name: shape for name, shape, _ in listed}
    assert kinds["blk.1.ffn_down_exps.weight"] == "Q2_K"
    assert shapes["blk.1.ffn_down_exps.weight"] == (TINY.moe.n, TINY.d_model, TINY.moe.ffn.d_ff)
    stored = sum(prod(shape) for shape in shapes.values())
    weights = sum(prod(shape) for name, shape in shapes_of(TINY).items() if not name.startswith("rope."))
    assert stored == weights + len(TINY.expert_keys()) * TINY.weights_per_expert()


def test_a_runner_answers_through_the_noise_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Runner([sys.executable, "-c", ECHO]) as runner:
        assert runner.ask("generate", [7, 8], 3) == [[7, 7, 7], 0.5, 0.75]
        assert speed.decode_speed(1, 9)(runner, 0) == 8
        assert speed.first_token_s(10)(runner, 0) == 0.5
        assert speed.prefill_speed(10)(runner, 0) == 20
        assert speed.whole_speed([[7], [8]], 5)(runner, 0) == 5
        assert runner.ask("read", [7], 8) is None
        assert speed.going_on_speed(8)(runner, 0) == 4
        assert runner.ask("variables") == []
        with pytest.raises(ProgramEnded, match="status 3"):
            runner.ask("fail")


def test_a_round_has_the_same_prompt_for_everyone_and_another_one_than_the_next() -> None:
    assert speed.prompt(3, 16) == speed.prompt(3, 16)
    assert speed.prompt(3, 16) != speed.prompt(4, 16)
    assert len(speed.prompt(0, 512)) == 512
    assert all(0 <= token < OLMOE.vocab_size for token in speed.prompt(0, 512))


def test_runs_alternate_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def run(side: str) -> Callable[[int], float]:
        def measure(number: int) -> float:
            order.append(f"{side} {number}")
            return float(len(order))

        return measure

    runs = alternate("speed", {OURS: run("ours"), "peer": run("theirs")}, 2, [])
    assert order == ["ours 0", "theirs 0", "ours 1", "theirs 1", "theirs 2", "ours 2"]
    assert runs == {OURS: [3.0, 6.0], "peer": [4.0, 5.0]}


def test_the_ratio_is_the_median_of_ratios_to_the_best_setting() -> None:
    rows = compared("decode", {OURS: [2.0, 9.0, 8.0], "peer": [1.0, 3.0, 8.0], "peer, plain": [1.0, 2.0, 9.0]})
    assert [row.name for row in rows] == ["decode: moert", "decode: peer", "decode: peer, plain", "decode: ratio"]
    assert [row.value for row in rows] == [8.0, 3.0, 2.0, 2.0]
    fewest = compared("start", {OURS: [1.0], "slow": [9.0], "fast": [4.0]}, "s", lambda row: row.at_most(0.2))
    assert (fewest[-1].value, fewest[-1].met) == (0.25, False)


def test_without_one_side_there_is_no_ratio() -> None:
    assert [row.name for row in compared("decode", {OURS: [1.0]})] == ["decode: moert"]
    assert [row.name for row in compared("decode", {"peer": [1.0]})] == ["decode: peer"]
    assert compared("decode", {}) == []


def test_a_program_that_ends_loses_its_own_rows_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's first setting dies of the first long prompt; ours, the second one and the rows before it stay."""
    fake = {"moert": [], "Q4_K": ["mortal"], "Q4_K, not repacked": []}
    commands = {name: [sys.executable, "-c", ECHO, *arguments] for name, arguments in fake.items()}
    monkeypatch.setattr(speed.Level, "commands", lambda self, *options: commands)
    monkeypatch.setattr(speed.Level, "make", lambda self: None)
    failures: list[str] = []
    rows = speed.level_rows(replace(speed.LEVELS["4bits"], busy=False), speed.QUICK, 1e9, failures)
    names = {row.name for row in rows}
    assert "4.5 bits: effective bits of an expert's weight: Q4_K" in names
    assert rows[0] == Row("4.5 bits: effective bits of an expert's weight: moert", 4.5, "bits").at_most(4.5)
    sizes = speed.QUICK
    long = f"prefill of {sizes.long_prefill}", f"decode behind {sizes.long_context}"
    for what in ("prefill of 512", "first token after 128", "decode", *long):
        assert f"4.5 bits: {what}: Q4_K" not in names
        assert {f"4.5 bits: {what}: {side}" for side in ("moert", "Q4_K, not repacked", "ratio")} <= names
    assert len(names) == len(rows)
    assert failures
    assert all(line.startswith("4.5 bits: ") and "Q4_K: " in line and "(SIGSEGV)" in line for line in failures)


def test_the_bench_goes_on_writes_what_failed_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir(parents=True)
    (tmp_path / "bin/python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin/python").chmod(0o755)
    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.setattr(speed, "LLAMA", tmp_path / "bin/python")
    monkeypatch.setattr(speed, "DEMO", tmp_path)
    monkeypatch.setattr(speed, "LEVELS", {"4bits": speed.LEVELS["4bits"]})
    monkeypatch.setattr(speed, "REFERENCES", {})
    monkeypatch.setattr(speed, "read_bandwidth", lambda threads: 1e9)
    monkeypatch.setattr(speed, "level_rows", lambda *arguments: [Row("4.5 bits: decode: moert", 2.0, "tokens/s")])
    monkeypatch.setattr(speed, "start_rows", lambda *arguments: [])
    monkeypatch.setattr(speed, "process_rows", lambda *arguments: [])
    monkeypatch.setattr(sys, "argv", ["speed"])
    written = {}

    def write(name: str, where: dict[str, object], rows: list[Row]) -> Path:
        written[name] = (where, rows)
        return tmp_path / f"{name}.json"

    monkeypatch.setattr(speed, "write", write)
    with pytest.raises(SystemExit, match="status 9") as ended:
        speed.main()
    assert ended.value.code != 0
    where, rows = written["peers"]
    found = json.loads(json.dumps(where))["settings"]
    assert found["llama_cpp_built"] == {"as pip compiles it": "", "as released": ""}
    assert [line for line in found["failed"] if "status 9" in line]
    assert [row.name for row in rows] == ["read bandwidth", "4.5 bits: decode: moert"]
    assert "decode: moert" in capsys.readouterr().out


def test_shares_are_of_the_quiet_run_before() -> None:
    runs = {OURS: [(10.0, 6.0), (20.0, 8.0)], "Q4_K": [(20.0, 2.0), (20.0, 2.0)]}
    rows = speed.busy_rows(speed.LEVELS["4bits"], runs)
    assert [row.value for row in rows] == [7.0, 2.0, 3.5, 0.5, 0.1]
    assert [row.met for row in rows] == [None, None, None, True, None]


def test_both_sides_have_the_same_bits() -> None:
    """A group of 64 has 32 bits of scale and minimum; blocks of 256 of K-quants: 84 and 144 bytes."""
    blocks = {"Q2_K": 84, "Q4_K": 144}
    for level in speed.LEVELS.values():
        share = 1 / level.every if level.every else 0.0
        bits = level.bits * (1 - share) + level.more * share + 32 / 64
        assert bits == 8 * blocks[level.peer] / 256
        assert level.peer in llama.MODELS


def test_what_runs_in_the_peers_python_imports_only_what_is_there() -> None:
    """Of what our sources import, numpy alone comes with the packages of peers-llama.txt."""
    program = """
import sys
from importlib.abc import MetaPathFinder
there = {*sys.stdlib_module_names, "numpy", "moert", "recipes", "tests", "sitecustomize"}
class Nothing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in there:
            raise ModuleNotFoundError(f"no module named {name}")
sys.meta_path.insert(0, Nothing())
import recipes.bench.llama
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["g2p", "wiki"])
def test_rows_of_whole_programs_have_the_aims_of_their_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pack(tmp_path / f"{name}.pack", 4, HALF, TINY)
    (tmp_path / f"{name}-prompts.jsonl").write_text('{"prompt": "a b"}\n')
    output = json.dumps({"stats": {"peak_rss_bytes": 90_000_000, "prompt_tokens": 2}}).encode()
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, output)

    monkeypatch.setattr(subprocess, "run", run)
    first, most, beside = process_rows(tmp_path, [name], 3)
    assert len(asked) == 1 + 3 + 3
    assert all(["moert", "run", str(tmp_path / f"{name}.pack"), "a b"] == command[2:6] for command in asked)
    assert (first.runs, first.aim) == (3, "≤ 0.4" if name == "wiki" else None)
    assert most.value == 90
    assert 80 < beside.value < 90
    assert beside.met is False


def test_every_expert_of_ours_can_be_read_at_once(tmp_path: Path) -> None:
    write_pack(tmp_path / "a.pack", 4, HALF, TINY)
    ours = Ours(tmp_path / "a.pack")
    ours.fill()
    assert ours._engine.cache.resident() == sorted(TINY.expert_keys())
    read = ours._engine.stats().bytes_read
    ours.generate([5, 17, 80, 3], 5)
    assert ours._engine.stats().bytes_read == read
    assert ours.expert_bits() == 4.5


# The bench of the native kernels: the weights it lays out, the order it times in, what its rows say.

TINY_OLMOE = Olmoe(d_model=128, d_ff=64, heads=2, experts=8, top_k=2, vocab=96, context=4)
ROOM = 1 << 18


@pytest.fixture
def ours() -> Iterator[Kernels]:
    found = library.load()
    if found is None:
        pytest.skip("no native kernels")
    with Kernels(found, Material(ROOM), threads=1) as opened:
        yield opened


def nothing(name: str, nbytes: int = 0, macs: int = 0) -> Case:
    return Case(name, lambda: None, 1, nbytes, macs)


@pytest.mark.parametrize(("bits", "group", "expected"), [(16, 0, 2048), (32, 0, 4096), (2, 0, 288), (8, 32, 1152)])
def test_bytes_that_a_product_reads(bits: int, group: int, expected: int) -> None:
    (matrix,) = Material(ROOM).matrices([(8, 128)], bits, group, most=1)
    assert nbytes_of(matrix) == expected
    assert matrix.group == (group or 128)


def test_a_case_multiplies_what_it_says() -> None:
    found = library.load()
    if found is None:
        pytest.skip("no native kernels")
    material, (rows, cols) = Material(ROOM), (16, 128)
    with Kernels(found, material, threads=1) as opened:
        case = opened.linear("one", [(rows, cols)], 4, 64, tokens=3, most=1)
        case.run()
    codes, scales = rows * cols // 2, rows * 2
    halves = material.data[codes : codes + 4 * scales].view(np.float16).reshape(2, rows, 2)
    weights = dequantize(QuantizedMatrix(4, cols, 64, material.data[:codes].reshape(rows, -1), *halves))
    x, y = case.alive[:2]  # type: ignore[index]
    expected = vector(3, cols) @ weights.T
    assert np.array_equal(x, vector(3, cols))
    assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()
    assert (case.calls, case.nbytes, case.macs) == (1, codes + 4 * scales, 3 * rows * cols)


def test_rounds_turn_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "REST_S", 0)
    order: list[str] = []
    cases = [Case(name, partial(order.append, name), 1, 1) for name in "ab"]
    times = kernels.timed(cases, 2)
    assert "".join(order) == "baabba"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}


def test_shares_are_of_the_reading_in_the_same_round() -> None:
    read, case = nothing("read", nbytes=10**9), nothing("case", nbytes=3 * 10**9)
    times = {"read": [1.0, 2.0, 4.0], "case": [6.0, 8.0, 24.0]}
    rate, share = kernels.share_rows(case, times, read, 60)
    assert (rate.value, rate.unit) == (0.375, "GB/s")
    assert share.value == 50
    assert share.met is False
    assert kernels.share_rows(case, times, read, None)[1].met is None


def test_ratios_are_ours_to_each_peers() -> None:
    cases = [nothing("moert", macs=10**9), nothing("peer", macs=2 * 10**9)]
    rows = kernels.speed_rows("4 bits", cases, {"moert": [1.0, 1.0, 1.0], "peer": [1.0, 4.0, 8.0]})
    assert [row.value for row in rows] == [1.0, 0.5, 2.0]
    assert rows[2].name == "4 bits: ratio to peer"


def test_rows_have_names_of_their_own_and_all_aims(ours: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OLMOE": TINY_OLMOE, "INWARD": (64, 128), "OUTWARD": (128, 64), "REST_S": 0}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernel_cases, "NBYTES", ROOM)
    rows = list(kernels.bandwidth_rows(ours, Material(ROOM), 1, 1)) + list(kernels.step_rows(ours, 1))
    assert len({row.name for row in rows}) == len(rows)
    aims = {row.name: row.aim for row in rows if row.aim}
    assert aims.pop("read bandwidth, memory of weights: share") == "≥ 90"
    kinds = [f"{kind}, {bits} bits" for kind in ("linear", "mixture") for bits in kernels.WIDTHS]
    assert list(aims.values()) == ["≥ 60", "≥ 60", "≥ 75", "≥ 75"] * 2
    assert all(name.startswith(kind) for name, kind in zip(aims, kinds, strict=True))


def test_a_missing_peer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "SITE", tmp_path)
    monkeypatch.setattr(sys, "path", [])  # also put back, with what is added to it
    monkeypatch.setitem(sys.modules, "onnx", None)
    found = list(kernels.peers(8, (64, 128), tokens=2, most=3, threads=1))
    assert [case.name for case in found] == ["torch int8"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(kernels.GROUPS)
    assert all(line.startswith("left out: onnxruntime") for line in lines)


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_torchs_products_have_the_shape_of_ours(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "onnxruntime", lambda *_: pytest.fail("not asked for"))
    torch.set_num_threads(1)
    makers = {
        4: lambda: kernels.torch_int4(64, (64, 128), 2, 3),
        16: lambda: kernels.torch_float(torch.bfloat16, (64, 128), 2, 3),
        32: lambda: kernels.torch_float(torch.float32, (64, 128), 2, 3),
    }
    case = makers[bits]()
    outputs = case.run()
    assert [tuple(output.shape) for output in outputs] == [(2, 64)] * 3  # type: ignore[attr-defined]
    assert case.macs == 3 * 2 * 64 * 128


# How `make bench-quant` compares: documents resampled in pairs, equal bits, a peer's end that costs its own rows.

needs_ggml = pytest.mark.skipif(not (FOLDER / "ggml").is_dir(), reason="ggml is not built: make build/peers/.built")
needs_autoround = pytest.mark.skipif(
    not (FOLDER / "site/auto_round").is_dir(), reason="AutoRound is not installed: make build/peers/.built"
)


def judged(kls: np.ndarray) -> Likelihoods:
    return Likelihoods(nats=kls + 1.0, kls=kls, tokens=np.full(len(kls), 10.0))


def result(method: str, name: str, bits: float, kls: np.ndarray, calibration: np.ndarray | None = None) -> Result:
    return Result("m", method, name, bits, 0.1, {"calibration": judged(kls if calibration is None else calibration),
                                                 "heldout": judged(kls)})  # fmt: skip


def test_a_ratio_that_is_the_same_in_each_document_has_no_width_however_much_documents_differ():
    kls = np.random.default_rng(0).exponential(size=40)
    rows = {row.name: row for row in duels([result("peer", "p", 3.0, kls), result("ours", "o", 3.0, kls / 2)])[0]}
    ratio = rows["m against p, heldout: divergence"]
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, 0.5, 0.5, 40))
    assert ratio.met


def test_an_interval_holds_the_ratio_and_is_wide_where_documents_disagree():
    generator = np.random.default_rng(1)
    peer, mine = generator.exponential(size=(2, 40))
    rows = {row.name: row for row in duels([result("peer", "p", 3.0, peer), result("ours", "o", 3.0, mine)])[0]}
    ratio = rows["m against p, heldout: divergence"]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < ratio.value < ratio.high
    assert ratio.high - ratio.low > 0.2


def test_ours_is_chosen_on_calibration_text_among_those_of_no_more_bits():
    one = np.ones(8)
    found = [
        result("peer", "p", 3.0, one),
        result("ours", "larger", 3.1, one / 10),
        result("ours", "lucky", 2.9, one / 5, calibration=one),
        result("ours", "chosen", 2.5, one / 2),
    ]
    rows, chosen = duels(found)
    assert chosen == {"m against p": "chosen"}
    bits = next(row for row in rows if row.name == "m against p: bits of ours")
    assert (bits.value, bits.met) == (2.5, True)


def test_where_ours_needs_more_bits_that_is_a_missed_aim_and_the_ratio_has_none():
    one = np.ones(8)
    rows, _ = duels([result("peer", "p", 2.0, one), result("ours", "o", 2.2, one / 2)])
    assert [row.met for row in rows if row.name == "m against p: bits of ours"] == [False]
    assert {row.met for row in rows if row.name.endswith(("divergence", "perplexity"))} == {None}


def test_samples_of_one_document_are_added_up():
    class Fixed(torch.nn.Module):
        config = type("Config", (), {"is_encoder_decoder": False})

        def forward(self, input_ids, use_cache):
            return type("Out", (), {"logits": torch.zeros(*input_ids.shape, 4)})

    text = Text([{"input_ids": torch.zeros(3, 5, dtype=torch.int64), "labels": torch.zeros(3, 5, dtype=torch.int64)}],
                [7, 9, 7])  # fmt: skip
    found = judge(Fixed(), text)
    assert found.tokens.tolist() == [8, 4]
    assert found.nats == pytest.approx([8 * np.log(4), 4 * np.log(4)])


def test_a_process_that_aborts_or_raises_is_one_failure_and_the_next_call_is_answered():
    with Apart() as apart:
        with pytest.raises(Failure, match="its process ended"):
            apart.call(os.abort)
        with pytest.raises(Failure, match="ZeroDivisionError: "):
            apart.call(divmod, 1, 0)
        assert apart.call(divmod, 7, 2) == (3, 1)


@needs_ggml
@pytest.mark.parametrize("name", [*K_QUANTS, *I_QUANTS])
def test_what_a_format_can_hold_comes_back(name):
    weights = np.random.default_rng(0).standard_normal((1, 4, 128), dtype=np.float32)
    ggml, even = Ggml(name), np.ones((1, 128), np.float32)
    once = ggml.decode(ggml.encode(weights, even)).reshape(weights.shape)
    twice = ggml.decode(ggml.encode(once, even)).reshape(weights.shape)
    norm, (first, second) = np.square(weights).sum(), (0.25, 0.02) if name.startswith("IQ1") else (0.15, 0.01)
    assert np.square(once - weights).sum() / norm < first
    assert np.square(twice - once).sum() / norm < second


@needs_ggml
def test_a_block_written_by_hand_is_read_as_the_format_says():
    """Q4_K: 1.0 and 0.5 in float16; scales 1 and minima 2 of the first four groups of 32; codes 0 to 15."""
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([1.0, 0.5], np.float16).view(np.uint8)
    block[4:8], block[8:12] = 1, 2
    block[16:48] = np.arange(32) % 16  # low halves are the first 32 weights
    found = Ggml("Q4_K").decode(block[None])[0]
    assert found[:32].tolist() == [float(code % 16) - 1.0 for code in range(32)]
    assert found[32:64].tolist() == [-1.0] * 32


@pytest.mark.slow
@needs_autoround
def test_autoround_gives_each_group_of_experts_four_values_and_leaves_all_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_olmoe(tmp_path / "model", hidden_size=64, intermediate_size=32)
    monkeypatch.setattr(sys, "path", [*sys.path])
    import_peers()
    windows = np.random.default_rng(0).integers(3, 40, (8, 16))
    with Apart() as apart:
        rounded, tuned = (apart.call(autoround, model, windows, 2, steps) for steps in (1, 8))
    checkpoint = Checkpoint.open(model)
    assert {(place.stack, place.layer) for place in checkpoint.spec.moe_layers()} == {at[:2] for at in tuned}
    assert {at[2] for at in tuned} == {"gate", "up", "down"}
    for (stack, layer, projection), coded in tuned.items():
        for number, weights in enumerate(coded.weights):
            source = checkpoint.expert(ExpertKey(stack, layer, number))[projection]
            assert weights.shape == source.shape
            assert np.abs(weights - source).max() < np.ptp(source)
            assert max(len(np.unique(group)) for group in weights.reshape(-1, AUTOROUND_GROUP)) <= 4
        assert coded.nbytes * 8 / coded.weights[0].size == 2 + (16 + 2) / AUTOROUND_GROUP
    assert any((tuned[at].weights != rounded[at].weights).any() for at in tuned)


def test_autoround_is_a_peer_of_decoders_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(model: str) -> set[str]:
        subject = SimpleNamespace(name=model, sizes={18432}, seen=[{"input_ids": torch.zeros(2, 4)}])
        return {name for name in quant.peers(subject, Apart()) if name.startswith("AutoRound")}  # type: ignore[arg-type]

    monkeypatch.setattr(quant, "without_autoround", lambda: None)
    assert named("wiki") == named("wikids") == {"AutoRound 2 bits"}
    assert named("g2p") == set()
    monkeypatch.setattr(quant, "without_autoround", lambda: "not installed")
    assert named("wiki") == set()


# Every bench is run on very little: which they are, and what counts as a fault.

ROOT = Path(__file__).resolve().parents[2]


def test_every_bench_of_the_makefile_is_run() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {line.partition(":")[0] for line in makefile.splitlines() if line.startswith("bench-") and "##" in line}
    assert set(smoke.benches(makefile)) == targets - {"bench-smoke"}
    assert len(targets) > 15


def test_a_bench_without_its_peers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "LLAMA_FOLDER", tmp_path / "llama")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert smoke.unbuilt(makefile, "bench-quant") == [".built"]
    assert smoke.unbuilt(makefile, "bench-kernels") == ["kernels/.built"]
    assert smoke.unbuilt(makefile, "bench-peers") == smoke.unbuilt(makefile, "bench-sweep") == []
    (tmp_path / ".built").touch()
    assert smoke.unbuilt(makefile, "bench-quant") == []


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.toml")))
def test_a_recipe_becomes_smaller_and_expects_nothing(recipe: str, tmp_path: Path) -> None:
    """In all settings, also those that it leaves to the defaults."""
    path, smaller, only = ROOT / "recipes" / recipe, tmp_path / "smaller.toml", tmp_path / "only.toml"
    smaller.write_text(smoke.smaller(path.read_text(encoding="utf-8")))
    only.write_text("".join(f"{name} = {value}\n" for name, value in smoke.SMALL.items()))
    whole, small, said = (read_toml(each) for each in (path, smaller, only))
    assert small == {**{name: value for name, value in whole.items() if name != "expect"}, **said}


@pytest.mark.parametrize(
    ("failed", "code", "without_library", "wrong"),
    [
        ([], 0, False, []),
        (["llama, ssd"], 1, True, []),
        (["llama, ssd"], 1, False, ["llama, ssd", "exit status 1: said"]),
        (["g2p, ssd"], 1, True, ["g2p, ssd"]),
    ],
)
def test_only_what_lacks_llamas_library_may_fail(
    failed: list[str], code: int, without_library: bool, wrong: list[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def ran(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
        out = folder / "build/bench/some.json"
        out.parent.mkdir(parents=True)
        out.write_text(json.dumps({"context": {"settings": {"failed": failed}}, "rows": []}))
        return subprocess.CompletedProcess([], code, "", "said")

    monkeypatch.setattr(smoke, "ran", ran)
    assert smoke.faults("some", tmp_path, without_library) == wrong


def test_a_bench_without_a_result_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "ran", lambda module, folder: subprocess.CompletedProcess([], 2, "", "no safetensors"))
    assert smoke.faults("some", tmp_path, False) == ["exit status 2, no result: no safetensors"]


def test_sizes_are_small_where_it_is_asked_for_and_the_flag_is_taken() -> None:
    program = "import sys; from recipes.bench.sized import sized; print(sized(5, 1), sys.argv[1:])"
    for flags, said in (([], "5 []"), (["--smoke"], "1 []")):
        done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.strip() == said


# `make check-gpu` where there is no GPU.


def test_without_a_gpu_it_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["card"])
    assert card.main() == 0
    assert capsys.readouterr().out == "make check-gpu: there is no GPU with CUDA here, so nothing is checked\n"


def test_a_comparison_goes_on_from_the_results_of_the_same_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = {split: Likelihoods(np.array([1.5, 2.0]), np.array([0.25, 0.5]), np.array([3.0, 4.0]))
            for split in SPLITS}  # fmt: skip
    result = Result("wiki", "peer", "Q4_K, no data", 4.5, 0.125, sums)
    before = quant.Progress("wiki", "one", tmp_path)
    assert before.results() == {}
    before.add(result)
    (found,) = quant.Progress("wiki", "one", tmp_path).results().values()
    assert repr(found) == repr(result)
    with before.path.open("a") as file:
        file.write('{"name": "half a l')
    assert list(quant.Progress("wiki", "one", tmp_path).results()) == [result.name], "killed while it wrote"
    assert quant.Progress("g2p", "one", tmp_path).results() == {}
    before.add(result)
    assert len(quant.Progress("wiki", "one", tmp_path).results()) == 1
    assert quant.Progress("wiki", "other", tmp_path).results() == {}, "of another model"
    monkeypatch.setattr(quant, "PROGRAM", quant.PROGRAM[1:])
    assert quant.Progress("wiki", "one", tmp_path).results() == {}, "of another program"
