"""The memory that requests take beside the weights: activations, KV cache, recurrent states. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moert.kernels.backend import ROWS
from moert.kernels.pages import KvBits
from moert.models.kv import BLOCK_TOKENS, fixed_bytes, growth_bytes, recent_bytes, state_bytes
from moert.pack.mixers import FixedState, GatedDelta, Mamba, Mamba2, Pooled, ShortConv
from moert.pack.model_spec import Layer, ModelSpec
from moert.pack.parts import Attention, Experts, Ffn, GatedStreams, Latent, Ngrams, Streams

_ROUNDED = 16
"""The bytes that one number takes in the native kernels: as float32, rounded in up to three orders with the scales, and
a quarter more, as their scratch grows ahead."""
_PADDED = 512  # numbers of a row are rounded to whole multiples of this
_REFERENCE_COPIES = 4  # of each number that an expert makes, in numpy
_LOGITS = 3  # for each sequence: the last ones, the present ones, and those put together
_DRAWN = 10  # the same numbers adjusted, sorted, filtered and so on, of one sequence (9 at most)


def activation_bytes(spec: ModelSpec, tokens: int, widened: bool, sequences: int = 1) -> int:
    """Returns an upper bound of the bytes of activations for `tokens` tokens of `sequences` sequences that are read in
    one pass, and of copies of their logits. `widened`: see Backend.widens."""
    projected = sequences * 2 * _ROUNDED * _padded(spec.d_model) if spec.head.projected else 0
    return _layer_bytes(spec, tokens, widened) + projected + 4 * spec.vocab_size * (_LOGITS * sequences + _DRAWN)


def _layer_bytes(spec: ModelSpec, tokens: int, widened: bool) -> int:
    """Returns the bytes of the layer that takes the most. Tokens that see each other are read at once. The outputs of
    experts that take a shortcut are kept, of two layers at most."""
    whole, kept = spec.tokens.prefix_end is not None, any(experts.shortcut for experts in spec.experts.values())
    return 8 * kept * tokens * spec.d_model + max(
        tokens * _whole_row_bytes(spec.d_model, kind)
        + max(
            _mixture_bytes(spec.d_model, kind.ffn, tokens, widened)
            + _mixer_bytes(spec.d_model, kind, tokens, name == "encoder" or whole, widened),
            _ngrams_bytes(spec.d_model, kind, tokens),
        )
        + _streams_bytes(spec.d_model, kind.streams, tokens)
        for name, stack in spec.stacks.items()
        for kind in stack.kinds
    )


def _whole_row_bytes(d_model: int, kind: Layer) -> int:
    """Returns the bytes that a token keeps while a layer runs: the stream, its norm, the router's scores and choice;
    the layer's input where both halves read it; and the experts' output where it does not go into the stream at
    once."""
    if not isinstance(kind.ffn, Experts):
        return 4 * (3 + kind.parallel) * d_model
    apart = 3 if kind.ffn.beside is not None or kind.ffn_join.after is not None or kind.ffn.bypass else 0
    router, narrow = kind.ffn.router, kind.ffn.narrow
    apart += (router.weigh == "input") + router.keeps
    made = (3 + apart + kind.parallel) * d_model + (0 if narrow is None else 3 * d_model + 3 * narrow.features)
    return 4 * made + 16 * (kind.ffn.n + router.identities) + 48 * router.top_k


def _streams_bytes(d_model: int, part: Streams | GatedStreams | None, tokens: int) -> int:
    """Returns the bytes of several streams: the streams and their weights of all tokens, a half's input and output
    beside the layer's, and for a piece of them the copies that mix them, with the native kernels' scratch."""
    if part is None:
        return 0
    width, rows = part.n * d_model, min(tokens, ROWS)
    if isinstance(part, GatedStreams):
        numbers = 6 * width + d_model + 3 * part.rank + 4 * part.n
        scratch = _ROUNDED * (_padded(width) + _padded(part.rank)) // 2
        return tokens * 4 * (width + part.n + 2 * d_model) + rows * (4 * numbers + scratch)
    kept = tokens * 4 * (width + part.weights + 2 * d_model)
    return kept + rows * (4 * (2 * width + 6 * part.weights) + _ROUNDED * _padded(width) // 2)


def _ngrams_bytes(d_model: int, kind: Layer, tokens: int) -> int:
    """Returns the bytes of an embedding of tokens together: the numbers of all tokens' rows, and for a piece of them
    the rows as they are stored and widened, keys, values and the convolution, with the native kernels' scratch."""
    part: Ngrams | None = kind.ngrams
    if part is None or kind.streams is None:
        return 0
    width, rows = kind.streams.n * d_model, min(tokens, ROWS)
    numbers = 4 * part.features + 9 * width + d_model
    return tokens * 8 * (2 * len(part.sizes) + 6) + rows * (4 * numbers + _ROUNDED * _padded(part.features) // 2)


def _mixture_bytes(d_model: int, part: Ffn | Experts | None, tokens: int, widened: bool) -> int:
    """Returns the bytes that one call of a network takes, with as many rows as it may have; for one token all experts
    that it goes to."""
    if part is None:
        return 0
    if isinstance(part, Ffn):
        return _network_bytes((d_model, part.d_ff), min(tokens, ROWS), widened)
    beside = None if part.beside is None else part.beside.ffn
    rows = max(min(tokens, ROWS), part.router.top_k)
    others = [ffn.d_ff for ffn in (part.shared, beside) if ffn is not None]
    others += [] if part.narrow is None else [part.narrow.features]
    others += [d_model] if part.bypass else []
    return max(
        _network_bytes((part.width(d_model), part.ffn.d_ff), rows, widened),
        *(_network_bytes((d_model, width), min(tokens, ROWS), widened) for width in others),
        0,
    )


def _network_bytes(widths: tuple[int, int], rows: int, widened: bool) -> int:
    """Returns the bytes of one network for `rows` rows. `widths`: the features that its matrices get, one after the
    other."""
    if widened:
        return rows * 4 * _REFERENCE_COPIES * sum(widths)
    return rows * _ROUNDED * sum(map(_padded, widths))


def _mixer_bytes(d_model: int, kind: Layer, tokens: int, whole: bool, widened: bool) -> int:
    """Returns the bytes that one call of the layer's mixer takes."""
    if isinstance(kind.mixer, Pooled):
        return _pooled_bytes(d_model, kind.mixer, min(tokens, ROWS), widened)
    if isinstance(kind.mixer, FixedState):
        return _fixed_bytes(d_model, kind.mixer, min(tokens, ROWS), widened)
    return 0 if kind.mixer is None else _attention_bytes(d_model, kind.mixer, tokens, whole, widened)


def _fixed_bytes(d_model: int, part: FixedState, rows: int, widened: bool) -> int:
    """Returns the bytes of a piece of a prompt in a mixer: all arrays that it makes, one step after the other, and the
    native kernels' scratch."""
    inner = _inner(d_model, part)
    made = rows * (4 * (2 * d_model + _made(d_model, part)) + _ROUNDED * (_padded(d_model) + _padded(inner)) // 2)
    if not widened:
        return made
    states = sum(math.prod(shape) for shape in part.state_shapes(d_model))
    repeated = 0  # for each head, the arrays that the heads of a group share
    if isinstance(part, (Mamba, Mamba2)):
        repeated = 2 * part.state * (part.n if isinstance(part, Mamba2) else part.features)
    return 2 * made + 4 * (_REFERENCE_COPIES * (states + rows * inner) + rows * repeated)


def _pooled_bytes(d_model: int, part: Pooled, rows: int, widened: bool) -> int:
    """Returns the bytes of a piece of a prompt in attention to pools: queries and copies of them, all that tokens
    leave, and for one query keys and scores of the window and of the pools that an indexer chooses."""
    heads, narrow, pools = part.n * part.dim, part.groups * part.o_rank, part.pools
    indexer = None if pools is None else pools.indexer
    asked = 0 if indexer is None else indexer.n * (indexer.dim + 1)
    left = 0 if pools is None else sum(4 * pools.width(dim) for dim in part.kept.values())
    widths = _padded(d_model) + _padded(part.q_rank) + _padded(heads // part.groups) + _padded(narrow)
    numbers = 2 * d_model + 5 * heads + 3 * asked + 3 * part.dim + left + 2 * narrow
    made = rows * (4 * numbers + _ROUNDED * widths // 2)
    kept = sum(map(math.prod, part.state_shapes(d_model)))
    seen = part.window + (0 if indexer is None else indexer.top)
    return (2 if widened else 1) * made + 4 * (2 * kept + seen * (part.dim + 4 * part.n))


def _inner(d_model: int, part: FixedState) -> int:
    """Returns the features that the mixer's last matrix gets."""
    if isinstance(part, ShortConv):
        return d_model
    return part.value_features if isinstance(part, GatedDelta) else part.features


def _made(d_model: int, part: FixedState) -> int:
    """Returns the count of numbers that the mixer makes of one token between two matrices, with the copies that lie
    apart."""
    if isinstance(part, ShortConv):
        return 6 * d_model
    if isinstance(part, GatedDelta):
        rows = 8 * part.decays + part.n if part.by_feature else 0  # decays, and the keys of each in native kernels
        rank = 0 if part.rank is None else _ROUNDED // 4 * _padded(part.rank)
        return 4 * part.channels + 4 * part.value_features + 6 * part.n + rows + rank
    if isinstance(part, Mamba2):
        return 4 * part.channels + 5 * part.features + 3 * part.n
    assert isinstance(part, Mamba)
    return 10 * part.features + 3 * (part.rank + 2 * part.state)


def _attention_bytes(d_model: int, part: Attention | Latent, tokens: int, whole: bool, widened: bool) -> int:
    """Returns the bytes that one call of attention takes: a piece of a prompt, or, where `whole`, all of it."""
    rows, q, kv = tokens if whole else min(tokens, ROWS), part.q_features, part.kv_features
    inner = part.n * part.v if isinstance(part, Latent) else q
    made = rows * (4 * (d_model + 2 * q + 2 * kv) + _ROUNDED * (_padded(d_model) + _padded(inner)) // 2)
    if isinstance(part, Latent):
        heads = part.n * (_padded(part.nope) + _padded(part.kv_rank)) + _padded(part.q_rank or 0)
        made += rows * (4 * part.n * (part.nope + part.turning + part.v + 2 * part.gate) + _ROUNDED * heads // 2)
    elif part.gate:
        made += 4 * rows * q
    if not widened:
        return made
    return 2 * made + 4 * _REFERENCE_COPIES * (rows * tokens + 2 * tokens * kv)


def _padded(width: int) -> int:
    return -(-width // _PADDED) * _PADDED


WHOLE = sys.maxsize
"""As many tokens as there are."""


@dataclass(frozen=True)
class Load:
    """One request: tokens of its prompt, the most that it may write, and the tokens `written` so far (0: its prompt is
    still to be read, but for the `kept_tokens` that it begins with). `held_bytes` of memory are in its KV cache and
    recurrent states. `marks`: it keeps its recurrent states as they are behind its prompt. `beams`: sequences that go
    on from the prompt together. `noted_bytes` are kept of each token that it writes, and printed; `scored`: tokens
    whose logits are there at once, if these are more than its sequences."""

    prompt_tokens: int
    max_new_tokens: int
    written: int = 0
    held_bytes: int = 0
    kept_tokens: int = 0
    marks: bool = False
    beams: int = 1
    noted_bytes: int = 0
    scored: int = 0
    part: int = WHOLE
    """Tokens of its prompt that one pass reads at most."""

    @property
    def at_once(self) -> int:
        """Tokens that the next pass reads at most."""
        unread = self.beams if self.written else self.prompt_tokens - self.kept_tokens
        return min(unread, self.part)


Loads = Sequence[Load]


@dataclass(frozen=True)
class Footprint:
    """Upper bounds in bytes for requests that run together. `widened`: see Backend.widens; `prefers`: see Recent;
    `foreseeing`: the bytes that a Foresees takes, by the tokens of a prompt and the new ones; `apart`: the output of
    each expert for each of its tokens is kept until the layer is done."""

    spec: ModelSpec
    widened: bool
    kv_bits: KvBits = 16
    prefers: bool = False
    foreseeing: Callable[[int, int], int] | None = None
    apart: bool = False

    def request(self, loads: Loads) -> int:
        """Returns the most bytes at one time, if all requests start or go on now and write all that they may."""
        return max(self.prompt(loads), self.written(loads))

    def prompt(self, loads: Loads) -> int:
        """Returns the bytes while the prompts of new requests are read and the others go on."""
        tokens = sum(load.at_once for load in loads)
        states = (self._state(load, max(1, load.written)) for load in loads)
        made = activation_bytes(self.spec, tokens, self.widened, _sequences(loads))
        return made + self._parts(tokens) + sum(states)

    def written(self, loads: Loads) -> int:
        """Returns the bytes when all requests have written all that they may."""
        return self._step(_sequences(loads)) + sum(self._state(load, load.max_new_tokens) for load in loads)

    def next_block(self, loads: Loads) -> int:
        """Returns the bytes of a step, and of keys and values of the next block beside the present ones."""
        grown = (growth_bytes(self.spec, self.kv_bits, load.beams) for load in loads)
        noted = (load.noted_bytes * (load.written + BLOCK_TOKENS) for load in loads)
        return self._step(_sequences(loads)) + sum(grown) + sum(noted)

    def read(self, load: Load) -> int:
        """Returns the number of tokens that the decoder has read."""
        return (load.prompt_tokens if self.spec.encoder is None else 1) + load.written - 1

    def _step(self, sequences: int) -> int:
        return activation_bytes(self.spec, sequences, self.widened, sequences) + self._parts(sequences)

    def _parts(self, tokens: int) -> int:
        """The results of experts, once more on their way from another memory, and the input of one."""
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
