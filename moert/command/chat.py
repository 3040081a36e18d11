"""moert chat: a conversation line by line, at a terminal or through a pipe; and moert run --chat, one turn of it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from moert.chat.conversation import Conversation
from moert.chat.marks import Part
from moert.chat.speaker import Reply
from moert.command import console
from moert.command.answers import logprobs_of
from moert.command.orders import Orders
from moert.command.prompts import Longest
from moert.engine import Engine
from moert.errors import InputInvalid, PromptTooLong, RunError
from moert.generation.answer import Answer, Interrupted
from moert.generation.settings import GenerationSettings
from moert.pack.errors import PackError
from moert.pack.shown import json_line

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


class Printer:
    """Writes replies to stdout as they come, thinking dimmed on a terminal; or each as one JSON object when it is
    whole."""

    def __init__(self, engine: Engine, thinking: bool, as_json: bool, raw: bool = False) -> None:
        """`raw`: also what a terminal obeys."""
        self._engine, self._thinking, self._as_json, self._write = engine, thinking, as_json, console.writer(raw)
        obeys = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._dim, self._plain = (_DIM, _PLAIN) if obeys else ("", "")
        self._last: Part | None = None
        self._breaks = ""  # at the end of what was thought so far

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
        """`answer`: what came of it; None where an error ended it, which has a line for itself."""
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
    """Says one thing and prints the reply. Raises what Conversation.say does."""
    try:
        reply = conversation.say(text, settings, printer.hear)
    except Interrupted as interrupt:
        printer.end(interrupt.answers[0])
        raise
    except (KeyboardInterrupt, PackError, RunError):
        printer.end(None)
        raise
    printer.end(reply)
    if reply.result.stop_reason == "context_full":
        console.note(
            f"the answer ends because the model's context is full: {reply.prompt_tokens} prompt tokens and "
            f"{len(reply.result.tokens)} new ones"
        )


def converse(
    conversation: Conversation, settings: GenerationSettings, printer: Printer, longest: Longest
) -> None:  # fmt: skip
    """Until the input ends. What can't be answered is said in one line: a terminal goes on, a pipe ends with it."""
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
    """The same in the words of a conversation."""
    if isinstance(error, PromptTooLong):
        return InputInvalid(f"the conversation is full ({error}): /reset begins anew")
    return error


class _Lines:
    """What is typed, or comes through a pipe; `asks` tells which."""

    def __init__(self, longest: Longest) -> None:
        self._longest = longest
        self.asks = sys.stdin.isatty()
        if self.asks:
            with suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited then
            console.note("/help lists commands, Ctrl-C stops an answer")

    def read(self) -> str | None:
        """The next line that is not empty; None at the end. At a terminal Ctrl-C is asked about once. Raises
        InputInvalid."""
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
        """With its end; empty where there are no more."""
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
