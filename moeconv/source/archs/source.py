"""Where a tensor of a pack is in a checkpoint, and in what form it lies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moeconv.source.archs.views import View

Form = Literal["fp8 blocks", "mxfp4", "int4 groups"]

FP8_SCALES, INT4_CODES = "_scale_inv", "_packed"
_FP8_BLOCK = 128
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the eight others are their negatives
_MX_BIAS = 127


class Fetch(Protocol):
    """Reads a tensor of the checkpoint by its name, or one index of its first dimension."""

    def __call__(self, name: str, index: int | None) -> Tensor: ...


@dataclass(frozen=True)
class Source:
    """The tensor `name`; of it the `index` of the first dimension, and of that a `view`, times `factor`, plus `plus`.

    `form`: how its numbers are coded; None if it holds them as they are. `shape`: of the decoded tensor, or of one
    index of it; None for that of the pack's tensor.
    """

    name: str
    index: int | None = None
    view: View | None = None
    shape: tuple[int, ...] | None = None
    form: Form | None = None
    factor: float = 1.0
    plus: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it is made of."""
        return (self.name,) if self.form is None else _FORMS[self.form].names(self.name)

    def read(self, fetch: Fetch, shape: tuple[int, ...]) -> Tensor:
        """The pack's tensor of this shape, in the checkpoint's type; what is coded, multiplied or added to
        becomes float32.

        Raises ShapeDiffers."""
        if self.form is None:
            found = fetch(self.name, self.index)
        else:
            found = _FORMS[self.form].decode(*(fetch(name, self.index) for name in self.names))
        expected = self.shape or shape
        if tuple(found.shape) != expected:
            raise ShapeDiffers(f"{self.name} has the shape {tuple(found.shape)}, config.json implies {expected}")
        found = self._viewed(found).reshape(shape)
        return found if self._as_it_is else found.float() * self.factor + self.plus

    def write(self, tensor: Tensor, weight: Tensor) -> None:
        """Puts the pack's tensor where it belongs in the one that is called `name`."""
        place = self._viewed(tensor if self.index is None else tensor[self.index])
        place.copy_((weight if self._as_it_is else (weight - self.plus) / self.factor).reshape(place.shape))

    @property
    def _as_it_is(self) -> bool:
        return self.factor == 1 and self.plus == 0

    def _viewed(self, tensor: Tensor) -> Tensor:
        return tensor if self.view is None else self.view(tensor)


class ShapeDiffers(ValueError):
    """A tensor has another shape than config.json implies; the message is a part of a sentence."""


class _Form(NamedTuple):
    suffixes: tuple[str, ...]
    decode: Callable[..., Tensor]

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(name + suffix for suffix in self.suffixes)


def _fp8_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [out, in], scale [⌈out / 128⌉, ⌈in / 128⌉] (DeepSeek-V3's report, section 3.3)"""
    expected = tuple(-(-size // _FP8_BLOCK) for size in codes.shape)
    if tuple(scale.shape) != expected:
        raise ShapeDiffers(f"a matrix of {tuple(codes.shape)} has scales of {tuple(scale.shape)}, expected {expected}")
    wide = scale.float().repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 [rows, groups, 16], the lower half of a byte first; scales uint8 [rows, groups], powers of two
    (OCP Microscaling Formats 1.0)"""
    if blocks.shape[:-1] != scales.shape:
        raise ShapeDiffers(
            f"blocks of {tuple(blocks.shape)} have scales of {tuple(scales.shape)}, one each is expected"
        )
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - _MX_BIAS).flatten(-2)


def _int4_groups(codes: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    """codes int32 [out, ⌈in / 8⌉], eight to a number, the lowest bits first; scale [out, groups]; shape (out, in)
    ("pack-quantized" of the library compressed-tensors)"""
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


_FORMS: Mapping[Form, _Form] = {
    "fp8 blocks": _Form(("", FP8_SCALES), _fp8_blocks),
    "mxfp4": _Form(("_blocks", "_scales"), _mxfp4),
    "int4 groups": _Form((INT4_CODES, "_scale", "_shape"), _int4_groups),
}
