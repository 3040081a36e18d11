"""A conversation: its messages, its marks, and the tokens that the model has read of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moert.chat.renderer import Rendered, Renderer
from moert.engine.constraint import Grammar, Opening
from moert.engine.generation import GenerationOptions, GenerationSettings, longest_beginning
from moert.engine.session import Answer, Continued, Interrupted, Keeps, Prefix, Session
from moert.engine.text import Text
from moert.errors import InputInvalid, SettingInvalid
from moert.pack.messages import in_one_line
from moert.pack.text import ChatFormat

if TYPE_CHECKING:
    from typing_extensions import Unpack


Part = Literal["answer", "thinking", "hidden"]
Marks = Mapping[str, Part]
"""Marks in a text, each with the part that follows it, up to the next mark."""

_USUAL: Marks = {"<think>": "thinking", "</think>": "answer"}
_CONVENTIONS: Mapping[str, Marks] = {
    "<|channel|>": {
        "<|channel|>analysis<|message|>": "thinking", "<|channel|>commentary": "thinking",
        "<|channel|>commentary<|message|>": "thinking",
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
"""Marks of models, by a text that stands in their chat templates."""


def marks_of(chat: ChatFormat) -> Marks:
    """Returns the marks of the model that a chat template is for; the usual ones where the template has no others."""
    text = chat.template + (chat.tool_template or "")
    return next((marks for sign, marks in _CONVENTIONS.items() if sign in text), _USUAL)


def begins_with(prompt: str, marks: Marks, said: str = "") -> Part:
    """Returns the part that a model writes first after a prompt, which may end with a mark, and behind `said`, the
    beginning of its reply."""
    found = [(said.rfind(mark), part) for mark, part in marks.items() if mark in said]
    return max(found)[1] if found else _marked(prompt, marks) or "answer"


def _marked(prompt: str, marks: Marks) -> Part | None:
    """Returns the part that begins by the mark at the end of a prompt, if there is one."""
    end = prompt.rstrip()
    return next((part for mark, part in marks.items() if end.endswith(mark)), None)


def opening_of(prompt: str, chat: ChatFormat, text: Text, calls: bool = False) -> Opening | None:
    """Returns the beginning of a reply to a prompt that no grammar binds: thinking, and marks before the answer; None
    where the answer begins at once. `calls`: the model has tools, and may end its reply with a call before any answer.

    Where the prompt ends with no mark, a model whose marks hide a part writes one before each answer; another one may
    begin with a mark of thinking, if its template knows that mark and its tokenizer has a token for it.
    """
    marks = marks_of(chat)
    part = _marked(prompt, marks)
    if part == "answer":
        return None
    until = tuple(mark for mark, follows in marks.items() if follows == "answer")
    breaks = frozenset(text.line_breaks)
    begins = part is not None or "hidden" in marks.values()
    if begins:
        return Opening(until, begins, frozenset(), breaks, calls)
    known = [mark for mark, follows in marks.items() if follows == "thinking" and mark in chat.template]
    openers = frozenset(text.beginnings(known))
    return Opening(until, False, openers, breaks, calls) if openers else None


class Splitter:
    """A splitter of text as it comes: returns pieces with their parts, and neither marks nor hidden text. Line breaks
    that follow a mark belong to it."""

    def __init__(self, marks: Marks, first: Part = "answer") -> None:
        self._marks, self._part, self._held = marks, first, ""
        self._after_mark = first != "answer"

    def push(self, text: str) -> list[tuple[Part, str]]:
        held, pieces = self._held + text, list[tuple[Part, str]]()
        while found := [(held.index(mark), -len(mark), mark) for mark in self._marks if mark in held]:
            place, _, mark = min(found)
            if any(len(each) > len(held) - place and each.startswith(held[place:]) for each in self._marks):
                break  # it may become a longer mark
            self._give(held[:place], pieces)
            self._part, self._after_mark = self._marks[mark], True
            held = held[place + len(mark) :]
        keep = longest_beginning(held, self._marks)
        self._give(held[: len(held) - keep], pieces)
        self._held = held[len(held) - keep :]
        return pieces

    def flush(self) -> list[tuple[Part, str]]:
        """Returns the text that was held back because it might have become a mark."""
        pieces = list[tuple[Part, str]]()
        if self._held not in self._marks:
            self._give(self._held, pieces)
        self._held = ""
        return pieces

    def _give(self, text: str, pieces: list[tuple[Part, str]]) -> None:
        if self._after_mark:
            text = text.lstrip("\n")
        if text and self._part != "hidden":
            self._after_mark = False
            pieces.append((self._part, text))


Message = Mapping[str, Any]
"""A message: {"role": …, "content": …}, and whatever else a template knows."""
Hear = Callable[[Part, str], None]
"""A function that is called with each piece of a reply as it is made: its part, "thinking" or "answer", and its
text."""


@dataclass(frozen=True)
class Asked:
    """The input of a template: messages, JSON schemas of tools, and other variables (enable_thinking)."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None
    shown: Collection[str] = ()
    """Texts with special tokens that the answer shows, beside the marks of its parts."""
    forced: Callable[[bool], tuple[Grammar, bool]] | None = None
    """Returns the grammar of the reply to a prompt, which may end inside of thinking, and whether thinking is free of
    it."""
    continues: bool = False
    """Whether the reply goes on from the last message, the model's own."""


