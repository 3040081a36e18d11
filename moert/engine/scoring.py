"""The likelihood of a given text under a model: each token's log-probability, and perplexity over tokens and over
words. And a text's embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from moert.engine import generation
from moert.engine.generation import Logprobs, check_ids, log_likelihoods, logprobs_of
from moert.engine.session import Gate
from moert.engine.text import LONG_TEXT, Encoded, Text
from moert.errors import InputInvalid, PromptTooLong, SettingInvalid, memory_shortage, said
from moert.kernels.backend import ROWS
from moert.models.footprint import Load
from moert.models.model import Model
from moert.pack.codec import F32

_LOGIT_BYTES = 8 << 20
_LEAST_LENGTH = 1e-12
Pooling = Literal["mean", "last"]
POOLINGS = get_args(Pooling)
"""Ways to make one vector of the hidden states of a text."""
_LARGEST_EXPONENT = 600.0  # a perplexity beyond this is as bad as any, and still a finite number


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a text. `log_likelihood` in nats (natural logarithm), of `scored` tokens, in which `words` end:
    pieces between white space; None where texts were given as token ids."""

    log_likelihood: float
    scored: int
    words: int | None

    @property
    def token_perplexity(self) -> float:
        return self._perplexity(self.scored)

    @property
    def word_perplexity(self) -> float | None:
        """Perplexity over words instead of tokens, so that it does not depend on the tokenizer; None where no word
        ends."""
        return self._perplexity(self.words) if self.words else None

    def __add__(self, other: Likelihood) -> Likelihood:
        words = None if self.words is None or other.words is None else self.words + other.words
        return Likelihood(self.log_likelihood + other.log_likelihood, self.scored + other.scored, words)

    def _perplexity(self, units: int) -> float:
        return math.exp(min(-self.log_likelihood / units, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class Score(Likelihood):
    """The likelihood of a text and of each of its tokens. `logprobs`: for each of `tokens` the natural logarithm of its
    probability behind the tokens before it in its window, None for a token that is only read and not scored."""

    tokens: list[int]
    logprobs: list[float | None]
    windows: int = 1


class Scorer:
    """A scorer of texts; not for use while a session is open."""

    def __init__(self, model: Model, text: Text, gate: Gate) -> None:
        self._model, self._text, self._gate = model, text, gate

    def score(self, text: str | Sequence[int], target: str | Sequence[int] | None, context: int | None) -> Score:
        """Scores a text behind its first token (mostly a special one, which the tokenizer adds); behind an encoder,
        which reads the text, scores `target`. With a `context` texts are cut into windows of this many tokens, without
        special ones, and the first token of each window is not scored, as moeconv measures perplexity; the last window
        reaches back.

        Raises InputInvalid, PromptTooLong, SettingInvalid, TokenizerMissing, BudgetTooSmall, NotFinite or PackError.
        """
        if self._model.spec.encoder is not None:
            return self._behind_encoder(text, target, context)
        if target is not None:
            raise InputInvalid("a target is for models with an encoder: this one scores all of the text itself")
        encoded = self._encoded(text, context is not None) if isinstance(text, str) else None
        ids = self._text.ids(text, self._aside) if encoded is None else encoded.ids
        self._check(ids, context)
        parts = windows(len(ids), context)
        logprobs: list[float | None] = [None] * len(ids)
        with self._admitted(Load(max(stop - start for start, stop, _ in parts), 1, scored=self._rows)):
            for start, stop, fresh in parts:
                found = self._read(ids[start:stop], None, ids[start + 1 : stop])
                logprobs[stop - fresh : stop] = found[len(found) - fresh :]
        words = None if encoded is None else sum(encoded.words(stop - fresh, stop) for _, stop, fresh in parts)
        return _score(ids, logprobs, words, len(parts))

    def steps(self, text: str | Sequence[int], count: int, further: int) -> list[tuple[int, str, Logprobs | None]]:
        """Returns of each token of a text, as one window, its id, its own text, and its log-probability with those of
        the `count` likeliest in its place; None for the first token. `further` 1 adds the likeliest next token. Raises
        the errors of `score`."""
        if self._model.spec.encoder is not None:
            raise InputInvalid("this model reads with an encoder: its input has no log-probabilities")
        ids = self._text.ids(text, self._aside)
        check_ids(self._model.spec, ids)
        self._check_length(ids, further)
        names, found = self._text.detokenizer(), list[tuple[int, str, Logprobs | None]]()

        def add(token: int, row: F32 | None) -> None:
            step = None if row is None else logprobs_of(row, token, count, names.piece)
            found.append((token, names.piece(token), step))
            names.push(token)

        add(ids[0], None)
        with self._admitted(Load(len(ids), 1, scored=self._rows)):
            for rows in self._model.rows(ids, None, self._rows):
                for row in rows:
                    generation.check_finite(row, len(found) + 1, "text")
                    if len(found) < len(ids) + further:
                        at = len(found)
                        add(ids[at] if at < len(ids) else int(row.argmax()), row)
        return found

    def embeddings(self, texts: Sequence[str | Sequence[int]], pooling: Pooling) -> list[F32]:
        """Returns one vector [d_model] of length 1 for each text: the mean of its tokens' hidden states behind the last
        norm, or the last one of them. As many texts are read in one pass as fit into memory. Raises the errors of
        `score`."""
        spec = self._model.spec
        if spec.encoder is not None:
            raise InputInvalid("this model reads with an encoder: only texts of other models have embeddings")
        if pooling not in POOLINGS:
            raise SettingInvalid("pooling", f"is {pooling!r}: it should be one of {', '.join(POOLINGS)}")
        prompts = [self._text.ids(text, self._aside) for text in texts]
        for ids in prompts:
            check_ids(spec, ids)
            self._check_length(ids)
        found: list[F32] = []
        while left := prompts[len(found) :]:
            loads = [Load(len(ids), 1) for ids in left]
            count = max(1, self._gate.together((), loads))
            with self._admitted(*loads[:count]):
                found += self._embedded(left[:count], pooling)
        return found

    def _embedded(self, prompts: Sequence[Sequence[int]], pooling: Pooling) -> Iterator[F32]:
        """Yields the embeddings of prompts that are read in one pass."""
        sums, read = np.zeros((len(prompts), self._model.spec.d_model)), [0] * len(prompts)
        for place, rows in self._model.hidden(prompts):
            read[place] += len(rows)
            generation.check_finite(np.abs(rows), read[place], "text")
            sums[place] = sums[place] + rows.sum(0, dtype=np.float64) if pooling == "mean" else rows[-1]
        for each in sums:
            yield (each / max(float(np.linalg.norm(each)), _LEAST_LENGTH)).astype(np.float32)

    def _behind_encoder(
        self, text: str | Sequence[int], target: str | Sequence[int] | None, context: int | None
    ) -> Score:
        if context is not None:
            raise SettingInvalid("context", "has no effect behind an encoder, which reads a text whole: leave it out")
        if target is None:
            raise InputInvalid("this model reads with an encoder: give a target, the text that is scored behind it")
        spec = self._model.spec
        ids = self._text.ids(text, self._aside)
        found = self._target(target) if isinstance(target, str) else self._text.ids(target, self._aside)
        self._check(ids, None)
        self._check(found, None)
        with self._admitted(Load(len(ids) + len(found), 1, scored=self._rows)):
            logprobs = self._read(ids, [spec.tokens.start or 0, *found[:-1]], found)
        return _score(found, [*logprobs], len(target.split()) if isinstance(target, str) else None, 1)

    def _target(self, text: str) -> list[int]:
        """Returns the tokens of a target as the model is to write it: where answers begin with a token of their own,
        that stands in place of the special tokens that the tokenizer puts before an input."""
        encoded, first = self._encoded(text), self._model.spec.tokens.first
        return encoded.ids if first is None else [first, *encoded.ids[encoded.special_before :]]

    def _encoded(self, text: str, whole: bool = False) -> Encoded:
        return self._text.encoded(text, whole, self._aside, bounded=False)

    @contextmanager
    def _aside(self, nbytes: int) -> Iterator[None]:
        """Makes room for turning a text into tokens."""
        self._gate.aside(nbytes, LONG_TEXT)
        yield

    def _check(self, ids: Sequence[int], context: int | None) -> None:
        check_ids(self._model.spec, ids)
        most, alone = self._model.spec.max_positions, self._model.spec.encoder is None
        if context is not None and (context < 2 or (most is not None and context > most)):
            raise SettingInvalid("context", f"is {context}: it should be from 2 to the {most or 'any number of'} "
                                 "tokens that the model can take")  # fmt: skip
        if alone and len(ids) < 2:
            raise InputInvalid("the text has only one token, and no token before it to predict it from: give more text")
        if context is None:
            advice = f"give {said('context', most)} to score it in windows" if alone else "shorten it"
            self._check_length(ids, advice=advice)

    def _check_length(self, ids: Sequence[int], further: int = 0, advice: str = "shorten it") -> None:
        most = self._model.spec.max_positions
        if most is not None and len(ids) + further > most:
            raise PromptTooLong(f"the text has {len(ids)} tokens, the model can take {most - further}: {advice}")

    @property
    def _rows(self) -> int:
        """Rows of logits that are computed at once."""
        return max(1, min(ROWS, _LOGIT_BYTES // (4 * self._model.spec.vocab_size)))

    @contextmanager
    def _admitted(self, *loads: Load) -> Iterator[None]:
        try:
            with memory_shortage():
                self._gate.before(loads)
                yield
        finally:
            self._gate.passed()
            self._gate.idle()

    def _read(self, ids: Sequence[int], read: Sequence[int] | None, wanted: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token of `wanted`, which the decoder writes in turn."""
        targets, found = np.array(wanted, np.int64), list[float]()
        for rows in self._model.rows(ids, read, self._rows):
            rows = rows[: len(targets) - len(found)]  # nobody needs the row behind the last token
            for at, row in enumerate(rows):
                generation.check_finite(row, len(found) + at + 1, "text")
            found += log_likelihoods(rows, targets[len(found) :][: len(rows)]).tolist()
        return found


def windows(tokens: int, context: int | None) -> list[tuple[int, int, int]]:
    """Returns for each window of a text its first token, its end, and how many of its last tokens are scored: all but
    the first, or in the last window the tokens that were not scored yet."""
    if context is None or tokens <= context:
        return [(0, tokens, tokens - 1)]
    whole, rest = divmod(tokens, context)
    found = [(at * context, (at + 1) * context, context - 1) for at in range(whole)]
    return [*found, (tokens - context, tokens, rest)] if rest else found


def _score(tokens: list[int], logprobs: list[float | None], words: int | None, count: int) -> Score:
    there = [each for each in logprobs if each is not None]
    return Score(math.fsum(there), len(there), words, tokens, logprobs, count)
