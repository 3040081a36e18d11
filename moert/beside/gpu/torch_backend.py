"""A backend that has all matrices but the experts' on a device of torch, and keys and values there too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from moert.beside.gpu.device import DeviceFull
from moert.beside.gpu.torch_matrices import (
    TorchMatrix,
    TorchMemory,
    array_of,
    chosen_rows,
    copied,
    placed,
    sent,
    weights,
)
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
from moert.kernels.pages import KEYS, KeptPage, Page, PageLayout
from moert.kernels.reference import SCORES
from moert.pack.codec import F32, ROWS, U8, QuantizedMatrix, TrellisMatrix
from moert.pack.parts import Act, Attention, Ffn, Latent

TILE = 1 << 22
"""Weights that are made floats at once: 16 MiB of them."""
FEW = 16
"""Most tokens of a product by a Triton kernel, on devices that have it: with more, the weights of a tile are made
floats once for all of them."""

Product = Callable[[Tensor, TorchMatrix], Tensor]


def product(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """Returns the product of x [tokens, cols] in float32 and the matrix, [tokens, rows], its bias added."""
    fused = fused_product() if x.is_cuda and len(x) <= FEW else None
    made = tiled(x, matrix) if fused is None else fused(x, matrix)
    if fused is not None and matrix.power:
        made.mul_(2.0**matrix.power)
    return made if matrix.bias is None else made.add_(matrix.bias)


def tiled(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """Returns the same by torch alone, without the bias."""
    if matrix.kind == "F32":
        return x @ matrix.data.T
    made = torch.empty((len(x), matrix.rows), dtype=torch.float32, device=x.device)
    step = rows_of_tile(matrix)
    for first in range(0, matrix.rows, step):
        stop = min(first + step, matrix.rows)
        made[:, first:stop] = x @ weights(matrix, first, stop).T
    return made


def rows_of_tile(matrix: TorchMatrix) -> int:
    """Returns the rows that are made floats at once: of trellis codes whole blocks."""
    rows, least = TILE // matrix.cols, 1 if matrix.code is None else ROWS
    return max(least, rows // least * least)


def by_head(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """Returns the products [tokens, heads, out] of each head of x [tokens, heads, in] and a matrix of its own, [heads ·
    out, in] one after the other. Without a bias."""
    tokens, heads, inputs = x.shape
    out = matrix.rows // heads
    made = torch.empty((tokens, heads, out), dtype=torch.float32, device=x.device)
    step = max(1, TILE // (out * inputs))
    for first in range(0, heads, step):
        stop = min(first + step, heads)
        each = weights(matrix, first * out, stop * out).view(stop - first, out, inputs)
        made[:, first:stop] = (x[:, first:stop].transpose(0, 1) @ each.transpose(1, 2)).transpose(0, 1)
    return made


@cache
def fused_product() -> Product | None:
    """Returns the product of the Triton kernels, which come with torch for CUDA; None where there is no Triton."""
    try:
        from moert.beside.gpu import triton_kernel
    except ImportError:
        return None
    return triton_kernel.product


def ffn(matrices: Mapping[str, TorchMatrix], x: Tensor, spec: Ffn) -> Tensor:
    """Returns the output [rows, d_model] of a feed-forward network for x [rows, d_model]; see moert.pack.parts.Ffn and
    Act."""
    return product(_bent(matrices, x, spec), matrices["down"])


def _bent(matrices: Mapping[str, TorchMatrix], x: Tensor, spec: Ffn) -> Tensor:
    """Returns the values before `down`: [rows, d_ff]"""
    act = spec.act
    limit, bound = (math.inf if each is None else each for each in (act.limit, act.bound))
    up = product(x, matrices["up"])
    if "gate" not in matrices:
        return activated(act, up.clamp_(max=limit)).clamp_(max=bound)
    gate, most = activated(act, product(x, matrices["gate"]).clamp_(max=limit)).clamp_(max=bound), min(limit, bound)
    return gate.mul_(up.clamp_(-most, most).add_(act.plus))


def activated(act: Act, x: Tensor) -> Tensor:
    if act.name == "silu":
        return x * torch.sigmoid(act.slope * x)
    return _ACTIVATIONS[act.name](x)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchNorm(NamedTuple):
    """See moert.kernels.backend.NormWeights."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


