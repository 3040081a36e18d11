"""Problems for attention of both kinds: random weights, positions and pieces; and what a backend does with them. The
exact answers are in attention_answers.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from native_problems import CODED, KINDS, Kind, normal, random_stored

from moert.kernels.backend import AttentionWeights, BackendOf, NormWeights, Positions, Stored
from moert.kernels.pages import KvBits
from moert.models.kv import Kept
from moert.pack.codec import F32
from moert.pack.parts import Attention, Latent, Norm

EPS = 1e-3
SOFT = 0.1
"""The eps of norms that would make much of what float32 leaves of a small difference."""
GARBAGE = {1: 0x80, 2: 0xFFFF, 4: 0xFFFFFFFF}
"""By the bytes of a number: -128, which nobody writes, and as float16 not a number."""
MOST = 400
"""Tokens of a sequence, at most."""

AnyBackend = BackendOf[Any, Any]
Raw = npt.NDArray[np.unsignedinteger[Any]]
Biases = Literal["qkv", "qkvo", "qkvog"]


@dataclass(frozen=True)
class Problem:
    """An attention: its weights by name, and biases by how far a key lies after the query, from -MOST on; what queries
    are multiplied with, by position."""

    kind: Kind
    part: Attention | Latent
    own: bool
    causal: bool
    rope_dims: int
    norms: dict[str, NormWeights]
    matrices: dict[str, Stored]
    matrix_biases: dict[str, F32]
    sinks: F32 | None
    bias: F32 | None
    query_scale: F32 | None
    add: float
    bits: KvBits

    @property
    def d_model(self) -> int:
        return len(self.norms["before"].weight)

    def on(self, backend: AnyBackend) -> AttentionWeights[Any]:
        biases = self.matrix_biases
        matrices = {name: backend.matrix(stored, biases.get(name)) for name, stored in self.matrices.items()}
        return AttentionWeights(
            self.part, self.own, self.causal, self.rope_dims, self.norms, matrices, self.sinks, self.add
        )

    def positions(self, start: int, tokens: int) -> Positions:
        turns = turns_of(self.rope_dims)[start : start + tokens] if self.rope_dims else None
        scale = None if self.query_scale is None else self.query_scale[start : start + tokens]
        return Positions(turns, self.bias, 0 if self.bias is None else MOST, scale)

    def tokens(self, count: int) -> F32:
        return normal(np.random.default_rng(count), count, self.d_model)


@cache
def turns_of(dims: int) -> F32:
    """Cosines and sines, [MOST, 2, dims / 2]."""
    angles = np.arange(MOST)[:, None] * 1000.0 ** -(np.arange(dims // 2) / (dims // 2))
    return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


def random_norm(rng: np.random.Generator, n: int, layer: bool = False, soft: bool = False) -> NormWeights:
    """`layer`: of the kind that takes the mean away, and has a bias."""
    weight = 1 + np.float32(0.2) * normal(rng, n)
    return NormWeights(weight, np.float32(0.3) * normal(rng, n) if layer else None, SOFT if layer or soft else EPS)


def make(
    seed: int = 0, kind: Kind = "F32", kv: int = 2, shared: int = 2, dim: int = 20, d_model: int = 40,
    qk_norm: Literal["whole", "head"] | None = None, clip: float | None = None, scale: float = 0.3, turning: float = 0,
    biased: bool = False, own: bool = True, causal: bool = True, window: int | None = None,
    softcap: float | None = None, sinks: bool = False, biases: Biases | None = None, norm_turned: bool = False,
    v_norm: bool = False, chunk: int | None = None, gate: bool = False, layer: bool = False, after: bool = False,
    add: float = 1, scaled: bool = False, bits: KvBits = 16,
) -> Problem:  # fmt: skip
    """`shared`: heads of queries for each of keys; `turning`: the share of a head's features that turn; `biased`: by
    distance; `layer`: the kind of the norms before and after; `scaled`: queries by their position."""
    rng, n = np.random.default_rng(seed), kv * shared
    gate = gate or "g" in (biases or "")
    part = Attention(
        n, kv, dim, scale, qk_norm, clip, None, None, window=window, softcap=softcap, sinks=sinks, biases=biases,
        norm_turned=norm_turned, v_norm=v_norm, chunk=chunk if causal and own else None, gate=gate,
    )  # fmt: skip
    shapes = {"q": (n * dim, d_model), "k": (kv * dim, d_model), "v": (kv * dim, d_model), "o": (d_model, n * dim)}
    if gate:
        shapes["gate"] = (n * dim, d_model)
    norms = {"before": random_norm(rng, d_model, layer)}
    if qk_norm is not None:
        whole = qk_norm == "whole"
        norms |= {"q": random_norm(rng, n * dim if whole else dim), "k": random_norm(rng, kv * dim if whole else dim)}
    if v_norm:
        norms["v"] = random_norm(rng, dim)
    if after:
        norms["after"] = random_norm(rng, d_model, layer, soft=True)
    return Problem(
        kind, part, own, causal,
        int(turning * dim / 2) * 2 if own else 0, norms,
        {name: random_stored(rng, kind, *shape, 16, 1.5 * shape[1] ** -0.5) for name, shape in shapes.items()},
        {name: normal(rng, shape[0]) for name, shape in shapes.items() if name[0] in (biases or "")},
        normal(rng, n) if sinks else None, normal(rng, n, 2 * MOST + 1) if biased and own else None,
        rng.uniform(0.5, 1.5, MOST).astype(np.float32) if scaled and own else None, add, bits,
    )  # fmt: skip


def make_latent(
    seed: int = 0, kind: Kind = "F32", n: int = 3, q_rank: int | None = None, kv_rank: int = 32, nope: int = 20,
    turning: int = 8, v: int = 12, d_model: int = 40, scale: float = 0.3, turns: bool = True, bias: bool = False,
    layer: bool = False, after: bool = False, add: float = 1, bits: KvBits = 16, gate: bool = False,
) -> Problem:  # fmt: skip
    """`layer`: the kind of all norms."""
    rng, norm = np.random.default_rng(seed), Norm(EPS, "layer" if layer else "rms")
    part = Latent(n, q_rank, kv_rank, nope, turning, v, scale, norm, 0 if turns else None, bias, gate)
    tensors = {tensor.name.removeprefix("at."): tensor.shape for tensor in part.tensors("at", d_model)}
    shapes = {name[:-7]: shape for name, shape in tensors.items() if name.endswith(".weight") and len(shape) == 2}
    sizes = {"before": d_model, "kv": kv_rank} | ({"after": d_model} if after else {})
    sizes |= {} if q_rank is None else {"q": q_rank}
    return Problem(
        kind, part, True, True, turning if turns else 0,
        {name: random_norm(rng, size, layer, soft=name == "after") for name, size in sizes.items()},
        {name: random_stored(rng, kind, *shape, 16, 1.5 * shape[1] ** -0.5) for name, shape in shapes.items()},  # type: ignore[misc]
        {name: normal(rng, shape[0]) for name, shape in shapes.items() if f"{name}.bias" in tensors},
        None, None, None, add, bits,
    )  # fmt: skip


def problems(kinds: Sequence[Kind] = (*KINDS, *CODED), **fixed: Any) -> st.SearchStrategy[Problem]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 1 << 20), "kind": st.sampled_from(kinds), "kv": st.integers(1, 3),
        "shared": st.integers(1, 4), "dim": st.sampled_from([2, 6, 16, 20, 33, 64, 128]),
        "d_model": st.integers(3, 70), "qk_norm": st.sampled_from([None, "whole", "head"]),
        "clip": st.sampled_from([None, 0.7]), "scale": st.sampled_from([1.0, 0.3]),
        "softcap": st.sampled_from([None, None, 3.0]), "sinks": st.booleans(),
        "turning": st.sampled_from([0, 0.4, 1]), "biased": st.booleans(), "bits": st.sampled_from([16, 16, 8]),
        "biases": st.sampled_from([None, "qkv", "qkvo", "qkvog"]), "norm_turned": st.booleans(),
        "v_norm": st.booleans(), "chunk": st.sampled_from([None, None, 1, 7, 64]), "gate": st.booleans(),
        "layer": st.booleans(), "after": st.booleans(), "add": st.sampled_from([1.0, 0.3]), "scaled": st.booleans(),
    }  # fmt: skip
    return st.builds(make, **drawn | {name: st.just(value) for name, value in fixed.items()})


def latent_problems(kinds: Sequence[Kind] = (*KINDS, *CODED), **fixed: Any) -> st.SearchStrategy[Problem]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 1 << 20), "kind": st.sampled_from(kinds), "n": st.integers(1, 5),
        "q_rank": st.sampled_from([None, 5, 32]), "kv_rank": st.sampled_from([2, 15, 32, 64]),
        "nope": st.sampled_from([1, 6, 20, 32]), "turning": st.sampled_from([2, 8]),
        "v": st.sampled_from([1, 12, 32, 72]), "d_model": st.integers(3, 70), "scale": st.sampled_from([1.0, 0.3]),
        "turns": st.booleans(),
        "bias": st.booleans(), "layer": st.booleans(), "after": st.booleans(), "add": st.sampled_from([1.0, 0.3]),
        "bits": st.sampled_from([16, 16, 8]), "gate": st.booleans(),
    }  # fmt: skip
    return st.builds(make_latent, **drawn | {name: st.just(value) for name, value in fixed.items()})


# What a backend does


def read(
    backend: AnyBackend, problem: Problem, weights: AttentionWeights[Any], x: F32, pieces: Sequence[int]
) -> tuple[F32, Kept]:
    """x [tokens, d_model] in pieces, which attend to themselves → what comes out, and what is kept."""
    out, kept = x.copy(), Kept(problem.part, bits=problem.bits, make=backend.pages)
    for tokens in pieces:
        start = room_for(kept, tokens)
        backend.attend(weights, out[start : kept.length], kept, start, problem.positions(start, tokens))
    return out, kept


def keep(
    backend: AnyBackend, weights: AttentionWeights[Any], encoded: F32, pieces: Sequence[int], bits: KvBits = 16
) -> Kept:
    """What a decoder attends to, written in pieces."""
    kept = Kept(weights.part, bits=bits, make=backend.pages)
    for tokens in pieces:
        start = room_for(kept, tokens)
        backend.keep(weights, encoded[start : kept.length], kept, start)
    return kept


def room_for(kept: Kept, tokens: int) -> int:
    """Room for tokens, in which and behind which there is nothing of use."""
    pages, start = len(kept.pages), kept.extend(tokens)
    for page in kept.pages[pages:]:
        for part in (page.keys, page.values, page.key_steps, page.value_steps):
            _bytes(part)[...] = GARBAGE[part.itemsize]
    return start


def _bytes(numbers: npt.NDArray[Any]) -> Raw:
    return numbers.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[numbers.itemsize])


def raw(kept: Kept) -> tuple[Raw, ...]:
    """Copies of keys and values, those behind the last included: [kv, room, dim] and [kv, room, value_dim]; and of
    their steps."""
    pages = kept.pages
    parts = [[page.keys.swapaxes(1, 2) for page in pages], [page.values for page in pages]]
    parts += [[page.key_steps[..., None] for page in pages], [page.value_steps[..., None] for page in pages]]
    return tuple(_bytes(np.concatenate(each, axis=1)) for each in parts)


def nothing_behind(kept: Kept) -> bool:
    """Whether nothing was written behind the last key and value."""
    return all((each[:, kept.length :] == GARBAGE[each.itemsize]).all() for each in raw(kept))