class Spoken(NamedTuple):
    """A prompt of a conversation for a session, the marks of the reply's parts, and the part that comes first."""

    prompt: Continued
    marks: Marks
    first: Part
    settings: GenerationSettings


@dataclass(frozen=True)
class Reply(Answer):
    """The reply of a turn. `text` is the answer alone, `thinking` the text before it; `result.text` is all text that
    the model wrote, with marks."""

    said: str = ""
    thinking: str = ""

    @property
    def text(self) -> str:
        return self.said

    @property
    def message(self) -> Message:
        """The reply as a message for templates."""
        thought = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.said, **thought}


class Speaker:
    """The model's side of conversations. `session`: opens a session in the engine."""

    def __init__(self, renderer: Renderer, text: Text, session: Callable[[], Session]) -> None:
        self._renderer, self._text, self._session = renderer, text, session
        self._marks = marks_of(renderer.chat)
        ends = renderer.chat.ends
        self._ends = frozenset(text.numbers(ends))
        self._stops = () if self._ends else tuple(ends)  # where the tokenizer has no such token

    @property
    def chat(self) -> ChatFormat:
        """The format of conversations."""
        return self._renderer.chat

    def first_message(self, tokens: int) -> tuple[int, int]:
        """Returns the figures of Renderer.first_message."""
        return self._renderer.first_message(self._text, tokens)

    def rendering(self, asked: Asked) -> tuple[Callable[[], Rendered], int]:
        """Returns a function that any thread may call for the prompt that the template makes, where there is room for
        the memory [bytes] that its process takes, which is the second result. The function raises the errors of
        Renderer.render and Renderer.continued. Raises InputInvalid."""
        given = asked.messages, asked.tools, asked.variables
        return self._renderer.continuing(*given) if asked.continues else self._renderer.rendering(*given)

    def render(self, asked: Asked) -> Rendered:
        """Returns the prompt that the template makes, and the beginning of the reply if there is one. Raises the errors
        of Renderer.render and Renderer.continued."""
        given = asked.messages, asked.tools, asked.variables
        return self._renderer.continued(*given) if asked.continues else (self._renderer.render(*given), "")

    def ids(self, rendered: Rendered) -> list[int]:
        """Returns the token ids of a prompt and the beginning of its reply. Raises the errors of Text.encode."""
        return self._text.encode("".join(rendered), whole=True)

    def prompt(
        self, asked: Asked, prefix: Keeps, settings: GenerationSettings | None = None, rendered: Rendered | None = None
    ) -> Spoken:
        """Returns the prompt that the template makes, for a session; it may have been `rendered` before. Raises the
        errors of `render` and `ids`."""
        prompt, said = rendered or self.render(asked)
        ids = self.ids((prompt, said))
        text = self._text.detokenizer_with([*self._marks, *asked.shown])
        chosen = settings or GenerationSettings()
        if self._stops:
            chosen = chosen.but(stop=(*chosen.stops, *self._stops))
        first, free, opening = begins_with(prompt, self._marks, said), True, None
        if asked.continues and (asked.forced is not None or chosen.constraint is not None):
            name = "tool_choice" if chosen.constraint is None else chosen.constraint.setting
            raise SettingInvalid(name, "is for whole answers: leave it out where one is continued")
        if asked.forced is not None:
            grammar, free = asked.forced(first == "thinking")
            chosen = chosen.but(grammar=grammar)
        if chosen.constraint is not None and free:
            opening = opening_of(prompt, self._renderer.chat, self._text, asked.tools is not None)
        return Spoken(Continued(ids, text, prefix, self._ends, opening), self._marks, first, chosen)

    def reply(
        self, asked: Asked, prefix: Keeps, settings: GenerationSettings | None = None, hear: Hear | None = None
    ) -> Reply:
        """Returns the reply; of the prompt, reads only the tokens that `prefix` has not read yet.

        Raises the errors of Renderer.render and Session.add, and Interrupted, with the reply so far, on Ctrl-C while it
        runs.
        """
        spoken = self.prompt(asked, prefix, settings)
        parts = _Parts(Splitter(spoken.marks, spoken.first), hear)
        with self._session() as session:
            request = session.add(spoken.prompt, spoken.settings)
            try:
                for _, piece in session:
                    parts.take(piece.text)
                parts.end()
            except KeyboardInterrupt:
                raise Interrupted([parts.reply(request.answer)]) from None
        return parts.reply(request.answer)


