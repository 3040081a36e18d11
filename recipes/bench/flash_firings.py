"""Which neurons fire while the decoder of a trained model writes, or are named by its predictor: written down, and put
in the place of those of a model of another shape.

A *visit* is a layer and a token. Every model here goes to one expert a layer and token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moert.beside.flash.keeping import I64
from moert.pack.codec import F32, U8
from moert.pack.files import atomic_write
from moert.pack.model_spec import ExpertKey, LayerKey

if TYPE_CHECKING:
    from moert.engine.engine import Engine

Bits = npt.NDArray[np.bool_]
Found = F32 | Bits
"""What neurons give, or whether they are named. [tokens, d_ff]"""
SHIFT = 97
"""Tokens between copies of a pattern that lie side by side."""
LEAST = np.float32(1e-3)
"""What a neuron gives that is to fire, and did not."""


@dataclass(frozen=True)
class Firings:
    """`experts` [layers, visits]: where each token went; `packed` [layers, visits, d_ff / 8]: which of that expert's
    neurons fired, or were named, eight to a byte."""

    experts: I64
    packed: U8
    n_experts: int
    d_ff: int

    @classmethod
    def load(cls, path: Path) -> Firings:
        with np.load(path) as found:
            n_experts, d_ff = found["sizes"].tolist()
            return cls(found["experts"], found["packed"], n_experts, d_ff)

    def save(self, path: Path) -> None:
        with atomic_write(path) as fresh, fresh.open("wb") as stream:
            sizes = np.array([self.n_experts, self.d_ff])
            np.savez(stream, experts=self.experts, packed=self.packed, sizes=sizes)

    @property
    def n_layers(self) -> int:
        return len(self.experts)

    @property
    def visits(self) -> int:
        return self.experts.shape[1]

    def fired(self, layer: int) -> Bits:
        """[visits, d_ff]"""
        return np.unpackbits(self.packed[layer], axis=1, count=self.d_ff).astype(np.bool_)

    @property
    def share(self) -> float:
        """Of an expert's neurons, how many fire for a token."""
        return float(np.mean([self.fired(layer).mean() for layer in range(self.n_layers)]))


class Recorder:
    """Stays in an engine that runs experts neuron by neuron, and hears what fires, or where a predictor names neurons,
    what is named. Tokens that come several at once are left out."""

    def __init__(self, engine: Engine) -> None:
        self._spec, self._at = engine.spec, LayerKey("decoder", 0)
        self._seen: dict[LayerKey, list[tuple[int, U8]]] = {at: [] for at in engine.spec.moe_layers("decoder")}
        self.on = False
        _change(engine.runner, self._begin, self._keep)

    def firings(self) -> Firings:
        moe, layers = self._spec.moe, list(self._seen.values())
        assert len({len(layer) for layer in layers}) == 1, "each token goes to one expert of each layer"
        return Firings(
            np.array([[expert for expert, _ in layer] for layer in layers]),
            np.stack([np.stack([bits for _, bits in layer]) for layer in layers]), moe.n, moe.ffn.d_ff,
        )  # fmt: skip

    def _begin(self, key: ExpertKey, tokens: I64) -> None:
        self._key = key

    def _keep(self, fired: Found) -> Found:
        if self.on and self._key.stack == "decoder" and len(fired) == 1:
            self._seen[self._key.at].append((self._key.expert, np.packbits(fired[0] != 0)))
        return fired


class Replay:
    """Firings in the place of what fires in layers of another shape: neuron i fires where neuron i modulo d_ff did, so
    many tokens later for each copy beside. Recorded layers stand for as many of the others as it takes. An expert has
    the patterns of recorded ones of the same number, modulo their number."""

    def __init__(self, firings: Firings, layers: Sequence[LayerKey], n_experts: int, d_ff: int) -> None:
        self._n_experts, self._d_ff, self._visits = n_experts, d_ff, firings.visits
        self._layer = {at: place * firings.n_layers // len(layers) for place, at in enumerate(layers)}
        self._fired = [firings.fired(layer) for layer in range(firings.n_layers)]
        self._experts = firings.experts % n_experts
        self._next = dict.fromkeys(layers, 0)

    def begin(self, at: LayerKey, tokens: int) -> I64:
        """[tokens]: the recorded visits that stand for the next ones of a layer."""
        rows = np.arange(self._next[at], self._next[at] + tokens) % self._visits
        self._next[at] = (self._next[at] + tokens) % self._visits
        return rows

    def experts(self, at: LayerKey, rows: I64) -> I64:
        """[tokens, 1]"""
        chosen: I64 = self._experts[self._layer[at]][rows][:, None]
        return chosen

    def pattern(self, at: LayerKey, rows: I64) -> Bits:
        """[tokens, d_ff]"""
        fired = self._fired[self._layer[at]]
        copies = -(-self._d_ff // fired.shape[1])
        parts = [fired[(rows + copy * SHIFT) % self._visits] for copy in range(copies)]
        return np.concatenate(parts, axis=1)[:, : self._d_ff]

    def replace(self, engine: Engine) -> None:
        """From now on this engine's tokens go where recorded ones went, and where it runs experts neuron by neuron,
        these neurons fire, or are named."""
        runner: Any = engine.runner
        run = runner.run
        self._rows = self._mine = np.arange(0)

        def replayed(at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
            self._rows = self.begin(at, len(hidden))
            run(at, hidden, self.experts(at, self._rows), weights, out, x)

        runner.run = replayed
        if engine._streaming.firing is not None:
            _change(runner, self._begin, self._put)

    def _begin(self, key: ExpertKey, tokens: I64) -> None:
        self._at, self._mine = key.at, self._rows[tokens]

    def _put(self, found: Found) -> Found:
        mine, self._mine = self._mine[: len(found)], self._mine[len(found) :]
        pattern = self.pattern(self._at, mine)
        return pattern if found.dtype == np.bool_ else enforced(found, pattern)


def enforced(fired: F32, pattern: Bits) -> F32:
    """The same [tokens, d_ff] but for what is to fire and did not, or the other way round."""
    return np.where(pattern, np.where(fired == 0, LEAST, fired), np.float32(0))


def _change(runner: Any, begin: Callable[[ExpertKey, I64], None], changed: Callable[[Found], Found]) -> None:
    """`begin` gets each expert and its tokens before it runs; `changed` what is named, or where nothing is, what fires,
    [tokens, d_ff], and gives what is to be in its place."""
    from moert.beside.flash.runner import PredictedExperts

    add = runner._add

    def added(key: ExpertKey, first: Any, second: Any, tokens: I64, *others: Any) -> None:
        begin(key, tokens)
        add(key, first, second, tokens, *others)

    runner._add = added
    if isinstance(runner, PredictedExperts):
        scores: Any = runner._scores
        named = scores.named
        scores.named = lambda *arguments: changed(named(*arguments))
    else:
        runner._backend = _Changed(runner._backend, changed)


class _Changed:
    """A backend, but for what fires."""

    def __init__(self, backend: Any, changed: Callable[[Found], Found]) -> None:
        self._backend, self._changed = backend, changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def fire(self, *arguments: Any) -> Found:
        return self._changed(self._backend.fire(*arguments))
