"""Tiny checkpoints whose numbers are coded, as some models are published."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FP8_ROWS = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
PACKED_MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}},
}
DEEPSEEK_V4 = {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
SIZES = {
    "deepseek_v4": {"hidden_size": 160, "moe_intermediate_size": 32},
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "kimi_k2": {"hidden_size": 64, "moe_intermediate_size": 32},
    "deepseek_v3": {"hidden_size": 136, "moe_intermediate_size": 132},  # more than a block each way
    "qwen3_next": {"hidden_size": 136, "moe_intermediate_size": 132},
    "qwen3_5_moe": {"hidden_size": 136, "moe_intermediate_size": 132},
    "glm5_next": {"hidden_size": 136, "moe_intermediate_size": 132},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
}


def in_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts and the matrices of attention in FP8 with a scale for each block; and their numbers."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(5)
    for name, weight in tensors.items():
        if not name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_qkvz.weight", "in_proj_z.weight")):
            continue
        blocks = [-(-size // 128) for size in weight.shape]
        scale = 2.0 ** torch.randint(-3, 3, tuple(blocks), generator=chance)
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        coded[name] = (weight.float() / wide).to(torch.float8_e4m3fn)
        coded[f"{name}_scale_inv"] = scale
        plain[name] = (coded[name].float() * wide).to(torch.bfloat16)
    return coded, plain


def in_deepseek_v4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The makers' names; experts in FP4, most other matrices in FP8, with powers of two as scales; and their
    numbers."""
    coded, plain, chance = Tensors(), Tensors(), torch.Generator().manual_seed(11)
    for saved, weight in tensors.items():
        name = saved.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        name = name.replace(".attn.norm.", ".attn.kv_norm.")
        coded[name] = plain[name] = weight
        base = name.removesuffix(".weight")
        if ".ffn.experts." in name:
            shape = weight.shape[0], weight.shape[1] // 32
            codes = torch.randint(0, 16, tuple(weight.shape), dtype=torch.uint8, generator=chance)
            coded[name] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
            values = FP4[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
        elif ".w" in base and not base.endswith(("wgate", "weights_proj")) and "compressor" not in base:
            shape = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
            coded[name] = weight.to(torch.float8_e4m3fn)
            values = coded[name].float()
        else:
            continue
        powers = torch.randint(120, 130, shape, dtype=torch.uint8, generator=chance)
        wide = 2.0 ** (powers.int() - 127)
        block = (1, 32) if ".ffn.experts." in name else (128, 128)
        wide = wide.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: len(weight), : weight.shape[1]]
        coded[f"{base}.scale"], plain[name] = powers.view(torch.float8_e8m0fnu), (values * wide).to(torch.bfloat16)
    return coded, plain


def in_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts in blocks of 32 inputs, two to a byte; and their numbers."""
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


def in_packed_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts as compressed-tensors stores MXFP4; and their numbers."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(10)
    for name, weight in tensors.items():
        if ".experts." not in name:
            continue
        codes = torch.randint(0, 16, weight.shape, generator=chance)
        exponents = torch.randint(120, 124, (len(weight), weight.shape[1] // 32), generator=chance)
        coded[f"{name}_packed"] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        coded[f"{name}_scale"] = exponents.to(torch.uint8)
        scale = 2.0 ** (exponents - 127).repeat_interleave(32, 1)
        plain[name] = (FP4[codes & 7] * torch.where(codes >= 8, -1.0, 1.0) * scale).to(torch.bfloat16)
        del coded[name]
    return coded, plain


def in_int4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts in groups of 32 inputs, eight to a number; and their numbers."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(7)
    for name, weight in tensors.items():
        if ".mlp.experts." not in name:
            continue
        out, inputs = weight.shape
        codes = torch.randint(0, 16, (out, inputs), generator=chance)
        scale = 2.0 ** -torch.randint(3, 6, (out, inputs // 32), generator=chance)
        coded[f"{name}_packed"] = in_words(codes)
        coded[f"{name}_scale"], coded[f"{name}_shape"] = scale.to(torch.bfloat16), torch.tensor([out, inputs])
        plain[name] = ((codes - 8) * scale.repeat_interleave(32, 1)).to(torch.bfloat16)
        del coded[name]
    return coded, plain


def in_gptq(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts and the matrices of attention in groups of 32 inputs in any order, with zero points; and their
    numbers."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(8)
    for name, weight in tensors.items():
        if not re.search(r"(_proj|\.w[123])\.weight$", name):
            continue
        out, inputs = weight.shape
        order = torch.arange(inputs)[torch.randperm(inputs, generator=chance)] // 32
        codes = torch.randint(0, 16, (out, inputs), generator=chance)
        zeros = torch.randint(1, 16, (out, inputs // 32), generator=chance)
        scale = 2.0 ** -torch.randint(5, 8, (out, inputs // 32), generator=chance)
        base = name.removesuffix(".weight")
        coded |= {f"{base}.qweight": in_words(codes).T, f"{base}.qzeros": in_words(zeros.T - 1)}
        coded |= {f"{base}.scales": scale.half().T, f"{base}.g_idx": order.int()}
        plain[name] = ((codes - zeros[:, order]) * scale[:, order]).half()
        del coded[name]
    return {name: tensor.contiguous() for name, tensor in coded.items()}, plain


def in_fp8_rows(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts in FP8 with a scale for each row, and a scale of their activations; and their numbers."""
    coded, plain, chance = dict(tensors), dict(tensors), torch.Generator().manual_seed(9)
    for name, weight in tensors.items():
        if ".experts." not in name:
            continue
        scale = 2.0 ** torch.randint(-3, 3, (len(weight), 1), generator=chance)
        coded[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        coded[f"{name}_scale"] = scale
        coded[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(0.25)
        plain[name] = (coded[name].float() * scale).to(torch.bfloat16)
    return coded, plain


def in_words(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes of 4 bits, eight to a number. int32 [..., codes / 8]"""
    whole = (codes.reshape(*codes.shape[:-1], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32)


def written(source: Path, out: Path, tensors: Tensors, coding: Any) -> Path:
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(config if coding is None else {**config, "quantization_config": coding})
    )
    return out


def coded_and_plain(
    family: str, code: Callable[[Tensors], tuple[Tensors, Tensors]], coding: Any, folder: Path
) -> tuple[Path, Path]:
    source = TINY[family][0](folder / "source", **SIZES[family])
    coded, plain = code(load_file(source / "model.safetensors"))
    return written(source, folder / "coded", coded, coding), written(source, folder / "plain", plain, None)
