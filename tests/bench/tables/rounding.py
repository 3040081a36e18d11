"""`make bench-rounding`: what 8-bit activations add to a pack's loss."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Part


def parts(result: Result) -> Sequence[Part]:
    lines = [
        ("", "with native kernels"),
        ("wiki: rise of the perplexity (95% interval)",
         "{wiki: relative rise with native kernels|interval.3%}"),
        ("g2p: words that come out differently", "{g2p: words that differ|.1%} of {g2p: words that differ@n}"),
    ]  # fmt: skip
    return [lines]
