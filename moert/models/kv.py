"""What a sequence remembers: keys and values of the tokens so far, in 16 or 8 bits, in buffers that grow in blocks,
laid out as csrc/moert.h says; and states of a fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from moert.models.recent import Recent
from moert.pack.model_spec import ModelSpec
from moert.pack.parts import Attention, FixedState, Latent, Layer

F16 = npt.NDArray[np.float16]
KvBits = Literal[8, 16]

KEYS = 64
"""Keys that lie together (MOERT_KEYS)."""
BLOCK_TOKENS = 128


class Kept:
    """Keys and values of one attention: `keys` [kv, blocks, dim, KEYS], `values` [kv, tokens, value_dim], float16; or
    of 8 bits, times the steps of their tokens, `key_steps` [kv, blocks, KEYS] and `value_steps` [kv, tokens]."""

    def __init__(self, part: Attention | Latent, expected: int = 0, bits: KvBits = 16) -> None:
        """`expected`: tokens that will come soon, for which room is made at once when the first of them does."""
        self.length = 0
        self._part, self._expected, self._bits = part, expected, bits
        self.keys, self.values, self.key_steps, self.value_steps = self._room(0)
        self.place: Any = None
        """What a backend remembers of where they lie; None where nothing is known of the present room."""

    def extend(self, new: int) -> int:
        """Makes room for `new` tokens, whose keys and values are the caller's to write; gives the first one's place."""
        start = self.length
        self.length += new
        if self.length > self.values.shape[1]:
            room = self._room(rounded(max(self.length, self._expected)))
            for old, fresh in zip(self._parts, room, strict=True):
                if old is not None and fresh is not None:
                    fresh[:, : old.shape[1]] = old
            self.keys, self.values, self.key_steps, self.value_steps = room
            self.place = None
        return start

    def copy(self) -> Kept:
        """Another with the same, that goes on by itself."""
        twin = Kept(self._part, self._expected, self._bits)
        if self.length:
            twin.extend(self.length)
        for old, fresh in zip(self._parts, twin._parts, strict=True):
            if old is not None and fresh is not None:
                reach = min(old.shape[1], fresh.shape[1])
                fresh[:, :reach] = old[:, :reach]
        return twin

    def cut(self, length: int, expected: int) -> bool:
        """Forgets all but the first `length` tokens; `expected` will be there in all. False where Ctrl-C came between
        new room and its use, so that nothing of it can be relied on."""
        blocks = {part.shape[1] * KEYS for part in (self.keys, self.key_steps) if part is not None}
        tokens = {part.shape[1] for part in (self.values, self.value_steps) if part is not None}
        if blocks != tokens or len(tokens) > 1 or length > min(self.length, *tokens):
            return False
        self.length, self._expected, self.place = length, expected, None
        return True

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts if part is not None)

    @property
    def written_bytes(self) -> int:
        """Of the tokens so far: the system gives memory when it is written."""
        return self.nbytes * self.length // max(1, int(self.values.shape[1]))

    @property
    def _parts(self) -> tuple[npt.NDArray[Any] | None, ...]:
        return self.keys, self.values, self.key_steps, self.value_steps

    def _room(self, tokens: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], F16 | None, F16 | None]:
        heads, blocks, small = self._part.kv, tokens // KEYS, self._bits == 8
        number = np.int8 if small else np.float16
        # Whole blocks are multiplied; what lies behind the last key must be a number.
        keys = np.zeros((heads, blocks, self._part.dim, KEYS), number)
        values = np.empty((heads, tokens, self._part.value_dim), number)
        if not small:
            return keys, values, None, None
        return keys, values, np.zeros((heads, blocks, KEYS), np.float16), np.empty((heads, tokens), np.float16)


class Fixed:
    """What a layer without attention remembers of any number of tokens: the `arrays` of its mixer, in float32, zeros
    before the first; none for a layer that has no mixer. It can be cut to where it was marked, and nowhere else."""

    def __init__(self, part: FixedState | None, d_model: int) -> None:
        shapes = () if part is None else part.state_shapes(d_model)
        self.length = 0
        self.arrays = [np.zeros(shape, np.float32) for shape in shapes]
        self._marked: tuple[int, list[npt.NDArray[np.float32]]] | None = None

    def extend(self, new: int) -> int:
        """To be called before the arrays change, so that `length` is never that of an earlier state; gives the place of
        the first of `new` tokens."""
        self.length += new
        return self.length - new

    def copy(self) -> Fixed:
        """Another with the same, that goes on by itself and has no mark."""
        twin = Fixed(None, 0)
        twin.length, twin.arrays = self.length, [array.copy() for array in self.arrays]
        return twin

    def mark(self) -> None:
        """Keeps a copy of how it is now, in place of the one before."""
        self._marked = self.length, [array.copy() for array in self.arrays]

    def reaches(self) -> set[int]:
        """The lengths that it can be cut to."""
        return {self.length} if self._marked is None else {self.length, self._marked[0]}

    def cut(self, length: int, expected: int) -> bool:
        """Forgets all but the first `length` tokens, if it can."""
        if self.arrays and length != self.length:
            if self._marked is None or length != self._marked[0]:
                return False
            self.length = -1  # until all is as it was
            self.arrays = [array.copy() for array in self._marked[1]]
        self.length = length
        return True

    @property
    def nbytes(self) -> int:
        marked = () if self._marked is None else self._marked[1]
        return sum(array.nbytes for array in (*self.arrays, *marked))

    @property
    def written_bytes(self) -> int:
        return self.nbytes


Remembered = Kept | Fixed
"""Of one layer."""


class Heard(Protocol):
    """What a Foresees remembers of the tokens of a sequence."""

    def copy(self) -> Heard: ...

    def cut(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        ...

    @property
    def nbytes(self) -> int: ...


@dataclass
class State:
    """All that a running sequence remembers: of each decoder layer what it has read, and with an encoder what that has
    made of the input."""

    own: list[Remembered]
    cross: list[Kept] = field(default_factory=list)
    recent: list[Recent] = field(default_factory=list)
    """Of each decoder layer with experts, where routers prefer some."""
    heard: Heard | None = None
    """Where something foresees what layers will ask for."""

    @property
    def length(self) -> int:
        """Tokens that the decoder has read."""
        return self.own[0].length

    def copy(self) -> State:
        own, cross = [kept.copy() for kept in self.own], [kept.copy() for kept in self.cross]
        heard = None if self.heard is None else self.heard.copy()
        return State(own, cross, [kept.copy() for kept in self.recent], heard)

    def exact_until(self, length: int) -> None:
        """The first `length` tokens are a prompt, and routed exactly."""
        for kept in self.recent:
            kept.exact = length

    def mark(self) -> None:
        """Takes care that it can be cut to its present length later, whatever it remembers by."""
        for kept in self._fixed:
            kept.mark()

    def reach(self, length: int) -> int:
        """The most of the first `length` tokens that it can be cut to."""
        length = min((kept.reach(length) for kept in self.recent), default=length)
        lengths = [kept.reaches() for kept in self._fixed]
        return max((each for each in set.intersection(*lengths) if each <= length), default=0) if lengths else length

    def cut(self, length: int, expected: int = 0) -> bool:
        """Forgets all that the decoder has read but the first `length` tokens, as many as it reaches; where it fails,
        all of it is to be thrown away."""
        for kept in self.recent:
            kept.cut(length)
        if self.heard is not None:
            self.heard.cut(length)
        return all(kept.cut(length, expected) for kept in self.own)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (*self.own, *self.cross)) + self._beside_bytes

    @property
    def written_bytes(self) -> int:
        return sum(kept.written_bytes for kept in (*self.own, *self.cross)) + self._beside_bytes

    @property
    def _beside_bytes(self) -> int:
        return sum(kept.nbytes for kept in self.recent) + (0 if self.heard is None else self.heard.nbytes)

    @property
    def _fixed(self) -> list[Fixed]:
        return [kept for kept in self.own if isinstance(kept, Fixed) and kept.arrays]


def remembered(layer: Layer, d_model: int, expected: int, bits: KvBits) -> Remembered:
    """Of a layer that has read nothing yet; `expected` tokens will come soon."""
    if isinstance(layer.mixer, (Attention, Latent)):
        return Kept(layer.mixer, expected, bits)
    return Fixed(layer.mixer, d_model)


def rounded(tokens: int) -> int:
    """`tokens` rounded up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def state_bytes(spec: ModelSpec, prompt_tokens: int, max_new_tokens: int, bits: KvBits = 16) -> int:
    """Upper bound of the bytes that keys, values and states take while such a request runs."""
    if (room := spec.room(prompt_tokens)) is not None:
        max_new_tokens = max(1, min(max_new_tokens, room))
    per_token, largest = token_bytes(spec, bits)
    tokens = prompt_tokens + max_new_tokens if spec.encoder is None else 1 + max_new_tokens
    crossed = sum(_kept_bytes(kind.cross, bits) for kind in _layers(spec) if kind.cross is not None)
    return fixed_bytes(spec) + crossed * rounded(prompt_tokens) + (per_token + largest) * rounded(tokens)


