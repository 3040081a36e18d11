"""The exact answers to the problems of attention, in double precision."""

from __future__ import annotations

import numpy as np
from attention_problems import Problem, raw
from native_problems import F64, FLOATS, Kind, exact, seen

from moert.kernels.backend import Floats, NormWeights, Stored
from moert.models.kv import Kept
from moert.pack.codec import F32
from moert.pack.parts import Attention, Latent


def close(found: F32 | F64, expected: F64, kind: Kind, beside: float = 0.0) -> None:
    """Matrices of codes see rounded activations: one that lies between two steps may fall either way for a difference
    in the last bit, and is then off by 1/127 of the largest. `beside`: what else the answer may be off by."""
    bound = beside + (1e-5 if kind in FLOATS else 0.02) * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def close_kept(found: F64, expected: F64, problem: Problem) -> None:
    """The same for what was rounded to float16, or to whole steps."""
    apart = 2.0**-11 * np.abs(expected) + 2.0**-15 * np.abs(expected).max(-1, keepdims=True)
    if problem.bits == 8:
        apart = 2 * apart + 0.51 * np.abs(expected).max(-1, keepdims=True) / 127
    close(found, np.where(np.abs(found - expected) <= apart, found, expected), problem.kind)


def found_keys(kept: Kept) -> tuple[F64, F64]:
    """Keys [kv, tokens, dim] and values [kv, tokens, value_dim]."""
    found = [each[:, : kept.length] for each in raw(kept)]
    number = np.int8 if kept.layout.bits == 8 else np.float16
    numbers, steps = [each.view(number) for each in found[:2]], [each.view(np.float32) for each in found[2:]]
    keys, values = (whole.astype(np.float64) * step for whole, step in zip(numbers, steps, strict=True))
    return keys, values


def times(stored: Stored, x: F64, rounds: bool, bias: F32 | None = None) -> F64:
    """`rounds`: matrices of codes see rounded activations."""
    inputs = x if isinstance(stored, Floats) or not rounds else seen(stored, x.astype(np.float32))
    found: F64 = inputs @ exact(stored).T
    return found if bias is None else found + bias


def exact_norm(x: F64, norm: NormWeights) -> F64:
    if norm.bias is not None:
        x = x - x.mean(-1, keepdims=True)
    found: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * norm.weight
    return found if norm.bias is None else found + norm.bias


def exact_sigmoid(x: F64) -> F64:
    found: F64 = 1 / (1 + np.exp(-x))
    return found


def of_matrix(problem: Problem, name: str, x: F64, rounds: bool) -> F64:
    return times(problem.matrices[name], x, rounds, problem.matrix_biases.get(name))


def turned(made: F64, turns: F32 | None) -> F64:
    """[tokens, heads, dim], of which the first features turn."""
    if turns is None:
        return made
    half = turns.shape[2]
    first, second, made = made[..., :half], made[..., half : 2 * half], made.copy()
    angles = (turns[:, 0] + 1j * turns[:, 1].astype(np.float64))[:, None]
    around = (first + 1j * second) * angles
    made[..., :half], made[..., half : 2 * half] = around.real, around.imag
    return made


def exact_heads(problem: Problem, name: str, hidden: F64, turns: F32 | None, rounds: bool) -> F64:
    """Queries, keys or values of [tokens, d_model]: [tokens, heads, dim]."""
    part, made = problem.part, of_matrix(problem, name, hidden, rounds)
    assert isinstance(part, Attention)
    split = (len(made), -1, part.dim)
    whole = (len(made), -1) if part.qk_norm == "whole" and name != "v" else split

    def normed(x: F64) -> F64:
        return exact_norm(x.reshape(whole), problem.norms[name]).reshape(split) if name in problem.norms else x

    made = made.reshape(split)
    first = name == "v" or not part.norm_turned
    made = normed(made) if first else made
    if part.clip is not None:
        made = made.clip(-part.clip, part.clip)
    made = made if name == "v" else turned(made, turns)
    return made if first else normed(made)


def exact_kept(problem: Problem, hidden: F64, rounds: bool) -> tuple[F64, F64]:
    """Keys [kv, tokens, dim] and values [kv, tokens, value_dim], of what is normed already, not rounded."""
    turns = problem.positions(0, len(hidden)).turns
    if isinstance(problem.part, Latent):
        c = exact_norm(of_matrix(problem, "kv_a", hidden, rounds), problem.norms["kv"])[:, None]
        keys = np.concatenate((c, turned(of_matrix(problem, "k_turn", hidden, rounds)[:, None], turns)), -1)
        values = c
    else:
        keys, values = (exact_heads(problem, name, hidden, turns, rounds) for name in "kv")
    return tuple(each.swapaxes(0, 1) for each in (keys, values))  # type: ignore[return-value]