def normed(x: Tensor, norm: TorchNorm) -> Tensor:
    """Returns x [..., n], normed over the last axis."""
    if norm.weight is None:
        return x
    if norm.bias is not None:
        x = x - x.mean(dim=-1, keepdim=True)
    made = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + norm.eps) * norm.weight
    return made if norm.bias is None else made + norm.bias


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Returns the softmax over the last axis, in place. `sinks`, of as many axes, add one score whose share is left
    out."""
    most = scores.amax(dim=-1, keepdim=True)
    most = most if sinks is None else torch.maximum(most, sinks)
    powers = scores.sub_(most).exp_()
    total = powers.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - most)
    return powers.div_(total)


_SCORES = 1 << 25
"""Most scores in memory at once, if one head of keys has no more: 128 MiB of them."""


class TorchAttention(NamedTuple):
    """See moert.kernels.backend.AttentionWeights."""

    part: Attention | Latent
    own: bool
    causal: bool
    norms: Mapping[str, TorchNorm]
    matrices: Mapping[str, TorchMatrix]
    sinks: Tensor | None


class TorchPositions(NamedTuple):
    """See moert.kernels.backend.Positions."""

    turns: Tensor | None = None
    bias: Tensor | None = None
    zero: int = 0
    query_scale: Tensor | None = None


class Keys(Protocol):
    """Keys and values of one sequence."""

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Writes keys [tokens, kv, dim] and values [tokens, kv, value_dim], from the token `start` on."""
        ...

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns all keys [kv, tokens, dim] and values [kv, tokens, value_dim]."""
        ...


def attend(weights: TorchAttention, x: Tensor, keys: Keys, start: int, positions: TorchPositions) -> Tensor:
    """Returns the output of attention, to be added to x [tokens, d_model]; see moert.kernels.backend.Backend.attend."""
    part, matrices, hidden = weights.part, weights.matrices, normed(x, weights.norms["before"])
    if isinstance(part, Latent):
        query = _latent_queries(part, weights, hidden, positions)
        keys.write(start, *_latent_kept(weights, hidden, positions))
    else:
        query = _heads(part, weights, "q", hidden, positions)
        if weights.own:
            keys.write(start, *keys_and_values(part, weights, hidden, positions))
    if positions.query_scale is not None:
        query = query * positions.query_scale[:, None, None]
    found = _mixed(weights, query, keys.read(), start, positions)
    if isinstance(part, Latent):
        found = by_head(found, matrices["values"])
    if "gate" in matrices:
        found = found * torch.sigmoid(product(hidden, matrices["gate"])).reshape(len(x), part.n, -1)
    made = product(found.reshape(len(x), -1), matrices["o"])
    return normed(made, weights.norms["after"]) if "after" in weights.norms else made


def keys_and_values(
    part: Attention, weights: TorchAttention, hidden: Tensor, positions: TorchPositions
) -> tuple[Tensor, Tensor]:
    """Returns keys [tokens, kv, dim] and values [tokens, kv, value_dim] of hidden [tokens, d_model]."""
    return _heads(part, weights, "k", hidden, positions), _heads(part, weights, "v", hidden, positions)


def _heads(
    part: Attention, weights: TorchAttention, name: str, hidden: Tensor, positions: TorchPositions
) -> Tensor:  # fmt: skip
    """Returns queries, keys or values [tokens, heads, dim] of hidden [tokens, d_model], normed, bounded and turned."""
    made, norm = product(hidden, weights.matrices[name]), weights.norms.get(name)
    split = (len(made), -1, part.dim)
    whole = (len(made), -1) if part.qk_norm == "whole" and name != "v" else split
    if norm is not None and (name == "v" or not part.norm_turned):
        made = normed(made.reshape(whole), norm)
    made = made.reshape(split)
    if part.clip is not None:
        made = made.clamp(-part.clip, part.clip)
    if name == "v":
        return made
    made = _turned(made, positions)
    if norm is not None and part.norm_turned:
        made = normed(made.reshape(whole), norm).reshape(split)
    return made


def _turned(heads: Tensor, positions: TorchPositions) -> Tensor:
    """Returns heads [tokens, heads, dim], of which the first features are turned."""
    if positions.turns is None:
        return heads
    half = positions.turns.shape[2]
    cos, sin = positions.turns[:, :1], positions.turns[:, 1:]
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def _latent_queries(part: Latent, weights: TorchAttention, hidden: Tensor, positions: TorchPositions) -> Tensor:
    """Returns queries [tokens, heads, dim]: a part that meets c, and a part that meets the key that turns."""
    matrices, n = weights.matrices, len(hidden)
    asked = hidden if part.q_rank is None else normed(product(hidden, matrices["q_a"]), weights.norms["q"])
    still = product(asked, matrices["q"]).reshape(n, part.n, part.nope)
    turning = _turned(product(asked, matrices["q_turn"]).reshape(n, part.n, part.turning), positions)
    return torch.cat((by_head(still, matrices["keys"]), turning), dim=-1)


def _latent_kept(weights: TorchAttention, hidden: Tensor, positions: TorchPositions) -> tuple[Tensor, Tensor]:
    """Returns keys [tokens, 1, dim], c with the key that turns, and values [tokens, 1, value_dim], c."""
    c = normed(product(hidden, weights.matrices["kv_a"]), weights.norms["kv"])[:, None]
    turned = _turned(product(hidden, weights.matrices["k_turn"])[:, None], positions)
    return torch.cat((c, turned), dim=-1), c


def _mixed(
    weights: TorchAttention, query: Tensor, kept: tuple[Tensor, Tensor], start: int, positions: TorchPositions
) -> Tensor:
    """Returns the mix of values that each head reads, [tokens, heads, value_dim], by query [tokens, heads, dim].
    `kept`: keys [kv, length, dim] and values [kv, length, value_dim]. Few heads of keys at a time, where all of them
    would have too many scores."""
    part, (keys, values), tokens = weights.part, kept, len(query)
    shared, length = part.n // part.kv, keys.shape[1]
    by_place = _places(weights, start, tokens, length, query.device)
    found = torch.empty((tokens, part.n, part.value_dim), dtype=torch.float32, device=query.device)
    step = max(1, _SCORES // (shared * tokens * length))
    for first in range(0, part.kv, step):
        some = slice(first * shared, min(first + step, part.kv) * shared)
        asked = query[:, some].reshape(tokens, -1, shared, part.dim).permute(1, 2, 0, 3).flatten(1, 2)
        scores = (asked @ keys[first : first + step].transpose(1, 2)).view(-1, tokens, length) * part.scale
        sinks = None if weights.sinks is None else weights.sinks[some, None, None]
        shares = softmax(_seen(weights, scores, some, by_place, positions), sinks)
        mixed = shares.view(-1, shared * tokens, length) @ values[first : first + step]
        found[:, some] = mixed.view(-1, tokens, part.value_dim).transpose(0, 1)
    return found


class _Places(NamedTuple):
    """Distances of keys. `after` [tokens, length]: how far a key lies after the query; `unseen`: which keys the query
    does not see, of the same shape, or None."""

    after: Tensor
    unseen: Tensor | None


def _seen(
    weights: TorchAttention, scores: Tensor, some: slice, places: _Places, positions: TorchPositions
) -> Tensor:  # fmt: skip
    """Returns scores [heads, tokens, length] of some heads, bounded, with the bias of distances added, and -infinity
    where a query does not see a key."""
    softcap = weights.part.softcap if isinstance(weights.part, Attention) else None
    if softcap is not None:
        scores = torch.tanh(scores / softcap).mul_(softcap)
    if positions.bias is not None:
        scores += positions.bias[some][:, places.after + positions.zero]
    return scores if places.unseen is None else scores.masked_fill_(places.unseen, -torch.inf)


def _places(weights: TorchAttention, start: int, tokens: int, length: int, device: torch.device) -> _Places:
    """Returns the distances of keys; those after the query, or before its window or chunk, are unseen."""
    part, key = weights.part, torch.arange(length, device=device)
    query = torch.arange(start, start + tokens, device=device)[:, None]
    if not weights.causal:
        return _Places(key - query, None)
    unseen = key > query
    if part.window is not None:
        unseen |= key <= query - part.window
    if isinstance(part, Attention) and part.chunk is not None:
        unseen |= key < query // part.chunk * part.chunk
    return _Places(key - query, unseen)


_LEAST, _MOST_HALF = 2.0**-10, 65504.0


class TorchPage(Page):
    """A page in memory that has a copy on the device once `parts` was called. `length`: how many of its first tokens
    are there as they are in memory."""

    def __init__(self, layout: PageLayout, buffer: U8, memory: TorchMemory) -> None:
        super().__init__(layout, buffer)
        self.length = 0
        self._memory = memory
        self._there: Tensor | None = None
        self._parts: list[Tensor] = []

    def copy(self) -> TorchPage:
        """Returns a copy of the page, on the device too if the page is there and finds room."""
        (twin,) = pages(self.layout, 1, self._memory)
        np.copyto(twin.buffer, self.buffer)
        if self._there is not None:
            try:
                twin.parts(0)
            except DeviceFull:
                return twin
            assert twin._there is not None
            twin._there.copy_(self._there)
            twin.length = self.length
        return twin

    def parts(self, tokens: int) -> list[Tensor]:
        """Returns keys, values, and their steps on the device, with the first `tokens` of them; shapes as in memory.
        Raises DeviceFull."""
        if self._there is None:
            self._there = self._memory.empty((self.buffer.nbytes,), torch.uint8)
            heads = self._there.view(self.layout.kv, -1)
            self._parts = [
                heads[:, slice(*self.layout.places[at : at + 2])]
                .view(torch.from_numpy(part[:0]).dtype)
                .view(part.shape)
                for at, part in enumerate(self.arrays)
            ]
        if self.length < tokens:
            self._there.copy_(torch.from_numpy(self.buffer))
            self.length = tokens
        return self._parts

    def leave(self) -> None:
        """Frees the copy on the device, until `parts` is called again."""
        self._there, self._parts, self.length = None, [], 0

    @property
    def arrays(self) -> list[Any]:
        """The arrays in memory that `parts` has copies of."""
        return [self.keys, self.values, self.key_steps, self.value_steps]


def pages(layout: PageLayout, count: int, memory: TorchMemory) -> list[TorchPage]:
    """Returns new pages, in memory alone so far."""
    return [TorchPage(layout, page.buffer, memory) for page in layout.pages(count) if isinstance(page, Page)]


class TorchKept:
    """Keys and values of one attention of one sequence."""

    def __init__(self, kept: KeptKeys) -> None:
        self._kept = kept

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Writes key [tokens, kv, dim] and value [tokens, kv, value_dim] in float32, from the token `start` on, rounded
        as memory rounds them: on the device and in memory. Raises DeviceFull."""
        given = _rounded(self._kept.layout.bits, key, value)
        arrays = [array_of(part) for part in given]
        for page, within, rows in self._stretches(start, len(key)):
            _put(page.parts(within.start), within, [part[rows] for part in given])
            _put(page.arrays, within, [array[rows] for array in arrays])
            page.length = within.stop

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns all keys [kv, tokens, dim] and values [kv, tokens, value_dim] so far in float32. Raises
        DeviceFull."""
        length = self._kept.length
        parts = [
            page.parts(min(length - first, KEYS))
            for first, page in zip(range(0, length, KEYS), self._kept.pages, strict=True)
        ]
        keys, values, *steps = (torch.stack(part) for part in zip(*parts, strict=True))
        wide = [keys.to(torch.float32).transpose(2, 3), values.to(torch.float32)]
        for part, step in zip(wide, steps, strict=True):
            part *= step[..., None]
        whole = [part.transpose(0, 1).flatten(1, 2)[:, :length] for part in wide]
        return whole[0], whole[1]

    def leave(self) -> None:
        """Frees the copies on the device: keys and values are in memory alone from now on."""
        for page in self._kept.pages:
            page.leave()

    def _stretches(self, start: int, tokens: int) -> Iterator[tuple[TorchPage, slice, slice]]:
        """Yields the pages that tokens from `start` on lie in, their places there, and which of the tokens these
        are."""
        first = 0
        while first < tokens:
            at, within = divmod(start + first, KEYS)
            last = min(tokens, first + KEYS - within)
            yield self._kept.pages[at], slice(within, within + last - first), slice(first, last)
            first = last


def _put(page: list[Any], within: slice, given: list[Any]) -> None:
    """Writes keys and values [tokens, kv, features], and steps [tokens, kv], into a page, on the device or in
    memory."""
    keys, values, *steps = given
    page[0][:, :, within] = keys.swapaxes(0, 1).swapaxes(1, 2)
    page[1][:, within] = values.swapaxes(0, 1)
    for part, step in zip(page[2:], steps, strict=True):
        part[:, within] = step.T


def _rounded(bits: int, key: Tensor, value: Tensor) -> list[Tensor]:
    """Returns keys and values as pages have them, and their steps."""
    (keys, key_steps), (values, value_steps) = _kept_as(bits, key), _kept_as(bits, value)
    return [keys, values, key_steps, value_steps]


def _kept_as(bits: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x rounded as pages keep it, and its steps; see moert.kernels.reference."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    fits = (largest == 0) | ((largest >= _LEAST) & (largest <= _MOST_HALF)) | ~largest.isfinite()
    power = torch.where(fits, 0, (torch.frexp(largest).exponent - 15).clamp(min=-126))
    numbers = torch.where(largest.isfinite(), x, 0) * _two_to(-power)
    steps = torch.where(largest.isfinite(), _two_to(power), torch.nan)
    if bits == 16:
        return numbers.to(torch.float16), steps[..., 0]
    each = (numbers.abs().amax(dim=-1, keepdim=True) / 127).to(torch.float16).to(torch.float32)
    whole = torch.where(each > 0, numbers / each, 0).round().clamp(-127, 127)
    return whole.to(torch.int8), (steps * each)[..., 0]


def _two_to(power: Tensor) -> Tensor:
    """Returns two to the power, exact for -126 to 127, as no device's own power need be."""
    return ((power.to(torch.int32) + 127) << 23).view(torch.float32)


