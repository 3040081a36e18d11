"""The reference as a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import (
    I32,
    I64,
    AttentionWeights,
    ExpertView,
    KeptKeys,
    NormWeights,
    Positions,
    RouterWeights,
    Stored,
)
from moert.kernels.pages import KeptPage, PageLayout
from moert.kernels.reference import foresee, neurons, recurrent
from moert.kernels.reference.arithmetic import Plain, ffn, normed, product, sigmoid
from moert.kernels.reference.attention import heads, keys_and_values, latent_kept, latent_queries, mixed
from moert.kernels.reference.codes import weights
from moert.kernels.reference.kept import read, write
from moert.kernels.reference.routing import SCORES, Preferred, best, of_best_groups, sparsely
from moert.pack.codec import F32, U8
from moert.pack.neurons import NeuronLayout
from moert.pack.parts import Attention, Ffn, Latent

Made = Callable[[], Mapping[str, Plain]]


class ReferenceBackend:
    """See `moert.kernels.backend.Backend`. Dense matrices are held in float32, experts unpacked at each use."""

    name = "reference"
    widens = True
    threads = 1

    def matrix(self, stored: Stored, bias: F32 | None = None) -> Plain:
        return Plain(weights(stored), bias)

    def biased(self, matrix: Plain, bias: F32) -> Plain:
        return matrix._replace(bias=bias)

    def rows(self, matrix: Plain, ids: Sequence[int]) -> F32:
        found: F32 = matrix.weight[np.asarray(ids)]
        return found

    def linear(self, x: F32, matrix: Plain) -> F32:
        return product(x, matrix)

    def linears(self, x: F32, matrices: Sequence[Plain]) -> list[F32]:
        return [product(x, matrix) for matrix in matrices]

    def norm(self, x: F32, norm: NormWeights) -> F32:
        return normed(x, norm)

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        return layout.pages(count)

    def attend(
        self, weights: AttentionWeights[Plain], x: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        part, matrices, hidden = weights.part, weights.matrices, normed(x, weights.norms["before"])
        if isinstance(part, Latent):
            query = latent_queries(part, weights, hidden, positions)
            self._write(kept, start, *latent_kept(part, weights, hidden, positions))
        else:
            query = heads(part, weights, "q", hidden, positions)
            if weights.own:
                self._write(kept, start, *keys_and_values(part, weights, hidden, positions))
        if positions.query_scale is not None:
            query = query * positions.query_scale[:, None, None]
        found = mixed(weights, query, self._kept(kept), start, positions)
        if isinstance(part, Latent):
            found = np.einsum("tnc,nvc->tnv", found, matrices["values"].weight.reshape(part.n, part.v, -1))
        flat = found.reshape(len(x), -1)
        if "gate" in matrices:
            flat = flat * sigmoid(product(hidden, matrices["gate"]))
        made = product(flat, matrices["o"])
        if "after" in weights.norms:
            made = normed(made, weights.norms["after"])
        x += np.float32(weights.add) * made

    def keep(self, weights: AttentionWeights[Plain], encoded: F32, kept: KeptKeys, start: int) -> None:
        assert isinstance(weights.part, Attention)
        self._write(kept, start, *keys_and_values(weights.part, weights, encoded, Positions()))

    def scores(self, x: F32, router: RouterWeights[Plain]) -> tuple[F32, F32]:
        hidden = normed(x, router.norm)
        numbers = product(hidden if router.own is None else normed(x, router.own), router.matrix)
        return hidden, SCORES[router.part.score](numbers)

    def choose(self, scores: F32, router: RouterWeights[Plain], preferred: Preferred | None = None) -> tuple[I64, F32]:
        part = router.part
        if part.score == "sparsemixer":
            chosen, weights = sparsely(scores, part, preferred)
        else:
            deciding = scores if router.choice_bias is None else scores + router.choice_bias
            chosen = best(of_best_groups(deciding, part), part.top_k, preferred)
            weights = np.take_along_axis(scores, chosen, axis=1)
            if part.score == "sigmoid_of_chosen":
                weights = sigmoid(weights)
        order = np.argsort(chosen, axis=1)
        chosen = np.take_along_axis(chosen, order, axis=1)
        weights = np.take_along_axis(weights, order, axis=1)
        if part.renormalise:
            weights = weights / weights.sum(axis=1, keepdims=True)
        if router.expert_scale is not None:
            weights = weights * router.expert_scale[chosen]
        return chosen, weights * np.float32(part.factor * router.factor)

    def prefer(
        self, scores: F32, router: RouterWeights[Plain], bonus: float, sure: int, recent: I32
    ) -> tuple[I64, F32]:
        chosen, weights = self.choose(scores, router, Preferred(np.float32(bonus), sure, recent[recent >= 0]))
        others = recent[~np.isin(recent, chosen)]
        recent[:] = np.concatenate([chosen[0], others])[: len(recent)]
        return chosen, weights

    def gate(self, hidden: F32, matrix: Plain, factor: float) -> F32:
        made: F32 = np.float32(factor) * sigmoid(product(hidden, matrix))[:, 0]
        return made

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: Plain) -> F32:
        logits = product(normed(x, norm) * np.float32(factor), matrix)
        return logits if softcap is None else np.float32(softcap) * np.tanh(logits / np.float32(softcap))

    def expert(self, view: ExpertView) -> Made:
        return lambda: {
            name: Plain(weights(part.stored(view.buffer)), part.bias(view.buffer))
            for name, part in view.projections.items()
        }

    def dense(self, gate: Plain | None, up: Plain, down: Plain) -> Made:
        matrices = {"up": up, "down": down} | ({} if gate is None else {"gate": gate})
        return lambda: matrices

    def mixture(
        self, experts: Sequence[Made], counts: Sequence[int], tokens: npt.NDArray[np.int32], weights: F32, x: F32,
        out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        ends = np.cumsum(counts)
        for expert, end, count in zip(experts, ends, counts, strict=True):
            rows = tokens[end - count : end]
            out[rows] += ffn(expert(), x[rows], spec) * weights[end - count : end, None]

    def parts(self, experts: Sequence[Made], x: F32, out: F32, spec: Ffn) -> None:
        for place, expert in enumerate(experts):
            out[place] = ffn(expert(), x, spec)[0]

    def add_parts(self, parts: F32, weights: F32, out: F32, tokens: npt.NDArray[np.int32] | None = None) -> None:
        rows = np.zeros(len(parts), np.int32) if tokens is None else tokens
        for part, weight, row in zip(parts, weights, rows, strict=True):
            out[row] += part * weight

    def fire(self, layout: NeuronLayout, base: U8, offsets: I64, x: F32, spec: Ffn) -> F32:
        return neurons.fire(layout, base, offsets, x, spec)

    def project(self, layout: NeuronLayout, base: U8, offsets: I64, hidden: F32, bias: F32 | None) -> F32:
        return neurons.project(layout, base, offsets, hidden, bias)

    def conv(self, x: F32, taps: F32, bias: F32 | None, state: F32, silu: bool) -> F32:
        made = recurrent.conv(x, taps, bias, state)
        return recurrent.silu(made) if silu else made

    def delta(self, q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
        return recurrent.delta(q, k, v, decay, beta, state)

    def scan(self, x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
        return recurrent.scan(x, dt, a, b, c, d, state)

    def lstm(self, inputs: F32, recurrent: F32, state: F32, counts: Sequence[int], backward: bool = False) -> F32:
        return foresee.lstm(inputs, recurrent, state, counts, backward)

    def attend_sparsely(self, queries: F32, keys: F32, values: F32, spans: I32) -> F32:
        return foresee.attend_sparsely(queries, keys, values, spans)

    def softplus(self, x: F32, bias: F32) -> F32:
        return recurrent.softplus(x + bias)

    def sigmoid(self, x: F32) -> F32:
        return sigmoid(x)

    def gated(self, x: F32, gate: F32, norm: NormWeights | None = None, groups: int = 1, last: bool = False) -> F32:
        return recurrent.gated(x, gate, norm, groups, last)

    def close(self) -> None:
        pass

    def _write(self, kept: KeptKeys, start: int, key: F32, value: F32) -> None:
        write(kept, start, key, value)

    def _kept(self, kept: KeptKeys) -> tuple[F32, F32]:
        return read(kept)
