"""One generation, token by token or by beam search: its settings, the choice of the next token, its text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from moert.engine.constraint import Constrained, Grammar
from moert.errors import Adjustable, InputInvalid, NotFinite, PromptTooLong, SettingInvalid, said
from moert.kernels.backend import I64
from moert.pack.codec import F32
from moert.pack.fence import fenced
from moert.pack.model_spec import ModelSpec

ENTRY_BYTES = 600
"""Bytes of memory for one Likely and its JSON (420 measured)."""


class Likely(NamedTuple):
    """A token, its text behind the tokens before it ("" where the prompt was token ids), and the natural logarithm of
    its probability."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """One step of an answer: the token that was chosen, and the likeliest ones, the likeliest first. The probabilities
    are the model's own: before penalties, bias, temperature and filters."""

    chosen: Likely
    likeliest: tuple[Likely, ...]


def log_softmax(logits: F32) -> F32:
    """Returns the logarithms of probabilities [vocab]."""
    shifted = logits - logits.max()
    made: F32 = shifted - np.log(np.exp(shifted).sum())
    return made


def largest(scores: F32, count: int) -> Iterable[int]:
    """Returns the places of the `count` largest scores, in any order."""
    if not count:
        return ()
    if count >= len(scores):
        return range(len(scores))
    found: list[int] = np.argpartition(scores, len(scores) - count)[-count:].tolist()
    return found


def logprobs_of(logits: F32, token: int, count: int, named: Callable[[int], str] | None) -> Logprobs:
    """Returns a token's log-probability, and the `count` likeliest of its place, from logits [vocab]. `named` gives the
    text of a token there."""
    scores = log_softmax(logits)

    def likely(token: int) -> Likely:
        return Likely(token, "" if named is None else named(token), max(float(scores[token]), _LEAST_LOGPROB))

    best = sorted(largest(scores, count), key=lambda each: (-scores[each], each))
    return Logprobs(likely(token), tuple(map(likely, best)))


def log_likelihoods(logits: F32, tokens: I64) -> F32:
    """Returns the log-probability of one token a row [rows]. `logits` [rows, vocab] are overwritten."""
    logits -= logits.max(axis=1, keepdims=True)
    right = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    np.exp(logits, out=logits)
    made: F32 = right - np.log(logits.sum(axis=1))
    return made


EarlyStopping = bool | Literal["never"]


class Hypothesis(NamedTuple):
    """The beginning of an answer, or a whole one. `score`: the sum of its tokens' log-probabilities; of an answer that
    has ended, over the number of tokens to the power of the length penalty."""

    tokens: tuple[int, ...]
    score: np.float32


@dataclass(frozen=True)
class BeamRules:
    """The rules of a beam search: `width` beams; answers end with one of `ends`, or with `most` tokens.

    Answers that have ended are final when there are `width` of them and, with `early_stopping` False, the likeliest
    beam as it is now would not be better than the last of them; with True at once; with "never" only if it would not be
    better at the length that favours it most.
    """

    width: int
    most: int
    ends: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def candidates(self) -> int:
        """Number of the likeliest next tokens that are looked at, so that `width` are left when all that can end an
        answer do."""
        return max(2, 1 + len(self.ends)) * self.width

    def final(self, score: np.float32, tokens: int) -> np.float32:
        made: np.float32 = np.float32(score / tokens**self.length_penalty)
        return made