def exact_attend(problem: Problem, x: F32, keys: F64, values: F64, rounds: bool) -> F64:
    """x [tokens, d_model], the first of which is at position 0, plus what it reads of these keys and values."""
    part, tokens = problem.part, len(x)
    hidden, at = exact_norm(x.astype(np.float64), problem.norms["before"]), problem.positions(0, tokens)
    if isinstance(part, Latent):
        mixed = exact_latent(problem, part, hidden, keys, values, rounds)
    else:
        queries = exact_heads(problem, "q", hidden, at.turns, rounds)
        if at.query_scale is not None:
            queries = queries * at.query_scale[:, None, None]
        shared = part.n // part.kv
        mixed = np.einsum(
            "htk,hkd->thd",
            exact_shares(problem, queries, np.repeat(keys, shared, axis=0)), np.repeat(values, shared, axis=0),
        ).reshape(tokens, -1)  # fmt: skip
    if part.gate:
        by = exact_sigmoid(of_matrix(problem, "gate", hidden, rounds)).reshape(tokens, part.n, -1)
        mixed = (mixed.reshape(tokens, part.n, -1) * by).reshape(tokens, -1)
    made = of_matrix(problem, "o", mixed, rounds)
    if "after" in problem.norms:
        made = exact_norm(made, problem.norms["after"])
    return x + problem.add * made


def unsteadiness(problem: Problem, x: F32, keys: F64, values: F64) -> float:
    """How far the exact answer moves when each number of x moves by four roundings of float32, the most of some
    directions: what large scores make of sums that processors add in another order."""
    random, exact = np.random.default_rng(0), exact_attend(problem, x, keys, values, rounds=False)
    moved = (x * (1 + 2.0**-22 * random.choice((-1.0, 1.0), x.shape)) for _ in range(8))
    return max(float(np.abs(exact_attend(problem, each, keys, values, rounds=False) - exact).max()) for each in moved)  # type: ignore[arg-type]


def exact_shares(problem: Problem, queries: F64, keys: F64) -> F64:
    """queries [tokens, n, dim] and keys [n, length, dim] → what each query reads of each key, [n, tokens, length]."""
    part, tokens, length = problem.part, len(queries), keys.shape[1]
    scores = np.einsum("thd,hkd->htk", queries, keys) * part.scale
    key, query = np.arange(length)[None], np.arange(tokens)[:, None]
    hides = key > query if problem.causal else np.zeros((tokens, length), bool)
    if isinstance(part, Attention):
        if part.softcap is not None:
            scores = part.softcap * np.tanh(scores / part.softcap)
        if part.window is not None:
            hides = hides | (key <= query - part.window)
        if part.chunk is not None:
            hides = hides | (key // part.chunk < query // part.chunk)
    if problem.bias is not None:
        scores = scores + problem.positions(0, tokens).bias[:, key - query + problem.positions(0, tokens).zero]  # type: ignore[index]
    scores = np.where(hides, -np.inf, scores)
    if problem.sinks is not None:
        sinks = np.broadcast_to(problem.sinks[:, None, None], (part.n, tokens, 1))
        scores = np.concatenate((scores, sinks), axis=2)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    shares: F64 = (powers / powers.sum(-1, keepdims=True))[..., :length]
    return shares


def exact_latent(problem: Problem, part: Latent, hidden: F64, keys: F64, values: F64, rounds: bool) -> F64:
    """What the heads read, [tokens, n * v]. Keys and values of each head are made of c, as in DeepSeek-V2's report; if
    activations are rounded, queries meet c itself, or other numbers would be rounded."""
    tokens, c, asked = len(hidden), part.kv_rank, hidden
    turns = problem.positions(0, tokens).turns
    if part.q_rank is not None:
        asked = exact_norm(of_matrix(problem, "q_a", hidden, rounds), problem.norms["q"])
    still = of_matrix(problem, "q", asked, rounds).reshape(tokens, part.n, -1)
    turning = turned(of_matrix(problem, "q_turn", asked, rounds).reshape(tokens, part.n, -1), turns)
    into, out = (
        exact(problem.matrices[name]).reshape(part.n, -1, size) for name, size in (("keys", part.nope), ("values", c))
    )
    if rounds:
        meets = np.einsum("thd,hcd->thc", rounded_heads(problem.matrices["keys"], still), into)
        shares = exact_shares(problem, np.concatenate((meets, turning), -1), np.repeat(keys, part.n, axis=0))
        read = rounded_heads(problem.matrices["values"], np.einsum("htk,kc->thc", shares, values[0]))
        return np.einsum("thc,hvc->thv", read, out).reshape(tokens, -1)
    made = np.einsum("hcd,kc->hkd", into, keys[0, :, :c])
    alike = np.broadcast_to(keys[:, :, c:], (part.n, len(keys[0]), part.turning))
    shares = exact_shares(problem, np.concatenate((still, turning), -1), np.concatenate((made, alike), -1))
    return np.einsum("htk,hkv->thv", shares, np.einsum("hvc,kc->hkv", out, values[0])).reshape(tokens, -1)


def rounded_heads(stored: Stored, x: F64) -> F64:
    """x [tokens, heads, inputs] as a matrix sees it that is another for each head."""
    found: F64 = seen(stored, x.reshape(-1, x.shape[-1]).astype(np.float32)).reshape(x.shape)
    return found
