"""How much memory requests take beside the weights: activations, and keys and values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moert.models.activations import activation_bytes
from moert.models.kv import KvBits, growth_bytes, state_bytes
from moert.pack.model_spec import ModelSpec


@dataclass(frozen=True)
class Footprint:
    """Upper bounds in bytes for requests of one or several prompts that run together: `prompts` has the tokens of each.
    `widened`: as of Backend.widens."""

    spec: ModelSpec
    widened: bool
    kv_bits: KvBits = 16

    def request(self, prompts: Sequence[int], max_new_tokens: int) -> int:
        """The most at one time."""
        return max(self.prompt(prompts), self.written(prompts, max_new_tokens))

    def prompt(self, prompts: Sequence[int]) -> int:
        """While the prompts are read."""
        read = activation_bytes(self.spec, sum(prompts), self.widened, len(prompts))
        return read + self._states(prompts, 1)

    def written(self, prompts: Sequence[int], max_new_tokens: int) -> int:
        """When the last token is written."""
        return self._step(len(prompts)) + self._states(prompts, max_new_tokens)

    def next_block(self, prompts: Sequence[int], new_tokens: int) -> int:
        """What a step takes, and keys and values of the next block beside those that are there after so many."""
        read = self.read(prompts, new_tokens)
        return self._step(len(prompts)) + sum(growth_bytes(self.spec, length, self.kv_bits) for length in read)

    def read(self, prompts: Sequence[int], new_tokens: int) -> list[int]:
        """Tokens that the decoder has read of each, when it has written so many."""
        return [(tokens if self.spec.encoder is None else 1) + new_tokens - 1 for tokens in prompts]

    def _step(self, sequences: int) -> int:
        return activation_bytes(self.spec, sequences, self.widened, sequences)

    def _states(self, prompts: Sequence[int], max_new_tokens: int) -> int:
        return sum(state_bytes(self.spec, tokens, max_new_tokens, self.kv_bits) for tokens in prompts)
