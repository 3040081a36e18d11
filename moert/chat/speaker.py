"""Messages in, a reply out: rendered, read, written, and told apart from thinking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moert.chat.marks import Part, Splitter, begins_with, marks_of
from moert.chat.renderer import Renderer
from moert.generation.answer import Answer, Interrupted
from moert.generation.prefix import Continued, Prefix
from moert.generation.session import Session
from moert.generation.settings import GenerationSettings
from moert.generation.text import Text

Message = Mapping[str, Any]
"""{"role": …, "content": …}, and whatever else a template knows."""
Hear = Callable[[Part, str], None]
"""Gets the pieces of a reply as they are made: "thinking" or "answer", and text."""


@dataclass(frozen=True)
class Asked:
    """What a template is given: messages, JSON schemas of tools, and other variables (enable_thinking)."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reply(Answer):
    """`text` is the answer alone, `thinking` what came before it; `result.text` is all that was written, with marks."""

    said: str = ""
    thinking: str = ""

    @property
    def text(self) -> str:
        return self.said

    @property
    def message(self) -> Message:
        """As templates take it."""
        thought = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.said, **thought}


class Speaker:
    """`session` opens one in the engine."""

    def __init__(self, renderer: Renderer, text: Text, session: Callable[[], Session]) -> None:
        self._renderer, self._text, self._session = renderer, text, session
        self._marks = marks_of(renderer.chat)
        ends = renderer.chat.ends
        self._ends = frozenset(text.numbers(ends))
        self._stops = () if self._ends else tuple(ends)  # where the tokenizer has no such token

    def reply(
        self, asked: Asked, prefix: Prefix, settings: GenerationSettings | None = None, hear: Hear | None = None
    ) -> Reply:
        """Reads what `prefix` has not read yet.

        Raises what Renderer.render and Session.add do, and Interrupted, with the reply so far, on Ctrl-C while it runs.
        """
        prompt = self._renderer.render(asked.messages, asked.tools, asked.variables)
        ids = self._text.encode(prompt, whole=True)
        text = self._text.detokenizer_with(self._marks)
        parts = _Parts(Splitter(self._marks, begins_with(prompt, self._marks)), hear)
        if self._stops:
            settings = settings or GenerationSettings()
            settings = settings.but(stop=(*settings.stops, *self._stops))
        with self._session() as session:
            request = session.add(Continued(ids, text, prefix, self._ends), settings)
            try:
                for _, piece in session:
                    parts.take(piece.text)
                parts.end()
            except KeyboardInterrupt:
                raise Interrupted([parts.reply(request.answer)]) from None
        return parts.reply(request.answer)


class _Parts:
    """Collects them."""

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