def growth_bytes(spec: ModelSpec, length: int, bits: KvBits = 16) -> int:
    """Upper bound of what the keys and values of the next block take beside `length` present ones, the copy of a layer
    that grows included."""
    per_token, largest = token_bytes(spec, bits)
    return per_token * BLOCK_TOKENS + largest * rounded(length + 1)


def fixed_bytes(spec: ModelSpec) -> int:
    """Of the states of a sequence that do not grow, in all layers of the decoder."""
    parts = [kind.mixer for kind in _layers(spec) if isinstance(kind.mixer, FixedState)]
    return 4 * sum(math.prod(shape) for part in parts for shape in part.state_shapes(spec.d_model))


def token_bytes(spec: ModelSpec, bits: KvBits = 16) -> tuple[int, int]:
    """Bytes that the keys and values of one token take in all layers of the decoder, and in the largest of them, which
    counts twice while its buffer grows."""
    each = [_kept_bytes(kind.attention, bits) for kind in _layers(spec) if kind.attention is not None]
    return sum(each), max(each, default=0)


def _kept_bytes(part: Attention | Latent, bits: KvBits) -> int:
    """Of the key and the value of one token."""
    steps = 4 if bits == 8 else 0
    return part.kv * ((part.dim + part.value_dim) * bits // 8 + steps)


def _layers(spec: ModelSpec) -> list[Layer]:
    return [spec.decoder[layer] for layer in range(len(spec.decoder))]
