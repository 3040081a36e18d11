"""Checkpoints whose numbers are coded give the packs of the same numbers in bf16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

from moeconv.artifacts import uniform
from moeconv.packing.emit import Label, emit
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint, CheckpointError
from moert.pack.reader import Pack

Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
SIZES = {
    "deepseek_v3": {"hidden_size": 136, "moe_intermediate_size": 132},  # more than a block each way
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
}


def in_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts and the matrices of attention in FP8 with a scale for each block; and what these are."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(5)
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        blocks = [-(-size // 128) for size in weight.shape]
        scale = 2.0 ** torch.randint(-3, 3, tuple(blocks), generator=chance)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        coded[name] = (weight.float() / wide).to(torch.float8_e4m3fn)
        coded[f"{name}_scale_inv"] = scale
        plain[name] = (coded[name].float() * wide).to(torch.bfloat16)
    return coded, plain


def in_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts in blocks of 32 inputs, two to a byte; and what these are."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(6)
    for name, weight in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=chance)
        exponents = torch.randint(122, 127, (experts, outputs, inputs // 32), generator=chance)
        coded[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        coded[f"{name}_scales"] = exponents.to(torch.uint8)
        values = FP4[codes & 7] * torch.where(codes >= 8, -1.0, 1.0) * 2.0 ** (exponents - 127)[..., None]
        plain[name] = values.flatten(2).transpose(1, 2).contiguous().to(torch.bfloat16)
        del coded[name]
    return coded, plain


def written(source: Path, out: Path, tensors: Tensors, coding: Any) -> Path:
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(config if coding is None else {**config, "quantization_config": coding})
    )
    return out


def pack_of(path: Path, out: Path) -> dict[str, str]:
    checkpoint = Checkpoint.open(path)
    emit(
        ExpertCoder(checkpoint, QUANTIZERS["group"](32), None), uniform(checkpoint.spec, 16), out, seed=0,
        label=Label("tests"),
    )  # fmt: skip
    manifest = Pack.open(out).manifest
    return {entry.path: entry.sha256 for entry in manifest.experts} | {
        name: entry.sha256 for name, entry in manifest.files.items() if name != "config.json"
    }


@pytest.mark.parametrize(
    ("family", "code", "coding"),
    [("deepseek_v3", in_fp8, FP8), ("gpt_oss", in_mxfp4, {"quant_method": "mxfp4"})],
)
def test_a_coded_checkpoint_gives_the_pack_of_its_numbers(
    family: str, code: Callable[[Tensors], tuple[Tensors, Tensors]], coding: Any, tmp_path: Path
) -> None:
    source = TINY[family][0](tmp_path / "source", **SIZES[family])
    coded, plain = code(load_file(source / "model.safetensors"))
    coded_at, plain_at = (
        written(source, tmp_path / name, tensors, said)
        for name, tensors, said in (("coded", coded, coding), ("plain", plain, None))
    )
    assert pack_of(coded_at, tmp_path / "coded.pack") == pack_of(plain_at, tmp_path / "plain.pack")
    ids = torch.arange(2, 30).view(2, 14)
    with torch.inference_mode():
        mine, theirs = (Checkpoint.open(path).model(torch.float32)(ids).logits for path in (coded_at, plain_at))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "coding",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8"},
    ],
)
def test_other_codings_are_refused_by_name(coding: Any, tmp_path: Path) -> None:
    source = TINY["mixtral"][0](tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": coding}))
    with pytest.raises(CheckpointError, match="weights are coded by"):
        Checkpoint.open(source)


def test_a_damaged_scale_is_refused(tmp_path: Path) -> None:
    source = TINY["deepseek_v3"][0](tmp_path / "source", **SIZES["deepseek_v3"])
    coded, _ = in_fp8(load_file(source / "model.safetensors"))
    name = next(name for name in coded if name.endswith("_scale_inv"))
    coded[name] = coded[name][:1, :1]
    path = written(source, tmp_path / "coded", coded, FP8)
    with pytest.raises(CheckpointError, match="scale"):
        pack_of(path, tmp_path / "coded.pack")
