"""Thinking and answer, told apart by the marks that models put between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from moert.generation.generation import longest_beginning
from moert.pack.chat import ChatFormat

Part = Literal["answer", "thinking", "hidden"]
Marks = Mapping[str, Part]
"""What stands in a text → what follows it, up to the next of them."""

_USUAL: Marks = {"<think>": "thinking", "</think>": "answer"}
_CONVENTIONS: Mapping[str, Marks] = {
    "<|channel|>": {
        "<|channel|>analysis<|message|>": "thinking", "<|channel|>commentary": "thinking",
        "<|channel|>final<|message|>": "answer", "<|end|>": "hidden", "<|start|>": "hidden",
    },
    "<channel|>": {"<|channel>thought": "thinking", "<channel|>": "answer"},
    "[/THINK]": {"[THINK]": "thinking", "[/THINK]": "answer"},
    "</seed:think>": {"<seed:think>": "thinking", "</seed:think>": "answer"},
    "<|END_THINKING|>": {
        "<|START_THINKING|>": "thinking", "<|END_THINKING|>": "hidden", "<|START_RESPONSE|>": "answer",
        "<|END_RESPONSE|>": "hidden",
    },
}  # fmt: skip
"""By what a template that speaks of them has in it."""


def marks_of(chat: ChatFormat) -> Marks:
    """Those of the model that this template is for; the usual ones where it names none."""
    text = chat.template + (chat.tool_template or "")
    return next((marks for sign, marks in _CONVENTIONS.items() if sign in text), _USUAL)


def begins_with(prompt: str, marks: Marks) -> Part:
    """What a model writes first after a prompt, which may end with a mark."""
    end = prompt.rstrip()
    return next((part for mark, part in marks.items() if end.endswith(mark)), "answer")


class Splitter:
    """Feed it text as it comes: it gives back pieces with their parts, and neither marks nor what is hidden. Line
    breaks that follow a mark belong to it."""

    def __init__(self, marks: Marks, first: Part = "answer") -> None:
        self._marks, self._part, self._held = marks, first, ""
        self._after_mark = first != "answer"

    def push(self, text: str) -> list[tuple[Part, str]]:
        held, pieces = self._held + text, list[tuple[Part, str]]()
        while found := [(held.index(mark), -len(mark), mark) for mark in self._marks if mark in held]:
            place, _, mark = min(found)
            self._give(held[:place], pieces)
            self._part, self._after_mark = self._marks[mark], True
            held = held[place + len(mark) :]
        keep = longest_beginning(held, self._marks)
        self._give(held[: len(held) - keep], pieces)
        self._held = held[len(held) - keep :]
        return pieces

    def flush(self) -> list[tuple[Part, str]]:
        """What was held back because it might have become a mark."""
        pieces = list[tuple[Part, str]]()
        self._give(self._held, pieces)
        self._held = ""
        return pieces

    def _give(self, text: str, pieces: list[tuple[Part, str]]) -> None:
        if self._after_mark:
            text = text.lstrip("\n")
        if text and self._part != "hidden":
            self._after_mark = False
            pieces.append((self._part, text))
