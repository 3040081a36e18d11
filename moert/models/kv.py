"""Keys and values of the tokens so far: buffers that grow in blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moert.pack.model_spec import ModelSpec

BLOCK_TOKENS = 128


class KvCache:
    """Keys and values of one attention layer, [n_kv_heads, tokens, head_dim] each."""

    def __init__(self, n_kv_heads: int, head_dim: int, expected: int = 0) -> None:
        """`expected`: tokens that will come soon, for which room is made at once when the first of them does."""
        self.length = 0
        self._expected = expected
        self._buffer = torch.empty(2, n_kv_heads, 0, head_dim)
        self._halves = (self._buffer[0], self._buffer[1])

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values [n_kv_heads, new, head_dim] → views of all keys and values so far."""
        start = self.length
        all_keys, all_values = self.extend(keys.shape[1])
        all_keys[:, start : self.length] = keys
        all_values[:, start : self.length] = values
        return all_keys[:, : self.length], all_values[:, : self.length]

    def extend(self, new: int) -> tuple[Tensor, Tensor]:
        """Makes room for `new` tokens, whose rows are the caller's to write; gives the buffers [n_kv_heads, ≥ length,
        head_dim] of keys and of values."""
        self.length += new
        if self.length > self._buffer.shape[2]:
            self._grow(max(self.length, self._expected))
        return self._halves

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def _grow(self, tokens: int) -> None:
        _, heads, _, head_dim = self._buffer.shape
        larger = torch.empty(2, heads, rounded(tokens), head_dim)
        larger[:, :, : self._buffer.shape[2]] = self._buffer
        self._buffer, self._halves = larger, (larger[0], larger[1])


@dataclass
class State:
    """All that a running sequence remembers. `cross` holds (keys, values) of the encoded input for each layer."""

    caches: list[KvCache]
    cross: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that the decoder has read."""
        return self.caches[0].length

    @property
    def nbytes(self) -> int:
        cross = sum(keys.nbytes + values.nbytes for keys, values in self.cross)
        return cross + sum(cache.nbytes for cache in self.caches)


def rounded(tokens: int) -> int:
    """`tokens` rounded up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def cache_bytes(n_layers: int, n_kv_heads: int, head_dim: int, tokens: int) -> int:
    """Upper bound for caches of `tokens` tokens; one layer counts twice, as it does while its buffer grows."""
    return (n_layers + 1) * 2 * n_kv_heads * head_dim * 4 * rounded(tokens)


def state_bytes(spec: ModelSpec, prompt_tokens: int, max_new_tokens: int) -> int:
    """Upper bound of the bytes that keys and values take while such a request runs."""
    if spec.max_positions is not None:
        max_new_tokens = max(1, min(max_new_tokens, spec.max_positions - prompt_tokens))
    layers, heads = spec.decoder.n_layers, spec.n_kv_heads
    if spec.encoder is None:
        return cache_bytes(layers, heads, spec.head_dim, prompt_tokens + max_new_tokens)
    cross = layers * 2 * heads * spec.head_dim * 4 * prompt_tokens
    return cross + cache_bytes(layers, heads, spec.head_dim, 1 + max_new_tokens)


def growth_bytes(spec: ModelSpec, length: int) -> int:
    """Upper bound of what the keys and values of the next block take beside `length` present ones, the copy of a layer
    that grows included."""
    per_token = 2 * spec.n_kv_heads * spec.head_dim * 4
    return per_token * (spec.decoder.n_layers * BLOCK_TOKENS + rounded(length + 1))
