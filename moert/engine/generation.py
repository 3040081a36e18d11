"""One generation, token by token or by beam search."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from moert.engine import choosing
from moert.engine.choosing import (
    BeamRules,
    Beams,
    GenerationSettings,
    Hypothesis,
    Likely,
    Logprobs,
    adjusted,
    largest,
    log_softmax,
)
from moert.errors import InputInvalid, PromptTooLong, SettingInvalid
from moert.pack.codec import F32
from moert.pack.model_spec import ModelSpec

_LEAST_LOGPROB = -1e9  # where a logit is minus infinity, which JSON has no number for
StopReason = Literal["eos", "stop_string", "max_new_tokens", "context_full", "cancelled", "interrupted"]


class TextSource(Protocol):
    """A converter of token ids to text; see `moert.engine.text.Detokenizer`. A copy goes on by itself."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...

    def piece(self, token: int) -> str: ...


@dataclass(frozen=True)
class Piece:
    """One step: the token, and the text that is certain after it (often, but not always, the token's own)."""

    token: int
    text: str


@dataclass(frozen=True)
class GenerationResult:
    """The result of a generation. `tokens` has the end token if one came; `text` (empty without a detokenizer) ends
    before a stop string. `score`: with beam search, the sum of the tokens' log-probabilities over their number to the
    power of the length penalty. `logprobs`: one for each of `tokens`, where they were requested."""

    tokens: list[int]
    text: str
    stop_reason: StopReason
    score: float | None = None
    logprobs: list[Logprobs] | None = None


