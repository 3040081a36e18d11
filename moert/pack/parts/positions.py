"""Positions that are vectors, added to the embeddings of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from moert.pack.parts.base import MOST, Tensor
from moert.pack.reading import Within


@dataclass(frozen=True)
class PositionTable:
    """A vector for each of the first `n` positions, which the token there gets added, learnt or computed alike. With
    `skips_pad` the pad token gets none, and an encoder counts those after it as if it were not there."""

    n: Annotated[int, Within(1, MOST)]
    skips_pad: bool = False

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.positions.weight", (self.n, d_model))
