"""Experts that stay in the four bits of their source: the numbers of transformers, in a quarter of the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from coded_sources import MXFP4, coded_and_plain, in_mxfp4
from kept_keys import WideKeys
from packs import MemoryRunner, open_model

from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import verify
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moert.kernels import library, open_backend
from moert.kernels.backend import opaque
from moert.models.model import Model
from moert.pack.reader import Pack

IDS = [[5, 9, 12, 30, 2, 7], [7], list(range(3, 45))]
WIDTHS = {"whole": (16, 16, 16), "mixed": (16, 2, 4), "trellis": (16, 1.5, 4)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return coded_and_plain("gpt_oss", in_mxfp4, MXFP4, tmp_path_factory.mktemp("mxfp4"))[0]


def pack_of(source: Path, out: Path, name: str) -> Pack:
    checkpoint = Checkpoint.open(source)
    quantizer = QUANTIZERS["trellis"](None) if name == "trellis" else QUANTIZERS["group"](32)
    coder = ExpertCoder(checkpoint, quantizer, None)
    emit(coder, dict.fromkeys(checkpoint.spec.expert_keys(), WIDTHS[name]), out, seed=0, label=Label("tests"))
    return Pack.open(out)


def logits(opened: tuple[Model, MemoryRunner], ids: list[int]) -> np.ndarray:
    return opened[0].forward_all(ids)


def test_logits_are_those_of_transformers(source: Path, tmp_path: Path) -> None:
    pack = pack_of(source, tmp_path / "p", "whole")
    assert pack.manifest.quantization.mxfp4
    spec = pack.manifest.model
    biases = 32 * sum(spec.projection_shape(name)[0] for name in ("gate", "up", "down")) / spec.weights_per_expert()
    assert pack.manifest.effective_bits() == 4.25 + biases
    model, opened = Checkpoint.open(source).model(torch.float32), open_model(pack, opaque(WideKeys()))
    for ids in IDS:
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(logits(opened, ids), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", WIDTHS)
def test_native_kernels_are_off_by_the_rounding_of_activations(source: Path, tmp_path: Path, name: str) -> None:
    if library.load() is None:
        pytest.skip(f"no native kernels: {library.missing()}")
    pack, shares = pack_of(source, tmp_path / "p", name), []
    (reference, leader), (native, follower) = open_model(pack), open_model(pack, open_backend())
    for ids in IDS:
        leader.decided = []
        expected = reference.forward_all(ids)
        follower.given = leader.decided
        shares.append(np.abs(native.forward_all(ids) - expected).max(-1) / np.abs(expected).max(-1))
    off = np.concatenate(shares)
    assert off.max() < 0.2
    assert 1e-5 < np.median(off) < 0.02


@pytest.mark.parametrize("name", WIDTHS)
def test_a_pack_verifies_against_its_source(source: Path, tmp_path: Path, name: str) -> None:
    verify(pack_of(source, tmp_path / "p", name), Checkpoint.open(source))