class Generation:
    """A generation that a session runs, alone or together with others; `results` can be read at any time.

    Before its end the stop reason is "interrupted".
    """

    def __init__(
        self, spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None,
        ends: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """`ends`: tokens that end the text beside the model's own. Raises InputInvalid for a prompt that can't be run,
        and SettingInvalid for stop strings without a detokenizer, and for a first token, which is an id here, or tokens
        with a bias that are not the model's."""
        if settings.stops and detokenizer is None:
            raise SettingInvalid("stop", "are found in text: give the prompt as text, not as token ids")
        self.room = room(spec, prompt_ids)
        self.settings, self.detokenizer, self._eos = settings, detokenizer, ends.union(spec.tokens.eos)
        self._spec, self._first = spec, first_token_of(spec, settings)
        self.prompt_ids, self._read = prompt_ids, decoder_prompt(spec, prompt_ids)
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.text = ""  # the text that was handed out
        self.stop_reason: StopReason = "interrupted"
        self.ended = False
        self._held = ""  # text that may turn out to begin a stop string
        self._generator: np.random.Generator | None = None  # most texts draw nothing, and its code takes memory

    @property
    def results(self) -> list[GenerationResult]:
        """One result, or with beam search as many as were requested, the best first."""
        logprobs = None if self.settings.logprobs is None else list(self.logprobs)
        return [GenerationResult(list(self.tokens), self.text, self.stop_reason, logprobs=logprobs)]

    @property
    def written(self) -> int:
        """Number of tokens so far."""
        return len(self.tokens)

    @property
    def follow(self) -> list[tuple[int, int]]:
        """For each sequence that goes on: the sequence that it continues, and the token that it reads next."""
        return [(0, self.tokens[-1])]

    def fork(self, settings: GenerationSettings) -> Generation:
        """Returns another generation that goes on from here, with these settings. Its draws begin anew with another
        seed, or else go on. Raises SettingInvalid for another first token or other logprobs where the first token is
        written, and for beams."""
        if settings.beams > 1:
            raise SettingInvalid("beams", "come too late: the request goes on from one text")
        for name in ("first_token", "logprobs"):
            if self.tokens and getattr(settings, name) != getattr(self.settings, name):
                raise SettingInvalid(name, "can't change: the request has written its first token")
        twin = copy.copy(self)
        twin._first = first_token_of(self._spec, settings)
        twin.tokens, twin.logprobs, twin.settings = list(self.tokens), list(self.logprobs), settings
        twin.detokenizer = copy.copy(self.detokenizer)
        same = settings.seed == self.settings.seed
        twin._generator = copy.deepcopy(self._generator) if same else None
        return twin

    def cancel(self) -> None:
        self.stop_reason, self.ended = "cancelled", True

    def take(self, logits: F32) -> Piece:
        """Chooses the next token from logits [sequences, vocab], and returns it with its text; `ended` tells whether it
        is the last. Raises NotFinite."""
        token = self._choose(logits[0])
        if self.settings.logprobs is not None:
            self.logprobs.append(self._logprobs(logits[0], token, self.settings.logprobs))
        self.tokens.append(token)
        reason = self._reason_to_stop(token)
        text = "" if self.detokenizer is None else self.detokenizer.push(token)
        if reason is not None and self.detokenizer is not None:
            text += self.detokenizer.flush()
        text, found = self._before_stop_string(text, last=reason is not None)
        self.text += text
        if found or reason is not None:
            self.stop_reason = "stop_string" if found or reason is None else reason
            self.ended = True
        return Piece(token, text)

    def _choose(self, logits: F32) -> int:
        choosing.check(logits, len(self.tokens) + 1)
        if self._first is not None and not self.tokens:
            return self._first
        scores = adjusted(logits, self.settings, self._read, self.tokens)
        if self.settings.temperature == 0.0:
            return choosing.likeliest(scores)
        if self._generator is None:
            self._generator = np.random.default_rng(self.settings.seed)
        return choosing.choose(scores, self.settings, self._generator)

    def _logprobs(self, logits: F32, token: int, count: int) -> Logprobs:
        scores = log_softmax(logits)

        def likely(token: int) -> Likely:
            text = "" if self.detokenizer is None else self.detokenizer.piece(token)
            return Likely(token, text, max(float(scores[token]), _LEAST_LOGPROB))

        best = sorted(largest(scores, count), key=lambda each: (-scores[each], each))
        return Logprobs(likely(token), tuple(map(likely, best)))

    def _reason_to_stop(self, token: int) -> StopReason | None:
        if token in self._eos and not self.settings.ignore_eos:
            return "eos"
        if len(self.tokens) >= self.settings.max_new_tokens:
            return "max_new_tokens"
        if self.room is not None and len(self.tokens) >= self.room:
            return "context_full"
        return None

    def _before_stop_string(self, text: str, last: bool) -> tuple[str, bool]:
        """Returns the text that may be handed out now, and whether a stop string was found. `text`: the new text."""
        if not self.settings.stops:
            return text, False
        held = self._held + text
        places = [place for stop in self.settings.stops if (place := held.find(stop)) >= 0]
        if places:
            return held[: min(places)], True
        keep = 0 if last else longest_beginning(held, self.settings.stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False


def decoder_prompt(spec: ModelSpec, prompt_ids: list[int]) -> list[int]:
    """Returns the tokens that the decoder is given: behind an encoder, which reads the prompt, only the start token."""
    start = spec.tokens.start
    return prompt_ids if spec.encoder is None or start is None else [start]


def first_token_of(spec: ModelSpec, settings: GenerationSettings) -> int | None:
    """Returns the token that an answer has to begin with, if any. Raises SettingInvalid if that token, or one of
    `logit_bias`, is no id of the model's."""
    for biased in settings.logit_bias or ():
        if not 0 <= biased < spec.vocab_size:
            raise SettingInvalid("logit_bias", f"has the id {biased}: there are ids below {spec.vocab_size}")
    token = settings.first_token
    if token is None:
        return spec.tokens.first
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < spec.vocab_size:
        raise SettingInvalid("first_token", f"is {token!r}: it should be an id below {spec.vocab_size}")
    return token


def room(spec: ModelSpec, prompt_ids: list[int]) -> int | None:
    """Returns the number of tokens that the model can still write after this prompt; None for no limit. Raises
    InputInvalid."""
    check_ids(spec, prompt_ids)
    longest = spec.longest_prompt
    if longest is not None and len(prompt_ids) > longest:
        raise PromptTooLong(f"the prompt has {len(prompt_ids)} tokens, the model can take {longest}: shorten it")
    return spec.room(len(prompt_ids))


def check_ids(spec: ModelSpec, ids: Sequence[int]) -> None:
    """Raises InputInvalid if there are no ids, or ids outside the model's vocabulary."""
    if not ids:
        raise InputInvalid("the prompt has no tokens: give some text")
    if not all(0 <= token < spec.vocab_size for token in ids):
        raise InputInvalid(
            f"the prompt has token ids outside the model's vocabulary of {spec.vocab_size}: wrong tokenizer?"
        )


def longest_beginning(text: str, stops: Collection[str]) -> int:
    """Returns the length of the longest end of `text` that one of `stops` begins with."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class BeamGeneration:
    """A generation by beam search: like a Generation, but of several sequences at once. `tokens` and `text` are the
    beginning that all of them share; after the end, the best answer."""

    def __init__(
        self, spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None
    ) -> None:
        """Raises InputInvalid for a prompt that can't be run, and SettingInvalid for a first token that is no id of the
        model's."""
        self.room = room(spec, prompt_ids)
        self.settings, self.prompt_ids = settings, prompt_ids
        self._first, self._written = first_token_of(spec, settings), 0
        self._ends = frozenset() if settings.ignore_eos else frozenset(spec.tokens.eos)
        most = settings.max_new_tokens if self.room is None else min(settings.max_new_tokens, self.room)
        rules = BeamRules(settings.beams, most, self._ends, settings.length_penalty, settings.early_stopping)
        read = decoder_prompt(spec, prompt_ids)
        self._beams = Beams(rules, lambda scores, tokens: adjusted(scores, settings, read, tokens))
        self._fresh, self._detokenizer = detokenizer, copy.copy(detokenizer)
        self.tokens: list[int] = []
        self.text = ""
        self.stop_reason: StopReason = "interrupted"
        self.ended = False

    @property
    def written(self) -> int:
        return self._written

    @property
    def follow(self) -> list[tuple[int, int]]:
        beams = self._beams
        return [(parent, each.tokens[-1]) for parent, each in zip(beams.parents, beams.running, strict=True)]

    @property
    def results(self) -> list[GenerationResult]:
        if self.stop_reason in ("interrupted", "cancelled"):
            return [GenerationResult(list(self.tokens), self.text, self.stop_reason)]
        best, *others = self._beams.finished[: self.settings.n_return]
        first = GenerationResult(list(self.tokens), self.text, self.stop_reason, float(best.score))
        return [first, *map(self._result, others)]

    def fork(self, settings: GenerationSettings) -> BeamGeneration:
        """Raises SettingInvalid: beams can't be forked."""
        raise SettingInvalid("beams", "can't be forked: ask for another request")

    def cancel(self) -> None:
        self.stop_reason, self.ended = "cancelled", True

    def take(self, logits: F32) -> Piece:
        """Takes a step of all beams, as Generation.take does. Raises NotFinite."""
        beams = self._beams
        for row in logits:
            choosing.check(row, self._written + 1)
        beams.step(logits, None if self._written else self._first)
        self._written += 1
        self.ended = beams.over
        best = beams.finished[0] if beams.over else beams.running[0]
        new = (best.tokens if beams.over else beams.agreed)[len(self.tokens) :]
        text = _text(self._detokenizer, new, last=beams.over)
        self.tokens.extend(new)
        self.text += text
        if beams.over:
            self.stop_reason = self._reason(best)
        return Piece(best.tokens[-1], text)

    def _result(self, found: Hypothesis) -> GenerationResult:
        text = _text(copy.copy(self._fresh), found.tokens, last=True)
        return GenerationResult(list(found.tokens), text, self._reason(found), float(found.score))

    def _reason(self, found: Hypothesis) -> StopReason:
        if found.tokens[-1] in self._ends:
            return "eos"
        return "max_new_tokens" if len(found.tokens) >= self.settings.max_new_tokens else "context_full"


Writing = Generation | BeamGeneration


def writing(
    spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None
) -> Writing:
    """Returns the generation for these settings, with or without beams. Raises InputInvalid and SettingInvalid."""
    kind = Generation if settings.beams == 1 else BeamGeneration
    return kind(spec, prompt_ids, settings, detokenizer)


def _text(detokenizer: TextSource | None, tokens: tuple[int, ...], last: bool) -> str:
    if detokenizer is None:
        return ""
    return "".join(map(detokenizer.push, tokens)) + (detokenizer.flush() if last else "")
