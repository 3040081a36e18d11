"""A backend that has the matrices of everything but the experts on a device of torch, and keys and values there too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moert.devices.device import DeviceFull
from moert.devices.torch_attention import TorchAttention, TorchPositions, attend, keys_and_values
from moert.devices.torch_copies import sent
from moert.devices.torch_kept import TorchKept, pages
from moert.devices.torch_matrices import TorchMatrix, array_of, chosen_rows, copied, placed
from moert.devices.torch_memory import TorchMemory
from moert.devices.torch_ops import TorchNorm, ffn, product
from moert.kernels.backend import (
    I32,
    I64,
    AttentionWeights,
    Backend,
    Expert,
    Floats,
    KeptKeys,
    Matrix,
    NormWeights,
    Positions,
    RouterWeights,
    Stored,
)
from moert.kernels.pages import KeptPage, PageLayout
from moert.kernels.reference.routing import SCORES
from moert.pack.codec import F32
from moert.pack.parts import Attention, Ffn

T = TypeVar("T")
W = TypeVar("W")
_FOR_WORK = 4
"""Of a device's memory, matrices leave this part to keys and values, what is computed, and experts."""


class PlacedMatrix:
    """On the device while it has room for it, else as the host's backend holds it."""

    def __init__(self, there: TorchMatrix | None, here: Matrix | None, rows: int) -> None:
        self.there, self._here, self.rows = there, here, rows

    def here(self, host: Backend) -> Matrix:
        """In memory from now on, and not on the device."""
        if self._here is None:
            assert self.there is not None
            self._here = host.matrix(*self.there.stored())
            self.there = None
        return self._here


class PlacedNetwork:
    """A feed-forward of such matrices."""

    def __init__(self, matrices: Mapping[str, PlacedMatrix]) -> None:
        self.matrices = matrices
        self._here: Expert | None = None

    def here(self, host: Backend) -> Expert:
        if self._here is None:
            here = {name: matrix.here(host) for name, matrix in self.matrices.items()}
            self._here = host.dense(here.get("gate"), here["up"], here["down"])
        return self._here


