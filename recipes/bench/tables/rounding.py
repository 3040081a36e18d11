"""`make bench-rounding`: what 8-bit activations, and keys and values of 16 bits, add to a pack's loss."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Part


def parts(result: Result) -> Sequence[Part]:
    lines = [
        ("", "with native kernels"),
        ("wiki: rise of the perplexity per token (95% interval)",
         "{wiki: relative rise with native kernels|interval.3%}"),
        *((f"{name}: the same by keys and values of {bits} bits alone",
           f"{{{name}: relative rise with keys of {bits} bits|interval.3%}}")
          for name in ("wiki", "g2p") for bits in (16, 8)
          if f"{name}: relative rise with keys of {bits} bits" in result.by_name),
        ("g2p: words that come out differently", "{g2p: words that differ|.1%} of {g2p: words that differ@n}"),
    ]  # fmt: skip
    return [lines]
