"""Problems for attention: random weights, positions and pieces, and the exact answer in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from native_problems import F64, FLOATS, KINDS, Kind, exact, normal, random_stored, seen

from moert.kernels.backend import AttentionWeights, BackendOf, Floats, Positions, Stored
from moert.models.kv import KEYS, Kept, KvBits
from moert.pack.codec import F32
from moert.pack.parts import Attention

EPS = 1e-3
GARBAGE = {1: 0x80, 2: 0xFFFF}
"""By the bytes of a number: -128, which nobody writes, and as float16 not a number."""
MOST_HALF = 65504.0
MOST = 400
"""Tokens of a sequence, at most."""

AnyBackend = BackendOf[Any, Any]
Raw = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Problem:
    """An attention: its weights by name, and biases by how far a key lies after the query, from -MOST on."""

    kind: Kind
    part: Attention
    own: bool
    causal: bool
    rope_dims: int
    norms: dict[str, F32]
    matrices: dict[str, Stored]
    bias: F32 | None
    bits: KvBits

    @property
    def d_model(self) -> int:
        return len(self.norms["x"])

    def on(self, backend: AnyBackend) -> AttentionWeights[Any]:
        norms, matrices = self.norms, {name: backend.matrix(stored) for name, stored in self.matrices.items()}
        return AttentionWeights(
            self.part, EPS, self.own, self.causal, self.rope_dims, norms["x"], norms.get("q"), norms.get("k"),
            norms.get("sinks"), **matrices,
        )  # fmt: skip

    def positions(self, start: int, tokens: int) -> Positions:
        turns = turns_of(self.rope_dims)[start : start + tokens] if self.rope_dims else None
        return Positions(turns, self.bias, 0 if self.bias is None else MOST)

    def tokens(self, count: int) -> F32:
        return normal(np.random.default_rng(count), count, self.d_model)


@cache
def turns_of(dims: int) -> F32:
    """Cosines and sines, [MOST, 2, dims / 2]."""
    angles = np.arange(MOST)[:, None] * 1000.0 ** -(np.arange(dims // 2) / (dims // 2))
    return np.stack((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)


def make(
    seed: int = 0, kind: Kind = "F32", kv: int = 2, shared: int = 2, dim: int = 20, d_model: int = 40,
    qk_norm: Literal["whole", "head"] | None = None, clip: float | None = None, scale: float = 0.3, turning: float = 0,
    biased: bool = False, own: bool = True, causal: bool = True, window: int | None = None,
    softcap: float | None = None, sinks: bool = False, bits: KvBits = 16,
) -> Problem:  # fmt: skip
    """`shared`: heads of queries for each of keys; `turning`: the share of a head's features that turn."""
    rng, n = np.random.default_rng(seed), kv * shared
    shapes = {"q": (n * dim, d_model), "k": (kv * dim, d_model), "v": (kv * dim, d_model), "o": (d_model, n * dim)}
    norms = {"x": d_model}
    if qk_norm is not None:
        norms |= {"q": n * dim, "k": kv * dim} if qk_norm == "whole" else {"q": dim, "k": dim}
    if sinks:
        norms["sinks"] = n
    part = Attention(n, kv, dim, scale, qk_norm, clip, None, None, window=window, softcap=softcap, sinks=sinks)
    return Problem(
        kind, part, own, causal,
        int(turning * dim / 2) * 2 if own else 0,
        {name: 1 + np.float32(0.2) * normal(rng, size) for name, size in norms.items()},
        {name: random_stored(rng, kind, *shape, 16, 1.5 * shape[1] ** -0.5) for name, shape in shapes.items()},
        normal(rng, n, 2 * MOST + 1) if biased and own else None, bits,
    )  # fmt: skip