class TorchBackend:
    """See `moert.kernels.backend.Backend`. Arrays come and go as numpy's. What has no matrix, as norms, the choice of
    experts, recurrences and their states, is `host`'s, and so are experts in memory, and matrices for which the device
    has no room. A token may get other bits in company than alone, as much as float32 sums in another order differ."""

    def __init__(self, name: str, host: Backend, memory: TorchMemory) -> None:
        self.name, self.threads, self.widens = f"{host.name} and {name}", host.threads, host.widens
        self._host, self._memory = host, memory
        self._made: dict[tuple[int, str], tuple[object, Any]] = {}
        self._bias: tuple[F32, Tensor] | None = None
        self.norm, self.softplus, self.sigmoid, self.gated = host.norm, host.softplus, host.sigmoid, host.gated
        self.conv, self.delta, self.scan = host.conv, host.delta, host.scan
        self.lstm, self.attend_sparsely = host.lstm, host.attend_sparsely
        self.expert, self.add_parts, self.fire, self.project = host.expert, host.add_parts, host.fire, host.project

    def close(self) -> None:
        self._made.clear()
        self._host.close()

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        return [*pages(layout, count, self._memory)]

    def matrix(self, stored: Stored, bias: F32 | None = None) -> PlacedMatrix:
        rows = len(stored.data if isinstance(stored, Floats) else stored.qweight)
        parts = (stored.data,) if isinstance(stored, Floats) else (stored.qweight, stored.scale, stored.minimum)
        nbytes = sum(part.nbytes for part in parts)
        if self._memory.fits(nbytes + self._memory.capacity_bytes // _FOR_WORK):
            try:
                with self._memory.shortage():
                    there = placed(stored, bias, self._memory.device)
            except DeviceFull:
                return PlacedMatrix(None, self._host.matrix(stored, bias), rows)
            self._memory.count(there, nbytes)
            return PlacedMatrix(there, None, rows)
        return PlacedMatrix(None, self._host.matrix(stored, bias), rows)

    def biased(self, matrix: PlacedMatrix, bias: F32) -> PlacedMatrix:
        if matrix.there is None:
            return PlacedMatrix(None, self._host.biased(matrix.here(self._host), bias), matrix.rows)
        return PlacedMatrix(matrix.there.biased(bias), None, matrix.rows)

    def rows(self, matrix: PlacedMatrix, ids: Sequence[int]) -> F32:
        return self._run(
            [matrix],
            lambda there: array_of(chosen_rows(there[0], ids)),
            lambda: self._host.rows(matrix.here(self._host), ids),
        )

    def linear(self, x: F32, matrix: PlacedMatrix) -> F32:
        return self.linears(x, [matrix])[0]

    def linears(self, x: F32, matrices: Sequence[PlacedMatrix]) -> list[F32]:
        def on_device(there: Sequence[TorchMatrix]) -> list[F32]:
            up = self._up(x)
            return [array_of(made) for made in [product(up, matrix) for matrix in there]]

        return self._run(
            matrices, on_device, lambda: self._host.linears(x, [matrix.here(self._host) for matrix in matrices])
        )

    def attend(
        self, weights: AttentionWeights[PlacedMatrix], x: F32, kept: KeptKeys, start: int, positions: Positions
    ) -> None:
        def on_device(there: Sequence[TorchMatrix]) -> F32:
            block = self._attention(weights, there)
            made = attend(block, self._up(x), TorchKept(kept), start, self._positions(positions))
            return array_of(made.mul_(weights.add))

        def in_memory() -> None:
            TorchKept(kept).leave()
            self._host.attend(self._hosted(weights), x, kept, start, positions)

        made = self._run(list(weights.matrices.values()), on_device, in_memory)
        if made is not None:
            x += made

    def keep(self, weights: AttentionWeights[PlacedMatrix], encoded: F32, kept: KeptKeys, start: int) -> None:
        part = weights.part
        assert isinstance(part, Attention)

        def on_device(there: Sequence[TorchMatrix]) -> None:
            made = keys_and_values(part, self._attention(weights, there), self._up(encoded), TorchPositions())
            TorchKept(kept).write(start, *made)

        def in_memory() -> None:
            TorchKept(kept).leave()
            self._host.keep(self._hosted(weights), encoded, kept, start)

        self._run(list(weights.matrices.values()), on_device, in_memory)

    def scores(self, x: F32, router: RouterWeights[PlacedMatrix]) -> tuple[F32, F32]:
        hidden = self.norm(x, router.norm)
        numbers = self.linear(hidden if router.own is None else self.norm(x, router.own), router.matrix)
        return hidden, SCORES[router.part.score](numbers)

    def choose(self, scores: F32, router: RouterWeights[PlacedMatrix]) -> tuple[I64, F32]:
        return self._host.choose(scores, self._chooser(router))

    def prefer(
        self, scores: F32, router: RouterWeights[PlacedMatrix], bonus: float, sure: int, recent: I32
    ) -> tuple[I64, F32]:
        return self._host.prefer(scores, self._chooser(router), bonus, sure, recent)

    def gate(self, hidden: F32, matrix: PlacedMatrix, factor: float) -> F32:
        made: F32 = np.float32(factor) * self.sigmoid(self.linear(hidden, matrix)[:, 0])
        return made

    def head(self, x: F32, norm: NormWeights, factor: float, softcap: float | None, matrix: PlacedMatrix) -> F32:
        logits = self.linear(self.norm(x, norm) * np.float32(factor), matrix)
        return logits if softcap is None else np.float32(softcap) * np.tanh(logits / np.float32(softcap))

    def dense(self, gate: PlacedMatrix | None, up: PlacedMatrix, down: PlacedMatrix) -> PlacedNetwork:
        return PlacedNetwork(({} if gate is None else {"gate": gate}) | {"up": up, "down": down})

    def mixture(
        self, experts: Sequence[PlacedNetwork | Expert], counts: Sequence[int], tokens: npt.NDArray[np.int32],
        weights: F32, x: F32, out: F32, spec: Ffn,
    ) -> None:  # fmt: skip
        """Experts are all on the device, as networks that every token passes, or all in memory."""
        if not isinstance(experts[0], PlacedNetwork):
            self._host.mixture(cast("Sequence[Expert]", experts), counts, tokens, weights, x, out, spec)
            return
        first = 0
        for network, count in zip(experts, counts, strict=True):
            rows, by = tokens[first : first + count], weights[first : first + count]
            out[rows] += self._passed(cast("PlacedNetwork", network), x[rows], spec) * by[:, None]
            first += count

    def parts(self, experts: Sequence[PlacedNetwork | Expert], x: F32, out: F32, spec: Ffn) -> None:
        if not isinstance(experts[0], PlacedNetwork):
            self._host.parts(cast("Sequence[Expert]", experts), x, out, spec)
            return
        for place, network in enumerate(experts):
            out[place] = self._passed(cast("PlacedNetwork", network), x, spec)[0]

    def _passed(self, network: PlacedNetwork, x: F32, spec: Ffn) -> F32:
        def on_device(there: Sequence[TorchMatrix]) -> F32:
            return array_of(ffn(dict(zip(network.matrices, there, strict=True)), self._up(x), spec))

        def in_memory() -> F32:
            made, n = np.zeros_like(x), len(x)
            tokens, ones = np.arange(n, dtype=np.int32), np.ones(n, np.float32)
            self._host.mixture([network.here(self._host)], [n], tokens, ones, x, made, spec)
            return made

        return self._run(list(network.matrices.values()), on_device, in_memory)

    def _run(
        self, matrices: Sequence[PlacedMatrix], on_device: Callable[[Sequence[TorchMatrix]], T],
        in_memory: Callable[[], T],
    ) -> T:  # fmt: skip
        """On the device, where all these matrices are. If it has no room and gets none, in memory from now on."""
        while True:
            there = [matrix.there for matrix in matrices if matrix.there is not None]
            if len(there) < len(matrices):
                break
            try:
                with self._memory.shortage():
                    return on_device(there)
            except DeviceFull:
                if not self._memory.give_back():
                    break
        return in_memory()

    def _attention(
        self, weights: AttentionWeights[PlacedMatrix], there: Sequence[TorchMatrix]
    ) -> TorchAttention:  # fmt: skip
        norms, sinks = self._once(weights, "there", self._beside_matrices)
        matrices = dict(zip(weights.matrices, there, strict=True))
        return TorchAttention(weights.part, weights.own, weights.causal, norms, matrices, sinks)

    def _beside_matrices(
        self, weights: AttentionWeights[PlacedMatrix]
    ) -> tuple[dict[str, TorchNorm], Tensor | None]:  # fmt: skip
        norms = {
            name: TorchNorm(self._copied(norm.weight), self._copied(norm.bias), norm.eps)
            for name, norm in weights.norms.items()
        }
        return norms, self._copied(weights.sinks)

    def _hosted(self, weights: AttentionWeights[PlacedMatrix]) -> AttentionWeights[Matrix]:
        return self._once(weights, "here", self._host_weights)

    def _host_weights(self, weights: AttentionWeights[PlacedMatrix]) -> AttentionWeights[Matrix]:
        here = {name: matrix.here(self._host) for name, matrix in weights.matrices.items()}
        return replace(cast("AttentionWeights[Any]", weights), matrices=here)

    def _chooser(self, router: RouterWeights[PlacedMatrix]) -> RouterWeights[Matrix]:
        """The router for the host's choice, which never looks at the numbers of its matrix."""
        return self._once(router, "chooser", self._without_matrix)

    def _without_matrix(self, router: RouterWeights[PlacedMatrix]) -> RouterWeights[Matrix]:
        nothing = self._host.matrix(Floats("F32", np.zeros((router.matrix.rows, 1), np.float32)))
        return replace(cast("RouterWeights[Any]", router), matrix=nothing)

    def _once(self, weights: W, purpose: str, make: Callable[[W], T]) -> T:
        """What stands for these weights, which are kept alive: made once for each purpose."""
        key = id(weights), purpose
        if key not in self._made:
            self._made[key] = weights, make(weights)
        found: T = self._made[key][1]
        return found

    def _positions(self, of: Positions) -> TorchPositions:
        if of.bias is not None and (self._bias is None or self._bias[0] is not of.bias):
            self._bias = of.bias, copied(of.bias, self._memory.device)
        bias = None if of.bias is None or self._bias is None else self._bias[1]
        turns, scale = (None if each is None else self._up(each) for each in (of.turns, of.query_scale))
        return TorchPositions(turns, bias, of.zero, scale)

    def _copied(self, array: F32 | None) -> Tensor | None:
        return None if array is None else copied(array, self._memory.device)

    def _up(self, x: F32) -> Tensor:
        return sent(x, self._memory.device)