class Beams:
    """A beam search. `running`: beginnings, the likeliest first; `parents`: for each of them, which of the beams before
    the last step it continues; `finished`: answers, the best first."""

    def __init__(self, rules: BeamRules, adjust: Callable[[F32, Sequence[int]], F32] | None = None) -> None:
        """`adjust`: from log-probabilities [vocab] and the tokens of the answer so far to the scores that count in
        their place; by default the log-probabilities count."""
        self.rules, self._adjust = rules, adjust or (lambda scores, tokens: scores)
        self.running = [Hypothesis((), np.float32(0))]
        self.parents = [0]
        self.finished: list[Hypothesis] = []
        self.over = False

    def step(self, logits: F32, forced: int | None = None) -> None:
        """Takes one step with the logits [running, vocab] of the next token; `forced`: the token that has to come
        next."""
        rules, length = self.rules, len(self.running[0].tokens) + 1
        ranked = self._ranked(logits) if forced is None else [(self.running[0].score, 0, forced)]
        going: list[tuple[int, Hypothesis]] = []
        for rank, (score, parent, token) in enumerate(ranked):
            tokens = (*self.running[parent].tokens, token)
            if token not in rules.ends and length < rules.most:
                going.append((parent, Hypothesis(tokens, score)))
            elif rank < rules.width:
                self.finished.append(Hypothesis(tokens, rules.final(score, length)))
        self.finished = sorted(self.finished, key=lambda each: -each.score)[: rules.width]
        self.parents = [parent for parent, _ in going[: rules.width]]
        self.running = [each for _, each in going[: rules.width]]
        self.over = not self.running or self._decided(length)

    @property
    def agreed(self) -> tuple[int, ...]:
        """The tokens that all running beams and finished answers begin with."""
        every = [each.tokens for each in (*self.running, *self.finished)]
        one, other = min(every), max(every)  # a beginning that these two share is shared by all between them
        return tuple(a for a, _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))

    def _ranked(self, logits: F32) -> list[tuple[np.float32, int, int]]:
        """Returns the likeliest of all next tokens: their scores, the numbers of their beams, their ids."""
        found: list[tuple[np.float32, int, int]] = []
        for parent, (row, before) in enumerate(zip(logits, self.running, strict=True)):
            scores = self._adjust(log_softmax(row), before.tokens) + before.score
            found += [(scores[token], parent, int(token)) for token in largest(scores, self.rules.candidates)]
        return sorted(found, key=lambda each: (-each[0], *each[1:]))[: self.rules.candidates]

    def _decided(self, length: int) -> bool:
        rules = self.rules
        if len(self.finished) < rules.width:
            return False
        longest = rules.early_stopping == "never" and rules.length_penalty > 0
        best = rules.final(self.running[0].score, rules.most if longest else length)
        return rules.early_stopping is True or bool(best <= self.finished[-1].score)


_MOST_BEAMS = 64
_MOST_PENALTY = 4
"""Further from 0, float32 has no numbers for the scores of long answers."""
_MOST_REPEAT, _MOST_ADDED, _MOST_BIAS, _MOST_LOGPROBS = 10.0, 2.0, 100.0, 20  # but for the first as OpenAI has them


