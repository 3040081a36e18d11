"""Several streams: the formulas of SPEC.md one number after the other, transformers' modules, tokens alone and among
others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextConfig, Glm5NextTextHyperConnection

from moert.kernels import library, open_backend
from moert.kernels.backend import Backend, Floats, NormWeights
from moert.kernels.reference import ReferenceBackend
from moert.models.streams import StreamMixer, begun, ended
from moert.pack.codec import F32
from moert.pack.parts import Streams

EPS = 1e-5
BACKENDS = [ReferenceBackend] if library.load() is None else [ReferenceBackend, open_backend]


class Case:
    """A mixer of streams, and the tensors that it is made of."""

    def __init__(self, part: Streams, d_model: int, seed: int, make: Any) -> None:
        rng, self.part = np.random.default_rng(seed), part
        self.weight, self.bias, self.scale = (
            rng.normal(size=shape).astype(np.float32) * size
            for (_, shape, _), size in zip(part.tensors("", d_model), (0.3, 1.0, 1.0), strict=True)
        )
        self.streams = rng.normal(size=(7, part.n, d_model)).astype(np.float32)
        self.backend: Backend = make()
        matrix, norm = self.backend.matrix(Floats("F32", self.weight)), NormWeights(_ones(part.n * d_model), None, EPS)
        self.mixer = StreamMixer(part, matrix, self.bias, self.scale, norm, self.backend)

    def around(self, streams: F32) -> F32:
        """The streams behind a half that makes the sine of its input."""
        found = streams.copy()
        self.mixer.around(found, _add_sine)
        return found


def _ones(n: int) -> F32:
    return np.ones(n, np.float32)


def _add_sine(x: F32) -> None:
    x += np.sin(x)


def by_the_text(case: Case, x: list[list[float]]) -> list[list[float]]:
    """One token's streams behind the half, in the words of SPEC.md, with i and j from 0."""
    n, floor = case.part.n, case.part.floor
    b, scale = case.bias.tolist(), case.scale.tolist()
    u = [number for stream in x for number in stream]
    length = math.sqrt(sum(number * number for number in u) / len(u) + EPS)
    f = [sum(w * number for w, number in zip(row, u, strict=True)) / length for row in case.weight.tolist()]
    enter = [1 / (1 + math.exp(-(scale[0] * f[i] + b[i]))) + floor for i in range(n)]
    join = [2 / (1 + math.exp(-(scale[1] * f[n + i] + b[n + i]))) for i in range(n)]
    e = [[math.exp(scale[2] * f[k] + b[k]) for k in range(2 * n + i * n, 3 * n + i * n)] for i in range(n)]
    c = [[each / sum(row) + floor for each in row] for row in e]
    for at in range(case.part.rounds):
        if at:
            c = [[each / (floor + sum(row)) for each in row] for row in c]
        sums = [floor + sum(c[i][j] for i in range(n)) for j in range(n)]
        c = [[c[i][j] / sums[j] for j in range(n)] for i in range(n)]
    features = range(len(x[0]))
    made = [math.sin(sum(enter[i] * x[i][at] for i in range(n))) for at in features]
    return [[join[j] * made[at] + sum(c[i][j] * x[i][at] for i in range(n)) for at in features] for j in range(n)]


PARTS = [Streams(2, 1, 1e-6), Streams(4, 20, 1e-6), Streams(3, 7, 0.1), Streams(9, 3, 1e-3)]


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_half_is_that_of_the_text(part: Streams, make: Any) -> None:
    case = Case(part, 6, part.n, make)
    expected = [by_the_text(case, token) for token in case.streams.tolist()]
    np.testing.assert_allclose(case.around(case.streams), np.array(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(library.load() is None, reason="no native kernels: numpy's products differ with their rows")
@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("d_model", [1, 6, 40])
def test_a_token_alone_has_the_bits_that_it_has_among_others(part: Streams, d_model: int) -> None:
    case = Case(part, d_model, 1, open_backend)
    together = case.around(case.streams)
    for at in range(len(together)):
        assert case.around(case.streams[at : at + 1]).tobytes() == together[at : at + 1].tobytes()
    many = np.tile(case.streams, (200, 1, 1))  # several pieces
    assert case.around(many).tobytes() == np.tile(together, (200, 1, 1)).tobytes()
    assert ended(many)[:7].tobytes() == ended(case.streams).tobytes()


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_half_is_that_of_transformers(part: Streams, make: Any) -> None:
    case = Case(part, 6, 3, make)
    config = Glm5NextTextConfig(
        hc_mult=part.n, hc_eps=part.floor, hc_sinkhorn_iters=part.rounds, hidden_size=6, rms_norm_eps=EPS
    )
    theirs = Glm5NextTextHyperConnection(config)
    with torch.no_grad():
        for parameter, values in ((theirs.fn, case.weight), (theirs.base, case.bias), (theirs.scale, case.scale)):
            parameter.copy_(torch.from_numpy(values))
        streams = torch.from_numpy(case.streams)[None]
        join, mixing, x = theirs(streams)
        expected = join[..., None] * torch.sin(x)[..., None, :] + mixing.transpose(-1, -2) @ streams
    np.testing.assert_allclose(case.around(case.streams), expected[0].numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(library.load() is None, reason="no native kernels")
@pytest.mark.parametrize("n", [2, 4, 9, 64])
def test_native_kernels_balance_as_the_reference_does(n: int) -> None:
    matrices = np.random.default_rng(n).uniform(1e-6, 1, (150, n, n)).astype(np.float32)
    expected = matrices.copy()
    ReferenceBackend().balance(expected, 20, 1e-6)
    open_backend().balance(matrices, 20, 1e-6)
    assert matrices.tobytes() == expected.tobytes()
    assert np.allclose(matrices.sum(axis=1), 1, atol=1e-4)
    assert np.allclose(matrices.sum(axis=2), 1, atol=0.1)


def test_streams_begin_alike_and_end_with_their_mean() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    streams = begun(x, 4)
    assert streams.shape == (2, 4, 3)
    assert np.array_equal(streams[:, 3], x)
    streams[:, 1] += 4
    assert np.array_equal(ended(streams), x + 1)
