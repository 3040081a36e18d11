"""moert chat, and moert run --chat: lines of a conversation, answers printed as they come, orders to the program."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from moert.chat.conversation import Conversation, Part, Reply
from moert.chat.renderer import MAX_REQUEST_BYTES
from moert.command import console
from moert.command.prompts import Longest, logprobs_of, note_ending
from moert.engine.budget import MemoryLimit, room_within
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.session import Answer, Interrupted
from moert.engine.settings import EngineSettings
from moert.errors import BudgetTooSmall, InputInvalid, PromptTooLong, RunError, said
from moert.pack.documents import parsed
from moert.pack.errors import PackError
from moert.pack.files import write_atomically
from moert.pack.messages import json_line
from moert.pack.reader import Pack
from moert.stats import size

_HELP = """\
/reset         forget what was said
/undo          forget the last message and its answer
/system TEXT   tell the model how to answer; without TEXT nothing
/set NAME VALUE
               change a setting, as in /set temperature 0.8; alone, list them
/save FILE     write what was said to a new file; /save! FILE replaces one
/load FILE     go on from such a file
/help          this
/bye           end, as the end of the input does; so does /exit
//TEXT         say /TEXT to the model
Ctrl-C         stop an answer; twice at the prompt, end"""
_SETTABLE = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "stop",
)  # fmt: skip


def opened(pack: Path, chosen: EngineSettings, max_new_tokens: int) -> Engine:
    """Returns an engine to chat with. Raises the errors of Engine.open: BudgetTooSmall then names the memory of a usual
    first message and its reply."""
    try:
        return Engine.open(pack, chosen)
    except BudgetTooSmall as error:
        refused = error.with_traceback(None)  # what was opened is given back
    if not isinstance(chosen.limit, MemoryLimit):
        raise refused
    from moert.command.description import smallest_chat_memory  # memory that only a refusal takes

    found = smallest_chat_memory(Pack.open(pack, room_within(chosen.limit)), max_new_tokens)
    if found is None or found["bytes"] <= refused.smallest_bytes:
        raise refused
    limit, nbytes = str(refused).partition(" is too small")[0], found["bytes"]
    raise BudgetTooSmall(
        f"{limit} is too small: a usual first message and its reply ({found['prompt_tokens']} prompt tokens, "
        f"{found['new_tokens']} new ones) need {said('memory', nbytes)} ({size(nbytes)})",
        nbytes,
    )


class Orders:
    """The orders of a user to the program, lines such as /reset. `settings`: as they are now."""

    def __init__(self, conversation: Conversation, settings: GenerationSettings) -> None:
        self._conversation, self.settings = conversation, settings
        self._file: Path | None = None  # where the conversation came from or was written to

    def obey(self, line: str) -> bool:
        """Does as a line says; returns False for the order to end. Raises InputInvalid or SettingInvalid, and then
        nothing has changed."""
        name, _, text = line.partition(" ")
        text = text.strip()
        if name in ("/bye", "/exit"):
            return False
        if name == "/reset":
            self._conversation.reset()
        elif name == "/undo":
            if not self._conversation.undo():
                console.note("there is nothing to undo: nothing was said")
        elif name == "/system":
            self._conversation.system = text or None
        elif name == "/set":
            self._set(text)
        elif name in ("/save", "/save!"):
            self._save(text, replace=name == "/save!")
        elif name == "/load":
            self._load(text)
        elif name == "/help":
            print(_HELP, file=sys.stderr, flush=True)
        else:
            console.note(f"{name} is no command: /help lists them, and /{name} says it to the model")
        return True

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if name and name not in _SETTABLE:
            raise InputInvalid(f"/set {name}: there are {', '.join(_SETTABLE)}")
        if value.strip():
            self.settings = self.settings.but(**{name: value.strip() if name == "stop" else _number(value)})
            return
        for each in [name] if name else _SETTABLE:
            print(f"{each} {getattr(self.settings, each)}", file=sys.stderr, flush=True)

    def _save(self, text: str, replace: bool) -> None:
        path, talk = _path(text, "/save"), self._conversation
        if path.exists() and not path.is_file():
            raise InputInvalid(f"{text} is no file: name a new one")
        if path.exists() and not replace and path != self._file:
            raise InputInvalid(f"{text} is there already: /save! {text} replaces it")
        system = [] if talk.system is None else [{"role": "system", "content": talk.system}]
        body = json.dumps({"messages": [*system, *map(dict, talk.messages)]}, ensure_ascii=False, indent=1) + "\n"
        try:
            write_atomically(path, body.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise InputInvalid(f"{text} can't be written: {error.strerror or error}") from None
        self._file = path

    def _load(self, text: str) -> None:
        path = _path(text, "/load")
        try:
            if path.exists() and not path.is_file():
                raise InputInvalid(f"{text} is no file")
            with path.open("rb") as file:
                body = file.read(MAX_REQUEST_BYTES + 1)
            messages = parsed(body)["messages"] if len(body) <= MAX_REQUEST_BYTES else None
        except OSError as error:
            raise InputInvalid(f"{text} can't be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            messages = None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise InputInvalid(f"{text} is no conversation that /save wrote: its messages need role and text")
        begins = bool(messages) and messages[0]["role"] == "system"
        self._conversation.system = messages[0]["content"] if begins else None
        self._conversation.messages[:] = messages[begins:]
        self._file = path


def _path(text: str, order: str) -> Path:
    """Returns the path that an order names, without links. Raises InputInvalid if it names none."""
    if not text:
        raise InputInvalid(f"{order} needs the name of a file")
    return Path(os.path.realpath(os.path.expanduser(text)))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _number(text: str) -> object:
    """Returns the value that JSON has for a text; or the text, which settings then refuse."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