def problems(kinds: Sequence[Kind] = KINDS, **fixed: Any) -> st.SearchStrategy[Problem]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 1 << 20), "kind": st.sampled_from(kinds), "kv": st.integers(1, 3),
        "shared": st.integers(1, 4), "dim": st.sampled_from([2, 6, 16, 20, 33, 64, 128]),
        "d_model": st.integers(3, 70), "qk_norm": st.sampled_from([None, "whole", "head"]),
        "clip": st.sampled_from([None, 0.7]), "scale": st.sampled_from([1.0, 0.3]),
        "softcap": st.sampled_from([None, None, 3.0]), "sinks": st.booleans(),
        "turning": st.sampled_from([0, 0.4, 1]), "biased": st.booleans(), "bits": st.sampled_from([16, 16, 8]),
    }  # fmt: skip
    return st.builds(make, **drawn | {name: st.just(value) for name, value in fixed.items()})


# What a backend does


def read(
    backend: AnyBackend, problem: Problem, weights: AttentionWeights[Any], x: F32, pieces: Sequence[int]
) -> tuple[F32, Kept]:
    """x [tokens, d_model] in pieces, which attend to themselves → what comes out, and what is kept."""
    out, kept = x.copy(), Kept(problem.part, bits=problem.bits)
    for tokens in pieces:
        start = room_for(kept, tokens)
        backend.attend(weights, out[start : kept.length], kept, start, problem.positions(start, tokens))
    return out, kept


def keep(
    backend: AnyBackend, weights: AttentionWeights[Any], encoded: F32, pieces: Sequence[int], bits: KvBits = 16
) -> Kept:
    """What a decoder attends to, written in pieces."""
    kept = Kept(weights.part, bits=bits)
    for tokens in pieces:
        start = room_for(kept, tokens)
        backend.keep(weights, encoded[start : kept.length], kept, start)
    return kept


