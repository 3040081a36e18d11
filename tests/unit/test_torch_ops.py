"""A pack's bytes computed with in torch, beside the readable arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import ACTIVATION, CODED, KINDS, Kind, activations, normal, random_stored

from moert.beside.gpu import torch_backend
from moert.beside.gpu.torch_backend import by_head, ffn, product, tiled
from moert.beside.gpu.torch_matrices import chosen_rows, copied, lying, placed, weights
from moert.kernels.backend import Floats, ProjectionView
from moert.kernels.reference import Plain
from moert.kernels.reference import ffn as plain_ffn
from moert.kernels.reference import weights as plain_weights
from moert.pack.codec import CODES, F32, U8, QuantizedMatrix, TrellisMatrix, Width, n_groups, row_bytes
from moert.pack.parts import Act, Ffn
from tests.pairs import thinned
from tests.random_packs import random_trellis

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA, or a torch without it")
GROUPS = (None, 16, 32, 64, 10, 48, 1)
kinds, groups, seeds = st.sampled_from((*KINDS, *CODED)), st.sampled_from(GROUPS), st.integers(0, 1 << 20)
sizes, tokens_of = st.integers(1, 150), st.integers(1, 20)


def close(found: torch.Tensor, expected: F32) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


def random_mxfp4(rng: np.random.Generator, rows: int, cols: int, place: int = 0) -> tuple[bytes, ProjectionView]:
    """Any codes and any exponents, from this place on, and a bias behind them."""
    codes = rng.integers(0, 256, rows * row_bytes(cols, 4)).astype(np.uint8).tobytes()
    exponents = rng.integers(0, 256, rows * n_groups(cols, 32)).astype(np.uint8).tobytes()
    second = place + len(codes)
    third = -(-(second + len(exponents)) // 4) * 4
    body = bytes(place) + codes + exponents
    body += bytes(third - len(body)) + normal(rng, rows).tobytes()
    return body, ProjectionView((rows, cols), 16, 0, "MXFP4", (place, second), third)


def trellis_part(stored: TrellisMatrix, bias: F32 | None = None) -> tuple[U8, ProjectionView]:
    """The body of an expert's file with these codes alone, and where its parts lie."""
    rows, second = len(stored.scale), -(-len(stored.stream) // 2) * 2
    third = -(-(second + 2 * rows) // 4) * 4
    body = stored.stream.tobytes().ljust(second, b"\0") + stored.scale.tobytes()
    body = body.ljust(third, b"\0") + (b"" if bias is None else bias.tobytes())
    place, shape = None if bias is None else third, (rows, stored.in_features)
    part = ProjectionView(shape, stored.bits, shape[1], "F16", (0, second), place, stored.power, trellis=True)
    return np.frombuffer(body, np.uint8), part


@settings(max_examples=150)
@given(seed=seeds, kind=kinds, group=groups, rows=sizes, cols=sizes)
def test_weights_are_those_of_the_reference_bit_for_bit(
    seed: int, kind: Kind, group: int | None, rows: int, cols: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = random_stored(rng, kind, rows, cols, group)
    matrix, expected = placed(stored, None, CPU), plain_weights(stored)
    first, stop = sorted(rng.integers(0, rows + 1, 2).tolist())
    assert np.array_equal(weights(matrix).numpy(), expected)
    assert np.array_equal(weights(matrix, first, stop).numpy(), expected[first:stop])
    ids = rng.integers(0, rows, 5).tolist()
    assert np.array_equal(chosen_rows(matrix, ids).numpy(), expected[ids])


@settings(max_examples=50)
@given(seed=seeds, rows=st.integers(1, 20), cols=sizes)
def test_mxfp4_is_that_of_the_reference_bit_for_bit(seed: int, rows: int, cols: int) -> None:
    """At any exponent: weights that are infinite, and those that are less than a normal number."""
    body, part = random_mxfp4(np.random.default_rng(seed), rows, cols, place=64)
    buffer = np.frombuffer(bytearray(body), np.uint8)
    matrix = lying(copied(buffer, CPU), part)
    with np.errstate(over="ignore"):
        expected = plain_weights(part.stored(buffer))
    assert np.array_equal(weights(matrix).numpy(), expected)
    assert matrix.bias is not None
    assert np.array_equal(matrix.bias.numpy(), part.bias(buffer))


@settings(max_examples=80)
@given(
    seed=seeds, bits=st.sampled_from(list(CODES)), rows=st.integers(1, 400), cols=sizes, power=st.sampled_from([0, 3])
)
def test_trellis_codes_are_those_of_the_reference_bit_for_bit(
    seed: int, bits: Width, rows: int, cols: int, power: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = replace(random_trellis(rng, rows, cols, bits), power=power)
    body, part = trellis_part(stored)
    matrix, expected = lying(copied(body, CPU), part), plain_weights(stored)
    first, stop = sorted(rng.integers(0, rows + 1, 2).tolist())
    assert matrix.rows == rows
    assert np.array_equal(weights(matrix).numpy(), expected)
    assert np.array_equal(weights(matrix, first, stop).numpy(), expected[first:stop])
    x = activations(rng, 3, cols)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "TILE", 200 * cols)
        close(product(torch.from_numpy(x), matrix), x @ expected.T)


@settings(max_examples=50)
@given(seed=seeds, kind=kinds, group=groups, rows=sizes, cols=sizes, biased=st.booleans())
def test_a_matrix_comes_back_as_it_was(
    seed: int, kind: Kind, group: int | None, rows: int, cols: int, biased: bool
) -> None:
    rng = np.random.default_rng(seed)
    stored, bias = random_stored(rng, kind, rows, cols, group), normal(rng, rows) if biased else None
    found, again = placed(stored, bias, CPU).stored()
    assert (again is None) == (bias is None)
    assert again is None or np.array_equal(again, bias)
    if isinstance(stored, Floats):
        assert isinstance(found, Floats)
        assert (found.dtype, found.data.dtype) == (stored.dtype, stored.data.dtype)
        assert np.array_equal(found.data, stored.data)
        return
    if isinstance(stored, TrellisMatrix):
        assert isinstance(found, TrellisMatrix)
        assert (found.bits, found.in_features) == (stored.bits, stored.in_features)
        assert np.array_equal(found.stream, stored.stream)
        assert np.array_equal(found.scale, stored.scale)
        return
    assert isinstance(found, QuantizedMatrix)
    assert (found.bits, found.in_features, found.group_size) == (stored.bits, stored.in_features, stored.group_size)
    for mine, given_ in ((found.qweight, stored.qweight), (found.scale, stored.scale), (found.minimum, stored.minimum)):
        assert np.array_equal(mine, given_)


@settings(max_examples=100)
@given(seed=seeds, kind=kinds, group=groups, rows=sizes, cols=sizes, tokens=tokens_of, biased=st.booleans())
def test_products_are_those_of_the_reference(
    seed: int, kind: Kind, group: int | None, rows: int, cols: int, tokens: int, biased: bool
) -> None:
    rng = np.random.default_rng(seed)
    stored, bias = random_stored(rng, kind, rows, cols, group), normal(rng, rows) if biased else None
    x = activations(rng, tokens, cols)
    expected = x @ plain_weights(stored).T + (0 if bias is None else bias)
    close(product(torch.from_numpy(x), placed(stored, bias, CPU)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_of_as_many_weights_as_they_may_have(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes of them is the whole product."""
    rng = np.random.default_rng(2)
    stored, x, made = random_stored(rng, kind, 37, 50, 16), torch.from_numpy(normal(rng, 3, 50)), []
    matrix = placed(stored, None, CPU)
    monkeypatch.setattr(torch_backend, "TILE", 400)
    monkeypatch.setattr(torch_backend, "weights", lambda *which: made.append(weights(*which)) or made[-1])
    close(tiled(x, matrix), x.numpy() @ plain_weights(stored).T)
    assert [len(tile) for tile in made] == ([] if kind == "F32" else [8, 8, 8, 8, 5])


@pytest.mark.parametrize("tile", [1, 300, 1 << 20])
@pytest.mark.parametrize("kind", [4, -3])
def test_each_head_meets_a_matrix_of_its_own(kind: Kind, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where heads begin inside blocks of trellis codes."""
    monkeypatch.setattr(torch_backend, "TILE", tile)
    rng = np.random.default_rng(3)
    stored, x = random_stored(rng, kind, 5 * 27, 20, 8), normal(rng, 3, 5, 20)
    expected = np.einsum("thi,hoi->tho", x, plain_weights(stored).reshape(5, 27, 20))
    close(by_head(torch.from_numpy(x), placed(stored, None, CPU)), expected)


@settings(max_examples=150)
@given(
    seed=seeds, activation=st.sampled_from(list(ACTIVATION)), gated=st.booleans(),
    limit=st.sampled_from([None, 0.4]), slope=st.sampled_from([1.0, 1.702]), plus=st.sampled_from([0.0, 1.0]),
    biased=st.booleans(), group=groups, d_model=sizes, d_ff=sizes, tokens=tokens_of,
    widths=st.lists(kinds, min_size=3, max_size=3),
)  # fmt: skip
def test_feed_forwards_are_those_of_the_reference(
    seed: int, activation: Any, gated: bool, limit: float | None, slope: float, plus: float, biased: bool,
    group: int | None, d_model: int, d_ff: int, tokens: int, widths: list[Kind],
) -> None:  # fmt: skip
    act = Act(activation, limit, slope if activation == "silu" else 1.0, plus if gated else 0.0)
    spec, rng, x = Ffn(d_ff, act, gated, biased), np.random.default_rng(seed), None
    plain, there = {}, {}
    for name, kind in zip(spec.projections, widths, strict=False):
        rows, cols = spec.shape(name, d_model)
        stored = random_stored(rng, kind, rows, cols, group, size=1.5 * cols**-0.5)
        bias = normal(rng, rows) if biased else None
        plain[name], there[name] = Plain(plain_weights(stored), bias), placed(stored, bias, CPU)
    x = normal(rng, tokens, d_model)
    close(ffn(there, torch.from_numpy(x), spec), plain_ffn(plain, x, spec))


@pytest.mark.cuda
@needs_cuda
@thinned(
    "kind, tokens, rows, cols",
    [*KINDS, *CODED, "MXFP4"],
    [1, 3, torch_backend.FEW, torch_backend.FEW + 1, 300],
    [(1, 1), (37, 50), (1000, 1500)],
)
def test_products_on_a_gpu_are_those_of_the_processor(kind: Any, tokens: int, rows: int, cols: int) -> None:
    """Of few tokens by the Triton kernel, which comes with torch there."""
    assert torch_backend.fused_product() is not None
    rng, gpu = np.random.default_rng(6), torch.device("cuda:0")
    if kind == "MXFP4":
        body, part = random_mxfp4(rng, rows, cols)
        here = lying(copied(np.frombuffer(body, np.uint8), CPU), part)
        assert here.scale is not None
        here.scale.copy_(here.scale % 12 + 120)  # so that sums are finite
        there = replace(here, data=here.data.to(gpu), scale=here.scale.to(gpu), bias=None)
    else:
        stored = random_stored(rng, kind, rows, cols, 32)
        here, there = placed(stored, None, CPU), placed(stored, None, gpu)
    assert np.array_equal(weights(there).cpu().numpy(), weights(here).numpy())
    x = torch.from_numpy(normal(rng, tokens, cols))
    close(product(x.to(gpu), there).cpu(), tiled(x, here).numpy())


@pytest.mark.cuda
@needs_cuda
@thinned(
    "bits, tokens, rows, cols",
    list(CODES),
    [1, 3, torch_backend.FEW, torch_backend.FEW + 1],
    [(1, 1), (37, 50), (129, 33), (1000, 1500), (640, 2048), (1000, 4608)],
)
def test_products_of_trellis_codes_on_a_gpu_are_those_of_the_reference(
    bits: Width, tokens: int, rows: int, cols: int
) -> None:
    """Of few tokens by a Triton kernel, with bias and power."""
    rng = np.random.default_rng(6)
    stored, bias = replace(random_trellis(rng, rows, cols, bits), power=3), normal(rng, rows)
    body, part = trellis_part(stored, bias)
    x = normal(rng, tokens, cols)
    found = product(torch.from_numpy(x).to("cuda:0"), lying(copied(body, torch.device("cuda:0")), part))
    close(found.cpu(), x @ plain_weights(stored).T + bias)


def test_without_triton_few_tokens_are_computed_like_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is none of CUDA, the kernel is not asked for."""
    monkeypatch.setattr(torch_backend, "fused_product", lambda: pytest.fail("asked for"))
    rng = np.random.default_rng(0)
    stored, x = random_stored(rng, 3, 9, 33, 10), normal(rng, 1, 33)
    close(product(torch.from_numpy(x), placed(stored, None, CPU)), x @ plain_weights(stored).T)
