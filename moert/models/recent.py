"""Which experts a sequence has used lately: an imagined cache of one layer, the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import I32, I64
from moert.pack.model_spec import ModelSpec

_BLOCK_TOKENS = 128


class Recent:
    """Of one sequence and layer: the `experts` [k] that its tokens went to last, the latest first, of one token
    ascending, -1 behind the last. It depends on the tokens of the sequence alone, and not on how many of them were
    read at once, or what is in memory.

    The first `exact` tokens are routed as the model would. What these chose is written down, 2 bytes a choice, so that
    all behind any of them can be forgotten; of what comes later nothing can.
    """

    def __init__(self, k: int, top_k: int) -> None:
        self.experts: I32 = np.full(k, -1, np.int32)
        self.length = self.exact = 0
        self._chosen: npt.NDArray[np.int16] = np.empty((0, top_k), np.int16)

    def add(self, chosen: I64) -> None:
        """The next tokens, routed exactly, went to chosen [tokens, top_k]; -1 for none."""
        end = self.length + len(chosen)
        if end > len(self._chosen):
            room = np.empty((-(-end // _BLOCK_TOKENS) * _BLOCK_TOKENS, chosen.shape[1]), np.int16)
            room[: self.length] = self._chosen[: self.length]
            self._chosen = room
        self._chosen[self.length : end] = chosen
        self._use(chosen)
        self.length = end

    def went(self) -> None:
        """A token chose by `experts`, and has put its own first."""
        self.length += 1

    def reach(self, length: int) -> int:
        """The most of the first `length` tokens that it can be cut to."""
        return min(length, self.exact, self.length)

    def cut(self, length: int) -> None:
        """Forgets all but the first `length` tokens, which are as many as it reaches."""
        assert self.reach(length) == length
        self.length = length
        self.experts[:] = -1
        self._use(self._chosen[:length].astype(np.int64))

    def copy(self) -> Recent:
        """Another with the same, that goes on by itself."""
        twin = Recent(len(self.experts), self._chosen.shape[1])
        twin.length, twin.exact, twin._chosen = self.length, self.exact, self._chosen.copy()
        twin.experts = self.experts.copy()
        return twin

    @property
    def nbytes(self) -> int:
        return self._chosen.nbytes + self.experts.nbytes

    def _use(self, chosen: I64) -> None:
        latest = np.concatenate([chosen[::-1].reshape(-1), self.experts])
        latest = latest[latest >= 0]
        _, first = np.unique(latest, return_index=True)
        kept = latest[np.sort(first)][: len(self.experts)]
        self.experts[: len(kept)] = kept


def recent_bytes(spec: ModelSpec, prompt_tokens: int) -> int:
    """Upper bound of what a sequence with such a prompt takes in all layers, while its room grows."""
    moe, layers = spec.moe, sum(at.stack == "decoder" for at in spec.moe_layers())
    choices = 2 * moe.router.top_k * (prompt_tokens + _BLOCK_TOKENS)
    return layers * (2 * choices + 4 * moe.n)
