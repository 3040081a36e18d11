"""Room that layers give each other: an encoder's is of no use while the decoder writes. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moert.experts.neurons.keeping import F64, I64

EVERY = 16
"""Fetches, after which room moves."""
_PART = 0.125
"""Of what a layer has, how much it gives at once; and of an equal share, how much it keeps."""
_TIMES = 3.0
"""As much as the other, for its size, is read by a layer that gets some."""
_HALVES_AFTER = 200
"""Fetches of each layer, after which what was read counts half."""


class Move(NamedTuple):
    giver: int
    taker: int
    nbytes: int


class Balance:
    """What has lately been read of each layer, since it had no room to stay, by its number."""

    def __init__(self, n_layers: int) -> None:
        self._read: F64 = np.zeros(n_layers)
        self._least = 0.0
        self._fetches, self._n_layers = 0, n_layers
        self._fades = 0.5 ** (EVERY / (_HALVES_AFTER * n_layers))

    def begin(self, nbytes: int) -> None:
        """Layers have so many together."""
        self._least = _PART * nbytes / self._n_layers

    def read(self, layer: int, nbytes: int) -> None:
        self._read[layer] += nbytes

    def is_due(self) -> bool:
        """Counts a fetch; is it time to move some room?"""
        self._fetches += 1
        return self._fetches % EVERY == 0

    def moves(self, held: I64, most: I64) -> list[Move]:
        """Of layers that have so many bytes of `most` each [n_layers], who is to give some to whom: those for whose
        size least is read to those for whose size most is, if that is much more. Each is named once."""
        need = self._read / np.maximum(held, 1)
        self._read *= self._fades
        order = need.argsort(kind="stable").tolist()
        givers = [each for each in order if held[each] > self._least]
        takers = [each for each in reversed(order) if held[each] < most[each]]
        found, used = [], set[int]()
        for giver, taker in zip(givers, takers, strict=False):
            if need[taker] <= _TIMES * need[giver] or used & {giver, taker}:
                break
            nbytes = min(_PART * held[giver], held[giver] - self._least, most[taker] - held[taker])
            found.append(Move(giver, taker, int(nbytes)))
            used |= {giver, taker}
        return found
