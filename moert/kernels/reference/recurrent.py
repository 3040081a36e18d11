"""What mixes tokens through a state of fixed size: short convolution, gated delta rule, the scan of Mamba."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moert.kernels.backend import NormWeights
from moert.kernels.reference.arithmetic import normed, sigmoid
from moert.pack.codec import F32

_LENGTH_EPS = np.float32(1e-6)


def conv(x: F32, taps: F32, bias: F32 | None, state: F32) -> F32:
    """See `moert.kernels.backend.Backend.conv`."""
    inputs, made = np.concatenate((state, x)), np.zeros_like(x)
    for place, tap in enumerate(taps):
        made += tap * inputs[place : place + len(x)]
    state[:] = inputs[len(x) :]
    return made if bias is None else made + bias


def delta(q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> F32:
    """See `moert.kernels.backend.Backend.delta`."""
    shared, made = v.shape[1] // k.shape[1], np.empty_like(v, order="C")
    q = _of_length_1(q).repeat(shared, axis=1) / np.float32(q.shape[2] ** 0.5)
    k, kept = _of_length_1(k).repeat(shared, axis=1), np.exp(decay)
    for at in range(len(v)):
        state *= kept[at][:, None, None]
        missing = v[at] - _read(state, k[at])
        state += k[at][:, :, None] * (beta[at][:, None] * missing)[:, None]
        made[at] = _read(state, q[at])
    return made


def _of_length_1(x: F32) -> F32:
    made: F32 = x / np.sqrt((x * x).sum(axis=-1, keepdims=True, dtype=np.float32) + _LENGTH_EPS)
    return made


def _read(state: F32, by: F32) -> F32:
    """state [heads, dk, dv], by [heads, dk] → [heads, dv]"""
    found: F32 = np.matmul(by[:, None], state)[:, 0]
    return found


def scan(x: F32, dt: F32, a: F32, b: F32, c: F32, d: F32, state: F32) -> F32:
    """See `moert.kernels.backend.Backend.scan`."""
    shared, made = x.shape[1] // b.shape[1], np.empty_like(x, order="C")
    b, c = b.repeat(shared, axis=1), c.repeat(shared, axis=1)
    for at in range(len(x)):
        state *= np.exp(dt[at][:, None] * a)[:, None]
        state += (dt[at][:, None] * x[at])[:, :, None] * b[at][:, None]
        made[at] = np.matmul(state, c[at][:, :, None])[:, :, 0] + d[:, None] * x[at]
    return made


def softplus(x: F32) -> F32:
    made: F32 = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return made


def silu(x: F32) -> F32:
    return x * sigmoid(x)


def gated(x: F32, gate: F32, norm: NormWeights | None, groups: int, last: bool) -> F32:
    """See `moert.kernels.backend.Backend.gated`."""
    by = silu(gate)
    if norm is None:
        return x * by
    made = _normed_parts(x * by if last else x, norm, groups)
    return made if last else made * by


def _normed_parts(x: F32, norm: NormWeights, groups: int) -> F32:
    assert norm.weight is not None
    parts = replace(norm, weight=norm.weight.reshape(groups, -1))
    return normed(x.reshape(len(x), groups, -1), parts).reshape(x.shape)
