from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import Moert
from random_hash import add_hash
from tiny_packs import DECODER, DECODER_SHAPE, PROMPTS, SWITCH, SWITCH_SHAPE, damage_expert, write_pack

from moeconv.writer import add_to_pack
from moert import __version__
from moert.beside.flash.keeping import DEFAULT_KEEPING
from moert.beside.flash.runner import EXACT
from moert.beside.flash.runner import check_settings as flash_settings
from moert.beside.gpu.opening import NO_DEVICE, PROCESSOR
from moert.beside.gpu.opening import check_settings as gpu_settings
from moert.built import version_line
from moert.command import cli
from moert.engine import registry
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.registry import PREDICTS
from moert.engine.settings import EngineSettings
from moert.errors import RunError, SettingInvalid
from moert.experts.names import EVICTIONS, PREDICTORS
from moert.kernels import auto_name, library, open_backend
from moert.kernels.backend import Backend
from moert.machine import usable_cores
from moert.models.kv import State
from moert.models.model import Model
from moert.pack.codec import F32
from moert.pack.manifest import LossEstimate, Quality
from moert.pack.reader import Pack
from recipes.bench import sweeps

ROOT = Path(cli.__file__).parent.parent
NEW = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_hash(write_pack(tmp_path_factory.mktemp("cli") / "switch.pack", SWITCH))


@pytest.fixture(scope="module")
def expected(pack: Path) -> dict[str, str]:
    with Engine.open(pack, predict="none") as engine:
        settings = GenerationSettings(max_new_tokens=6)
        return {prompt: engine.generate(prompt, settings).text for prompt in PROMPTS}


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


