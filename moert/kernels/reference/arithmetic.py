"""Matrices, norms and activations on float32 arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from moert.kernels.backend import NormWeights
from moert.pack.codec import F32
from moert.pack.parts import Act, Ffn


class Plain(NamedTuple):
    """A matrix: weight [out, in], bias [out] or None."""

    weight: F32
    bias: F32 | None = None


def product(x: F32, matrix: Plain) -> F32:
    """x [tokens, in] → [tokens, out]"""
    made: F32 = x @ matrix.weight.T
    return made if matrix.bias is None else made + matrix.bias


def ffn(matrices: Mapping[str, Plain], x: F32, spec: Ffn) -> F32:
    """x [rows, d_model] → [rows, d_model]; see moert.pack.parts.Ffn and Act."""
    return product(bent(matrices, x, spec), matrices["down"])


def bent(matrices: Mapping[str, Plain], x: F32, spec: Ffn) -> F32:
    """The same before `down`: [rows, d_ff]"""
    act, limit = spec.act, np.float32(math.inf if spec.act.limit is None else spec.act.limit)
    up = product(x, matrices["up"])
    if "gate" not in matrices:
        return activated(act, np.minimum(up, limit))
    gate = np.minimum(product(x, matrices["gate"]), limit)
    made: F32 = activated(act, gate) * (np.clip(up, -limit, limit) + np.float32(act.plus))
    return made


def normed(x: F32, norm: NormWeights) -> F32:
    """x [..., n]; see moert.pack.parts.Norm, and NormWeights."""
    if norm.weight is None:
        same: F32 = x.copy()
        return same
    if norm.bias is not None:
        x = x - x.mean(axis=-1, keepdims=True, dtype=np.float32)
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True, dtype=np.float32) + np.float32(norm.eps))
    made: F32 = x / scale * norm.weight
    return made if norm.bias is None else made + norm.bias


def softmax(scores: F32, sink: np.float32 | None = None) -> F32:
    """Over the last axis; with a `sink` that is one score more, whose share is left out."""
    most = scores.max(axis=-1, keepdims=True)
    most = most if sink is None else np.maximum(most, sink)
    powers: F32 = np.exp(scores - most)
    total: F32 = powers.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - most)
    shares: F32 = powers / total
    return shares


def sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):
        value: F32 = np.reciprocal(1 + np.exp(-x))
    return value


def _erf(x: F32) -> F32:
    found: F32 = np.vectorize(math.erf, otypes=[np.float32])(x)
    return found


_ACTIVATIONS: Mapping[str, Callable[[F32], F32]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "gelu": lambda x: np.float32(0.5) * x * (1 + _erf(x * np.float32(0.5**0.5))),
    "gelu_new": lambda x: (
        np.float32(0.5) * x * (1 + np.tanh(np.float32((2 / math.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)))
    ),
}


def activated(act: Act, x: F32) -> F32:
    if act.name == "silu":
        return x * sigmoid(np.float32(act.slope) * x)
    return _ACTIVATIONS[act.name](x)
