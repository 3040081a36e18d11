"""The bench beside llama.cpp and transformers: the model it makes, how its processes talk, what its rows say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from moert.engine import Engine
from moert.generation.settings import GenerationSettings
from moert.pack.codec import dequantize
from recipes.bench import bandwidth, llama, speed
from recipes.bench.ours import Ours
from recipes.bench.result import Row
from recipes.bench.runner import ProgramEnded, Runner, ending
from recipes.bench.shaped import OLMOE, OLMOE_SHAPE, quantize, weight, write_pack
from recipes.bench.sides import OURS, Sides, alternate, compared
from recipes.bench.whole import process_rows
from tests.shapes import every, shapes_of

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


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_within_half_a_step(bits: int) -> None:
    weights = weight("some.weight", (16, 128))
    coded = quantize(weights, bits)
    step = np.repeat(coded.scale.astype(np.float32), coded.group_size, axis=1)
    assert np.all(np.abs(dequantize(coded) - weights) <= 0.51 * step + 2e-3)
    same = np.full((2, 128), 0.25, np.float32)
    assert np.array_equal(dequantize(quantize(same, bits)), same)


def test_weights_follow_from_seed_and_name() -> None:
    first = weight("decoder.0.attn.q.weight", (8, 64))
    assert np.array_equal(first, weight("decoder.0.attn.q.weight", (8, 64)))
    assert not np.array_equal(first, weight("decoder.1.attn.q.weight", (8, 64)))
    assert 0.8 < float(first.std()) * 64**0.5 < 1.2


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


def test_a_pack_is_made_once(tmp_path: Path) -> None:
    out = tmp_path / "a.pack"
    write_pack(out, 4, HALF, TINY)
    before = (out / "manifest.json").stat().st_mtime_ns
    write_pack(out, 4, HALF, TINY)
    assert (out / "manifest.json").stat().st_mtime_ns == before
    write_pack(out, 2, HALF, TINY)
    assert (out / "manifest.json").stat().st_mtime_ns > before


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


def test_how_a_program_ended_names_the_signal() -> None:
    assert ending(3) == "ended with status 3"
    assert ending(-11) == "ended with status -11 (SIGSEGV)"
    assert ending(-9) == "ended with status -9 (SIGKILL)"


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


def test_the_answers_of_one_command_are_of_each_side() -> None:
    with Sides("here", {"a": [sys.executable, "-c", ECHO]}, []) as sides:
        assert sides.once("expert_bits") == {"a": 4.5}


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


def test_ours_goes_on_behind_a_prompt_that_is_read_once(tmp_path: Path) -> None:
    write_pack(tmp_path / "a.pack", 4, HALF, TINY)
    ours = Ours(tmp_path / "a.pack")
    ours.read([5, 17, 80, 3], 6)
    assert ours.go_on(2) > 0
    assert ours.go_on(4) > 0
    assert ours._session.unfinished == 0
    ours.forget()
    assert len(ours.generate([5, 17, 80, 3], 5)[0]) == 5


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


def test_the_busy_process_ends() -> None:
    with speed.busy_process() as process:
        assert process.poll() is None
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_bandwidth_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "NBYTES", 1 << 20)
    assert bandwidth.read_bandwidth(2, runs=2) > 1e6
