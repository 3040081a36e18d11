"""Trellis codes as packs have them: the codec by hand, the C beside numpy, whole packs, and each way to be refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_packs
import torch
from dense_packs import widened, write_dense_pack
from native_problems import Natives, activations, all_natives, rounded, running
from random_packs import NEURONS, QUANTIZATION, SPECS, minor_of, random_trellis, read_all, sealed, write_pack
from tiny_packs import PROMPTS, run_greedy

from moeconv.matrices import matrices_of, read_expert
from moeconv.packing.packed import check_expert
from moeconv.writer import CODED_MINOR, ROWS_MINOR, TRELLIS_MINOR, width_of
from moert.beside.gpu.torch_device import TorchDevice
from moert.command.description import description_lines
from moert.engine.engine import Engine
from moert.kernels import library, reference
from moert.kernels.backend import ExpertView, ProjectionView
from moert.kernels.native import NativeMatrix
from moert.models.backbone import load_backbone
from moert.pack.codec import (
    CODES,
    F32,
    TrellisMatrix,
    Width,
    block_bytes,
    decoded,
    dequantize_trellis,
    rows_of_blocks,
    signs,
    stream_bytes,
    turned,
    turned_together,
)
from moert.pack.errors import HeaderInvalid, ManifestInvalid, PackError
from moert.pack.manifest import Dense
from moert.pack.reader import Pack
from tests.fast_card import FAST
from tests.kernels import needs_native

TRELLIS = replace(QUANTIZATION, codes="trellis")


@pytest.fixture(scope="module")
def backends() -> Iterator[Natives]:
    with all_natives() as opened:
        yield opened


def test_a_matrix_worked_out_by_hand() -> None:
    """Windows 0x234 and 0x123: times 19503 modulo 65536 they are 55180 and 39277, whose fields of 5 bits are 26 and 30,
    19 and 5."""
    stream = np.frombuffer(bytes.fromhex("341200000000"), np.uint8)
    matrix = TrellisMatrix(2, 2, stream, np.array([[0.5], [2]], np.float16))
    assert decoded(matrix).tolist() == [[52, 95], [15, -52]]
    root = np.float32(2**-0.5)
    expected = [[147 * (root / 2), -43 * (root / 2)], [-37 * (root * 2), 67 * (root * 2)]]
    assert dequantize_trellis(matrix).tolist() == np.array(expected, np.float32).tolist()
    assert np.array_equal(dequantize_trellis(replace(matrix, power=3)), 8 * dequantize_trellis(matrix))


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("shape", [(1, 1), (8, 2), (121, 5), (128, 6), (129, 64), (300, 70)])
def test_a_stream_has_the_bytes_of_its_blocks(bits: Width, shape: tuple[int, int]) -> None:
    out, inputs = shape
    whole = sum(block_bytes(rows, inputs, CODES[bits].step) for rows in rows_of_blocks(out))
    assert stream_bytes(bits, out, inputs) == whole


def test_streams_and_scales_of_another_size_are_no_matrix() -> None:
    stream, scale = np.zeros(6, np.uint8), np.ones((2, 1), np.float16)
    for wrong in ((2, 2, stream[:5], scale), (2, 4, stream, scale), (2, 2, stream, scale[:, 0]), (8, 2, stream, scale)):
        with pytest.raises(ValueError, match=r"expected|no trellis code of 8 bits"):
            TrellisMatrix(*wrong)


def turned_inputs(x: F32) -> F32:
    """Activations as the kernels round them."""
    size = turned_together(x.shape[1])
    found: F32 = turned(x * signs(x.shape[1])) * (np.float32(1) / np.sqrt(np.float32(size)))
    return found


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("shape", [(1, 2), (9, 33), (130, 48), (263, 136), (64, 640)])
def test_the_kernels_multiply_what_the_codec_decodes(backends: Natives, bits: Width, shape: tuple[int, int]) -> None:
    """Of inputs turned and rounded in blocks, for one token and for many, and the same bits on all instruction sets."""
    rng, (out, inputs) = np.random.default_rng(7), shape
    matrix = random_trellis(rng, out, inputs, bits)
    at = len(matrix.stream) + -len(matrix.stream) % 64
    body = np.zeros(at + 2 * out, np.uint8)
    body[: len(matrix.stream)], body[at:] = matrix.stream, matrix.scale.view(np.uint8).reshape(-1)
    view = ProjectionView(shape, bits, inputs, "F16", (0, at), trellis=True)
    assert np.array_equal(decoded(matrix), decoded(view.stored(body)))  # type: ignore[arg-type]
    x, found = activations(rng, 40, inputs), []
    for backend in backends.values():
        expert = backend.expert(ExpertView(body, {"up": view, "down": view}))
        up = NativeMatrix(view.stored(body), None, library.Ffn.from_buffer_copy(expert.ffn).up)  # type: ignore[arg-type]
        found.append(backend.linear(x, up))
        assert np.array_equal(backend.linear(x[5:6], up)[0], found[-1][5])
    assert all(np.array_equal(found[0], each) for each in found)
    weights = decoded(matrix).astype(np.float64) * matrix.scale.astype(np.float64)
    seen, own = rounded(turned_inputs(x), 64 if inputs > 512 else 32), turned_inputs(x)
    exact, terms = seen @ weights.T, np.abs(seen) @ np.abs(weights).T
    step = np.abs(own).max() / 127  # an input near the middle of two numbers may fall either way
    assert (np.abs(found[0] - exact) <= 1e-5 * terms + step * np.abs(weights).max()).all()
    assert (np.abs(found[0] - exact) <= 1e-5 * terms).mean() > 0.9
    plain = reference.product(x, reference.Plain(reference.weights(view.stored(body))))
    assert np.linalg.norm(found[0] - plain) <= 0.03 * np.linalg.norm(plain)


@pytest.mark.parametrize("family", SPECS)
def test_what_is_written_is_read(tmp_path: Path, family: str) -> None:
    root, spec = tmp_path / "p", SPECS[family]
    given = write_pack(root, spec, TRELLIS)
    pack = Pack.open(root)
    assert pack.manifest.minor == minor_of(spec, TRELLIS_MINOR)
    assert json.loads((root / "manifest.json").read_text())["quantization"]["codes"] == "trellis"
    for entry in pack.manifest.experts:
        buffer = read_expert(pack, entry.key)
        check_expert(pack, entry.key, buffer)
        found = matrices_of(pack, entry.key, buffer)
        assert entry.bits == {name: getattr(part, "bits", 16) for name, part in given[entry.key].items()}
        for name, part in found.items():
            theirs = given[entry.key][name]
            if isinstance(theirs, TrellisMatrix):
                assert isinstance(part, TrellisMatrix)
                assert (part.stream.tobytes(), part.scale.tobytes()) == (
                    theirs.stream.tobytes(),
                    theirs.scale.tobytes(),
                )
    assert any("trellis codes" in line for line in description_lines(pack))
    assert any("1.5 bits: " in line for line in description_lines(pack))


def test_a_whole_width_is_written_without_a_fraction() -> None:
    assert [str(width_of(random_trellis(np.random.default_rng(0), 8, 8, bits))) for bits in (2.0, 1.5)] == ["2", "1.5"]


def test_plain_packs_do_not_name_their_codes(tmp_path: Path) -> None:
    write_pack(tmp_path / "p")
    assert "codes" not in json.loads((tmp_path / "p" / "manifest.json").read_text())["quantization"]


@needs_native
@pytest.mark.parametrize("name", tiny_packs.SPECS)
def test_a_pack_runs_alike_on_all_kernels(tmp_path: Path, name: str) -> None:
    bits = (2, 1.5, 3, 8, 1, 2.5, 16, 4)
    path = tiny_packs.write_pack(tmp_path / "p", tiny_packs.SPECS[name], bits=bits, codes="trellis")
    answers = {}
    for kernels in (*running(), "reference"):
        with Engine.open(path, predict="none", kernels=kernels) as engine:
            answers[kernels] = run_greedy(engine, engine.encode(PROMPTS[3]), 6)
    best, *others = running()
    assert all(np.array_equal(answers[best][1], answers[each][1]) for each in others)
    first, plain = answers[best][1][0], answers["reference"][1][0]
    assert np.linalg.norm(first - plain) < 0.1 * np.linalg.norm(plain)
    assert first.argmax() == plain.argmax()  # later tokens may differ where 8 bits of activations decide


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("shape", [(1, 2), (9, 33), (130, 48), (263, 136)])
def test_a_row_is_decoded_by_itself(backends: Natives, bits: Width, shape: tuple[int, int]) -> None:
    """Bit for bit as the codec has it, also the last one of a block and those of a block that is filled up."""
    out, inputs = shape
    matrix = replace(random_trellis(np.random.default_rng(3), out, inputs, bits), power=2)
    picked = sorted({0, out // 2, min(out, 128) - 1, out - 1})
    for backend in backends.values():
        found = backend.rows(backend.matrix(matrix), picked)
        assert np.array_equal(found, dequantize_trellis(matrix)[picked]), backend.name


@needs_native
@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_head_and_embedding_have_trellis_codes(tmp_path: Path, name: str) -> None:
    """switch has one matrix for both."""
    spec = tiny_packs.SPECS[name]
    coded = {role: width for role, width in (("head", 3), ("embed", 4)) if role in spec.roles()}
    path = tiny_packs.write_pack(tmp_path / "p", spec, bits=(4,), coded=coded)
    assert Pack.open(path).manifest.minor == ROWS_MINOR
    assert any("trellis codes of head" in line for line in description_lines(Pack.open(path)))
    logits = {}
    for kernels in (*running(), "reference"):
        with Engine.open(path, predict="none", kernels=kernels) as engine:
            logits[kernels] = run_greedy(engine, engine.encode(PROMPTS[3]), 1)[1][0]
    best, *others = running()
    assert all(np.array_equal(logits[best], logits[each]) for each in others)
    assert np.linalg.norm(logits[best] - logits["reference"]) < 0.1 * np.linalg.norm(logits["reference"])
    with Engine.open(path, predict="none", kernels="reference", device="torch:cpu") as engine:
        there = run_greedy(engine, engine.encode(PROMPTS[3]), 1)[1][0]
    assert np.abs(there - logits["reference"]).max() < 2e-3 * np.abs(there).max()


@needs_native
@pytest.mark.parametrize("name", tiny_packs.SPECS)
def test_all_matrices_but_routers_have_trellis_codes(tmp_path: Path, name: str) -> None:
    """Attention of each kind, mixers, networks, head and embedding; the prompt has tokens for strips of rows."""
    spec = tiny_packs.SPECS[name]
    coded = {role: 4 for role in spec.roles() if role != "router"}
    path = tiny_packs.write_pack(tmp_path / "p", spec, bits=(4,), codes="trellis", coded=coded, paths=False)
    assert Pack.open(path).manifest.minor == CODED_MINOR
    ids, logits = [], {}
    for kernels in (*running(), "reference"):
        with Engine.open(path, predict="none", kernels=kernels) as engine:
            ids = engine.encode(PROMPTS[3])
            logits[kernels] = run_greedy(engine, ids, 3)[1]
    best, *others = running()
    assert all(np.array_equal(logits[best], logits[each]) for each in others)
    first, plain = logits[best][0], logits["reference"][0]
    assert np.linalg.norm(first - plain) < 0.3 * np.linalg.norm(plain)  # rounded inputs may choose other experts
    with Engine.open(path, predict="none", kernels="reference", device="torch:cpu") as engine:
        there = run_greedy(engine, ids, 1)[1][0]
    assert np.abs(there - plain).max() < 2e-3 * np.abs(plain).max()


@pytest.mark.parametrize(
    ("part", "wrong", "words"),
    [
        ("scale", lambda scale: scale.index_fill(0, torch.tensor([2]), float("inf")), "scales of .* are not finite"),
        ("trellis", lambda stream: stream[:-1], r"has the shape \(\d+,\), expected"),
        ("trellis", lambda stream: stream.to(torch.float16), "type F16, expected U8"),
    ],
)
def test_damaged_codes_of_attention_are_refused(tmp_path: Path, part: str, wrong: Any, words: str) -> None:
    dense = Dense("trellis", 8, {"attention": 3}, trellis=("attention",))
    name = f"decoder.0.attn.keys.{part}"
    write_dense_pack(
        tmp_path / "p", SPECS["rich"], replace(QUANTIZATION, dense=dense),
        lambda tensors: tensors.update({name: wrong(tensors[name])}),
    )  # fmt: skip
    with pytest.raises(HeaderInvalid, match=words):
        widened(load_backbone(Pack.open(tmp_path / "p")))


def refused(root: Path, words: str, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((root / "manifest.json").read_text())
    change(document)
    (root / "manifest.json").write_text(sealed(document))
    with pytest.raises(PackError, match=words) as caught:
        read_all(root)
    assert type(caught.value) is ManifestInvalid
    assert "\n" not in str(caught.value)


def put(width: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["experts"][0]["bits"].update(up=width)


@pytest.mark.parametrize("width", [1.25, 2.0, 16.0, "2", True, None, 0, -2, 5, 1e300, [2]])
@pytest.mark.parametrize("codes", ["plain", "trellis"])
def test_widths_that_the_codes_do_not_have_are_refused(tmp_path: Path, codes: Any, width: Any) -> None:
    write_pack(tmp_path / "p", quantization=replace(QUANTIZATION, codes=codes))
    among = {"plain": r"\(2, 3, 4, 8, 16\)", "trellis": r"\(1, 1.5, 2, 2.5, 3, 4, 8, 16\)"}[codes]
    refused(tmp_path / "p", f"bits: up should be (among {among}|a width in bits), found", put(width))


def test_widths_of_trellis_codes_are_refused_in_plain_packs(tmp_path: Path) -> None:
    write_pack(tmp_path / "p")
    refused(tmp_path / "p", r"bits: up should be among \(2, 3, 4, 8, 16\), found 1.5", put(1.5))


def test_a_stream_of_another_width_is_refused(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", quantization=TRELLIS)
    refused(tmp_path / "p", "its widths need", put(2.5))


def test_codes_that_are_not_known_are_refused(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", quantization=TRELLIS)
    refused(
        tmp_path / "p", "codes should be one of plain, trellis", lambda said: said["quantization"].update(codes="x")
    )


def test_plain_sizes_are_no_trellis_codes(tmp_path: Path) -> None:
    write_pack(tmp_path / "p")
    refused(tmp_path / "p", "its widths need", lambda said: said["quantization"].update(codes="trellis"))


def test_blocks_of_neurons_with_trellis_codes_are_refused(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", SPECS["late"], replace(QUANTIZATION, neurons=NEURONS[0]))
    words = "in blocks of neurons and trellis codes: a pack has one of them"
    refused(tmp_path / "p", words, lambda said: said["quantization"].update(codes="trellis"))


def test_a_truncated_stream_is_refused(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", quantization=TRELLIS)
    pack = Pack.open(tmp_path / "p")
    path = pack.root / pack.manifest.experts[0].path
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(PackError, match="bytes") as caught:
        Pack.open(tmp_path / "p")
    assert "\n" not in str(caught.value)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", quantization=TRELLIS)
    pack = Pack.open(tmp_path / "p")
    entry = pack.manifest.experts[0]
    buffer, layout = read_expert(pack, entry.key), pack.layout(entry.key)
    name = next(name for name, width in entry.bits.items() if width < 8)
    at = layout.data_offset + layout.slot(f"{name}.scale").start
    buffer[at : at + 2] = 0xFF, 0x7F
    with pytest.raises(PackError, match="not finite"):
        check_expert(pack, entry.key, buffer)


@pytest.mark.parametrize("device", ["torch:cpu", "sim:t4"])
@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_devices_run_trellis_codes(tmp_path: Path, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchDevice, "costs", lambda device: FAST)
    bits = (2, 1.5, 3, 8, 1, 2.5, 16, 4)
    path = tiny_packs.write_pack(tmp_path / "p", tiny_packs.SPECS[name], bits=bits, codes="trellis", paths=False)
    answers = []
    for where in ("none", device):
        rule: dict[str, Any] = {} if where == "none" else {"device_experts": "copied"}
        with Engine.open(path, predict="none", kernels="reference", device=where, **rule) as engine:
            answers.append(run_greedy(engine, engine.encode(PROMPTS[3]), 6))
            assert where == "none" or engine.stats().device.counters.held + engine.stats().device.counters.copied > 0
    (tokens, logits), (others, found) = answers
    assert others == tokens
    assert np.abs(found - logits).max() < 2e-3 * np.abs(logits).max()
