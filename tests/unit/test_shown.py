"""Text from anyone reaches a terminal without what it would obey or hide."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from command_line import Moert
from hypothesis import given
from hypothesis import strategies as st
from tiny_packs import DECODER, write_pack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moeconv.command import packs
from moeconv.writer import add_to_pack
from moert.command import console
from moert.pack.messages import in_one_line, json_line, shown
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
SEEN = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"  # Cf, and drawn
JOINERS = "\u200b\u200c\u200d\u200e\u200f"
ESCAPE = "\x1b]0;mine\x07\x1b[2J"


def hidden(letter: str) -> bool:
    return unicodedata.category(letter) in HIDDEN and letter not in SEEN


def test_every_letter_that_is_hidden_is_written_out() -> None:
    for number in range(sys.maxunicode + 1):
        letter = chr(number)
        if hidden(letter):
            assert in_one_line(letter) == f"<U+{number:04X}>"
            assert shown(letter) == (letter if letter in "\n\t" + JOINERS else f"<U+{number:04X}>")


@given(st.text(max_size=40))
def test_what_comes_out_has_none(text: str) -> None:
    assert not any(map(hidden, in_one_line(text)))
    assert not any(hidden(letter) for letter in shown(text) if letter not in "\n\t" + JOINERS)
    assert json.loads(json_line({"a": text})) == {"a": text}
    assert not any(map(hidden, json_line({"a": text})))


@pytest.mark.parametrize(
    "text", ["", "a b\n\tc", "naïve — ‘x’", "漢字かな\u3000", "😀 👩\u200d🔬", "می\u200cخواهم", "n\u00a0b"]
)
def test_text_that_is_meant_well_stays(text: str) -> None:
    assert shown(text) == text
    assert in_one_line(text.replace("\n", "").replace("\t", "").strip(JOINERS)).startswith(text[:1])


def test_a_name_can_not_be_a_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x\nmoert: all is well\r\x1b[1A"
    console.note(f"tensor {name} is unknown")
    packs.say(f"note: {name} is left out")
    assert capsys.readouterr().err.splitlines() == [
        "moert: tensor x<U+000A>moert: all is well<U+000D><U+001B>[1A is unknown",
        "note: x<U+000A>moert: all is well<U+000D><U+001B>[1A is left out",
    ]


def test_a_line_has_an_end() -> None:
    line = in_one_line("a" * 10**6 + "b")
    assert len(line) < 5000
    assert line.endswith("b")


def test_names_of_files_too(moert: Moert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted as Python does it, or as everything else."""
    monkeypatch.chdir(tmp_path)  # long names are cut
    for line in (
        moert.refuses("run", "\x1b[2J", "one"), moert.refuses("info", "\u202egnp"),
        moert.refuses("run", ".", "--file", "\x1b"), moert.refuses("bench", ".", "--plot\x1b"),
    ):  # fmt: skip
        assert not any(map(hidden, line[:-1]))
        assert "x1b" in line or "u202e" in line or "<U+001B>" in line


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that writes nothing but escape sequences."""
    path = write_pack(tmp_path_factory.mktemp("shown") / "p", DECODER, paths=False, tokenizer=False)
    words = {f"{ESCAPE}\u202e\n{number}\t": number for number in range(DECODER.vocab_size - 1)}
    made = Tokenizer(models.WordLevel({**words, "x": len(words)}, unk_token="x"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    add_to_pack(path, Pack.open(path).manifest, TOKENIZER, made.to_str().encode())
    return path


def at_terminal(*arguments: object) -> str:
    """What a program writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "moert", *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        cwd=ROOT,
    )  # fmt: skip
    os.close(theirs)
    found, deadline = b"", time.monotonic() + 120
    try:
        while time.monotonic() < deadline and select.select([ours], [], [], deadline - time.monotonic())[0]:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            found += part
        assert process.wait(max(1.0, deadline - time.monotonic())) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return found.decode().replace("\r\n", "\n")


NEW = ("--max-new-tokens", "3")


def test_a_terminal_gets_no_escape_sequences(hostile: Path) -> None:
    text = at_terminal("run", hostile, "x", *NEW)
    assert "<U+001B>]0;mine<U+0007><U+001B>[2J<U+202E>\n" in text
    assert not any(hidden(letter) for letter in text if letter not in "\n\t")
    assert "\t" in text
    assert ESCAPE in at_terminal("run", hostile, "x", "--tune", "raw", *NEW)
    fields = json.loads(text := at_terminal("run", hostile, "x", "--json", *NEW))
    assert ESCAPE in fields["output"]
    assert "\u202e" not in text


def test_a_file_gets_text_as_it_is(hostile: Path, moert: Moert) -> None:
    assert moert("run", hostile, "x", *NEW) == 0
    assert f"{ESCAPE}\u202e\n" in moert.out
    assert "\\u202e" in json.dumps(moert.out)
    assert moert("run", hostile, "--input", "-", *NEW, stdin='{"prompt": "x"}\n') == 0
    assert ESCAPE in json.loads(moert.out)["output"]
    assert moert.out.count("\n") == 1


def test_raw_has_no_effect_with_json(hostile: Path, moert: Moert) -> None:
    assert "--tune raw has no effect with --json" in moert.refuses("run", hostile, "x", "--tune", "raw", "--json")
    assert "--tune raw has no effect with --input" in moert.refuses(
        "run", hostile, "--tune", "raw", "--input", "-", stdin=""
    )
    assert "--tune raw has no effect with --json" in moert.refuses("chat", hostile, "--tune", "raw", "--json", stdin="")
