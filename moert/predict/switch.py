"""Does reading ahead pay? Tokens with it and tokens without it are timed in turn, and the quicker way is kept. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

_WARM_TOKENS = 32  # before the first trial, while the cache fills
_BLOCK_TOKENS = 4  # timed together, so that rare long stalls count and single outliers don't
_PERIOD_TOKENS = (8, 16, 32, 64)  # in the stages of a trial
_CLEAR = 3.0  # standard deviations
_GAIN = 0.99  # what is kept without clear evidence must at least take 1% less time
_PAUSE = 32  # tokens without a trial for each token that the trial gave to the losing side
_MOST_DOUBLINGS = 6


class Switch:
    """`on` says whether the next token is to run with reading ahead.

    A trial times tokens with and without reading ahead, in up to four stages. Each stage has four periods in the order
    present, other, other, present, so that a steady drift adds as much to both. After each stage a rank test (Mann and
    Whitney 1947) over blocks of tokens decides if it is clear; after the last the smaller median does, and a draw
    switches reading ahead off. The winner then runs for 32 times as many tokens as the loser had, and twice as many
    each time that it wins again, up to 2,048 times. So the slower way gets 48 to 240 tokens of the first trial, 3% of
    those after it, and one in 2,000 while the same way goes on winning.
    """

    def __init__(self) -> None:
        self.on = True
        self._blocks: dict[bool, list[float]] = {True: [], False: []}
        self._block_s, self._in_block = 0.0, 0
        self._winner = True
        self._wins = 0  # of the same way, one after the other
        self._stage: int | None = None  # of a trial
        self._period = 0
        self._left = _WARM_TOKENS

    def token(self, seconds: float) -> None:
        """One generated token took so many seconds, run with or without reading ahead as `on` said. Tokens of a prompt
        are not reported."""
        if self._stage is not None:
            self._block_s += seconds
            self._in_block += 1
            if self._in_block == _BLOCK_TOKENS:
                self._blocks[self.on].append(self._block_s)
                self._block_s, self._in_block = 0.0, 0
        self._left -= 1
        if not self._left:
            self._turn()

    def _turn(self) -> None:
        """Begins what comes after a period of timing or a pause."""
        if self._stage is None:
            self._blocks = {True: [], False: []}
            self._begin(0)
        elif self._period == 3:
            self._judge(self._stage)
        else:
            self._period += 1
            self.on = self._winner if self._period == 3 else not self._winner
            self._left = _PERIOD_TOKENS[self._stage]

    def _begin(self, stage: int) -> None:
        self._stage, self._period, self._left = stage, 0, _PERIOD_TOKENS[stage]

    def _judge(self, stage: int) -> None:
        slower = rank_test(self._blocks[True], self._blocks[False])
        if abs(slower) >= _CLEAR:
            self._keep(slower < 0)
        elif stage + 1 == len(_PERIOD_TOKENS):
            self._keep(bool(np.median(self._blocks[True]) < _GAIN * np.median(self._blocks[False])))
        else:
            self._begin(stage + 1)

    def _keep(self, on: bool) -> None:
        self._wins = self._wins + 1 if on is self._winner else 0
        self._stage, self._winner, self.on = None, on, on
        lost = len(self._blocks[not on]) * _BLOCK_TOKENS
        self._left = (_PAUSE * lost) << min(self._wins, _MOST_DOUBLINGS)


def rank_test(these: Sequence[float], those: Sequence[float]) -> float:
    """How many standard deviations `these` are larger than `those`, by the ranks of both (normal approximation)."""
    ordered = sorted(those)
    above = sum((bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in these)
    n, m = len(these), len(those)
    return float((above - n * m / 2) / (n * m * (n + m + 1) / 12) ** 0.5)