T = TypeVar("T")
W = TypeVar("W")
_FOR_WORK = 4
"""Matrices leave one part in four of a device's memory to keys and values, computing, and experts."""


class PlacedMatrix:
    """A matrix that lies on the device while it has room for it, else as the host's backend holds it."""

    def __init__(self, there: TorchMatrix | None, here: Matrix | None, rows: int) -> None:
        self.there, self._here, self.rows = there, here, rows

    def here(self, host: Backend) -> Matrix:
        """Returns the matrix in memory, where it lies from now on, and not on the device."""
        if self._here is None:
            assert self.there is not None
            self._here = host.matrix(*self.there.stored())
            self.there = None
        return self._here


class PlacedNetwork:
    """A feed-forward network of such matrices."""

    def __init__(self, matrices: Mapping[str, PlacedMatrix]) -> None:
        self.matrices = matrices
        self._here: Expert | None = None

    def here(self, host: Backend) -> Expert:
        if self._here is None:
            here = {name: matrix.here(host) for name, matrix in self.matrices.items()}
            self._here = host.dense(here.get("gate"), here["up"], here["down"])
        return self._here


_PARTS: Mapping[type[Stored], tuple[str, ...]] = {
    Floats: ("data",), QuantizedMatrix: ("qweight", "scale", "minimum"), TrellisMatrix: ("stream", "scale"),
}  # fmt: skip


