"""Where a tensor of a pack is in a checkpoint, and in what form it lies there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from moeconv.source.archs.errors import ShapeDiffers
from moeconv.source.archs.views import View

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["fp8 blocks", "mxfp4", "int4 groups"]

FP8_SCALES, INT4_CODES = "_scale_inv", "_packed"
_SUFFIXES: Mapping[Form, tuple[str, ...]] = {
    "fp8 blocks": ("", FP8_SCALES), "mxfp4": ("_blocks", "_scales"), "int4 groups": (INT4_CODES, "_scale", "_shape"),
}  # fmt: skip
"""How the tensors are called that a coded matrix is made of."""


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
        suffixes = ("",) if self.form is None else _SUFFIXES[self.form]
        return tuple(self.name + suffix for suffix in suffixes)

    def read(self, fetch: Fetch, shape: tuple[int, ...]) -> Tensor:
        """The pack's tensor of this shape, in the checkpoint's type; what is coded, multiplied or added to
        becomes float32.

        Raises ShapeDiffers."""
        if self.form is None:
            found = fetch(self.name, self.index)
        else:
            from moeconv.source.archs.coded import DECODERS

            found = DECODERS[self.form](*(fetch(name, self.index) for name in self.names))
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
