"""Matrices whose scales float16 can't hold count a power of two: what they give is that of the same matrix without it,
and packs say so where they are needed and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_packs import widened
from native_problems import all_natives, random_stored
from safetensors.torch import load_file, save_file
from tiny import tiny_olmoe, tiny_switch

from moeconv.dense import dense_of
from moeconv.matrices import matrices_of, projection_weights, read_expert
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import error_share, verify
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import dump_manifest
from moert.beside.gpu.torch_backend import TorchBackend
from moert.beside.gpu.torch_matrices import TorchMemory
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.settings import EngineSettings
from moert.kernels.backend import opaque
from moert.kernels.native import NativeBackend
from moert.kernels.reference import ReferenceBackend
from moert.models.backbone import load_backbone
from moert.pack.codec import power_of
from moert.pack.errors import ManifestInvalid, PackError
from moert.pack.layout import Neurons
from moert.pack.manifest import parse_manifest
from moert.pack.reader import MANIFEST, Pack
from tests.golden.test_spec import check_against_our_reader, check_blocks_against_our_reader

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def natives() -> Iterator[list[NativeBackend]]:
    with all_natives() as opened:
        yield list(opened.values())


@pytest.mark.parametrize(
    ("largest", "power"),
    [(0, 0), (1, 0), (2.0**-8, 0), (65503, 0), (0.9 * 2.0**-8, -23), (65504, 1), (2.0**-149, -126), (3e38, 113)],
)
def test_only_what_float16_does_not_hold_counts_a_power(largest: float, power: int) -> None:
    weights = np.array([[0, -largest]], np.float32)
    assert power_of(weights) == power
    if power > -126 and power:
        assert 2.0**14 <= np.ldexp(largest, -power) < 2.0**15


@pytest.mark.parametrize("kind", [2, 3, 4, 8, "F16"])
@pytest.mark.parametrize("power", [-100, -30, 40])
def test_a_product_is_that_without_the_power_times_it(natives: list[NativeBackend], kind: Any, power: int) -> None:
    rng = np.random.default_rng(0)
    stored, bias = random_stored(rng, kind, 40, 96, None if kind == "F16" else 32), np.ones(40, np.float32)
    device = TorchBackend("torch:cpu", opaque(ReferenceBackend()), TorchMemory(torch.device("cpu"), 1 << 30))
    for backend in (*natives, ReferenceBackend(), device):
        plain: Any = backend.matrix(stored, bias)
        scaled: Any = backend.matrix(replace(stored, power=power), np.ldexp(bias, power))
        for tokens in (1, 5, 40):
            x = rng.normal(size=(tokens, 96)).astype(np.float32)
            found, expected = backend.linear(x, scaled), np.ldexp(backend.linear(x, plain), power)
            if isinstance(backend, NativeBackend):
                np.testing.assert_array_equal(found, expected)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.ldexp(1.0, power))
        np.testing.assert_array_equal(backend.rows(scaled, [3, 7]), np.ldexp(backend.rows(plain, [3, 7]), power))


def scaled_olmoe(path: Path, power: int) -> Path:
    """What norms before experts grow by, gate, up and routers make up for: exact, and the same model."""
    tiny_olmoe(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        by = -power if any(part in name for part in ("gate", "up_proj")) else power * ("post_attention" in name)
        tensors[name] = torch.ldexp(tensor.float(), torch.tensor(by))  # F32, which 16 bits make float16
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def packed(source: Path, out: Path, bits: int, neurons: Neurons | None = None) -> Pack:
    checkpoint = Checkpoint.open(source)
    widths = {key: (bits,) * len(checkpoint.spec.moe.ffn.projections) for key in checkpoint.spec.expert_keys()}
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](32), None, neurons=neurons)
    dense = DenseCoder(checkpoint, dense_of(checkpoint.spec, {"router": bits}))
    emit(coder, widths, out, seed=0, label=Label("tests"), dense=dense)
    return Pack.open(out)


def answer(pack: Pack, kernels: str) -> Sequence[int]:
    engine = Engine.open(pack.root, EngineSettings(kernels=kernels))
    return engine.generate(PROMPT, GenerationSettings(max_new_tokens=12)).result.tokens


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a_model_whose_weights_are_below_float16_gives_the_same_pack_and_answers(bits: int, tmp_path: Path) -> None:
    plain = packed(scaled_olmoe(tmp_path / "plain", 0), tmp_path / "plain.pack", bits)
    tiny = packed(scaled_olmoe(tmp_path / "tiny", 24), tmp_path / "tiny.pack", bits)
    assert (plain.manifest.minor, tiny.manifest.minor) == (0, 5)
    assert b"powers" not in (plain.root / MANIFEST).read_bytes()
    for key in plain.manifest.model.expert_keys():
        one, other = (matrices_of(each, key, read_expert(each, key)) for each in (plain, tiny))
        for name, matrix in one.items():
            weights, expected = projection_weights(other[name]), projection_weights(matrix)
            expected = np.ldexp(expected, 0 if name == "down" else -24)
            np.testing.assert_allclose(weights, expected, rtol=2.0**-11, atol=2.0**-50 if bits == 16 else 0)
            assert bits == 16 or np.array_equal(weights, expected)
    check_against_our_reader(tiny.root)
    routers = [widened(load_backbone(each))["decoder.1.router.weight"] for each in (plain, tiny)]
    np.testing.assert_allclose(routers[1], np.ldexp(routers[0], -24), rtol=2.0**-11)
    verify(tiny, Checkpoint.open(tmp_path / "tiny"))
    for kernels in ("reference", "auto"):
        assert answer(tiny, kernels) == answer(plain, kernels)


def scaled_switch(path: Path, power: int) -> Path:
    tiny_switch(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor = torch.ldexp(tensor, torch.tensor(power if ".wi." in name else -power))
        tensors[name] = tensor.float()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("bits", [4, 16])
def test_blocks_of_neurons_count_powers_too(bits: int, tmp_path: Path) -> None:
    """relu lets a factor through: what wi shrinks by, wo grows by."""
    blocks = Neurons(4096, bundled=False)
    plain = packed(scaled_switch(tmp_path / "plain", 0), tmp_path / "plain.pack", bits, blocks)
    tiny = packed(scaled_switch(tmp_path / "tiny", -30), tmp_path / "tiny.pack", bits, blocks)
    assert (plain.manifest.minor, tiny.manifest.minor) == (3, 5)
    check_blocks_against_our_reader(tiny.root)
    verify(tiny, Checkpoint.open(tmp_path / "tiny"))
    for kernels in ("reference", "auto"):
        assert answer(tiny, kernels) == answer(plain, kernels)


def test_verify_refuses_scales_that_float16_did_not_hold() -> None:
    weights = np.ldexp(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32), -30)
    for bits in (2, 4, 8):
        matrix = QUANTIZERS["group"](32).quantize(weights[None], bits, None)[0]
        assert error_share(matrix, weights, False) > 1
    assert error_share(np.zeros_like(weights), weights, False) > 1


@pytest.mark.parametrize("power", [0, -127, 128, 1.5, True, "1"])
def test_a_power_that_can_not_be_is_refused(power: Any, tmp_path: Path) -> None:
    pack = packed(scaled_olmoe(tmp_path / "tiny", 24), tmp_path / "tiny.pack", 4)
    first, *others = pack.manifest.experts
    for powers in ({"gate": power}, {"neither": -3}):
        forged = replace(pack.manifest, experts=(replace(first, powers=powers), *others))
        with pytest.raises(ManifestInvalid, match="powers"):
            parse_manifest(dump_manifest(forged))
    dense = replace(pack.manifest.quantization.dense, powers={"decoder.norm.weight": -3})  # type: ignore[type-var]
    forged = replace(pack.manifest, quantization=replace(pack.manifest.quantization, dense=dense))
    with pytest.raises(ManifestInvalid, match="powers"):
        parse_manifest(dump_manifest(forged))


def test_a_pack_whose_powers_were_taken_away_is_refused(tmp_path: Path) -> None:
    pack = packed(scaled_olmoe(tmp_path / "tiny", 24), tmp_path / "tiny.pack", 4)
    bare = tuple(replace(entry, powers=None) for entry in pack.manifest.experts)
    (pack.root / MANIFEST).write_text(dump_manifest(replace(pack.manifest, experts=bare)))
    with pytest.raises(PackError, match="header"):
        read_expert(Pack.open(pack.root), bare[0].key)
