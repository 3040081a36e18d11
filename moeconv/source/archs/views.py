"""Views of a checkpoint's tensors that hold what a pack calls a tensor: written to, they change the tensor itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

View: TypeAlias = "Callable[[Tensor], Tensor]"
"""Of more dimensions than the pack's tensor, maybe, with the same numbers in the same order."""


def rows(start: int | None = None, stop: int | None = None, step: int | None = None) -> View:
    return lambda tensor: tensor[start:stop:step]


def transposed(tensor: Tensor) -> Tensor:
    """The last two dimensions change places."""
    return tensor.transpose(-1, -2)


def of_heads(heads: int, start: int | None = None, stop: int | None = None) -> View:
    """Some rows of each head of a matrix [heads · dim, ...]: [heads, stop - start, ...]."""
    return lambda tensor: tensor.reshape(heads, -1, *tensor.shape[1:])[:, start:stop]


def halves(heads: int, start: int | None = None, stop: int | None = None) -> View:
    """The same, where rotary positions turn pairs (2i, 2i + 1): the first of all pairs, then the second, as a pack has
    them. Heads all turned alike give the same scores in any order."""
    pick = of_heads(heads, start, stop)
    return lambda tensor: pick(tensor).unfold(1, 2, 2).movedim(-1, 1)


def in_turn(*views: View) -> View:
    """Each a view of what the one before gives."""

    def all_of_them(tensor: Tensor) -> Tensor:
        for view in views:
            tensor = view(tensor)
        return tensor

    return all_of_them
