"""Checkpoints whose numbers are coded give the packs of the same numbers in bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_sources import FP8, INT4, MXFP4, SIZES, Tensors, coded_and_plain, in_fp8, in_int4, in_mxfp4, written
from safetensors.torch import load_file
from tiny import TINY, reconfigure

from moeconv.artifacts import uniform
from moeconv.packing.emit import Label, emit
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint, CheckpointError
from moert.pack.reader import Pack


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
    [
        ("deepseek_v3", in_fp8, FP8), ("qwen3_next", in_fp8, FP8), ("qwen3_5_moe", in_fp8, FP8),
        ("kimi_k2", in_int4, INT4), ("gpt_oss", in_mxfp4, MXFP4),
    ],
)  # fmt: skip
def test_a_coded_checkpoint_gives_the_pack_of_its_numbers(
    family: str, code: Callable[[Tensors], tuple[Tensors, Tensors]], coding: Any, tmp_path: Path
) -> None:
    coded_at, plain_at = coded_and_plain(family, code, coding, tmp_path)
    of_coded, of_plain = (pack_of(path, path.with_suffix(".pack")) for path in (coded_at, plain_at))
    if coding is not MXFP4:
        assert of_coded == of_plain
    else:  # which stay what they are
        packs = [Pack.open(path.with_suffix(".pack")) for path in (coded_at, plain_at)]
        for key in packs[0].manifest.model.expert_keys():
            mine, theirs = (pack.projections(key, pack.read_expert(key)) for pack in packs)
            assert all(np.array_equal(mine[name], theirs[name]) for name in ("gate", "up", "down"))
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
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {**INT4, "config_groups": {}},
        {**INT4, "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True}}}},
    ],
)
def test_other_codings_are_refused_by_name(coding: Any, tmp_path: Path) -> None:
    source = TINY["mixtral"][0](tmp_path)
    reconfigure(source, quantization_config=coding)
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


@pytest.mark.parametrize(("suffix", "other"), [("_shape", torch.tensor([32, 96])), ("_scale", torch.ones(32, 3))])
def test_codes_that_do_not_fit_are_refused(suffix: str, other: torch.Tensor, tmp_path: Path) -> None:
    source = TINY["kimi_k2"][0](tmp_path / "source", **SIZES["kimi_k2"])
    coded, _ = in_int4(load_file(source / "model.safetensors"))
    name = next(name for name in coded if name.endswith(f"up_proj.weight{suffix}"))
    coded[name] = other
    path = written(source, tmp_path / "coded", coded, INT4)
    with pytest.raises(CheckpointError, match="do not fit"):
        pack_of(path, tmp_path / "coded.pack")