def jsonl(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_prompt_from_argument_file_or_stdin_gives_the_same_text(moert, pack, expected, tmp_path) -> None:
    prompt = PROMPTS[0]
    (tmp_path / "prompt.txt").write_text(prompt + "\n")
    for code in (
        lambda: moert("run", pack, prompt, *NEW),
        lambda: moert("run", pack, "--file", tmp_path / "prompt.txt", *NEW),
        lambda: moert("run", pack, *NEW, stdin=prompt + "\n"),
    ):
        assert code() == 0
        assert moert.out == expected[prompt] + "\n"
        assert moert.err == ""


def test_json_lines_keep_their_fields_and_order(moert, pack, expected, tmp_path) -> None:
    records = [
        {"id": 7, "prompt": PROMPTS[0]}, {"input": PROMPTS[1], "target": "é\n"}, {"text": PROMPTS[2], "x": [1]},
    ]  # fmt: skip
    source, target = jsonl(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    wanted = [{**record, "output": expected[PROMPTS[at]]} for at, record in enumerate(records)]
    assert moert("run", pack, "--input", source, *NEW) == 0
    assert [json.loads(line) for line in moert.out.splitlines()] == wanted
    assert moert("run", pack, "--input", source, "--output", target, *NEW) == 0
    assert moert.out == ""
    assert [json.loads(line) for line in target.read_text().split("\n")[:-1]] == wanted
    assert moert("run", pack, "--input", "-", *NEW, stdin=source.read_text()) == 0
    assert [json.loads(line) for line in moert.out.splitlines()] == wanted


def test_figures_as_json_cover_the_whole_file(moert, pack, tmp_path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    assert moert("run", pack, "--input", source, "--json", "--stats", "--tune", "cache=50%", *NEW) == 0
    answers = [json.loads(line) for line in moert.out.splitlines()]
    summary = json.loads(moert.err.splitlines()[-1])
    assert summary["requests"] == len(PROMPTS)
    assert summary["new_tokens"] == sum(len(answer["tokens"]) for answer in answers)
    assert summary["prompt_tokens"] == sum(answer["prompt_tokens"] for answer in answers)
    assert 0 < summary["hit_rate"] < 1
    assert summary["bytes_read"] > 0
    assert summary["cache_bytes"] == summary["expert_bytes"] // 2
    assert {"tokens_per_s", "peak_rss_bytes", "time_to_first_token_s", "stall_s", "memory_bytes"} <= set(summary)


def test_json_for_one_prompt_is_one_object(moert, pack, expected) -> None:
    assert moert("run", pack, PROMPTS[1], "--json", *NEW) == 0
    answer = json.loads(moert.out)
    assert answer["output"] == expected[PROMPTS[1]]
    assert len(answer["tokens"]) == answer["stats"]["new_tokens"]


def test_stats_go_to_stderr(moert, pack, expected) -> None:
    assert moert("run", pack, PROMPTS[1], "--stats", *NEW) == 0
    assert moert.out == expected[PROMPTS[1]] + "\n"
    assert "asked for " in moert.err
    assert "peak memory" in moert.err


def test_policies_and_budgets_do_not_change_the_text(moert, pack, expected) -> None:
    for eviction in EVICTIONS:
        for predict in PREDICTS:
            flags = (
                "--tune",
                f"eviction={eviction}",
                "--tune",
                f"predict={predict}",
                "--tune",
                "cache=40%",
                "--tune",
                "threads=1",
            )
            assert moert("run", pack, PROMPTS[3], *flags, *NEW) == 0
            assert moert.out == expected[PROMPTS[3]] + "\n"


@pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.missing()}")
def test_kernels_by_name(moert, pack, expected) -> None:
    names = [each.name for each in library.load().instruction_sets if each.runs]
    for kernels in ("auto", names[0]):
        assert moert("run", pack, PROMPTS[0], "--tune", f"kernels={kernels}", *NEW) == 0
        assert (moert.out, moert.err) == (expected[PROMPTS[0]] + "\n", "")
    for kernels in ("reference", *names):
        assert moert("run", pack, PROMPTS[0], "--tune", f"kernels={kernels}", "--json", *NEW) == 0
        assert json.loads(moert.out)["tokens"]
    assert moert.refuses("run", pack, "abc", "--tune", "kernels=mmx").endswith(f"or one of {', '.join(names)}\n")


def test_without_native_kernels_that_is_said_once_and_it_answers(moert, pack, tmp_path, monkeypatch) -> None:
    assert moert("run", pack, PROMPTS[0], "--tune", "kernels=reference", *NEW) == 0
    written = moert.out
    assert moert.err == ""
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": PROMPTS[0]}] * 3)
    assert moert("run", pack, "--input", source, *NEW) == 0
    assert [json.loads(line)["output"] for line in moert.out.splitlines()] == [written[:-1]] * 3
    assert moert.err.startswith("moert: no native kernels: _native.so was not built; computing with numpy, slowly")
    assert moert.err.count("\n") == 1
    assert "there are no native kernels (_native.so" in moert.refuses("run", pack, "abc", "--tune", "kernels=avx2")


def test_threads_do_not_change_the_tokens(moert, pack, monkeypatch) -> None:
    monkeypatch.setattr("moert.engine.engine.usable_cores", lambda: 2)  # they may share one
    written = []
    for threads in (1, 2):
        assert moert("run", pack, PROMPTS[3], "--tune", f"threads={threads}", "--json", *NEW) == 0
        written.append(json.loads(moert.out)["tokens"])
    assert written[0] == written[1]


def test_text_ends_before_a_stop_string(moert, pack, expected) -> None:
    text = expected[PROMPTS[0]]
    stop = text[2:4]
    assert moert("run", pack, PROMPTS[0], "--stop", "never there", "--stop", stop, *NEW) == 0
    assert moert.out == text[: text.index(stop)] + "\n"


def test_a_seed_repeats_a_drawn_text(moert, pack, expected) -> None:
    texts = []
    for seed in (1, 1, 2):
        flags = (
            "--temperature",
            "1.5",
            "--tune",
            "top-k=40",
            "--tune",
            "top-p=0.99",
            "--tune",
            "min-p=0.001",
            "--seed",
            seed,
        )
        assert moert("run", pack, PROMPTS[0], *flags, "--max-new-tokens", "20") == 0
        texts.append(moert.out)
    assert texts[0] == texts[1] != texts[2]


def own_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line where what the tests hold does not count."""
    command = [sys.executable, "-m", "moert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def refused(*arguments: object) -> str:
    """The one line that a refusal prints in a process of its own."""
    done = own_process(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


def test_the_named_smallest_limits_work(moert, pack, expected) -> None:
    line = refused("run", pack, PROMPTS[0], "--memory", "1kB", *NEW)
    least = int(re.findall(r"--memory (\d+)", line)[-1])
    done = own_process("run", pack, PROMPTS[0], "--memory", least, *NEW)
    assert (done.returncode, done.stdout) == (0, expected[PROMPTS[0]] + "\n"), done.stderr
    line = moert.refuses("run", pack, PROMPTS[0], "--tune", "cache=1kB", *NEW)
    least = int(re.findall(r"--tune cache=(\d+)", line)[-1])
    assert moert("run", pack, PROMPTS[0], "--tune", f"cache={least}", *NEW) == 0
    assert moert.out == expected[PROMPTS[0]] + "\n"
    assert f"--tune cache={least}" in moert.refuses("run", pack, PROMPTS[0], "--tune", f"cache={least - 1}", *NEW)
    assert moert("run", pack, PROMPTS[0], "--tune", f"cache={least}", *NEW) == 0
    assert moert.err.count("\n") == 1  # the warning about one token's demand
    assert "less than one token demands" in moert.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "1.5XB"], "1.5XB"),
        (["--memory", ""], "--memory '' is not a size"),
        (["--tune", "cache="], "--tune cache '' is not a size"),
        (["--tune", "io=direct,999"], "'999' should be a number of threads, 1 to 64"),
        (["--memory", "-5MB"], "-5MB"),
        (["--memory", "120%"], "at most 100%"),
        (["--tune", "cache=auto"], "--tune cache 'auto'"),
        (["--tune", "eviction=random"], "'paper', 'lru', 'layer-lru', 'lfu'"),
        (["--tune", "predict=luck"], "'transitions'"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--max-new-tokens", "x"], "'x'"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--tune", "top-p=nan"], "--tune top-p is nan"),
        (["--seed", "x"], "--seed"),
        (["--stop", ""], "--stop has an empty stop string"),
        (["--tune", "threads=0"], "0 should be at least 1 (see moert run --help)"),
        (["--batch", "-1"], "-1 is not in the range x>=1 (see moert run --help)"),
        (["--tune", "kernels=mmx"], "mmx"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--file", "words.txt"], "PROMPT and --file exclude each other"),
        (["--output", "out.jsonl"], "--output goes with --input"),
    ],
)
def test_wrong_options_are_one_line(moert, pack, arguments, says) -> None:
    assert says in moert.refuses("run", pack, "abc", *arguments)


def test_help_is_named_that_helps(moert) -> None:
    assert "(see moert --help)" in moert.refuses("frobnicate")
    assert "(see moert bench --help)" in moert.refuses("bench")
    assert "(see moert info --help)" in moert.refuses("info", "a.pack", "b.pack")


def test_a_prompt_that_is_missing_is_said_before_anything_is_loaded(moert, pack, monkeypatch) -> None:
    monkeypatch.setattr(Engine, "open", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "no prompt: give one" in moert.refuses("run", pack)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'prompt': 1}", "is not JSON"),
        ("[1]", "should be a JSON object, found list"),
        ('{"question": "x"}', "has no prompt"),
        ('{"prompt": 3}', "prompt should be text, found int"),
    ],
)
def test_bad_lines_are_named_before_anything_runs(moert, pack, tmp_path, line, says) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n\n' + line + "\n")
    message = moert.refuses("run", pack, "--input", source)
    assert "in.jsonl line 3" in message
    assert says in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": ""}', "the prompt has no tokens"),
        ('{"prompt": "a\\ud800"}', "not valid Unicode"),
        ('{"prompt": "a", "score": NaN}', "is not JSON"),
        ('{"prompt": "a", "score": [1e999]}', "is not JSON"),
    ],
)
def test_a_row_that_cannot_run_is_named_before_anything_runs(moert, pack, tmp_path, line, says) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n' + line + "\n")
    target.write_text("of yesterday\n")
    message = moert.refuses("run", pack, "--input", source, "--output", target, "--overwrite", *NEW)
    assert "in.jsonl line 2" in message
    assert says in message
    assert target.read_text() == "of yesterday\n"


def test_a_row_that_memory_is_too_small_for_is_named_before_anything_runs(pack, tmp_path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "a" * 20_000}])
    least = refused("run", pack, "a", "--memory", "1kB", *NEW).split("--memory ")[1].split()[0]
    message = refused("run", pack, "--input", source, "--output", tmp_path / "out.jsonl", "--memory", least, *NEW)
    assert "in.jsonl line 2" in message
    assert "memory budget" in message
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_without_prompts_is_said_to_be_one(moert, pack, tmp_path) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    (tmp_path / "out.jsonl").write_text("of yesterday\n")
    asked = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--overwrite")
    said = moert.refuses("run", pack, *asked)
    assert "in.jsonl has no prompts" in said
    assert (tmp_path / "out.jsonl").read_text() == "of yesterday\n"
    assert "stdin has no prompts" in moert.refuses("run", pack, "--input", "-", stdin="")


@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "symlink", "hard link"])
def test_answers_never_replace_their_prompts(moert, pack, tmp_path, link) -> None:
    source = jsonl(tmp_path / "j.jsonl", [{"prompt": PROMPTS[0]}])
    before, output = source.read_bytes(), source
    if link is not None:
        output = tmp_path / "other.jsonl"
        link(source, output)
    said = moert.refuses("run", tmp_path / "no such.pack", "--input", source, "--output", output)
    assert "is the file that --input reads" in said  # before the pack is looked for
    assert source.read_bytes() == before


def test_nor_those_that_come_from_stdin(pack, tmp_path) -> None:
    source = jsonl(tmp_path / "j.jsonl", [{"prompt": PROMPTS[0]}])
    before = source.read_bytes()
    with source.open("rb") as stream:
        run = subprocess.run(
            [sys.executable, "-m", "moert", "run", pack, "--input", "-", "--output", source, *NEW],
            stdin=stream, capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
    assert (run.returncode, run.stdout) == (2, "")
    assert "is the file that --input reads" in run.stderr
    assert source.read_bytes() == before


def test_sampling_options_that_change_nothing_are_named(moert, pack, expected) -> None:
    prompt = PROMPTS[0]
    assert moert("run", pack, prompt, "--tune", "top-p=0.5", "--seed", "3", *NEW) == 0
    assert moert.out == expected[prompt] + "\n"
    assert moert.err.startswith("moert: --tune top-p and --seed would count only above --temperature 0")
    assert moert("run", pack, prompt, "--tune", "top-p=0.5", "--seed", "3", "--temperature", "1", *NEW) == 0
    assert moert.err == ""


def test_a_full_context_is_the_said_end_of_a_text(moert, tmp_path) -> None:
    spec = DECODER_SHAPE.but(eos=(), max_positions=40).spec
    short = write_pack(tmp_path / "short.pack", spec, paths=False)
    assert moert("run", short, PROMPTS[0], "--json") == 0
    answer = json.loads(moert.out)
    assert answer["stop_reason"] == "context_full"
    assert answer["prompt_tokens"] + len(answer["tokens"]) == 40
    ends = f"context is full: {answer['prompt_tokens']} prompt tokens and {len(answer['tokens'])} new ones\n"
    assert moert.err.endswith(ends)
    assert moert("run", short, PROMPTS[0]) == 0
    assert moert.err.endswith(ends)
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": PROMPTS[0]}, {"prompt": PROMPTS[1]}])
    assert moert("run", short, "--input", source) == 0
    assert "2 of the texts end because the model's context is full" in moert.err


def test_a_checkpoint_is_said_to_be_one(moert, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no manifest.json" in moert.refuses("run", tmp_path, "abc")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert f"is a checkpoint, not a pack: convert it with moeconv quantize {tmp_path}" in moert.refuses(
        "run", tmp_path, "abc"
    )


def test_fields_are_repeated_whatever_they_hold(moert, pack, tmp_path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "x\\udc80": ["\\ud800", "\xc3\xa9"]}\r\n')
    assert moert("run", pack, "--input", source, "--output", target, *NEW) == 0
    assert moert("run", pack, "--input", source, *NEW) == 0
    assert moert.out == target.read_bytes().decode()
    assert json.loads(moert.out)["x\udc80"] == ["\ud800", "é"]
    assert "é" in moert.out


def test_a_prompt_that_is_no_text_is_one_line(moert, pack) -> None:
    assert "not valid Unicode" in moert.refuses("run", pack, "caf\udce9")


def test_more_threads_than_cores_are_cut_with_a_note_as_memory_is(moert, pack, expected, monkeypatch) -> None:
    cores, asked = usable_cores(), list[int]()

    def opened(name: str, threads: int) -> Backend:
        asked.append(threads)
        backend = open_backend(name, threads)
        assert backend.name == "reference" or backend.threads == threads
        return backend

    monkeypatch.setattr("moert.engine.engine.open_backend", opened)
    assert moert("run", pack, PROMPTS[0], "--tune", "threads=5000", *NEW) == 0
    assert asked == [cores]
    assert moert.out == expected[PROMPTS[0]] + "\n"
    assert moert.err == (
        f"moert: --tune threads=5000 is more than the {cores} core(s) that this process may use: {cores} are used\n"
    )
    with pytest.raises(SettingInvalid, match="at least 1"):
        Engine.open(pack, threads=0)


def test_fifty_bytes_are_meant_as_a_share(moert, pack) -> None:
    assert "did you mean 50GB, or a share like 50%" in moert.refuses("run", pack, "abc", "--memory", "50")
    assert "did you mean 1500MB, or a share" in moert.refuses("run", pack, "abc", "--memory", "1500")
    assert "did you mean" not in moert.refuses("run", pack, "abc", "--memory", "1000000")


def test_info_names_a_tokenizer_that_cannot_be_used(moert, tmp_path) -> None:
    for name, body in (("empty", b""), ("broken", b"{}"), ("bare", b'{"model": {"type": "BPE", "vocab": {}}}')):
        pack = write_pack(tmp_path / name, DECODER, paths=False, tokenizer=False)
        add_to_pack(pack, Pack.open(pack).manifest, "tokenizer.json", body)
        assert "tokenizer.json" in moert.refuses("run", pack, "abc", "--tune", "predict=none")
        assert moert("info", pack) == 0
        assert "tokenizer        no: tokenizer.json in" in moert.out
        assert moert("info", pack, "--json") == 0
        assert not json.loads(moert.out)["has_tokenizer"]


def test_memory_that_the_system_refuses_is_one_line(moert, pack, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        np.empty(1 << 60, np.uint8)

    monkeypatch.setattr(Model, "_encode", refuse)
    assert "not enough memory" in moert.refuses("run", pack, "abc", *NEW)


def test_missing_files_are_one_line(moert, pack, tmp_path) -> None:
    assert "nowhere.txt can't be read" in moert.refuses("run", pack, "--file", tmp_path / "nowhere.txt")
    assert "nowhere.jsonl can't be read" in moert.refuses("run", pack, "--input", tmp_path / "nowhere.jsonl")
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert "can't be written" in moert.refuses("run", pack, "--input", source, "--output", tmp_path / "no" / "x.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in moert.refuses("run", pack, "--file", tmp_path / "latin.txt")


def test_packs_that_are_none_or_broken_are_one_line(moert, pack, tmp_path) -> None:
    assert "not a directory" in moert.refuses("run", tmp_path / "none.pack", "abc")
    assert "not a directory" in moert.refuses("info", tmp_path / "none.pack")
    cut = shutil.copytree(pack, tmp_path / "cut.pack")
    expert = cut / Pack.open(cut).manifest.experts[3].path
    expert.write_bytes(expert.read_bytes()[:-1])
    assert "bytes" in moert.refuses("run", cut, "abc")
    damaged = shutil.copytree(pack, tmp_path / "damaged.pack")
    for entry in Pack.open(damaged).manifest.experts:
        damage_expert(damaged, entry.key)
    assert "checksum" in moert.refuses("run", damaged, "abc", "--tune", "predict=none")
    bare = write_pack(tmp_path / "bare.pack", DECODER, paths=False, tokenizer=False)
    assert "tokenizer.json" in moert.refuses("run", bare, "abc")
    assert "paths.safetensors" in moert.refuses("run", bare, "abc", "--tune", "predict=transitions")


def test_info_agrees_with_the_manifest(moert, pack) -> None:
    assert moert("info", pack, "--json") == 0
    facts, manifest = json.loads(moert.out), Pack.open(pack).manifest
    assert facts["experts"] == {
        "per_layer": 6,
        "top_k": 1,
        "identities": 0,
        "all": 30,
        "weights_each": 2 * 24 * 28,
        "files": 30,
    }
    assert sum(facts["bits_histogram"].values()) == 2 * 30
    assert facts["effective_bits"] == manifest.effective_bits()
    assert facts["bytes"]["experts"] == sum(entry.file_bytes for entry in manifest.experts)
    assert facts["has_paths"]
    assert facts["has_tokenizer"]
    assert facts["smallest_memory"]["bytes"] > 50_000_000 + facts["bytes"]["backbone"]  # the whole process


def test_info_names_the_unit_of_a_perplexity(moert, tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "p", DECODER, paths=False)
    estimate = LossEstimate(8.0, 8.2, 0.025, 0.02, 0.03, 50)
    by_tokens = replace(estimate, reference_per_token=4.0, value_per_token=4.1)
    quality = Quality("perplexity", 0.05, estimate, by_tokens, "1" * 64, "2" * 64)
    add_to_pack(pack, replace(Pack.open(pack).manifest, quality=quality), "generation_config.json", b"{}\n")
    assert moert("info", pack) == 0
    assert "quality          perplexity per word, target loss 5.00%" in moert.out
    assert "8.2000 (reference 8.0000)" in moert.out
    assert "; per token 4.1000 (reference 4.0000)" in moert.out
    assert moert("info", pack, "--json") == 0
    found = json.loads(moert.out)["quality"]
    assert (found["heldout"]["reference_per_token"], found["heldout"]["value_per_token"]) == (4.0, 4.1)
    assert found["calibration"]["value_per_token"] is None


def test_info_says_the_same_of_memory_for_people_and_as_json(pack) -> None:
    smallest = json.loads(own_process("info", pack, "--json").stdout)["smallest_memory"]["bytes"]
    again = int(own_process("info", pack).stdout.split("smallest memory  ")[1].split()[0])
    assert abs(again - smallest) < 20_000_000  # no two processes are alike


def test_version_and_help(moert) -> None:
    assert moert("--version") == 0
    assert moert.out == version_line("moert", __version__, f"kernels {auto_name()}") + "\n"
    for command in ([], ["run"], ["info"]):
        assert moert(*command, "--help") == 0
        assert "Usage: moert" in moert.out


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from moert.command import cli\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_nothing_that_runs_imports_torch_or_transformers(pack, expected, kernels) -> None:
    code = (
        "import sys, moert.engine.engine\n"
        "from moert.command import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0, end\n"
        "print([name for name in ('torch', 'transformers', 'scipy') if name in sys.modules])"
    )
    asked = (
        "run",
        pack,
        PROMPTS[0],
        "--tune",
        "predict=gate",
        "--tune",
        "cache=50%",
        "--tune",
        f"kernels={kernels}",
        "--stats",
        *NEW,
    )
    command = [sys.executable, "-c", code, *map(str, asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    text, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert text
    assert kernels == "reference" or text == expected[PROMPTS[0]]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that never ends by itself."""
    spec = SWITCH_SHAPE.but(eos=()).spec
    return write_pack(tmp_path_factory.mktemp("cli") / "endless.pack", spec, paths=False)


def interrupted(pack: Path, *asked: object) -> tuple[str, str]:
    """What a run prints that gets Ctrl-C once it has written something; (stdout, stderr)."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "moert.command.cli",
            "run",
            str(pack),
            *map(str, asked),
            "--tune",
            "predict=none",
            "--tune",
            "threads=1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )
    try:
        assert process.stdout is not None
        first = process.stdout.read(1)  # it writes
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    return (first + rest).decode(), errors.decode()


@pytest.mark.parametrize("flags", [(), ("--stats",)])
def test_ctrl_c_ends_a_prompt_with_130_and_its_figures(endless, flags) -> None:
    text, errors = interrupted(endless, "abc", "--max-new-tokens", "1000000", *flags)
    assert text.endswith("\n")
    assert "Traceback" not in errors
    assert ("written in 1 request(s)" in errors) == bool(flags)


def test_ctrl_c_leaves_whole_lines_and_their_figures(endless, tmp_path) -> None:
    source = jsonl(tmp_path / "in.jsonl", [{"prompt": "abc"}] * 5_000)
    text, errors = interrupted(endless, "--input", source, "--max-new-tokens", "5", "--stats", "--json")
    answers = [json.loads(line)["tokens"] for line in text.splitlines()]
    assert json.loads(errors)["requests"] in (len(answers), len(answers) + 1)


def fail_after(steps: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the decoder make so many steps, the first that of the start token."""
    real, left = Model._decode, [None] * steps

    def decode(self: Model, sequences: Sequence[Sequence[int]], states: Sequence[State]) -> F32:
        if not left:
            raise error
        left.pop()
        return real(self, sequences, states)

    monkeypatch.setattr(Model, "_decode", decode)


def test_ctrl_c_with_json_gives_what_there_is(moert, endless, monkeypatch) -> None:
    fail_after(4, KeyboardInterrupt(), monkeypatch)
    assert moert("run", endless, "abc", "--tune", "predict=none", "--json") == 130
    answer = json.loads(moert.out)
    assert answer["stop_reason"] == "interrupted"
    assert len(answer["tokens"]) == answer["stats"]["new_tokens"] == 4
    assert moert.err == ""


def test_an_error_while_writing_has_a_line_for_itself_and_the_figures_so_far(moert, endless, monkeypatch) -> None:
    fail_after(4, RunError("the disk is gone"), monkeypatch)
    assert moert("run", endless, "abc", "--tune", "predict=none", "--stats") == 2
    assert moert.out.strip()
    assert moert.out.endswith("\n")
    figures, last = moert.err.splitlines()[:-1], moert.err.splitlines()[-1]
    assert figures[0].endswith("read, 4 written in 1 request(s)")
    assert last == "moert: the disk is gone"


def test_an_error_before_the_first_token_is_its_line_alone(moert, endless, monkeypatch) -> None:
    fail_after(0, RunError("the disk is gone"), monkeypatch)
    assert moert.refuses("run", endless, "abc", "--tune", "predict=none", "--stats") == "moert: the disk is gone\n"


SHELL = {
    "closed pipe": ("run {endless} abc --tune predict=none --max-new-tokens 3000 | head -c 5", 141, ".....", ""),
    "stdin closed": ("run {pack} <&-", 2, "", "moert: the prompt has no tokens: give some text\n"),
    "stdout closed": ("run {pack} abc --max-new-tokens 2 >&-", 2, "", "moert: stdout: Bad file descriptor\n"),
    "stdout full": ("run {pack} abc --max-new-tokens 2 >/dev/full", 2, "", "moert: stdout: No space left on device\n"),
    "stderr full": ("run {pack} 2>/dev/full </dev/null", 2, "", ""),
    "figures full": ("run {pack} '{prompt}' --max-new-tokens 6 --stats 2>/dev/full", 2, "{expected}\n", ""),
    "help full": ("--help >/dev/full", 2, "", "moert: stdout: No space left on device\n"),
    "stderr closed": ("run {pack} '{prompt}' --max-new-tokens 6 --stats 2>&-", 0, "{expected}\n", ""),
    "byte order mark": ("run {pack} --max-new-tokens 6 <{marked}", 0, "{expected}\n", ""),
}


@pytest.mark.parametrize("case", SHELL)
def test_streams_that_are_closed_full_or_marked(pack, endless, expected, tmp_path, case) -> None:
    command, code, out, err = SHELL[case]
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + PROMPTS[0].encode() + b"\n")
    words = {"pack": pack, "endless": endless, "marked": marked, "prompt": PROMPTS[0], "expected": expected[PROMPTS[0]]}
    shell = ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m moert.command.cli {command.format(**words)}"]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == err
    assert done.returncode == code
    assert re.fullmatch(out, done.stdout) if out.startswith("..") else done.stdout == out.format(**words)


def test_streams_are_utf8_in_any_locale(pack, tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "x": "é"}\n', encoding="utf-8")
    command = [sys.executable, "-m", "moert", "run", str(pack), "--input", "-", *NEW]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "latin-1"}
    with open(source, "rb") as stdin:
        done = subprocess.run(command, stdin=stdin, capture_output=True, cwd=ROOT, env=environment, check=True)
    assert json.loads(done.stdout.decode())["x"] == "é"
    assert "é" in done.stdout.decode()


def test_bench_has_eight_options_which_sweeps_have_too() -> None:
    said = {name: each.default for name, each in inspect.signature(cli.bench).parameters.items()}
    assert len({*said} - {"context", "packs"}) == 8
    every = {name: each.default for name, each in inspect.signature(sweeps.main).parameters.items()}
    assert said.items() <= every.items()


def test_the_registry_has_the_names_of_the_packages_that_it_loads() -> None:
    assert (registry.ALL_NEURONS, registry.KEPT_NEURONS) == (EXACT, DEFAULT_KEEPING)
    assert registry.ALONE == (NO_DEVICE, PROCESSOR)
    assert set(PREDICTS) == {*PREDICTORS, "hash"}
    defaults = EngineSettings()
    flash_settings(defaults)
    gpu_settings(defaults)
