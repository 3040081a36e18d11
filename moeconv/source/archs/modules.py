"""Modules that families put into transformers' models, and decoders of weights that checkpoints store coded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moeconv.source.archs.config import ShapeDiffers

# Weights whose numbers are coded in a checkpoint, decoded.

_FP8_BLOCK = 128
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the eight others are their negatives
_MX_BIAS = 127


def _fp8_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns the matrix [out, in] of codes [out, in] and scale [⌈out / 128⌉, ⌈in / 128⌉] (DeepSeek-V3's report,
    section 3.3). Raises ShapeDiffers."""
    expected = tuple(-(-size // _FP8_BLOCK) for size in codes.shape)
    if tuple(scale.shape) != expected:
        raise ShapeDiffers(f"a matrix of {tuple(codes.shape)} has scales of {tuple(scale.shape)}, expected {expected}")
    wide = scale.float().repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the matrix [rows, groups · 32] of blocks uint8 [rows, groups, 16], the lower half of a byte first, and
    scales uint8 [rows, groups], powers of two (OCP Microscaling Formats 1.0). Raises ShapeDiffers."""
    if blocks.shape[:-1] != scales.shape:
        raise ShapeDiffers(
            f"blocks of {tuple(blocks.shape)} have scales of {tuple(scales.shape)}, one each is expected"
        )
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - _MX_BIAS).flatten(-2)


def _int4_groups(codes: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    """Returns the matrix [out, in] of codes int32 [out, ⌈in / 8⌉], eight to a number, the lowest bits first; scale
    [out, groups]; shape (out, in) ("pack-quantized" of the library compressed-tensors). Raises ShapeDiffers."""
    out, inputs = (int(size) for size in shape)
    groups = scale.shape[-1]
    if codes.dtype != torch.int32 or tuple(codes.shape) != (out, -(-inputs // 8)) or inputs % groups:
        raise ShapeDiffers(
            f"codes of {tuple(codes.shape)} in {codes.dtype} stand for a matrix of {(out, inputs)} with scales of "
            f"{tuple(scale.shape)}: they do not fit"
        )
    apart = (codes[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    values = apart.flatten(-2)[:, :inputs].float() - 8
    return values * scale.float().repeat_interleave(inputs // groups, -1)


DECODERS: Mapping[str, Callable[..., Tensor]] = {
    "fp8 blocks": _fp8_blocks, "mxfp4": _mxfp4, "int4 groups": _int4_groups,
}  # fmt: skip
"""`Source.form` → its decoder, which is called with the tensors of `Source.names`."""


# Torch modules that take the place of a loaded model's own.


class Skipped(nn.Module):
    """A stand-in for a layer that does not run: it returns its input, and `more` times None."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden, *[None] * self.more) if self.more else hidden


class Network(nn.Module):
    """A dense layer's network, with the call of an experts module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, _chosen: Tensor, _weights: Tensor) -> Tensor:
        """Returns the network's output for x, both [tokens, d_model]."""
        found: Tensor = self.network(x)
        return found


class Alone(nn.Module):
    """A dense layer's network as the only expert, which gets all tokens."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.experts = Network(network)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's output for x, both [..., d_model]."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen = torch.zeros((len(tokens), 1), dtype=torch.int64)
        found: Tensor = self.experts(tokens, chosen, torch.ones((len(tokens), 1), dtype=x.dtype))
        return found.reshape(x.shape)


class AllTokens(nn.Module):
    """An indexer's stand-in, which chooses all tokens."""

    def forward(self, hidden: Tensor, _asked: Tensor, _turns: Any, mask: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the places of all keys for each query, [sequences, queries, keys]; mask [..., keys]."""
        keys = torch.arange(mask.shape[-1], dtype=torch.int32)
        return keys.expand(*hidden.shape[:2], -1)
