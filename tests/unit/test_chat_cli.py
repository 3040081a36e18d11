"""moert chat and moert run --chat: lines in, answers out, at a terminal and through a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_packs import ENDLESS, THINKING, write_chat_pack
from command_line import Moert
from tiny_packs import DECODER, SWITCH, write_pack

from moeconv.writer import add_to_pack
from moert.command import cli
from moert.engine.engine import Engine
from moert.pack.reader import Pack

ROOT = Path(cli.__file__).parents[2]
NEW = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_pack(tmp_path_factory.mktemp("chat") / "p")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_pack(tmp_path_factory.mktemp("chat") / "endless", ENDLESS)


def answers(pack: Path, *messages: str, system: str | None = None) -> list[str]:
    with Engine.open(pack, predict="none") as engine:
        talk = engine.conversation(system)
        return [talk.say(text, max_new_tokens=6).text for text in messages]


def test_info_says_whether_a_pack_can_chat(moert: Moert, pack: Path, tmp_path: Path) -> None:
    bare, damaged = write_pack(tmp_path / "bare", DECODER, paths=False), write_chat_pack(tmp_path / "damaged")
    add_to_pack(damaged, Pack.open(damaged).manifest, "chat.json", b"[]")
    for path, told in (
        (pack, "yes"),
        (bare, "no: the model came with none"),
        (damaged, "no: chat.json should be a JSON"),
    ):
        assert moert("info", path) == 0
        assert f"chat template    {told}" in moert.out
        assert moert("info", path, "--json") == 0
        assert json.loads(moert.out)["has_chat"] is (told == "yes")


def test_each_line_is_answered(moert: Moert, pack: Path) -> None:
    assert moert("chat", pack, *NEW, stdin="hello there\n\n  \nhow are you") == 0
    assert moert.out.splitlines() == answers(pack, "hello there", "how are you")
    assert moert.err == ""
    assert moert("chat", pack, *NEW, stdin="") == 0
    assert (moert.out, moert.err) == ("", "")


def test_one_question(moert: Moert, pack: Path) -> None:
    assert moert("run", pack, "hello", "--chat", *NEW) == 0
    assert moert.out.splitlines() == answers(pack, "hello")
    assert moert("run", pack, "hello", "--chat", "--system", "be brief", *NEW) == 0
    assert moert.out.splitlines() == answers(pack, "hello", system="be brief")
    assert moert("run", pack, "hello", *NEW) == 0
    assert moert.out.splitlines() != answers(pack, "hello")
    assert moert("run", pack, "--chat", "--json", *NEW, stdin="hello\n") == 0
    answer = json.loads(moert.out)
    assert (answer["output"], answer["stats"]["requests"]) == (answers(pack, "hello")[0], 1)


def test_commands(moert: Moert, pack: Path) -> None:
    said = ["hello", "/reset", "hello", "/system be brief", "/reset", "hello", "/system", "/reset", "hello"]
    said += ["/nonsense x", "/help", "/exit", "hello"]
    assert moert("chat", pack, *NEW, stdin="\n".join(said)) == 0
    plain, brief = answers(pack, "hello")[0], answers(pack, "hello", system="be brief")[0]
    assert moert.out.splitlines() == [plain, plain, brief, plain]
    first, *rest = moert.err.splitlines()
    assert first == "moert: /nonsense is no command: /help lists them, and //nonsense says it to the model"
    said = ["/reset", "/undo", "/system", "/set", "change", "/save", "/load", "/help", "/bye", "//TEXT", "Ctrl-C"]
    assert [line.split()[0] for line in rest] == said
    assert moert("chat", pack, *NEW, stdin="//help\n") == 0
    assert moert.out.splitlines() == answers(pack, "/help")


def test_what_was_said_is_undone_and_bye_ends(moert: Moert, pack: Path) -> None:
    said = ["/undo", "hello there", "zigzag", "/undo", "how are you", "/bye", "hello"]
    assert moert("chat", pack, *NEW, stdin="\n".join(said)) == 0
    first, _, third = moert.out.splitlines()
    assert [first, third] == answers(pack, "hello there", "how are you")
    assert moert.err == "moert: there is nothing to undo: nothing was said\n"


def test_settings_change_between_two_answers(moert: Moert, pack: Path) -> None:
    said = ["hello", "/reset", "/set max-new-tokens 3", "hello", "/reset", "/set stop x y", "/set"]
    assert moert("chat", pack, "--json", *NEW, stdin="\n".join(said)) == 0
    assert [len(json.loads(line)["tokens"]) for line in moert.out.splitlines()] == [6, 3]
    assert {"max_new_tokens 3", "stop x y", "temperature 0.0"} <= set(moert.err.splitlines())
    for wrong, told in (
        ("/set beams 2", "/set beams: there are max_new_tokens, temperature"),
        ("/set temperature warm", "--temperature is 'warm'"),
        ("/set top_p 2", "--tune top-p is 2"),
    ):
        assert told in moert.refuses("chat", pack, stdin=wrong + "\n")


def test_what_was_said_goes_to_a_file_and_comes_back(moert: Moert, pack: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other"
    other.write_text("mine")
    said = ["/system be brief", "hello there", f"/save {file}", "how are you", f"/save {file}"]
    assert moert("chat", pack, *NEW, stdin="\n".join(said)) == 0
    expected = answers(pack, "hello there", "how are you", system="be brief")
    assert moert.out.splitlines() == expected
    saved = json.loads(file.read_text())["messages"]
    assert [each["role"] for each in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert moert("chat", pack, *NEW, stdin=f"zigzag\n/load {file}\n/undo\nhow are you\n/save {file}") == 0
    assert moert.out.splitlines()[1:] == expected[1:]
    assert json.loads(file.read_text())["messages"] == saved
    (tmp_path / "link").symlink_to(other)
    for path in (other, file, tmp_path / "link"):
        assert "is there already: /save! " in moert.refuses("chat", pack, stdin=f"/save {path}\n")
    assert "is no file" in moert.refuses("chat", pack, stdin="/save! /dev/null\n")
    assert "can't be written" in moert.refuses("chat", pack, stdin=f"/save {tmp_path}/no/file\n")
    for name, body in (("text", "mine"), ("list", "[1]"), ("roles", '{"messages": [{"role": 1, "content": "x"}]}')):
        (tmp_path / name).write_text(body)
        assert "is no conversation that /save wrote" in moert.refuses("chat", pack, stdin=f"/load {tmp_path / name}\n")
    assert "can't be read" in moert.refuses("chat", pack, stdin=f"/load {tmp_path}/none\n")
    assert "/load needs the name of a file" in moert.refuses("chat", pack, stdin="/load\n")
    assert other.read_text() == "mine"
    assert moert("chat", pack, stdin=f"/save! {tmp_path / 'link'}\n") == 0
    assert json.loads(other.read_text()) == {"messages": []}
    assert (tmp_path / "link").is_symlink()


def test_json_is_one_object_for_each_answer(moert: Moert, pack: Path) -> None:
    assert moert("chat", pack, "--json", "--stats", *NEW, stdin="hello there\nhow are you\n") == 0
    first, second = (json.loads(line) for line in moert.out.splitlines())
    assert [first["output"], second["output"]] == answers(pack, "hello there", "how are you")
    assert (first["kept_tokens"], first["thinking"], len(first["tokens"])) == (0, "", 6)
    assert second["kept_tokens"] > first["prompt_tokens"]
    figures = json.loads(moert.err)
    read = first["prompt_tokens"] + second["prompt_tokens"] - second["kept_tokens"]
    assert (figures["requests"], figures["prompt_tokens"]) == (2, read)


def test_thinking_is_shown_or_hidden(moert: Moert, tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "p", ENDLESS, THINKING)
    with Engine.open(pack, predict="none") as engine:
        reply = engine.chat([{"role": "user", "content": "hello"}], max_new_tokens=12)
    mark = next(token for token in reply.result.tokens[2:] if token > 30 and token not in reply.result.tokens[:2])
    pack = write_chat_pack(tmp_path / "marked", ENDLESS, THINKING, {mark: "</think>"})
    with Engine.open(pack, predict="none") as engine:
        reply = engine.chat([{"role": "user", "content": "hello"}], max_new_tokens=12)
    assert reply.thinking
    new = ("--max-new-tokens", "12")
    for ask in (lambda *more: moert("run", pack, "hello", "--chat", *new, *more),
                lambda *more: moert("chat", pack, *new, *more, stdin="hello\n")):  # fmt: skip
        assert ask() == 0
        assert moert.out == f"{reply.thinking}\n\n{reply.text}\n"
        assert ask("--tune", "thinking=hide") == 0
        assert moert.out == f"{reply.text}\n"
        assert ask("--json") == 0
        assert json.loads(moert.out)["thinking"] == reply.thinking


def test_a_full_context_is_said(moert: Moert, pack: Path) -> None:
    assert moert("chat", pack, *NEW, stdin="hello\n" + "x" * 400 + "\nhello\n") == 2
    assert moert.out.splitlines() == answers(pack, "hello")
    assert moert.err.startswith("moert: the conversation is full (the prompt has ")
    assert moert.err.endswith("the model can take 299: shorten it): /reset begins anew\n")
    assert moert("chat", pack, stdin="x" * 270 + "\n") == 0
    assert "the answer ends because the model's context is full" in moert.err or moert.out.strip()


@pytest.mark.parametrize("command", [("chat",), ("run", "--chat")])
def test_packs_that_can_not_chat_are_one_line(moert: Moert, tmp_path: Path, command: tuple[str, ...]) -> None:
    switch = write_pack(tmp_path / "switch", SWITCH, paths=False)
    bare = write_pack(tmp_path / "bare", DECODER, paths=False)
    raising = write_chat_pack(tmp_path / "raising", template="{{ raise_exception('say please') }}")
    damaged = write_chat_pack(tmp_path / "damaged")
    (damaged / "chat.json").write_text("{}")
    for path, words in (
        (switch, "reads with an encoder"),
        (bare, "has no chat template"),
        (raising, "the model's chat template refuses this conversation: say please"),
        (damaged, "chat.json has 2 bytes"),
    ):
        assert words in moert.refuses(*command, path, "--tune", "predict=none", stdin="hello\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--chat", "--input", "x.jsonl"), "--chat takes one prompt"),
        (("hello", "--system", "x"), "--system goes with --chat"),
        (("hello", "--tune", "thinking=hide"), "--tune thinking goes with --chat"),
        (("hello", "--chat", "--tune", "thinking=dim"), "'dim'"),
    ],
)
def test_options_that_do_not_go_together(moert: Moert, pack: Path, options: tuple[str, ...], words: str) -> None:
    assert words in moert.refuses("run", pack, *options)


def test_what_is_no_text_is_one_line(pack: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moert", "chat", pack, *NEW], input=b"hello\ncaf\xe9\n", capture_output=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr == b"moert: stdin is not UTF-8 text (invalid continuation byte)\n"


def test_without_chat_nothing_of_it_is_imported(pack: Path) -> None:
    code = (
        "import sys, moert.engine.engine\nfrom moert.command import cli\n"
        "try: cli.main(sys.argv[1:])\nexcept SystemExit as end: assert end.code == 0, end\n"
        "heavy = ('jinja2', 'asyncio', 'hashlib')\n"
        "print([name for name in sys.modules if name in heavy or name.startswith('moert.chat')])"
    )
    for more, expected in (((), "[]"), (("--chat",), "['moert.chat'")):
        asked = ("run", str(pack), "hello", *NEW, *more)
        done = subprocess.run(
            [sys.executable, "-c", code, *asked], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert done.stdout.splitlines()[-1].startswith(expected)
        assert "jinja2" not in done.stdout


def named_limit(*arguments: object) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "moert", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, input="hello\n"
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return int(done.stderr.split("--memory ")[1].split()[0])


def test_the_named_smallest_memory_works(pack: Path) -> None:
    """What renders the template counts too."""
    for command in (("chat", pack), ("run", pack, "--chat")):
        least = named_limit(*command, *NEW, "--memory", "10MB")
        done = subprocess.run(
            [sys.executable, "-m", "moert", *map(str, command), *NEW, "--memory", str(least)],
            input="hello\n", capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        assert (done.returncode, done.stdout.splitlines()) == (0, answers(pack, "hello")), done.stderr


class Terminal:
    """The command at a terminal that stdin is, and stdout is not."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moert.command.cli", *map(str, arguments)],
            stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
        )  # fmt: skip
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def asked(self, times: int) -> str:
        """What stderr has when it has asked so often for a line."""
        found = ""
        while found.count("> ") < times:
            piece = self.process.stderr.read(1).decode()
            assert piece, found
            found += piece
        return found

    def written(self, line: bool = False) -> None:
        """Waits for the next letter of an answer, or for the end of its line."""
        while (letter := self.process.stdout.read(1)) != b"\n" and line:
            assert letter

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=600)
        finally:
            self.process.kill()
            os.close(self._ours)
        return self.process.returncode, out.decode(), err.decode()