class GenerationOptions(TypedDict, total=False):
    """The settings of a generation as arguments by name: the fields of GenerationSettings."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    first_token: int | str | None
    beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    n_return: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    json_schema: Mapping[str, Any] | bool | str | None
    grammar: Grammar | str | None


@dataclass(frozen=True)
class GenerationSettings(Adjustable):
    """The settings of a generation. With temperature 0 the likeliest token is taken each time, and the other sampling
    settings have no effect.

    `top_k` keeps the k likeliest tokens (0: all), `top_p` the smallest set of tokens that holds this much probability
    (1: all), `min_p` the tokens at least this fraction as likely as the likeliest (0: all). Text ends before `stop`, or
    before the first of several such texts, and after an end token unless `ignore_eos`. The first token of an answer is
    `first_token`, an id or the tokenizer's name for it; by default the one that the pack names, if any: for a model
    that translates, the language.

    With more than one of `beams`, this many beginnings go on at a time, and the `n_return` likeliest answers are
    returned: by the sum of their tokens' log-probabilities over the number of tokens to the power of `length_penalty`
    (above 0 favours long ones). `early_stopping`: True ends as soon as the answers are as many as the beams, False when
    the likeliest beam does not look better than the answers, "never" when it can't become better.

    Before a token is chosen, its logit gets the value that `logit_bias` has for its id, is divided by `repeat_penalty`
    (multiplied below 0) if the token stands in the prompt or the answer (behind an encoder in the answer alone), and
    loses `frequency_penalty` for each time that the token stands in the answer, and `presence_penalty` once if it does.
    With beams all this is done to log-probabilities, as in transformers. `logprobs`: how many of the likeliest tokens
    are listed at each place beside the chosen one, with the model's own probabilities.

    With `json_schema` (a JSON schema, or its text) the answer is JSON that the schema allows, unless it is cut short;
    with `grammar` it is a text of that grammar (moert.engine.constraint.Grammar; text is one of Lark, as llguidance
    knows it, and `start: /[0-9]+/` is a regular expression). Tokens that can't come next are left out before one is
    chosen, and end tokens come only where the grammar may end. In a conversation both bind the answer and not the
    thinking before it. Both need the extra serve. Raises SettingInvalid.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    first_token: int | str | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n_return: int = 1
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | bool | str | None = None
    grammar: Grammar | str | None = None

    @cached_property
    def constraint(self) -> Grammar | None:
        """The grammar of the answer, if it has one."""
        if self.json_schema is not None:
            return Grammar.of_schema(self.json_schema)
        return Grammar("lark", self.grammar) if isinstance(self.grammar, str) else self.grammar

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return bool(self._changed("repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias"))

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def without_effect(self) -> list[str]:
        """Names of settings that were changed and have no effect: those of sampling at temperature 0."""
        return [] if self.temperature != 0.0 else self._changed("top_k", "top_p", "min_p", "seed")

    def __post_init__(self) -> None:
        self.check_types()
        self._check_sampling()
        self._check_adjusting()
        self._check_beams()
        self._check_constraint()

    def _check_beams(self) -> None:
        if not 1 <= self.beams <= _MOST_BEAMS:
            raise SettingInvalid("beams", f"is {self.beams}: it should be between 1 and {_MOST_BEAMS}")
        if not abs(self.length_penalty) <= _MOST_PENALTY:
            raise SettingInvalid(
                "length_penalty",
                f"is {self.length_penalty}: it should be from -{_MOST_PENALTY} to {_MOST_PENALTY}, 0 for none",
            )
        if self.beams == 1:
            for name in self._changed("length_penalty", "early_stopping", "n_return"):
                raise SettingInvalid(name, "is of beam search: give the number of beams, 2 or more")
            return
        if not 1 <= self.n_return <= self.beams:
            raise SettingInvalid("n_return", f"is {self.n_return}: it should be between 1 and the {self.beams} beams")
        barred = self._changed("temperature", "logprobs", "json_schema", "grammar")
        for name in [*barred, *(["stop"] if self.stops else [])]:
            raise SettingInvalid(name, "does not go with beam search: leave one of both out")

    def _check_constraint(self) -> None:
        if self.json_schema is not None and self.grammar is not None:
            raise SettingInvalid("json_schema", f"and {said('grammar')} exclude each other: give one of both")
        if self.constraint is not None and self.ignore_eos:
            raise SettingInvalid("ignore_eos", f"does not go with {said(self.constraint.setting)}, which ends answers")

    def _changed(self, *names: str) -> list[str]:
        return [each.name for each in fields(self) if each.name in names and getattr(self, each.name) != each.default]

    def _check_adjusting(self) -> None:
        if not 1 / _MOST_REPEAT <= self.repeat_penalty <= _MOST_REPEAT:
            raise SettingInvalid(
                "repeat_penalty",
                f"is {self.repeat_penalty}: it should be from {1 / _MOST_REPEAT} to {_MOST_REPEAT}, 1 for none",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= _MOST_ADDED:
                raise SettingInvalid(
                    name, f"is {getattr(self, name)}: it should be from -{_MOST_ADDED} to {_MOST_ADDED}, 0 for none"
                )
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or not abs(bias) <= _MOST_BIAS:
                raise SettingInvalid(
                    "logit_bias",
                    f"has {token!r}: {bias!r}: give ids of tokens with values from -{_MOST_BIAS} to {_MOST_BIAS}",
                )
        if self.logprobs is not None and not 0 <= self.logprobs <= _MOST_LOGPROBS:
            raise SettingInvalid("logprobs", f"is {self.logprobs}: it should be between 0 and {_MOST_LOGPROBS}")

    def _check_sampling(self) -> None:
        if self.max_new_tokens < 1:
            raise SettingInvalid("max_new_tokens", f"is {self.max_new_tokens}: it should be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SettingInvalid("temperature", f"is {self.temperature}: it should be 0 (greedy) or more")
        if self.top_k < 0:
            raise SettingInvalid("top_k", f"is {self.top_k}: it should be 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise SettingInvalid("top_p", f"is {self.top_p}: it should be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SettingInvalid("min_p", f"is {self.min_p}: it should be between 0 and 1")
        if not 0 <= self.seed < 1 << 63:
            raise SettingInvalid("seed", f"is {self.seed}: it should be between 0 and 2**63 - 1")
        if any(not text for text in self.stops):
            raise SettingInvalid("stop", "has an empty stop string: every answer would end at once")


def adjusted(scores: F32, settings: GenerationSettings, read: Sequence[int], written: Sequence[int]) -> F32:
    """Returns scores [vocab] with bias, then penalties; the same array where the settings have none. `read`: tokens
    that the decoder was given, `written`: tokens of the answer so far.

    The repetition penalty is CTRL's (Keskar et al. 2019, arXiv 1909.05858) as in transformers; the penalties of
    presence and frequency are OpenAI's.
    """
    if not settings.adjusts:
        return scores
    made: F32 = scores.copy()
    for token, bias in (settings.logit_bias or {}).items():
        made[token] += np.float32(bias)
    if settings.repeat_penalty != 1.0:
        penalty, seen = np.float32(settings.repeat_penalty), np.array([*read, *written], np.int64)
        there = made[seen]
        made[seen] = np.where(there < 0, there * penalty, there / penalty)
    if written and (settings.presence_penalty or settings.frequency_penalty):
        tokens, counts = np.unique(np.array(written, np.int64), return_counts=True)
        made[tokens] -= (settings.presence_penalty + settings.frequency_penalty * counts).astype(np.float32)
    return made


_MANY, _LONGEST_S = 1 << 21, 600.0


def choose(logits: F32, settings: GenerationSettings, generator: np.random.Generator) -> int:
    """Returns the id of a token, drawn by the logits [vocab] among the tokens that the settings leave."""
    below = np.cumsum(softmax(filtered(logits, settings)), dtype=np.float64)
    return int(np.searchsorted(below, generator.random() * below[-1], side="right"))


def filtered(logits: F32, settings: GenerationSettings) -> F32:
    """Returns logits [vocab] over the temperature, minus infinity where a filter refuses a token."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scores: F32 = logits / np.float32(settings.temperature)
    if not np.isfinite(scores).all():  # so cold that float32 overflows: only distances to the largest matter
        with np.errstate(over="ignore"):
            scores = ((logits.astype(np.float64) - logits.max()) / settings.temperature).astype(np.float32)
    if settings.top_k:
        scores = keep_top_k(scores, settings.top_k)
    if settings.top_p < 1.0:
        scores = keep_top_p(scores, settings.top_p)
    if settings.min_p > 0.0:
        scores = keep_min_p(scores, settings.min_p)
    return scores


def keep_top_k(scores: F32, k: int) -> F32:
    """Returns the scores [vocab] with minus infinity for all but the k largest, and any equal to the last of these."""
    k = min(k, len(scores))
    smallest = np.partition(scores, len(scores) - k)[len(scores) - k]
    kept: F32 = np.where(scores < smallest, np.float32(-np.inf), scores)
    return kept


def keep_top_p(scores: F32, p: float) -> F32:
    """Returns the scores [vocab] with minus infinity for all but the likeliest tokens that together hold a probability
    of p, at least one."""
    order = ordered(scores)
    below = np.cumsum(softmax(scores[order])) <= np.float32(1 - p)
    below[-1] = False
    kept: F32 = scores.copy()
    kept[order[below]] = -np.inf
    return kept


def ordered(scores: F32) -> npt.NDArray[np.intp]:
    """Returns the places of the scores from the smallest on, the first of equal ones first. Ctrl-C works where that
    takes long."""
    if len(scores) < _MANY:
        return np.argsort(scores, kind="stable")
    return fenced(lambda: np.argsort(scores, kind="stable"), _LONGEST_S)


def keep_min_p(scores: F32, p: float) -> F32:
    """Returns the scores [vocab] with minus infinity for tokens less than p times as likely as the likeliest one."""
    probabilities = softmax(scores)
    kept: F32 = np.where(probabilities < np.float32(p) * probabilities.max(), np.float32(-np.inf), scores)
    return kept


def softmax(scores: F32) -> F32:
    powers = np.exp(scores - scores.max())
    shares: F32 = powers / powers.sum()
    return shares


def check_finite(logits: F32, number: int, what: str = "answer") -> None:
    """Raises NotFinite for token `number` of an answer, or of a text, where the largest of its logits is not finite, as
    it is where any of them is NaN."""
    if not np.isfinite(logits.max()):
        raise NotFinite(
            f"the model computes numbers that are not finite for token {number} of the {what}: its weights or factors "
            "are damaged or were never those of a model (moeconv verify PACK checks all of them)"
        )


_LEAST_LOGPROB = -1e9  # where a logit is minus infinity, which JSON has no number for
StopReason = Literal["eos", "stop_string", "max_new_tokens", "context_full", "grammar", "cancelled", "interrupted"]


class TextSource(Protocol):
    """A converter of token ids to text; see `moert.engine.text.Detokenizer`. A copy goes on by itself."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...

    def piece(self, token: int) -> str: ...


@dataclass(frozen=True)
class Piece:
    """One step: the token, with a draft the last of several, and the text that is certain after it (often, but not
    always, the tokens' own)."""

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
    stop: str | None = None
    """The stop string that was found, the first in the settings of those at its place."""


class Generation:
    """A generation that a session runs, alone or together with others; `results` can be read at any time.

    Before its end the stop reason is "interrupted".
    """

    def __init__(
        self, spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None,
        ends: frozenset[int] = frozenset(), constrained: Constrained | None = None,
    ) -> None:  # fmt: skip
        """`ends`: tokens that end the text beside the model's own; `constrained` knows both.

        Raises InputInvalid for a prompt that can't be run, and SettingInvalid for stop strings without a detokenizer,
        and for a first token, which is an id here, or tokens with a bias that are not the model's.
        """
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
        self._stop: str | None = None  # the stop string that was found
        self._constrained = constrained
        self.drawn: tuple[Piece, StopReason | None] | None = None
        """The token that was chosen, until `piece` returns it."""
        self._generator: np.random.Generator | None = None  # most texts draw nothing, and its code takes memory

    @property
    def results(self) -> list[GenerationResult]:
        """One result, or with beam search as many as were requested, the best first."""
        logprobs = None if self.settings.logprobs is None else list(self.logprobs)
        return [GenerationResult(list(self.tokens), self.text, self.stop_reason, logprobs=logprobs, stop=self._stop)]

    @property
    def written(self) -> int:
        """Number of tokens so far."""
        return len(self.tokens)

    @property
    def left(self) -> int:
        """Number of tokens that may still come."""
        most = self.settings.max_new_tokens
        return (most if self.room is None else min(most, self.room)) - len(self.tokens)

    @property
    def follow(self) -> tuple[Sequence[int], list[Sequence[int]]]:
        """For each sequence that goes on: the sequence that it continues, and the tokens that it reads next."""
        return (0,), [self.tokens[-1:]]

    def fork(self, settings: GenerationSettings) -> Generation:
        """Returns another generation that goes on from here, with these settings. Its draws begin anew with another
        seed, or else go on. Raises SettingInvalid for another first token or other logprobs where the first token is
        written, and for beams."""
        if settings.beams > 1:
            raise SettingInvalid("beams", "come too late: the request goes on from one text")
        if settings.constraint != self.settings.constraint:
            name = (settings.constraint or self.settings.constraint or Grammar("json_object")).setting
            raise SettingInvalid(name, "can't change: the request has begun with another one")
        for name in ("first_token", "logprobs"):
            if self.tokens and getattr(settings, name) != getattr(self.settings, name):
                raise SettingInvalid(name, "can't change: the request has written its first token")
        twin = copy.copy(self)
        twin._first = first_token_of(self._spec, settings)
        twin.tokens, twin.logprobs, twin.settings = list(self.tokens), list(self.logprobs), settings
        twin.detokenizer = copy.copy(self.detokenizer)
        twin._constrained = copy.copy(self._constrained)
        same = settings.seed == self.settings.seed
        twin._generator = copy.deepcopy(self._generator) if same else None
        return twin

    def cancel(self) -> None:
        self.stop_reason, self.ended = "cancelled", True

    def draw(self, logits: F32) -> None:
        """Chooses the next token from logits [sequences, vocab], which `piece` returns. Raises NotFinite."""
        token = self._choose(logits[0])
        if self.settings.logprobs is not None:
            named = None if self.detokenizer is None else self.detokenizer.piece
            self.logprobs.append(logprobs_of(logits[0], token, self.settings.logprobs, named))
        self.tokens.append(token)
        text = "" if self.detokenizer is None else self.detokenizer.push(token)
        reason = self._reason_to_stop(token)
        forced = self._first is not None and len(self.tokens) == 1
        if reason is None and self._constrained is not None and not forced:
            self._constrained.take(token, text)
        self.drawn = Piece(token, text), reason

    def piece(self, within_s: float | None = None) -> Piece | None:
        """Returns the token that was drawn, once, with its text; `ended` tells whether it is the last. None where no
        token was drawn, or where the grammar needs more seconds to know the tokens that come next."""
        if self.drawn is None or (self._constrained is not None and not self._constrained.ready(within_s)):
            return None
        (drawn, reason), self.drawn = self.drawn, None
        text = drawn.text
        if reason is None and self._constrained is not None and self._constrained.stuck:
            reason = "eos" if self._constrained.complete else "grammar"
        if reason is not None and self.detokenizer is not None:
            text += self.detokenizer.flush()
        found = False
        if self.settings.stops:
            text, found = self._before_stop_string(text, last=reason is not None)
        self.text += text
        if found or reason is not None:
            self.stop_reason = "stop_string" if found or reason is None else reason
            self.ended = True
        return Piece(drawn.token, text)

    def _choose(self, logits: F32) -> int:
        check_finite(logits, len(self.tokens) + 1)
        if self._first is not None and not self.tokens:
            return self._first
        scores = logits
        if self.settings.adjusts:
            scores = adjusted(logits, self.settings, self._read, self.tokens)
        if self._constrained is not None:
            scores = self._constrained.masked(scores)
        if self.settings.temperature == 0.0:
            return int(scores.argmax())  # the smallest id among equals
        if self._generator is None:
            self._generator = np.random.default_rng(self.settings.seed)
        return choose(scores, self.settings, self._generator)

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
        held = self._held + text
        places = [(place, stop) for stop in self.settings.stops if (place := held.find(stop)) >= 0]
        if places:
            place, self._stop = min(places, key=lambda found: found[0])
            return held[:place], True
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
        self._first, self.written = first_token_of(spec, settings), 0
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
        self.drawn: Piece | None = None

    @property
    def left(self) -> int:
        return self._beams.rules.most - self.written

    @property
    def follow(self) -> tuple[Sequence[int], list[Sequence[int]]]:
        return self._beams.parents, [each.tokens[-1:] for each in self._beams.running]

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

    def draw(self, logits: F32) -> None:
        """Takes a step of all beams, as Generation.draw does. Raises NotFinite."""
        beams = self._beams
        for row in logits:
            check_finite(row, self.written + 1)
        beams.step(logits, None if self.written else self._first)
        self.written += 1
        self.ended = beams.over
        best = beams.finished[0] if beams.over else beams.running[0]
        new = (best.tokens if beams.over else beams.agreed)[len(self.tokens) :]
        text = _text(self._detokenizer, new, last=beams.over)
        self.tokens.extend(new)
        self.text += text
        if beams.over:
            self.stop_reason = self._reason(best)
        self.drawn = Piece(best.tokens[-1], text)

    def piece(self, within_s: float | None = None) -> Piece | None:
        drawn, self.drawn = self.drawn, None
        return drawn

    def _result(self, found: Hypothesis) -> GenerationResult:
        text = _text(copy.copy(self._fresh), found.tokens, last=True)
        return GenerationResult(list(found.tokens), text, self._reason(found), float(found.score))

    def _reason(self, found: Hypothesis) -> StopReason:
        if found.tokens[-1] in self._ends:
            return "eos"
        return "max_new_tokens" if len(found.tokens) >= self.settings.max_new_tokens else "context_full"


Writing = Generation | BeamGeneration


def writing(
    spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None,
    constrained: Constrained | None = None,
) -> Writing:  # fmt: skip
    """Returns the generation for these settings, with or without beams. Raises InputInvalid and SettingInvalid."""
    if settings.beams == 1:
        return Generation(spec, prompt_ids, settings, detokenizer, constrained=constrained)
    return BeamGeneration(spec, prompt_ids, settings, detokenizer)


def _text(detokenizer: TextSource | None, tokens: tuple[int, ...], last: bool) -> str:
    if detokenizer is None:
        return ""
    return "".join(map(detokenizer.push, tokens)) + (detokenizer.flush() if last else "")
