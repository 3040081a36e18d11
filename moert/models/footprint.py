"""How much memory requests take beside the weights: activations, keys and values, and states. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moert.kernels.pages import KvBits
from moert.models.activations import activation_bytes
from moert.models.kv import BLOCK_TOKENS, fixed_bytes, growth_bytes, state_bytes
from moert.models.recent import recent_bytes
from moert.pack.model_spec import ModelSpec


@dataclass(frozen=True)
class Load:
    """One request: tokens of its prompt, the most that it may write, and what it has `written` so far (0: its prompt is
    still to be read, but for the `kept_tokens` that it begins with). `held_bytes` of memory are in its keys, values and
    states. `marks`: it keeps its states of fixed size as they are behind its prompt. `beams`: sequences that go on from
    the prompt together. `noted_bytes` are kept of each token that it writes, and printed; `scored`: tokens whose logits
    are there at once, if these are more than its sequences."""

    prompt_tokens: int
    max_new_tokens: int
    written: int = 0
    held_bytes: int = 0
    kept_tokens: int = 0
    marks: bool = False
    beams: int = 1
    noted_bytes: int = 0
    scored: int = 0


Loads = Sequence[Load]


@dataclass(frozen=True)
class Footprint:
    """Upper bounds in bytes for requests that run together. `widened`: as of Backend.widens; `prefers`: see Recent;
    `foreseeing`: what a Foresees takes for a prompt of so many tokens and so many new ones; `apart`: what each expert
    makes of each of its tokens is kept until the layer is done."""

    spec: ModelSpec
    widened: bool
    kv_bits: KvBits = 16
    prefers: bool = False
    foreseeing: Callable[[int, int], int] | None = None
    apart: bool = False

    def request(self, loads: Loads) -> int:
        """The most at one time, if all start or go on now and write all that they may."""
        return max(self.prompt(loads), self.written(loads))

    def prompt(self, loads: Loads) -> int:
        """While the prompts of new ones are read and the others go on."""
        tokens = sum(load.beams if load.written else load.prompt_tokens - load.kept_tokens for load in loads)
        states = (self._state(load, max(1, load.written)) for load in loads)
        made = activation_bytes(self.spec, tokens, self.widened, _sequences(loads))
        return made + self._parts(tokens) + sum(states)

    def written(self, loads: Loads) -> int:
        """When all have written all that they may."""
        return self._step(_sequences(loads)) + sum(self._state(load, load.max_new_tokens) for load in loads)

    def next_block(self, loads: Loads) -> int:
        """What a step takes, and keys and values of the next block beside those that are there."""
        grown = (growth_bytes(self.spec, self.kv_bits, load.beams) for load in loads)
        noted = (load.noted_bytes * (load.written + BLOCK_TOKENS) for load in loads)
        return self._step(_sequences(loads)) + sum(grown) + sum(noted)

    def read(self, load: Load) -> int:
        """Tokens that the decoder has read."""
        return (load.prompt_tokens if self.spec.encoder is None else 1) + load.written - 1

    def _step(self, sequences: int) -> int:
        return activation_bytes(self.spec, sequences, self.widened, sequences) + self._parts(sequences)

    def _parts(self, tokens: int) -> int:
        """What experts make, once more on its way from a device, and what one gets."""
        moe = self.spec.moe
        return 3 * 4 * tokens * moe.router.top_k * moe.width(self.spec.d_model) if self.apart else 0

    def _state(self, load: Load, written: int) -> int:
        extra = (fixed_bytes(self.spec) if load.marks else 0) + load.noted_bytes * written
        if self.prefers:
            extra += load.beams * recent_bytes(self.spec, load.prompt_tokens)
        if self.foreseeing is not None:
            extra += load.beams * self.foreseeing(load.prompt_tokens, written)
        return extra + state_bytes(self.spec, load.prompt_tokens, written, self.kv_bits, load.beams)


def _sequences(loads: Loads) -> int:
    return sum(max(load.beams, load.scored) for load in loads)