class TorchBackend:
    """See `moert.kernels.backend.Backend`. Arrays come and go as numpy's. Work without a matrix, as norms, the choice
    of experts, recurrences and their states, is `host`'s, and so are experts in memory, and matrices for which the
    device has no room. A token may get other bits beside others than alone, as much as float32 sums in another order
    differ."""

    def __init__(self, name: str, host: Backend, memory: TorchMemory) -> None:
        self.name, self.threads, self.widens = f"{host.name} and {name}", host.threads, host.widens
        self._host, self._memory = host, memory
        self._made: dict[tuple[int, str], tuple[object, Any]] = {}
        self._bias: tuple[F32, Tensor] | None = None
        self.norm, self.softplus, self.sigmoid, self.gated = host.norm, host.softplus, host.sigmoid, host.gated
        self.balance = host.balance
        self.conv, self.delta, self.scan = host.conv, host.delta, host.scan
        self.lstm, self.attend_sparsely = host.lstm, host.attend_sparsely
        self.expert, self.add_parts, self.fire, self.project = host.expert, host.add_parts, host.fire, host.project

    def close(self) -> None:
        self._made.clear()
        self._host.close()

    def pages(self, layout: PageLayout, count: int) -> list[KeptPage]:
        return [*pages(layout, count, self._memory)]

    def matrix(self, stored: Stored, bias: F32 | None = None) -> PlacedMatrix:
        parts = [getattr(stored, part) for part in _PARTS[type(stored)]]
        rows = len(stored.data if isinstance(stored, Floats) else stored.scale)
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
        """Runs experts that are all on the device, as networks that every token passes, or all in memory."""
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
        """Runs an operation on the device if all its matrices are there. If the device has no room and gets none, it
        runs in memory from now on."""
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
        """Returns the router for the host's choice, which never looks at the numbers of its matrix."""
        return self._once(router, "chooser", self._without_matrix)

    def _without_matrix(self, router: RouterWeights[PlacedMatrix]) -> RouterWeights[Matrix]:
        nothing = self._host.matrix(Floats("F32", np.zeros((router.matrix.rows, 1), np.float32)))
        return replace(cast("RouterWeights[Any]", router), matrix=nothing)

    def _once(self, weights: W, purpose: str, make: Callable[[W], T]) -> T:
        """Returns the result of `make` for these weights, which are kept alive: made once for each purpose."""
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
