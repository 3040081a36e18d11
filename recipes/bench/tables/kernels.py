"""`make bench-kernels`: the native kernels beside the bandwidth of memory and onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

WIDTHS = (2, 3, 4, 8)


def parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [
        ("", *(f"{bits} bits" for bits in WIDTHS)),
        ("one matrix of 1024 × 2048, one token", *(share(f"linear, {bits} bits, groups of 64") for bits in WIDTHS)),
        ("eight experts, one token, one call", *(share(f"mixture, {bits} bits") for bits in WIDTHS)),
        ("the matrix beside onnxruntime's MatMulNBits", *(beside(bits, "1 token", result) for bits in WIDTHS)),
        ("the same, 512 tokens", *(beside(bits, "512 tokens", result) for bits in WIDTHS)),
    ]
    bandwidth = (
        "The first two lines are shares of plain reading in the same run, which reached {read bandwidth|.1f} GB/s."
    )
    return [lines, bandwidth]


def share(row: str) -> str:
    return f"{{{row}: share|%}}"


def beside(bits: int, tokens: str, result: Result) -> str:
    """Nothing where onnxruntime has not this width."""
    row = f"{bits} bits, {tokens}: ratio to onnxruntime {bits} bits, groups of 64"
    return f"{{{row}|.1f}} ×" if row in result.by_name else ""
