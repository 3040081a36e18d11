"""A stranger's tokenizer.json takes no more memory or time than one that is meant well, and breaks in one line; Ctrl-C
ends what does take long."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_packs import DECODER, write_pack

from moeconv.errors import CalibrationError, SettingsError
from moeconv.measure.scoring import load_tokenizer
from moeconv.writer import add_to_pack
from moert.engine.text import Text
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER
from moert.pack.text import TokenizerUnfit, check_tokenizer
from tests.charsmaps import charsmap

ROOT = Path(__file__).resolve().parents[2]
ROOM, CPU_S, WALL_S = 3 << 30, 60, 120  # of the processes that tests start
WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "": 2}, "unk_token": "[UNK]"}
A_1000 = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
SPECIAL = {"id": "[X]", "ids": [0] * 20_000, "tokens": ["a"] * 20_000}
ONE = {"id": "[X]", "ids": [0], "tokens": ["a"]}
SPECIAL_X = {"SpecialToken": {"id": "[X]", "type_id": 0}}
TEXT_A = {"Sequence": {"id": "A", "type_id": 0}}


def many(kind: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def template(pieces: list[Any], specials: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces[:1], "special_tokens": specials or {}}


def tokenizer(**parts: Any) -> bytes:
    """A small one with these parts."""
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": WORDS, **parts,
    }).encode()  # fmt: skip


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
GROWING = {
    "three Replace": tokenizer(normalizer=many("normalizers", [A_1000] * 3)),
    "hundreds of Replace": tokenizer(normalizer=many("normalizers", [A_1000] * 300)),
    "sixty Prepend": tokenizer(normalizer=many("normalizers", [{"type": "Prepend", "prepend": "a" * 9000}] * 60)),
    "sequences in each other": tokenizer(
        normalizer=many("normalizers", [many("normalizers", [A_1000, A_1000]), many("normalizers", [A_1000])])
    ),
    "an expression": tokenizer(
        normalizer=many("normalizers", [{"type": "Replace", "pattern": {"Regex": "b*"}, "content": "b" * 50}] * 4)
    ),
    "forms of Unicode": tokenizer(normalizer=many("normalizers", [{"type": "NFKD"}] * 9)),
    "a table": tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap({b"a": b"a" * 5000})}
    ),
    "bytes of bytes": tokenizer(pre_tokenizer=many("pretokenizers", [BYTES] * 40)),
    "pieces before pieces": tokenizer(pre_tokenizer=many("pretokenizers", [META] * 40)),
    "a template": tokenizer(post_processor=template([TEXT_A] + [SPECIAL_X] * 2000, {"[X]": SPECIAL})),
    "templates": tokenizer(
        post_processor=many("processors", [template([TEXT_A, SPECIAL_X, SPECIAL_X], {"[X]": ONE})] * 60)
    ),
    "a text of itself": tokenizer(post_processor=template([TEXT_A] * 2000)),
    "decoders": tokenizer(decoder=many("decoders", [A_1000] * 3)),
    "a decoder's expression": tokenizer(decoder={"type": "Replace", "pattern": {"Regex": "(a+a+)+b"}, "content": ""}),
    "a decoder that fills": tokenizer(decoder={"type": "Replace", "pattern": {"String": ""}, "content": "a" * 40}),
    "a token": tokenizer(model={**WORDS, "vocab": {"[UNK]": 0, "a" * 100_000: 1}}),
    "an unknown": tokenizer(model={**WORDS, "vocab": {"a" * 5000: 0}, "unk_token": "a" * 5000}),
    "a beginning": tokenizer(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "b" * 999}
    ),
    "an added token": tokenizer(
        normalizer=A_1000, added_tokens=[{"id": 9, "content": "a" * 8000, "special": False, "normalized": True}] * 3
    ),
}  # fmt: skip
BREAKING = {
    "Strip": tokenizer(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 2}),
    "FixedLength": tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a missing token": tokenizer(post_processor=template([TEXT_A, {"SpecialToken": {"id": "x", "type_id": 0}}])),
    "no table": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": None}),
    "a short table": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a table of 4 GB": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    "a table in no base": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "é!"}),
    "no part of ours": tokenizer(normalizer={"type": "Later"}),
    "a part without a name": tokenizer(normalizer={"prepend": "x"}),
    "two of a name": tokenizer().replace(b'"normalizer": null', b'"normalizer": null, "normalizer": null'),
    "depth": tokenizer(normalizer="X").replace(
        b'"X"', b'{"type":"Sequence","normalizers":[' * 5000 + b"null" + b"]}" * 5000
    ),
}
SLOW = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


def packed(path: Path, body: bytes) -> Path:
    write_pack(path, DECODER, paths=False, tokenizer=False)
    add_to_pack(path, Pack.open(path).manifest, TOKENIZER, body)
    return path


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background ignore it


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "moert", *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=limited, cwd=ROOT,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=WALL_S)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("case", [*GROWING, *BREAKING])
def test_it_is_refused_before_the_library_reads_it(case: str) -> None:
    with pytest.raises(TokenizerUnfit) as error:
        check_tokenizer({**GROWING, **BREAKING}[case])
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["three Replace", "a template", "a table of 4 GB", "Strip", "FixedLength"])
def test_run_and_info_say_so_in_one_line(case: str, tmp_path: Path) -> None:
    pack = packed(tmp_path / "p", {**GROWING, **BREAKING}[case])
    code, out, err = ended(start("run", pack, "aaaa"))
    assert (code, out) == (2, "")
    assert err.startswith("moert: the pack's tokenizer.json ")
    assert err.count("\n") == 1
    code, out, err = ended(start("info", pack))
    assert (code, err) == (0, "")
    assert "\ntokenizer        no: the pack's tokenizer.json " in out


@pytest.mark.parametrize("case", ["three Replace", "a missing token", "a table of 4 GB"])
def test_converting_says_so_too(case: str, tmp_path: Path) -> None:
    path = tmp_path / TOKENIZER
    path.write_bytes({**GROWING, **BREAKING}[case])
    with pytest.raises(SettingsError, match=r"tokenizer\.json can't be used as a tokenizer, it \w+"):
        load_tokenizer(path)


def test_an_expression_that_breaks_at_a_prompt_is_one_line(tmp_path: Path) -> None:
    pack = packed(tmp_path / "p", tokenizer(pre_tokenizer=SLOW))
    code, out, err = ended(start("run", pack, "x" * 34))
    assert (code, out) == (2, "")
    assert err.startswith("moert: the pack's tokenizer can't take the prompt (")
    assert err.count("\n") == 1
    path = tmp_path / TOKENIZER
    path.write_bytes(tokenizer(pre_tokenizer=SLOW))
    with pytest.raises(CalibrationError, match="tokenizer fails on the text"):
        load_tokenizer(path).encode_batch(["a", "x" * 34])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not tell what a process does")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_while_the_library_works(number: int, code: int, tmp_path: Path) -> None:
    """Minutes of work, in pieces that the library does not give up."""
    pack = packed(tmp_path / "p", tokenizer(pre_tokenizer=SLOW))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(("x" * 21 + "z") * 20_000)
    before_s = sum(os.times()[2:4])
    process = start("run", pack, "--file", prompt)
    try:
        worked_s(process.pid, 2.0)
        process.send_signal(number)
        found, out, err = ended(process)
    finally:
        process.kill()
    assert (found, out, err) == (code, "", "")
    assert sum(os.times()[2:4]) - before_s < 30, "seconds of work, of which it takes minutes"


def worked_s(pid: int, seconds: float) -> None:
    """Waits until a process has used the processor for so long."""
    deadline = time.monotonic() + WALL_S
    while time.monotonic() < deadline:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if (int(words[11]) + int(words[12])) / 100 > seconds:
            return
        time.sleep(0.05)
    pytest.fail("it does not work")


def test_a_long_prompt_that_may_grow_much_is_refused(tmp_path: Path) -> None:
    body = tokenizer(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000})
    text = Text(Pack.open(packed(tmp_path / "p", body)))
    assert text.encode("b") == [0]
    with pytest.raises(Exception, match=r"tokenizer might make 20,000,000 bytes of a text of 20,000"):
        text.encode("b" * 20_000)
