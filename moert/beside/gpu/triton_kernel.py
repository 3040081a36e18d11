"""A Triton kernel for few tokens: a product that reads a matrix once in its pack's bytes, and makes floats of them
where they are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moert.beside.gpu.torch_matrices import TorchMatrix

_ROWS, _COLS, _TOKENS = 8, 256, 4
_FLOATS, _MXFP4 = 0, 1
"""Values of KIND beside the widths of codes."""


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator,unused-ignore]
def _multiply(  # type: ignore[no-untyped-def]
    x, data, scale, minimum, out, tokens, rows, cols, row_bytes, groups, group, low_bytes,
    KIND: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R rows of the matrix by T tokens; see moert.pack.codec for where codes lie."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    token = tl.program_id(1) * T + tl.arange(0, T)
    row_at = row.to(tl.int64)[:, None]
    total = tl.zeros((T, R), tl.float32)
    for start in range(0, cols, C):
        col = start + tl.arange(0, C)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        if KIND == 0:
            weight = tl.load(data + row_at * cols + col[None, :], mask=inside, other=0).to(tl.float32)
        elif KIND == 1:
            byte = tl.load(data + row_at * row_bytes + (col // 2)[None, :], mask=inside, other=0).to(tl.int32)
            code = (byte >> ((col % 2) * 4)[None, :]) & 15
            high, low = (code >> 1) & 3, (code & 1).to(tl.float32)
            weight = tl.where(high == 0, 0.5 * low, (1.0 + 0.5 * low) * (1 << high).to(tl.float32) * 0.5)
            weight = tl.where(code > 7, -weight, weight)
            place = row_at * groups + (col // group)[None, :]
            power = tl.load(scale + place, mask=inside, other=127).to(tl.int32) - 127
            half = power >> 1
            weight = weight * ((half + 127) << 23).to(tl.float32, bitcast=True)
            weight = weight * ((power - half + 127) << 23).to(tl.float32, bitcast=True)
        else:
            if KIND == 8:
                code = tl.load(data + row_at * row_bytes + col[None, :], mask=inside, other=0).to(tl.int32)
            elif KIND == 3:
                byte = tl.load(data + row_at * row_bytes + (col // 4)[None, :], mask=inside, other=0).to(tl.int32)
                code = (byte >> ((col % 4) * 2)[None, :]) & 3
                at = row_at * row_bytes + low_bytes + (col // 8)[None, :]
                byte = tl.load(data + at, mask=inside, other=0).to(tl.int32)
                code = code | (((byte >> (col % 8)[None, :]) & 1) << 2)
            else:
                at = row_at * row_bytes + (col // (8 // KIND))[None, :]
                byte = tl.load(data + at, mask=inside, other=0).to(tl.int32)
                code = (byte >> ((col % (8 // KIND)) * KIND)[None, :]) & ((1 << KIND) - 1)
            place = row_at * groups + (col // group)[None, :]
            by = tl.load(scale + place, mask=inside, other=0).to(tl.float32)
            weight = code.to(tl.float32) * by + tl.load(minimum + place, mask=inside, other=0).to(tl.float32)
        there = (token < tokens)[:, None] & (col < cols)[None, :]
        values = tl.load(x + token[:, None] * cols + col[None, :], mask=there, other=0)
        total += tl.sum(values[:, None, :] * weight[None, :, :], axis=2)
    kept = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(out + token[:, None] * rows + row[None, :], total, mask=kept)


def product(x: Tensor, matrix: TorchMatrix) -> Tensor:
    """Returns the product of x [tokens, cols] in float32 and the matrix, [tokens, rows], without the bias. Sums are in
    float32."""
    (tokens, cols), rows, x = x.shape, matrix.rows, x.contiguous()
    out = torch.empty((tokens, rows), dtype=torch.float32, device=x.device)
    kind: Any = _FLOATS if matrix.scale is None else _MXFP4 if matrix.minimum is None else matrix.kind
    scale = matrix.data if matrix.scale is None else matrix.scale
    minimum = scale if matrix.minimum is None else matrix.minimum
    token_block = 1 if tokens == 1 else _TOKENS
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(tokens, token_block))
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _multiply[grid](
            x, matrix.data, scale, minimum, out, tokens, rows, cols, matrix.data.shape[1], scale.shape[1],
            matrix.group, (2 * cols + 7) // 8, KIND=kind, T=token_block, R=_ROWS, C=_COLS,
        )  # fmt: skip
    return out
