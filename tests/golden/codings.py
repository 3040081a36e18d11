"""Builds codings.safetensors: a matrix as each library writes it, and the numbers that the library reads back.

Run by hand, with the libraries beside this project's: compressed-tensors 0.20.0, auto-round 0.16.1, auto-gptq 0.7.1
(whose module for the processor is loaded by its path, the second argument), nvidia-modelopt 0.47.0 and bitsandbytes
0.50.2.

    python tests/golden/codings.py tests/golden/codings.safetensors PATH/auto_gptq/nn_modules/qlinear/qlinear_cuda.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import bitsandbytes.functional as bnb
import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from torch import nn

OUT, INPUTS, GROUP = 32, 128, 32
Found = dict[str, torch.Tensor]


def weight() -> torch.Tensor:
    found = torch.randn(OUT, INPUTS, generator=torch.Generator().manual_seed(1)) * 0.05
    found[:, 5] *= 8
    return found + 0.01


def of_compressed_tensors(form: str, **arguments: Any) -> tuple[dict[str, Any], Found]:
    args = QuantizationArgs(**arguments)
    scheme, matrix = QuantizationScheme(targets=["Linear"], weights=args), weight()
    rows = matrix.unflatten(-1, (-1, args.group_size or INPUTS))
    state: Found = {"weight": matrix}
    if args.strategy == "block":
        rows = matrix.unflatten(0, (-1, 16)).unflatten(-1, (-1, 64)).movedim(1, 2).flatten(2)
    if args.strategy == "tensor":
        rows = matrix.flatten()
    more = {}
    if form == "nvfp4-pack-quantized":
        more["global_scale"] = state["weight_global_scale"] = generate_gparam(matrix.min(), matrix.max())
    scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args, **more)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    kind = BaseCompressor.get_value_from_registry(form)
    stored = kind.compress(state, scheme)
    read = kind.decompress(dict(stored), scheme)["weight"].float()
    weights = {name: value for name, value in args.model_dump(mode="json").items() if value is not None}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}
    return config, {f"weight{name.removeprefix('weight')}": each for name, each in stored.items()} | {"expected": read}


def of_gptq(path: str, bits: int, ordered: bool) -> tuple[dict[str, Any], Found]:
    spec = importlib.util.spec_from_file_location("qlinear_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    random = torch.Generator().manual_seed(3)
    layer, linear = module.QuantLinear(bits, GROUP, INPUTS, OUT, bias=False), nn.Linear(INPUTS, OUT, bias=False)
    groups = torch.arange(INPUTS) // GROUP
    if ordered:
        groups = groups[torch.randperm(INPUTS, generator=random)]
    scale = torch.rand(OUT, INPUTS // GROUP, generator=random).half().float() * 0.01 + 0.001
    zero = torch.randint(1, 1 << bits, scale.shape, generator=random).float()
    codes = torch.randint(0, 1 << bits, (OUT, INPUTS), generator=random)
    scale = scale.half().float()
    linear.weight.data = (codes - zero[:, groups]) * scale[:, groups]
    layer.pack(linear, scale.clone(), zero.clone(), groups.int())
    layer.scales = layer.scales.half()
    read = nn.Module.__call__(layer.float(), torch.eye(INPUTS)).T
    stored = {f".{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    stored[".scales"] = stored[".scales"].half()
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}
    return config, {**stored, "expected": read.contiguous()}


def of_awq() -> tuple[dict[str, Any], Found]:
    random = torch.Generator().manual_seed(4)
    scale = (torch.rand(INPUTS // GROUP, OUT, generator=random) * 0.01 + 0.001).half()
    zero = torch.randint(0, 16, scale.shape, generator=random)
    codes = torch.randint(0, 16, (INPUTS, OUT), generator=random)
    linear = nn.Linear(INPUTS, OUT, bias=False)
    linear.weight.data = ((codes - zero.repeat_interleave(GROUP, 0)) * scale.float().repeat_interleave(GROUP, 0)).T
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.float(), zeros=zero, device="cpu")
    read = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T
    stored = {f".{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    return config, {**stored, "expected": read.float().contiguous()}


def of_modelopt() -> tuple[dict[str, Any], Found]:
    coded, scale, whole = NVFP4QTensor.quantize(weight(), 16)
    read = coded.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    stored = {"weight": coded._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return config, {**stored, "weight.input_scale": torch.tensor(0.5), "expected": read}


def of_bitsandbytes(kind: str, nested: bool) -> tuple[dict[str, Any], Found]:
    matrix = weight().repeat(2, 1)
    codes, state = bnb.quantize_4bit(matrix, quant_type=kind, compress_statistics=nested, blocksize=64)
    read = bnb.dequantize_4bit(codes, state)
    stored = {"weight": codes} | {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return config, {**stored, "expected": read.float()}


def of_int8() -> tuple[dict[str, Any], Found]:
    codes, largest, _ = bnb.int8_vectorwise_quant(weight().half())
    read = bnb.int8_vectorwise_dequant(codes, largest)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return config, {".weight": codes, ".SCB": largest, "expected": read.float()}


def main(out: str, path: str) -> None:
    whole = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    fp8 = {"num_bits": 8, "type": "float"}
    cases = {
        "packed": of_compressed_tensors("pack-quantized", symmetric=True, **whole),
        "packed-zeros": of_compressed_tensors("pack-quantized", symmetric=False, **whole),
        "packed-8": of_compressed_tensors("pack-quantized", num_bits=8, type="int", strategy="channel"),
        "int8": of_compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        "fp8-tensor": of_compressed_tensors("float-quantized", strategy="tensor", **fp8),
        "fp8-channel": of_compressed_tensors("float-quantized", strategy="channel", **fp8),
        "fp8-block": of_compressed_tensors("float-quantized", strategy="block", block_structure=[16, 64], **fp8),
        "nvfp4": of_compressed_tensors(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
        "mxfp4": of_compressed_tensors(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
        ),
        "gptq": of_gptq(path, 4, ordered=False),
        "gptq-order": of_gptq(path, 4, ordered=True),
        "gptq-3": of_gptq(path, 3, ordered=False),
        "gptq-8": of_gptq(path, 8, ordered=False),
        "awq": of_awq(),
        "modelopt-nvfp4": of_modelopt(),
        "nf4": of_bitsandbytes("nf4", nested=False),
        "nf4-nested": of_bitsandbytes("nf4", nested=True),
        "fp4": of_bitsandbytes("fp4", nested=True),
        "bitsandbytes-int8": of_int8(),
    }
    tensors = {f"{name}:{each}": one.contiguous() for name, (_, found) in cases.items() for each, one in found.items()}
    save_file(tensors, out, metadata={name: json.dumps(config) for name, (config, _) in cases.items()})
    for name, (_, found) in cases.items():
        print(name, {each: (tuple(one.shape), str(one.dtype)) for each, one in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