def room_for(kept: Kept, tokens: int) -> int:
    """Room for tokens, in which and behind which there is nothing of use."""
    room, start = kept.values.shape[1], kept.extend(tokens)
    if kept.values.shape[1] > room:
        behind = np.arange(start, kept.values.shape[1])
        keys, values = _bytes(kept.keys), _bytes(kept.values)
        keys[:, behind // KEYS, :, behind % KEYS] = GARBAGE[keys.itemsize]
        values[:, start:] = GARBAGE[values.itemsize]
        if kept.key_steps is not None and kept.value_steps is not None:
            _bytes(kept.key_steps)[:, behind // KEYS, behind % KEYS] = GARBAGE[2]
            _bytes(kept.value_steps)[:, start:] = GARBAGE[2]
    return start


def _bytes(numbers: npt.NDArray[Any]) -> Raw:
    return numbers.view({1: np.uint8, 2: np.uint16}[numbers.itemsize])


def raw(kept: Kept) -> tuple[Raw, ...]:
    """Copies of keys and values, those behind the last included: both [kv, room, dim]; and of their steps."""
    kv, _, dim, _ = kept.keys.shape
    keys, values = _bytes(kept.keys.transpose(0, 1, 3, 2).reshape(kv, -1, dim).copy()), _bytes(kept.values.copy())
    if kept.key_steps is None or kept.value_steps is None:
        return keys, values
    return keys, values, _bytes(kept.key_steps.reshape(kv, -1, 1).copy()), _bytes(kept.value_steps[..., None].copy())


def nothing_behind(kept: Kept) -> bool:
    """Whether nothing was written behind the last key and value."""
    return all((each[:, kept.length :] == GARBAGE[each.itemsize]).all() for each in raw(kept))


# The exact answer


def close(found: F32 | F64, expected: F64, kind: Kind) -> None:
    """Matrices of codes see rounded activations: one that lies between two steps may fall either way for a difference
    in the last bit, and is then off by 1/127 of the largest."""
    bound = (1e-5 if kind in FLOATS else 0.02) * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def close_kept(found: F64, expected: F64, problem: Problem) -> None:
    """The same for what was rounded to float16, or to whole steps."""
    apart = 2.0**-11 * np.abs(expected) + 2.0**-25
    if problem.bits == 8:
        apart = 2 * apart + 0.51 * np.abs(expected).max(-1, keepdims=True) / 127
    close(found, np.where(np.abs(found - expected) <= apart, found, expected), problem.kind)


def found_keys(kept: Kept) -> tuple[F64, F64]:
    """[kv, tokens, dim] each."""
    found = [each[:, : kept.length] for each in raw(kept)]
    if len(found) == 2:
        keys, values = (each.view(np.float16).astype(np.float64) for each in found)
        return keys, values
    numbers, steps = [each.view(np.int8) for each in found[:2]], [each.view(np.float16) for each in found[2:]]
    keys, values = (whole * step.astype(np.float64) for whole, step in zip(numbers, steps, strict=True))
    return keys, values


def times(stored: Stored, x: F64, rounds: bool) -> F64:
    """`rounds`: matrices of codes see rounded activations."""
    inputs = x if isinstance(stored, Floats) or not rounds else seen(stored, x.astype(np.float32))
    found: F64 = inputs @ exact(stored).T
    return found


def exact_norm(x: F64, weight: F32) -> F64:
    found: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return found


def exact_heads(problem: Problem, name: str, hidden: F64, turns: F32 | None, rounds: bool) -> F64:
    """Queries, keys or values of [tokens, d_model]: [tokens, heads, dim]."""
    part, made = problem.part, times(problem.matrices[name], hidden, rounds)
    whole, split = (len(made), -1), (len(made), -1, part.dim)
    if name in problem.norms:
        made = exact_norm(made.reshape(whole if part.qk_norm == "whole" else split), problem.norms[name])
    made = made.reshape(split)
    if part.clip is not None:
        made = made.clip(-part.clip, part.clip)
    if turns is None or name == "v":
        return made
    half = turns.shape[2]
    first, second = made[..., :half].copy(), made[..., half : 2 * half].copy()
    angles = (turns[:, 0] + 1j * turns[:, 1].astype(np.float64))[:, None]
    turned = (first + 1j * second) * angles
    made[..., :half], made[..., half : 2 * half] = turned.real, turned.imag
    return made


def exact_kept(problem: Problem, hidden: F64, rounds: bool) -> tuple[F64, F64]:
    """Keys and values, [kv, tokens, dim], of what is normed already, in the bounds of float16 but not rounded to it."""
    turns = problem.positions(0, len(hidden)).turns
    keys, values = (exact_heads(problem, name, hidden, turns, rounds).swapaxes(0, 1) for name in "kv")
    return keys.clip(-MOST_HALF, MOST_HALF), values.clip(-MOST_HALF, MOST_HALF)


def exact_attend(problem: Problem, x: F32, keys: F64, values: F64, rounds: bool) -> F64:
    """x [tokens, d_model], the first of which is at position 0, plus what it reads of these keys and values."""
    part, tokens, length = problem.part, len(x), keys.shape[1]
    hidden = exact_norm(x.astype(np.float64), problem.norms["x"])
    queries = exact_heads(problem, "q", hidden, problem.positions(0, tokens).turns, rounds)
    shared = part.n // part.kv
    scores = np.einsum("thd,hkd->htk", queries, np.repeat(keys, shared, axis=0)) * part.scale
    if part.softcap is not None:
        scores = part.softcap * np.tanh(scores / part.softcap)
    after = np.arange(length)[None] - np.arange(tokens)[:, None]
    if problem.bias is not None:
        scores = scores + problem.bias[:, after + MOST]
    hides = after > 0 if problem.causal else np.zeros_like(after, bool)
    if part.window is not None:
        hides = hides | (after <= -part.window)
    scores = np.where(hides, -np.inf, scores)
    if part.sinks:
        sinks = problem.norms["sinks"][:, None, None]
        scores = np.concatenate((scores, np.broadcast_to(sinks, (part.n, tokens, 1))), axis=2)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    shares = (powers / powers.sum(-1, keepdims=True))[..., :length]
    mixed = np.einsum("htk,hkd->thd", shares, np.repeat(values, shared, axis=0)).reshape(tokens, -1)
    return x + times(problem.matrices["o"], mixed, rounds)