class _Parts:
    """Collects the parts of a reply."""

    def __init__(self, splitter: Splitter, hear: Hear | None) -> None:
        self._splitter, self._hear = splitter, hear
        self._found: dict[Part, str] = {"answer": "", "thinking": ""}

    def take(self, text: str) -> None:
        self._tell(self._splitter.push(text))

    def end(self) -> None:
        self._tell(self._splitter.flush())

    def reply(self, answer: Answer) -> Reply:
        return Reply(**vars(answer), said=self._found["answer"], thinking=self._found["thinking"].rstrip("\n"))

    def _tell(self, pieces: Sequence[tuple[Part, str]]) -> None:
        for part, text in pieces:
            self._found[part] += text
            if self._hear is not None:
                self._hear(part, text)


class Conversation:
    """A conversation with a model. `messages` may be changed between two turns, `system` too: the model then reads anew
    from the first difference on.

    `tools` and `variables`: see moert.chat.conversation.Asked.
    """

    def __init__(
        self,
        speaker: Speaker,
        prefix: Prefix,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self.system, self.tools, self.variables = system, tools, variables
        self._speaker, self._prefix = speaker, prefix

    def say(
        self,
        text: str,
        settings: GenerationSettings | None = None,
        hear: Hear | None = None,
        **changes: Unpack[GenerationOptions],
    ) -> Reply:
        """Returns the reply to one more message of the user, as it will be remembered; `hear` is called with its pieces
        as they are made. `changes`: settings by name.

        Raises InputInvalid (PromptTooLong where the conversation has become too long), TemplateFailed, SettingInvalid,
        BudgetTooSmall, OutOfMemory or PackError, and then nothing is remembered; Interrupted on Ctrl-C, and then the
        message is remembered with the answer so far, if any.
        """
        chosen = GenerationSettings.of(settings, changes)
        if not isinstance(text, str):
            raise InputInvalid(f"the message is {in_one_line(repr(text))[:60]}: give text")
        said: Message = {"role": "user", "content": text}
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = Asked([*system, *self.messages, said], self.tools, self.variables)
        try:
            reply = self._speaker.reply(asked, self._prefix, chosen, hear)
        except Interrupted as interrupt:
            for each in interrupt.answers:
                if isinstance(each, Reply) and each.text:
                    self.messages += [said, each.message]
            raise
        self.messages += [said, reply.message]
        return reply

    def reset(self) -> None:
        """Forgets all messages."""
        self.messages.clear()

    def undo(self) -> bool:
        """Forgets the user's last message and everything after it; returns False where the user has said nothing."""
        users = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        if users:
            del self.messages[users[-1] :]
        return bool(users)
