"""Parts of models whose streams are mixed by gates, and get embeddings of the last few tokens together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from moert.pack.documents import Within
from moert.pack.parts import MOST, MOST_FEATURES, MOST_STREAMS, Norm, Shapes, Tensor

MOST_ROWS = 1 << 40
_MOST_TOKENS = 16
MOST_WORD = (1 << 63) - 1
"""The largest number of a token times a multiplier."""
MOST_IDS = 1 << 24
"""The most tokens of a vocabulary whose numbers float32 has, and so a recurrent state."""
DIGITS = 3
"""The digits of such a number to the base 256, each of which any type of floats has."""


@dataclass(frozen=True)
class GatedStreams:
    """`n` streams in place of one, which the halves of a layer mix by gates of `rank` numbers (Qwen4-Exp). Each stream
    is normed by itself. A half gets the mean of the normed streams, each of whose features is multiplied with a gate;
    its output joins each stream by a weight of the token's own. Behind the last layer, gates make one vector of the
    streams."""

    KIND: ClassVar[str] = "gated"
    n: Annotated[int, Within(2, MOST_STREAMS)]
    rank: Annotated[int, Within(1, MOST)]
    norm: Norm

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        yield from self.end_tensors(at, d_model)
        yield Tensor(f"{at}.join.weight", (self.n, self.n * d_model))

    def end_tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        """Yields the tensors behind the last layer, whose streams get nothing more."""
        width = self.n * d_model
        yield Tensor(f"{at}.norm.weight", (width,))
        yield Tensor(f"{at}.narrow.weight", (self.rank, width))
        yield Tensor(f"{at}.wide.weight", (width, self.rank))

    def contradictions(self) -> Iterator[str]:
        if self.norm.kind != "rms":
            yield f"its streams are normed by one of the kind {self.norm.kind}, it should be rms"


@dataclass(frozen=True)
class Ngrams:
    """An embedding of the last 2 to `n` tokens together, which joins a token's streams (Qwen4-Exp). For each length
    there are as many heads as `sizes` has numbers for each. A head's row is the exclusive or of each token's number
    times the multiplier for its place, modulo the head's size; rows of all heads lie in one table of `rows` rows of
    `dim` features, which stays on the drive. Tokens before the last `end` count as `end`, and so do tokens before the
    first.

    The heads' rows together make keys for all streams and a value. The value, times a gate that follows from key and
    stream, joins the stream, and so does silu of a convolution of it, normed, over `taps` tokens that lie `n` apart."""

    n: Annotated[int, Within(2, _MOST_TOKENS)]
    dim: Annotated[int, Within(1, MOST)]
    rows: Annotated[int, Within(1, MOST_ROWS)]
    taps: Annotated[int, Within(1, MOST)]
    end: Annotated[int, Within(0, MOST_IDS)]
    multipliers: Annotated[tuple[int, ...], Within(1, MOST_WORD)]
    sizes: Annotated[tuple[int, ...], Within(1, MOST_ROWS)]
    norm: Norm

    @property
    def features(self) -> int:
        """Returns the features of all heads' rows together."""
        return len(self.sizes) * self.dim

    @property
    def reach(self) -> int:
        """Returns how many tokens before a token its convolution reaches."""
        return (self.taps - 1) * self.n

    def tensors(self, at: str, d_model: int, streams: int) -> Iterator[Tensor]:
        width = streams * d_model
        yield Tensor(f"{at}.key.weight", (width, self.features))
        yield Tensor(f"{at}.value.weight", (d_model, self.features))
        for name in ("key", "stream", "conv"):
            yield Tensor(f"{at}.{name}_norm.weight", (width,))
        yield Tensor(f"{at}.conv.weight", (width, self.taps))

    def table(self, at: str) -> Tensor:
        """Returns the table, which is no tensor that stays in memory."""
        return Tensor(f"{at}.table", (self.rows, self.dim))

    def state_shapes(self, width: int) -> Shapes:
        """Returns the shapes of the last tokens' numbers, each plus 1, and of the convolution's last inputs; `width`:
        features of all streams."""
        return (self.n - 1,), (self.reach, width)

    def contradictions(self) -> Iterator[str]:
        if len(self.multipliers) != self.n or len(self.sizes) % (self.n - 1) or not self.sizes:
            counts = f"{len(self.multipliers)} multipliers and {len(self.sizes)} heads"
            yield f"{counts} are for up to {self.n} tokens together"
        elif sum(self.sizes) > self.rows:
            yield f"the heads of its tokens together have {sum(self.sizes)} rows, their table has {self.rows}"
        elif self.norm.kind != "rms":
            yield f"its tokens together are normed by one of the kind {self.norm.kind}, it should be rms"
        elif max(self.features, self.taps * self.n) > MOST_FEATURES:
            yield f"its tokens together have {self.features} features, it should be at most {MOST_FEATURES}"
