"""How much memory the arithmetic of a prompt takes beside weights, keys and values. Pure."""

from __future__ import annotations

from moert.kernels.backend import ROWS
from moert.models.attention import SCORE_BYTES
from moert.pack.model_spec import ModelSpec

_ROUNDED = 16
"""Bytes that one number takes in the native kernels: as float32, rounded in up to three orders with the scales, and a
quarter more, as their scratch grows ahead."""
_PADDED = 256  # numbers of a row are rounded to whole multiples of this
_REFERENCE_COPIES = 4  # of each number that an expert makes, in torch
_LOGITS = 3  # for each sequence: the last ones, the present ones, and those put together
_DRAWN = 10  # the same numbers sorted, filtered and so on, of one sequence


def activation_bytes(spec: ModelSpec, tokens: int, widened: bool, sequences: int = 1) -> int:
    """Upper bound for `tokens` tokens of `sequences` that are read in one pass, and for what is done with the logits.
    `widened`: as of Backend.widens."""
    return _layer_bytes(spec, tokens, widened) + 4 * spec.vocab_size * (_LOGITS * sequences + _DRAWN)


def _layer_bytes(spec: ModelSpec, tokens: int, widened: bool) -> int:
    rows = min(tokens, ROWS)
    whole = tokens * _whole_row_bytes(spec) + _mixture_bytes(spec, tokens, widened)
    return whole + rows * _projection_row_bytes(spec) + _score_bytes(spec, tokens, rows)


def _whole_row_bytes(spec: ModelSpec) -> int:
    """What a token keeps while a layer runs: the stream, its norm, the router's scores and choice."""
    moe = spec.moe
    keys_values = 0 if spec.encoder is None else 2 * spec.n_kv_heads * spec.head_dim
    return 4 * (2 * spec.d_model + keys_values + 4 * moe.num_experts) + 48 * moe.top_k


def _mixture_bytes(spec: ModelSpec, tokens: int, widened: bool) -> int:
    """Bytes that one call of the experts takes, with as many rows as it may have; for one token, all of its experts."""
    widths = (spec.d_model, max(spec.moe.d_ff, spec.d_ff_dense))
    rows = max(min(tokens, ROWS), spec.moe.top_k)
    if widened:
        return rows * 4 * _REFERENCE_COPIES * sum(widths)
    return rows * _ROUNDED * sum(-(-width // _PADDED) * _PADDED for width in widths)


def _projection_row_bytes(spec: ModelSpec) -> int:
    """Bytes that attention takes for one row of the block of a prompt that it is at."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    return 4 * (2 * spec.d_model + 3 * (q + 2 * kv)) + _ROUNDED * (-(-max(spec.d_model, q) // _PADDED) * _PADDED)


def _score_bytes(spec: ModelSpec, tokens: int, rows: int) -> int:
    if spec.encoder is None:
        return 8 * rows * tokens  # a mask and its copy
    block = max(min(SCORE_BYTES, 4 * spec.n_heads * rows * tokens), 4 * spec.n_heads * tokens)
    return 5 * block + 64 * spec.n_heads * tokens
