"""Beam search: which beginnings of an answer go on, and when it is over, as transformers has it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np

from moert.generation.likelihood import largest, log_softmax
from moert.pack.codec import F32

EarlyStopping = bool | Literal["never"]


class Hypothesis(NamedTuple):
    """`score`: the sum of the logarithms of what its tokens were likely; of one that has ended, over the number of
    tokens to the power of the length penalty."""

    tokens: tuple[int, ...]
    score: np.float32


@dataclass(frozen=True)
class BeamRules:
    """`width` beams; answers end with one of `ends`, or with `most` tokens.

    What has ended is final when there are `width` such answers and, with `early_stopping` False, the likeliest beam as
    it is now would not be better than the last of them; with True at once; with "never" only if it would not be better
    at the length that favours it most.
    """

    width: int
    most: int
    ends: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def candidates(self) -> int:
        """How many of the likeliest next tokens are looked at, so that `width` are left when all that can end do."""
        return max(2, 1 + len(self.ends)) * self.width

    def final(self, score: np.float32, tokens: int) -> np.float32:
        made: np.float32 = np.float32(score / tokens**self.length_penalty)
        return made


class Beams:
    """`running`: beginnings, the likeliest first, and `parents`: which of the beams before the last step each goes on
    from; `finished`: answers, the best first."""

    def __init__(self, rules: BeamRules, adjust: Callable[[F32, Sequence[int]], F32] | None = None) -> None:
        """`adjust`: from the logarithms [vocab] of probabilities behind some tokens of an answer to what counts in
        their place; by default they count themselves."""
        self.rules, self._adjust = rules, adjust or (lambda scores, tokens: scores)
        self.running = [Hypothesis((), np.float32(0))]
        self.parents = [0]
        self.finished: list[Hypothesis] = []
        self.over = False

    def step(self, logits: F32, forced: int | None = None) -> None:
        """logits [running, vocab] of what comes next; `forced`: the token that has to."""
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
        """The tokens that all which may be given yet begin with."""
        every = [each.tokens for each in (*self.running, *self.finished)]
        one, other = min(every), max(every)  # what these begin with, those between them do
        return tuple(a for a, _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))

    def _ranked(self, logits: F32) -> list[tuple[np.float32, int, int]]:
        """The likeliest of all next tokens, with the scores and numbers of their beams."""
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
