"""Checkpoints whose numbers are coded give the packs of the same numbers in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_sources import (
    DEEPSEEK_V4,
    FP8,
    FP8_ROWS,
    GPTQ,
    INT4,
    MXFP4,
    PACKED_MXFP4,
    SIZES,
    Tensors,
    coded_and_plain,
    in_deepseek_v4,
    in_fp8,
    in_fp8_rows,
    in_gptq,
    in_int4,
    in_mxfp4,
    in_packed_mxfp4,
    written,
)
from safetensors.torch import load_file
from tiny import TINY, reconfigure

from moeconv.artifacts import uniform
from moeconv.matrices import matrices_of, read_expert
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
        ("glm5_next", in_fp8, FP8), ("kimi_k2", in_int4, INT4), ("gpt_oss", in_mxfp4, MXFP4),
        ("mixtral", in_gptq, GPTQ), ("qwen3_moe", in_fp8_rows, FP8_ROWS),
        ("qwen3_moe", in_packed_mxfp4, PACKED_MXFP4), ("deepseek_v4", in_deepseek_v4, DEEPSEEK_V4),
    ],
)  # fmt: skip
def test_a_coded_checkpoint_gives_the_pack_of_its_numbers(
    family: str, code: Callable[[Tensors], tuple[Tensors, Tensors]], coding: Any, tmp_path: Path
) -> None:
    coded_at, plain_at = coded_and_plain(family, code, coding, tmp_path)
    of_coded, of_plain = (pack_of(path, path.with_suffix(".pack")) for path in (coded_at, plain_at))
    if coding not in (MXFP4, PACKED_MXFP4, DEEPSEEK_V4):
        assert of_coded == of_plain
    else:  # which stay what they are
        assert Pack.open(coded_at.with_suffix(".pack")).manifest.quantization.mxfp4
        packs = [Pack.open(path.with_suffix(".pack")) for path in (coded_at, plain_at)]
        for key in packs[0].manifest.model.expert_keys():
            mine, theirs = (matrices_of(pack, key, read_expert(pack, key)) for pack in packs)
            assert all(np.array_equal(mine[name], theirs[name]) for name in ("gate", "up", "down"))
    ids = torch.arange(2, 30).view(2, 14)
    with torch.inference_mode():
        mine, theirs = (Checkpoint.open(path).model(torch.float32)(ids).logits for path in (coded_at, plain_at))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("coding", "named"),
    [
        ({"quant_method": "hqq"}, "weights are coded by 'hqq', which can't be read"),
        ({"quant_method": "mxfp4"}, "which only gpt_oss is known for"),
        (GPTQ, "weights are coded by gptq with 4 bits, and no tensor is"),
    ],
)
def test_other_codings_are_refused_by_name(coding: Any, named: str, tmp_path: Path) -> None:
    source = TINY["mixtral"][0](tmp_path)
    reconfigure(source, quantization_config=coding)
    with pytest.raises(CheckpointError, match=named):
        Checkpoint.open(source)


def test_notes_say_what_a_loss_is_against(tmp_path: Path) -> None:
    """And the coding may be named in another file."""
    coded_at, _ = coded_and_plain("qwen3_moe", in_fp8_rows, FP8_ROWS, tmp_path)
    notes = Checkpoint.open(coded_at).notes
    assert any("coded by modelopt FP8_PER_CHANNEL_PER_TOKEN: a loss is against" in note for note in notes)
    assert any("rounding of activations are left out" in note for note in notes)
    reconfigure(coded_at, quantization_config=None)
    with pytest.raises(CheckpointError):
        Checkpoint.open(coded_at)
    other = {"producer": {"name": "modelopt"}, "quantization": {**FP8_ROWS, "kv_cache_quant_algo": None}}
    (coded_at / "hf_quant_config.json").write_text(json.dumps(other))
    assert Checkpoint.open(coded_at).notes == notes


def test_deepseek_v4_names_the_type_of_experts_in_either_place(tmp_path: Path) -> None:
    coded_at, _ = coded_and_plain("deepseek_v4", in_deepseek_v4, DEEPSEEK_V4, tmp_path)
    found = Checkpoint.open(coded_at).description.scheme
    coding = {name: value for name, value in DEEPSEEK_V4.items() if name != "expert_dtype"}
    reconfigure(coded_at, quantization_config=coding, expert_dtype="fp4")
    assert Checkpoint.open(coded_at).description.scheme == found
    reconfigure(coded_at, expert_dtype="int4")
    with pytest.raises(CheckpointError, match="expert_dtype 'int4'"):
        Checkpoint.open(coded_at)


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
