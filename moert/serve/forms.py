"""The forms between interfaces and the engine: the wish of a client, and the events of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moert.chat.conversation import Asked, Part
from moert.engine.constraint import Grammar
from moert.engine.generation import GenerationSettings, Logprobs, StopReason
from moert.serve.calls import Format


@dataclass(frozen=True)
class Talk:
    """A conversation to be answered by the model's chat template: its messages, JSON schemas of tools, other variables
    of the template. `format`: the form in which the model calls tools; `forced` and `continues`: see
    moert.chat.conversation.Asked."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    format: Format | None = None
    forced: Callable[[bool], tuple[Grammar, bool]] | None = None
    continues: bool = False

    @property
    def asked(self) -> Asked:
        """The input of the template."""
        shown = () if self.format is None else self.format.special
        return Asked(self.messages, self.tools, self.variables, shown, self.forced, self.continues)


@dataclass(frozen=True)
class Wish:
    """The wish of a client: an answer to each of `prompts`, texts or token ids as they are, or one conversation; each
    with each of `settings`, of which the seeds differ."""

    prompts: Sequence[Talk | str | Sequence[int]]
    settings: Sequence[GenerationSettings]


class Wrote(NamedTuple):
    """A piece of an answer: its number, its part, its text, and the log-probabilities of the tokens since the last
    piece."""

    choice: int
    part: Part
    text: str
    logprobs: Sequence[Logprobs] = ()


class Ended(NamedTuple):
    """The end of an answer: why, how many tokens were written, how many the prompt has, how many of these had been read
    before; the stop string that was found; seconds until the first token and in all; the last log-probabilities."""

    choice: int
    reason: StopReason
    new_tokens: int
    prompt_tokens: int
    kept_tokens: int
    stop: str | None = None
    first_s: float = 0.0
    total_s: float = 0.0
    logprobs: Sequence[Logprobs] = ()

    @property
    def whole(self) -> bool:
        """Whether the model or a stop string ended the answer, and nothing cut it short."""
        return self.reason in ("eos", "stop_string")


class Called(NamedTuple):
    """The beginning of a tool call: the number of the answer, of the call in it from 0 on, its id, the tool's name."""

    choice: int
    call: int
    id: str
    name: str


class Argued(NamedTuple):
    """A piece of a tool call's arguments, as text of JSON."""

    choice: int
    call: int
    text: str


Event = Wrote | Ended | Called | Argued
