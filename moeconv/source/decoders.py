"""Decoders of matrices whose numbers a checkpoint has coded, each from the tensors that `archs.coding.Kind` names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moeconv.source.archs.coding import Scheme
from moeconv.source.archs.config import ShapeDiffers

Parts = Mapping[str, Tensor]
"""Ending of a tensor's name → the tensor."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the eight others are their negatives
_MX_BIAS = 127
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns codes int64 [..., count] of `bits` each, from int32 words [..., words] that hold them one after the
    other, the lowest bits first; a code may lie in two words. Raises ShapeDiffers."""
    if words.dtype != torch.int32 or words.shape[-1] != -(-count * bits // 32):
        raise ShapeDiffers(
            f"{count} codes of {bits} bits have words of {tuple(words.shape)} in {words.dtype}: they do not fit"
        )
    if 8 % bits == 0:
        apart = words.contiguous().view(torch.uint8)[..., None] >> torch.arange(0, 8, bits, dtype=torch.uint8)
        return (apart & (1 << bits) - 1).flatten(-2)[..., :count].long()
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    starts = torch.arange(count) * bits
    word, start = starts // 32, starts % 32
    return (wide[..., word] >> start | wide[..., word + 1] << (32 - start)) & (1 << bits) - 1


def _spread(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int] | None = None) -> Tensor:
    """Returns the scale of each number of a matrix [out, in], float32 of a shape that goes with the matrix's, from
    scales of the whole, of each row, of groups of a row, or of blocks. Raises ShapeDiffers."""
    out, inputs = shape
    found = scale.float()
    if block is not None and tuple(found.shape) == (-(-out // block[0]), -(-inputs // block[1])):
        return found.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :inputs]
    if found.numel() == 1 and (block is None or found.dim() < 2):
        return found.reshape(1, 1)
    found = found[:, None] if found.dim() == 1 else found
    if found.dim() != 2 or found.shape[0] != out or not found.shape[1] or inputs % found.shape[1]:
        raise ShapeDiffers(f"a matrix of {shape} has scales of {tuple(scale.shape)}: they do not fit")
    return found.repeat_interleave(inputs // found.shape[1], 1) if found.shape[1] > 1 else found


def _scaled(parts: Parts, scheme: Scheme) -> Tensor:
    """Codes int8 or FP8 [out, in] times their scales, less their zero points (compressed-tensors, fbgemm_fp8,
    modelopt). Scales in bytes are powers of two (MXFP8 of the OCP Microscaling Formats 1.0)."""
    scale = parts["_scale"]
    powers = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    return _of_codes(parts[""], powers, parts.get("_zero_point"), scheme)


def _fp8_blocks(parts: Parts, scheme: Scheme) -> Tensor:
    """Codes FP8 [out, in] and a scale for each block (DeepSeek-V3's report, section 3.3)."""
    return _of_codes(parts[""], parts["_scale_inv"], None, scheme)


def _fp8_or_fp4(parts: Parts, scheme: Scheme) -> Tensor:
    """Codes FP8 [out, in] and a power of two for each block, or bytes with two numbers in E2M1 [out, in / 2] and a
    power for each 32 of a row (DeepSeek-V4's checkpoints)."""
    codes, scale = parts[".weight"], parts[".scale"]
    if codes.dtype == torch.int8:
        return _of_fp4(codes.view(torch.uint8), scale, torch.ones(1))
    return _of_codes(codes, scale, None, scheme)


def _of_codes(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    if codes.dtype not in _CODES or codes.dim() != 2:
        raise ShapeDiffers(f"codes of {tuple(codes.shape)} in {codes.dtype} are no matrix of int8 or FP8")
    shape = tuple(codes.shape)
    values = codes.float()
    if zero is not None:
        values = values - _spread(zero, shape, scheme.block)
    return values * _spread(scale, shape, scheme.block)


def _packed(parts: Parts, scheme: Scheme) -> Tensor:
    """Whole numbers in int32 words [out, words], around half their range or with zero points packed along rows, with
    scales [out, groups] ("pack-quantized" of the library compressed-tensors)."""
    words, scale = parts["_packed"], parts["_scale"]
    if parts["_shape"].numel() != 2:
        raise ShapeDiffers(f"the shape of a packed matrix has {parts['_shape'].numel()} numbers: they do not fit")
    out, inputs = (int(size) for size in parts["_shape"].flatten())
    bits = next((bits for bits in scheme.bits if tuple(words.shape) == (out, -(-inputs * bits // 32))), None)
    if bits is None:
        raise ShapeDiffers(f"words of {tuple(words.shape)} stand for a matrix of {(out, inputs)}: they do not fit")
    half = 1 << (bits - 1)
    values = (unpacked(words, bits, inputs) - half).float()
    groups = _groups(parts.get("_g_idx"), inputs, scale.shape[-1])
    if (zero := parts.get("_zero_point")) is not None:
        if zero.dtype == torch.int32:
            zero = unpacked(zero.mT, bits, out).mT - half
        values = values - _grouped(zero.float(), groups, out)
    return values * _grouped(scale.float(), groups, out)


def _groups(of_input: Tensor | None, inputs: int, count: int) -> Tensor:
    """Returns the group of each input, int64 [inputs]. Raises ShapeDiffers."""
    if of_input is None or bool((of_input < 0).all()):  # as some files say that inputs are in order
        if not count or inputs % count:
            raise ShapeDiffers(f"{inputs} inputs have {count} groups: they do not fit")
        return torch.arange(inputs) // (inputs // count)
    if of_input.numel() != inputs or not bool(((of_input >= 0) & (of_input < count)).all()):
        raise ShapeDiffers(
            f"{of_input.numel()} numbers say the groups, 0 to {count - 1}, of {inputs} inputs: they do not fit"
        )
    return of_input.long()


def _grouped(each: Tensor, groups: Tensor, out: int) -> Tensor:
    """Returns the number of each weight [out, in] from those of each row's groups [out, groups]. Raises
    ShapeDiffers."""
    if each.dim() != 2 or each.shape[0] != out or int(groups.max()) >= each.shape[1]:
        raise ShapeDiffers(f"a matrix of {(out, len(groups))} has scales of {tuple(each.shape)}: they do not fit")
    return each[:, groups]


def _gptq(parts: Parts, scheme: Scheme) -> Tensor:
    """Codes packed along inputs [words, out], zero points along rows [groups, words], scales [groups, out], and the
    group of each input, in any order (GPTQ's reference, and AutoGPTQ's files)."""
    words, zeros, scale = (parts[name] for name in (".qweight", ".qzeros", ".scales"))
    out = scale.shape[-1]
    bits = next((bits for bits in (*scheme.bits, 2, 3, 4, 8) if zeros.shape[-1] == -(-out * bits // 32)), 0)
    if not bits or any(each.dim() != 2 for each in (words, zeros, scale)) or words.shape[0] * 32 % bits:
        raise ShapeDiffers(
            f"words of {tuple(words.shape)}, zero points of {tuple(zeros.shape)} and scales of {tuple(scale.shape)} do "
            "not fit"
        )
    inputs = words.shape[0] * 32 // bits
    groups = _groups(parts.get(".g_idx"), inputs, scale.shape[0])
    codes = unpacked(words.T, bits, inputs)
    zero = unpacked(zeros, bits, out) + scheme.plus & (1 << bits) - 1
    return (codes - _grouped(zero.T, groups, len(codes))).float() * _grouped(scale.float().T, groups, len(codes))


_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight codes


def _awq(parts: Parts, _: Scheme) -> Tensor:
    """Codes packed along outputs [in, words] in an order of their own, zero points so too [groups, words], scales
    [groups, out] (AutoAWQ's layout "gemm")."""
    words, zeros, scale = (parts[name] for name in (".qweight", ".qzeros", ".scales"))
    inputs, out = words.shape[0], scale.shape[-1]
    groups = _groups(None, inputs, scale.shape[0])
    if out % 8 or any(each.dim() != 2 for each in (words, zeros, scale)):
        raise ShapeDiffers(f"scales of {tuple(scale.shape)} do not fit words of eight codes")
    codes, zero = (_in_order(unpacked(each, 4, out)) for each in (words, zeros))
    return (codes - _grouped(zero, groups, out)).float() * _grouped(scale.float().T, groups, out)


def _in_order(codes: Tensor) -> Tensor:
    """Returns codes [..., out] of words in AWQ's order in the order of outputs, as their transpose. [out, ...]"""
    found: Tensor = codes.reshape(len(codes), -1, 8)[..., _OF_AWQ].flatten(-2).T
    return found


def _fp4(codes: Tensor) -> Tensor:
    """Returns the values of bytes with two numbers in E2M1 each, the lower half first. [..., 2 · bytes]"""
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)


def _mxfp4(parts: Parts, _: Scheme) -> Tensor:
    """Bytes [rows, groups, 16] and powers of two [rows, groups] (OCP Microscaling Formats 1.0, as gpt-oss has them)."""
    return _times_powers(parts["_blocks"], parts["_scales"])


def _packed_mxfp4(parts: Parts, _: Scheme) -> Tensor:
    """The same, with bytes [rows, groups · 16] ("mxfp4-pack-quantized" of compressed-tensors)."""
    codes, scales = parts["_packed"], parts["_scale"]
    if codes.shape != (*scales.shape[:-1], 16 * scales.shape[-1]):
        raise ShapeDiffers(f"blocks of {tuple(codes.shape)} have scales of {tuple(scales.shape)}: they do not fit")
    return _times_powers(codes.reshape(*scales.shape, 16), scales)


def _times_powers(blocks: Tensor, scales: Tensor) -> Tensor:
    if blocks.shape[:-1] != scales.shape or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ShapeDiffers(
            f"blocks of {tuple(blocks.shape)} have scales of {tuple(scales.shape)}, one byte for each is expected"
        )
    return torch.ldexp(_fp4(blocks), scales.int()[..., None] - _MX_BIAS).flatten(-2)


def _nvfp4(parts: Parts, _: Scheme) -> Tensor:
    """Bytes with two numbers [out, in / 2], a scale in FP8 for each group, over one number for the matrix
    ("nvfp4-pack-quantized" of compressed-tensors)."""
    return _of_fp4(parts["_packed"], parts["_scale"], 1 / parts["_global_scale"].float())


def _nvfp4_of_modelopt(parts: Parts, _: Scheme) -> Tensor:
    """Bytes with two numbers [out, in / 2], a scale in FP8 for each group, times one number for the matrix."""
    return _of_fp4(parts[""], parts["_scale"], parts["_scale_2"].float())


def _of_fp4(codes: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    if codes.dim() != 2 or codes.dtype != torch.uint8 or whole.numel() != 1:
        raise ShapeDiffers(f"codes of {tuple(codes.shape)} in {codes.dtype} are no matrix of bytes with one scale")
    values = _fp4(codes)
    return values * (_spread(scale, tuple(values.shape)) * whole.reshape(1, 1))


def _bitsandbytes(parts: Parts, _: Scheme) -> Tensor:
    """Bytes with two places in a table of 16 numbers, the upper half first, times the largest magnitude of each block,
    which may be coded in the same way by a table of 256 (bitsandbytes, QLoRA's double quantization)."""
    state = _state(next(tensor for name, tensor in parts.items() if name.startswith(".quant_state")))
    codes, table, largest = parts[""].flatten(), parts[".quant_map"].float(), parts[".absmax"]
    rows, inputs = state["shape"]
    if codes.dtype != torch.uint8 or 2 * len(codes) != rows * inputs or len(table) != 16:
        raise ShapeDiffers(f"codes of {tuple(codes.shape)} stand for a matrix of {(rows, inputs)}: they do not fit")
    if ".nested_absmax" in parts:
        nested = parts[".nested_quant_map"].float()[largest.long()]
        largest = nested * _blocks(parts[".nested_absmax"], state["nested_blocksize"], len(largest))
        largest = largest + float(state["nested_offset"])
    values = torch.stack((table[(codes >> 4).long()], table[(codes & 15).long()]), dim=-1).flatten()
    return (values * _blocks(largest, state["blocksize"], len(values))).reshape(rows, inputs)


def _blocks(each: Tensor, size: int, count: int) -> Tensor:
    """Returns each block's number for all its members. float32 [count]. Raises ShapeDiffers."""
    if len(each) != -(-count // size):
        raise ShapeDiffers(f"{count} numbers in blocks of {size} have {len(each)} scales: they do not fit")
    return each.float().repeat_interleave(min(size, count))[:count]


def _state(stored: Tensor) -> dict[str, Any]:
    """Returns the state of bitsandbytes: a JSON object in bytes. Raises ShapeDiffers."""
    try:
        found = json.loads(bytes(stored.flatten().tolist()))
        shape, sizes = found["shape"], [found["blocksize"], found.get("nested_blocksize", 1)]
        fits = len(shape) == 2 and all(isinstance(size, int) and size > 0 for size in (*shape, *sizes))
        float(found.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    if not fits:
        raise ShapeDiffers("quant_state is not the JSON object that bitsandbytes writes, or of no matrix")
    return dict(found)


def _int8(parts: Parts, scheme: Scheme) -> Tensor:
    """Codes int8 [out, in] and the largest magnitude of each row (LLM.int8)."""
    return _of_codes(parts[".weight"], parts[".SCB"] / 127, None, scheme)


DECODERS: Mapping[str, Callable[[Parts, Scheme], Tensor]] = {
    "fp8 blocks": _fp8_blocks, "fp8 or fp4 of deepseek": _fp8_or_fp4, "scaled": _scaled, "packed": _packed,
    "nvfp4": _nvfp4, "gptq": _gptq, "awq": _awq,
    "nvfp4 of modelopt": _nvfp4_of_modelopt, "mxfp4": _mxfp4, "packed mxfp4": _packed_mxfp4,
    "bitsandbytes nf4": _bitsandbytes, "bitsandbytes fp4": _bitsandbytes, "bitsandbytes int8": _int8,
}  # fmt: skip
"""`Kind.name` → its decoder: the matrix [out, in] in float32 of its parts. Raises ShapeDiffers."""
