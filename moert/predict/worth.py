"""What a prediction is worth: which predicted experts are read ahead, and whether any are. Pure.

A read that was predicted rightly saves the time by which it began early. One that was predicted wrongly costs what is
left of it when the router has spoken, if something else is to be read then, and the room that it took.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moert.predict.switch import Switch
from moert.stats import ReadAhead

_MOST = 16  # candidates that are looked at
_BUCKETS = 10
_PRIOR = 8  # observations that a predictor's own claim counts for
_MEMORY = 256  # observations of a bucket after which old ones fade
_WASTE = 0.25  # of a read: what its room was worth to the expert that had to leave
_HASTE = 0.1  # of a read: what it saves at least if begun just before the router speaks
_PACE = 1e-9  # seconds per byte, until the drive was heard of
_WINDOW_RATE, _DRIVE_RATE, _MISSED_RATE = 1 / 16, 1 / 8, 1 / 64
_LACKING_RATE, _ASKING_RATE = 1 / 8, 1 / 16


class Worth:
    """For each layer of each token, in this order: does it pay to ask (`asks`)? what is `wanted`? how long has that
    taken (`asked`)? `observe` what the router says, and tell what the layer `lacked`.

    After each token: `drive`, `token`. Where the predictor was not asked, `observe` does nothing.
    """

    def __init__(self) -> None:
        self.figures = ReadAhead()
        self._switch = Switch()
        self._pace: float | None = None
        self._window_s: float | None = None
        self._asking_s = 0.0  # what a question takes
        self._lacking_bytes: float | None = None  # of a layer, when it would be asked about
        self._missed = 0.5  # share of layers that still read something when the router has spoken
        self._rates = [min(1.0, (at + 0.5) / _BUCKETS) for at in range(_BUCKETS + 1)]
        self._seen = [_PRIOR] * (_BUCKETS + 1)
        self._asked: Sequence[tuple[int, float]] | None = None
        self._nbytes: Sequence[int] = ()
        self._busy_s = 0.0  # what reading all that was wanted takes

    def asks(self) -> bool:
        """Whether a question can pay: reading what the next layer is likely to lack must take longer than asking."""
        if not self._switch.on:
            return False
        lacking = self._lacking_bytes
        return lacking is None or lacking * (self._pace or _PACE) > self._asking_s

    def asked(self, seconds: float) -> None:
        """Asking the predictor once took so many seconds."""
        self._asking_s = self._asking_s + _ASKING_RATE * (seconds - self._asking_s) if self._asking_s else seconds

    def lacked(self, nbytes: int) -> None:
        """So many bytes of what a layer demands were not in memory when the predictor could have been asked."""
        known = self._lacking_bytes
        self._lacking_bytes = nbytes if known is None else known + _LACKING_RATE * (nbytes - known)

    def wanted(self, ranked: Sequence[tuple[int, float]], nbytes: Sequence[int]) -> list[int]:
        """Which to read ahead, in this order.

        `ranked`: (expert, claimed probability) of those that are not in memory, most probable first; nbytes
        [num_experts] of that layer's experts.
        """
        if not self._switch.on:
            self._asked = None
            return []
        self._asked, self._nbytes = ranked[:_MOST], nbytes
        self._busy_s = 0.0
        return self._chosen(self._asked, nbytes, self._window_s or 0.0)

    def further(self, ranked: Sequence[tuple[int, float]], nbytes: Sequence[int], layers: int) -> list[int]:
        """After `wanted`, the same for a layer that is `layers` ahead, once what was wanted so far is read."""
        return self._chosen(ranked[:_MOST], nbytes, layers * (self._window_s or 0.0))

    @property
    def busy_layers(self) -> float:
        """For how many layers the drive is busy with what was wanted so far."""
        return self._busy_s / self._window_s if self._window_s else 0.0

    def _chosen(self, ranked: Sequence[tuple[int, float]], nbytes: Sequence[int], window: float) -> list[int]:
        rates, pace, missed = self._rates, self._pace or _PACE, self._missed
        chosen, start = [], self._busy_s
        for expert, claim in ranked:
            rate, takes = rates[int(claim * _BUCKETS)], nbytes[expert] * pace
            saved = window - start
            if saved > takes:
                saved = takes
            elif saved < _HASTE * takes:
                saved = _HASTE * takes
            if rate * saved > (1.0 - rate) * ((takes - saved) * missed + _WASTE * takes):
                chosen.append(expert)
                start += takes
        self._busy_s = start
        return chosen

    def observe(self, demanded: Collection[int], started: Sequence[int], missed: int, window_s: float) -> None:
        """What came after `wanted`: what the layer demands; of what was wanted, the reads that were begun before the
        router spoke; how many of the demanded are still to be read from the beginning; and the seconds that the drive
        had for reading ahead (from the question to the router's answer, less what demanded reads took)."""
        asked = self._asked
        if asked is None:
            return
        self._asked = None
        self._window_s = (
            window_s if self._window_s is None else self._window_s + _WINDOW_RATE * (window_s - self._window_s)
        )
        self._missed += _MISSED_RATE * ((missed > 0) - self._missed)
        rates, seen = self._rates, self._seen
        for expert, claim in asked:
            at = int(claim * _BUCKETS)
            if seen[at] < _MEMORY:
                seen[at] += 1
            rates[at] += ((expert in demanded) - rates[at]) / seen[at]
        figures = self.figures
        figures.missed += missed
        for expert in started:
            figures.read += 1
            figures.read_bytes += self._nbytes[expert]
            if expert in demanded:
                figures.used += 1
            else:
                figures.wasted_bytes += self._nbytes[expert]

    def drive(self, nbytes: int, seconds: float) -> None:
        """Some reads brought so many bytes and took so many seconds, each summed over them."""
        if nbytes:
            pace = seconds / nbytes
            self._pace = pace if self._pace is None else self._pace + _DRIVE_RATE * (pace - self._pace)

    def token(self, seconds: float) -> None:
        """One token was generated in so many seconds."""
        if self._switch.on:
            self.figures.tokens_on += 1
        else:
            self.figures.tokens_off += 1
        self._switch.token(seconds)
