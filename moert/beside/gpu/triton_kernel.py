"""Triton kernels for few tokens: products that read a matrix once in its pack's bytes, and make floats of them where
they are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moert.beside.gpu.torch_matrices import TorchMatrix, table_of, turning
from moert.pack.codec import EVEN_ROWS, ROWS, TURNED, TrellisCode, block_bytes, turned_together

_ROWS, _COLS, _TOKENS = 8, 256, 4
PROGRAMS, _WARPS = 512, 4
"""Of trellis codes: programs that a matrix is shared among, if it has so many parts, and the warps of each."""
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
    if matrix.code is not None:
        return _coded_product(x, matrix, matrix.code)
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


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator,unused-ignore]
def _multiply_coded(  # type: ignore[no-untyped-def]
    x, signs, hadamard, stream, table, scale, out, norm, tokens, rows, cols, filled, block_bytes, part,
    STEP: tl.constexpr, INDEX: tl.constexpr, MULTIPLIER: tl.constexpr, TOGETHER: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One block of R rows of trellis codes by T tokens, for the `part` pairs of inputs of one program; see
    moert.pack.codec for where codes lie. The inputs of P pairs are turned at a time."""
    within, among = tl.arange(0, R), tl.arange(0, P)
    row = tl.program_id(0) * R + within
    first = tl.program_id(2) * part
    pairs = (cols + 1) // 2
    block_rows = tl.minimum(filled - tl.program_id(0) * R, R)
    bit = tl.minimum(within, block_rows - 1) * STEP
    byte = stream + tl.program_id(0).to(tl.int64) * block_bytes + (bit // 8)[:, None]
    shift = (bit % 8)[:, None]
    place, turned = among * 2 % TOGETHER, among * 2 // TOGETHER
    turns = tl.load(
        hadamard + place[:, None] * TOGETHER + place[None, :], mask=turned[:, None] == turned[None, :], other=0
    )
    total = tl.zeros((T, R), tl.float32)
    for start in range(first, tl.minimum(first + part, pairs), P):
        pair = start + among
        at = byte + (tl.minimum(pair, pairs - 1) * (block_rows * STEP // 8))[None, :]
        word = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
        if STEP % 4 != 0:
            word = word | (tl.load(at + 2).to(tl.int32) << 16)
        named = ((word >> shift) & 4095) * MULTIPLIER
        even = tl.load(table + ((named >> (16 - INDEX)) & ((1 << INDEX) - 1)))
        odd = tl.load(table + ((named >> (16 - 2 * INDEX)) & ((1 << INDEX) - 1)))
        col = 2 * pair
        sign = tl.load(signs + col, mask=col < cols, other=0)
        next_sign = tl.load(signs + col + 1, mask=col + 1 < cols, other=0)
        for t in tl.static_range(T):
            at = x + tl.minimum(tl.program_id(1) * T + t, tokens - 1) * cols + col
            this = tl.load(at, mask=col < cols, other=0) * sign
            that = tl.load(at + 1, mask=col + 1 < cols, other=0) * next_sign
            this = tl.sum(turns * this[None, :], axis=1)
            that = tl.sum(turns * that[None, :], axis=1)
            if TOGETHER > 1:
                this, that = this + that, this - that
            found = tl.sum(even * this[None, :], axis=1) + tl.sum(odd * that[None, :], axis=1)
            total += tl.where(tl.arange(0, T)[:, None] == t, found[None, :], 0)
    total *= (tl.load(scale + row, mask=row < rows, other=0).to(tl.float32) * norm)[None, :]
    token = tl.program_id(1) * T + tl.arange(0, T)
    kept = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(out + (tl.program_id(2) * tokens + token)[:, None] * rows + row[None, :], total, mask=kept)


def _coded_product(x: Tensor, matrix: TorchMatrix, code: TrellisCode) -> Tensor:
    """Returns the same of trellis codes. Programs share the inputs of a block, and their sums are added in order."""
    (tokens, cols), rows, x, pairs = x.shape, matrix.rows, x.contiguous(), triton.cdiv(x.shape[1], 2)
    together, blocks, token_block = turned_together(cols), triton.cdiv(rows, ROWS), 1 if tokens == 1 else _TOKENS
    at_once = TURNED // 2
    part = at_once * max(1, triton.cdiv(triton.cdiv(pairs, at_once) * blocks, PROGRAMS))
    parts = triton.cdiv(pairs, part)
    out = torch.empty((parts, tokens, rows), dtype=torch.float32, device=x.device)
    filled = triton.cdiv(rows, EVEN_ROWS) * EVEN_ROWS
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _multiply_coded[blocks, triton.cdiv(tokens, token_block), parts](
            x, *turning(cols, together, x.device), matrix.data, table_of(code, x.device), matrix.scale, out,
            together**-0.5, tokens, rows, cols, filled, block_bytes(ROWS, cols, code.step), part, STEP=code.step,
            INDEX=code.index, MULTIPLIER=code.multiplier, TOGETHER=together, T=token_block, R=ROWS, P=at_once,
            num_warps=_WARPS,
        )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)