class Printer:
    """A printer of replies to stdout as they come, thinking dimmed on a terminal; or of each as one JSON object when it
    is whole."""

    def __init__(self, engine: Engine, thinking: bool, as_json: bool, raw: bool = False) -> None:
        """`raw`: also characters that a terminal obeys."""
        self._engine, self._thinking, self._as_json, self._write = engine, thinking, as_json, console.writer(raw)
        obeys = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._dim, self._plain = (_DIM, _PLAIN) if obeys else ("", "")
        self._last: Part | None = None
        self._breaks = ""  # line breaks at the end of the thinking so far

    def hear(self, part: Part, text: str) -> None:
        if self._as_json or (part == "thinking" and not self._thinking):
            return
        before = ""
        if part == "thinking":
            text = ("" if self._last is None else self._breaks) + text
            kept = text.rstrip("\n")
            before, text, self._breaks = "" if self._last == part else self._dim, kept, text[len(kept) :]
        elif self._last == "thinking":
            before = f"{self._plain}\n\n"
        self._last = part
        print(before, end="")
        self._write(text)

    def end(self, answer: Answer | None) -> None:
        """Ends a reply. `answer`: the finished one; None where an error ended it, which has a line for itself."""
        if self._as_json and answer is not None:
            print(json_line(self._fields(answer)), flush=True)
        elif not self._as_json and (answer is not None or self._last is not None):
            print(self._plain if self._last == "thinking" else "", flush=True)
        self._last, self._breaks = None, ""

    def _fields(self, answer: Answer) -> dict[str, Any]:
        return {
            "output": answer.text,
            "thinking": answer.thinking if isinstance(answer, Reply) else "",
            "tokens": answer.result.tokens,
            "stop_reason": answer.result.stop_reason,
            "prompt_tokens": answer.prompt_tokens,
            "kept_tokens": answer.kept_tokens,
            **logprobs_of(answer.result),
            "stats": self._engine.stats().to_dict(),
        }


def turn(conversation: Conversation, text: str, settings: GenerationSettings, printer: Printer) -> None:
    """Says one message and prints the reply. Raises the errors of Conversation.say."""
    try:
        reply = conversation.say(text, settings, printer.hear)
    except Interrupted as interrupt:
        printer.end(interrupt.answers[0])
        raise
    except (KeyboardInterrupt, PackError, RunError):
        printer.end(None)
        raise
    printer.end(reply)
    note_ending(reply, "answer")


def converse(
    conversation: Conversation, settings: GenerationSettings, printer: Printer, longest: Longest
) -> None:  # fmt: skip
    """Holds a conversation until the input ends. A message that can't be answered brings one line of error: a terminal
    goes on, a pipe ends with it."""
    lines, orders = _Lines(longest), Orders(conversation, settings)
    while (line := lines.read()) is not None:
        try:
            if not line.startswith("/") or line.startswith("//"):
                turn(conversation, line.removeprefix("/") if line[:1] == "/" else line, orders.settings, printer)
            elif not orders.obey(line):
                return
        except (Exception, KeyboardInterrupt) as error:
            if not lines.asks:
                raise _told(error) from None
            if not console.interrupted(error):
                if not isinstance(error, RunError):
                    raise
                console.note(str(_told(error)))


def _told(error: BaseException) -> BaseException:
    """Returns the error in the words of a conversation."""
    if isinstance(error, PromptTooLong):
        return InputInvalid(f"the conversation is full ({error}): /reset begins anew")
    return error


class _Lines:
    """The lines that are typed, or come through a pipe; `asks` tells which of both."""

    def __init__(self, longest: Longest) -> None:
        self._longest = longest
        self.asks = sys.stdin.isatty()
        if self.asks:
            with suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited then
            console.note("/help lists commands, Ctrl-C stops an answer")

    def read(self) -> str | None:
        """Returns the next line that is not empty; None at the end. At a terminal the first Ctrl-C only brings a note.
        Raises InputInvalid."""
        asked = False
        while True:
            try:
                line = self._line()
            except UnicodeDecodeError as error:
                raise InputInvalid(f"stdin is not UTF-8 text ({error.reason})") from None
            except KeyboardInterrupt:
                if self.asks:
                    print(file=sys.stderr, flush=True)
                if not self.asks or asked:
                    raise
                asked = True
                console.note("Ctrl-C once more ends the conversation, a message goes on")
                continue
            if not line:
                return None
            if line.strip():
                return line.rstrip("\r\n")

    def _line(self) -> str:
        """Returns a line with its end; empty after the last one."""
        if not self.asks:
            return self._longest.checked(sys.stdin.readline(self._longest.letters + 1), "a line of stdin")
        if sys.stdout.isatty():
            try:
                return input("> ") + "\n"
            except EOFError:
                print(flush=True)
                return ""
        print("> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()
