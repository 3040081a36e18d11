"""Some tokens of a layer, of which each of its experts is told too: what an expert saw is drawn to it."""

from __future__ import annotations

import torch
from torch import Tensor

from moeconv.quantizers.quantizer import Wants
from moeconv.source.experts import Call

SAMPLED = 4  # tokens for each input of the matrices
_WORTH = 0.2  # of a token of the layer, beside one of the expert's own
_TOGETHER = 0.8  # own tokens for each input that a sample counts for at most, where products are wanted
_SQUARES = 16.0  # and where squares are, which fewer tokens tell


class LayerSample:
    """Tokens of one layer, evenly spread over all that it was asked about, padding left out: `SAMPLED * size` at most,
    and half as many at least where there were so many. The same however the text was cut into batches."""

    def __init__(self, size: int, width: int) -> None:
        """`size`: inputs of the widest matrix; `width` of what the layer is asked about."""
        self.room = SAMPLED * size
        self._stride, self._seen = 1, 0
        self._parts: list[Tensor] = [torch.empty(0, width)]

    def add(self, call: Call) -> None:
        for there in torch.split((call.chosen >= 0).any(1).nonzero()[:, 0], self.room):  # a call may not fit memory
            first = -self._seen % self._stride
            self._seen += len(there)
            self._parts.append(call.x[there[first :: self._stride]].float())
            while sum(map(len, self._parts)) > self.room:
                self._parts = [torch.cat(self._parts)[::2].clone()]
                self._stride *= 2

    def tokens(self, size: int) -> Tensor:
        """As many as tell about `size` inputs [tokens, in]"""
        found = torch.cat(self._parts)
        return found[:: max(1, -(-len(found) // (SAMPLED * size)))]


def worth(tokens: int, in_features: int, wants: Wants) -> float:
    """What one of so many sampled tokens counts beside one that the expert saw itself."""
    most = _SQUARES if wants == "squares" else _TOGETHER * in_features
    return min(_WORTH, most / max(1, tokens))