def test_ctrl_c_stops_an_answer_and_ends_at_the_prompt(endless: Path) -> None:
    terminal = Terminal("chat", endless, "--max-new-tokens", "1000000", "--tune", "predict=none", "--tune", "threads=1")
    assert terminal.asked(1).startswith("moert: /help lists commands, Ctrl-C stops an answer\n")
    for _ in range(2):
        terminal.type("hello\n")
        terminal.written()
        terminal.process.send_signal(signal.SIGINT)
        terminal.written(line=True)
        assert terminal.asked(1) == "> "
    terminal.type("/nonsense\n")
    assert "is no command" in terminal.asked(1)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.asked(1) == "\nmoert: Ctrl-C once more ends the conversation, a message goes on\n> "
    terminal.type("/nonsense\n")  # whoever goes on is asked again
    assert "is no command" in terminal.asked(1)
    terminal.process.send_signal(signal.SIGINT)
    assert "Ctrl-C once more" in terminal.asked(1)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == (130, "", "\n")


def test_a_terminal_goes_on_after_what_can_not_be_answered(tmp_path: Path) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('once only') }}{% endif %}hello"
    terminal = Terminal("chat", write_chat_pack(tmp_path / "p", template=template), *NEW, "--tune", "predict=none")
    for text in ("one\n", "two\n", "/reset\n", "three\n", "\x04"):
        terminal.asked(1)
        terminal.type(text)
    code, out, _ = terminal.end()
    assert code == 0
    assert len(out.splitlines()) == 2
    assert len(set(out.splitlines())) == 1


def test_ctrl_c_ends_a_pipe(endless: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "moert.command.cli", "chat", endless, "--max-new-tokens", "1000000", "--stats"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    process.stdin.write(b"hello\n")
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"written in 1 request(s)" in err
    assert b"Traceback" not in err
