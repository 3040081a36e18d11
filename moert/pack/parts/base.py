"""What all parts are made of: tensors with a role, and norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from moert.pack.reading import Between

MOST = 65535
"""Of heads, features of a head, experts, and whatever else is counted in a part."""
MOST_FEATURES = 1 << 24

# What numbers that are not whole may be, so that float32 has them, and products of them, in every kernel alike. All
# that is known of models is well inside: the least and the largest are said beside each.
Eps = Annotated[float, Between(1e-30, 1.0)]
"""1e-12 to 1e-5"""
Factor = Annotated[float, Between(1e-6, 1e6)]
"""What something is multiplied with: 0.0078 (scores of Granite) to 72 (embeddings of 5,120 features)"""
Limit = Annotated[float | None, Between(1e-3, 1e9)]
"""What something is bounded to, hard or softly: 6 to 50"""
Plus = Annotated[float, Between(-1e3, 1e3)]
"""What is added: 0 or 1"""

Role = Literal["attention", "mixer", "router", "ffn", "head", "embed"]
ROLES: tuple[Role, ...] = ("attention", "mixer", "router", "ffn", "head", "embed")
"""What a dense matrix (one outside the experts) is for; a pack gives widths to roles."""


class Tensor(NamedTuple):
    """A tensor that stays in memory: its canonical name, its shape, and what it is for; None for what is never
    quantised."""

    name: str
    shape: tuple[int, ...]
    role: Role | None = None


@dataclass(frozen=True)
class Norm:
    """weight · x / √(mean(x²) + eps); of the kind layer, of x less its mean, plus a bias."""

    eps: Eps
    kind: Literal["rms", "layer"] = "rms"

    def tensors(self, at: str, features: int) -> Iterator[Tensor]:
        yield Tensor(f"{at}.weight", (features,))
        if self.kind == "layer":
            yield Tensor(f"{at}.bias", (features,))


def matrix(at: str, shape: tuple[int, int], role: Role, bias: bool = False) -> Iterator[Tensor]:
    """A matrix [out, in], and its bias [out] if it has one."""
    yield Tensor(f"{at}.weight", shape, role)
    if bias:
        yield Tensor(f"{at}.bias", shape[:1])
