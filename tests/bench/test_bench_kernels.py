"""The bench of the native kernels: the weights it lays out, the order it times in, what its rows say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moert.kernels import library
from moert.pack.codec import QuantizedMatrix, dequantize, row_bytes
from recipes.bench import bandwidth, kernel_peers, kernels
from recipes.bench.kernel_cases import Case, Kernels, Olmoe, Widths, vector
from recipes.bench.kernel_weights import Material, nbytes_of

TINY = Olmoe(d_model=128, d_ff=64, heads=2, experts=8, top_k=2, vocab=96, context=4)
ROOM = 1 << 18


@pytest.fixture
def ours() -> Iterator[Kernels]:
    found = library.load()
    if found is None:
        pytest.skip("no native kernels")
    with Kernels(found, Material(ROOM), threads=1) as opened:
        yield opened


def nothing(name: str, nbytes: int = 0, macs: int = 0) -> Case:
    return Case(name, lambda: None, 1, nbytes, macs)


def test_matrices_follow_one_another_to_the_end() -> None:
    material = Material(10_000)
    found = material.matrices([(8, 128), (16, 64)], 3, 64)
    assert [(m.rows, m.cols) for m in found[:3]] == [(8, 128), (16, 64), (8, 128)]
    at = material.data.ctypes.data
    for matrix in found:
        assert matrix.data >= at
        assert matrix.scale == matrix.data + matrix.rows * row_bytes(matrix.cols, 3)
        at = matrix.minimum + 2 * matrix.rows * matrix.cols // 64
        assert at - matrix.data == nbytes_of(matrix)
    assert 10_000 - 512 < at - material.data.ctypes.data <= 10_000
    assert len(material.matrices([(8, 128)], 3, 64, most=2)) == 2


@pytest.mark.parametrize(("bits", "group", "expected"), [(16, 0, 2048), (32, 0, 4096), (2, 0, 288), (8, 32, 1152)])
def test_bytes_that_a_product_reads(bits: int, group: int, expected: int) -> None:
    (matrix,) = Material(ROOM).matrices([(8, 128)], bits, group, most=1)
    assert nbytes_of(matrix) == expected
    assert matrix.group == (group or 128)


def test_any_two_bytes_are_a_scale() -> None:
    data = Material(ROOM).data
    assert 0.1 < data.view(np.float16).min() < data.view(np.float16).max() < 0.5
    floats = data.view(np.float32)
    assert 1e-10 < floats.min() < floats.max() < 1e-4
    assert len(np.unique(data[::2])) == 256


def test_a_case_multiplies_what_it_says() -> None:
    found = library.load()
    if found is None:
        pytest.skip("no native kernels")
    material, (rows, cols) = Material(ROOM), (16, 128)
    with Kernels(found, material, threads=1) as opened:
        case = opened.linear("one", [(rows, cols)], 4, 64, tokens=3, most=1)
        case.run()
    codes, scales = rows * cols // 2, rows * 2
    halves = material.data[codes : codes + 4 * scales].view(np.float16).reshape(2, rows, 2)
    weights = dequantize(QuantizedMatrix(4, cols, 64, material.data[:codes].reshape(rows, -1), *halves))
    x, y = case.alive[:2]  # type: ignore[index]
    expected = vector(3, cols) @ weights.T
    assert np.array_equal(x, vector(3, cols))
    assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()
    assert (case.calls, case.nbytes, case.macs) == (1, codes + 4 * scales, 3 * rows * cols)


def test_cases_count_their_calls_and_stay_finite(ours: Kernels) -> None:
    expert = 3 * (64 * 128 // 2 + 64 * 2 * 4)
    mixture = ours.mixture("mixture", TINY, [Widths(4, 4, 4)], 64)
    assert mixture.calls == ROOM // (2 * expert)
    assert mixture.nbytes == 2 * expert * mixture.calls
    cases = [mixture, ours.attend("attend", TINY, 8, 64), ours.route("route", TINY, 4, 64), ours.head("h", TINY, 8, 64)]
    for case in cases:
        case.run()
        assert case.calls > 1
        assert case.nbytes > 0
        for array in case.alive or ():  # type: ignore[attr-defined]
            assert not isinstance(array, np.ndarray) or np.isfinite(array).all()


def test_rounds_turn_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "REST_S", 0)
    order: list[str] = []
    cases = [Case(name, partial(order.append, name), 1, 1) for name in "ab"]
    times = kernels.timed(cases, 2)
    assert "".join(order) == "baabba"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}


def test_shares_are_of_the_reading_in_the_same_round() -> None:
    read, case = nothing("read", nbytes=10**9), nothing("case", nbytes=3 * 10**9)
    times = {"read": [1.0, 2.0, 4.0], "case": [6.0, 8.0, 24.0]}
    rate, share = kernels.share_rows(case, times, read, 60)
    assert (rate.value, rate.unit) == (0.375, "GB/s")
    assert share.value == 50
    assert share.met is False
    assert kernels.share_rows(case, times, read, None)[1].met is None


def test_ratios_are_ours_to_each_peers() -> None:
    cases = [nothing("moert", macs=10**9), nothing("peer", macs=2 * 10**9)]
    rows = kernels.speed_rows("4 bits", cases, {"moert": [1.0, 1.0, 1.0], "peer": [1.0, 4.0, 8.0]})
    assert [row.value for row in rows] == [1.0, 0.5, 2.0]
    assert rows[2].name == "4 bits: ratio to peer"


def test_rows_have_names_of_their_own_and_all_aims(ours: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"OLMOE": TINY, "INWARD": (64, 128), "OUTWARD": (128, 64), "REST_S": 0}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(bandwidth, "NBYTES", ROOM)
    rows = list(kernels.bandwidth_rows(ours, Material(ROOM), 1, 1)) + list(kernels.step_rows(ours, 1))
    assert len({row.name for row in rows}) == len(rows)
    aims = {row.name: row.aim for row in rows if row.aim}
    assert aims.pop("read bandwidth, memory of weights: share") == "≥ 90"
    kinds = [f"{kind}, {bits} bits" for kind in ("linear", "mixture") for bits in kernels.WIDTHS]
    assert list(aims.values()) == ["≥ 60", "≥ 60", "≥ 75", "≥ 75"] * 2
    assert all(name.startswith(kind) for name, kind in zip(aims, kinds, strict=True))


def test_a_missing_peer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_peers, "SITE", tmp_path)
    monkeypatch.setattr(sys, "path", [])  # also put back, with what is added to it
    monkeypatch.setitem(sys.modules, "onnx", None)
    found = list(kernel_peers.peers(8, (64, 128), tokens=2, most=3, threads=1))
    assert [case.name for case in found] == ["torch int8"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(kernel_peers.GROUPS)
    assert all(line.startswith("left out: onnxruntime") for line in lines)


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_torchs_products_have_the_shape_of_ours(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_peers, "onnxruntime", lambda *_: pytest.fail("not asked for"))
    torch.set_num_threads(1)
    makers = {
        4: lambda: kernel_peers.torch_int4(64, (64, 128), 2, 3),
        16: lambda: kernel_peers.torch_float(torch.bfloat16, (64, 128), 2, 3),
        32: lambda: kernel_peers.torch_float(torch.float32, (64, 128), 2, 3),
    }
    case = makers[bits]()
    outputs = case.run()
    assert [tuple(output.shape) for output in outputs] == [(2, 64)] * 3  # type: ignore[attr-defined]
    assert case.macs == 3 * 2 * 64 * 128
