"""What a sequence remembers: keys and values of the tokens so far, in pages that forks share; and states of a fixed
size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moert.kernels.pages import KEYS, STEP_BYTES, KeptPage, KvBits, PageLayout, pages_of
from moert.models.router import Recent
from moert.pack.model_spec import Layer, ModelSpec
from moert.pack.parts import Attention, FixedState, Latent

BLOCK_TOKENS = 128
"""Tokens that room is reckoned for at once."""

MakePages = Callable[[PageLayout, int], list[KeptPage]]
"""Gives so many new pages; see moert.kernels.backend.Backend."""


class Kept:
    """Keys and values of one attention: `pages`, as many as its `length` takes.

    A copy shares them. Of a page that both have, the first of them writes on behind what the other one reads, the copy
    writes into a page of its own, and so does who has gone back to a place that others read. So pages are shared until
    they are written, and no more than the last one is ever copied.
    """

    def __init__(
        self, part: Attention | Latent, expected: int = 0, bits: KvBits = 16, make: MakePages | None = None
    ) -> None:
        """`expected`: tokens that will come soon, for which room is made at once when the first of them does. `make`:
        by default pages in memory."""
        self.layout = PageLayout.of(part, bits)
        self.length = 0
        self.pages: list[KeptPage] = []
        self.place: Any = None
        """What a backend remembers of where they lie; None where nothing is known of the present pages."""
        self._part, self._expected, self._make = part, expected, make or PageLayout.pages
        self._room: list[KeptPage] = []  # pages for what is expected
        self._own = 0  # it may write into pages from this one on,
        self._read = 0  # at places from this one on: what lies before is read by copies

    def extend(self, new: int) -> int:
        """Makes room for `new` tokens, whose keys and values are the caller's to write; gives the first one's place."""
        start = self.length
        self.length += new
        at, within = divmod(start, KEYS)
        writable = within and at >= self._own and start >= self._read
        if not writable or self.length > len(self.pages) * KEYS:
            if not writable:
                self._part_ways(at, within)
            self._grow()
            self.place = None
        return start

    def copy(self) -> Kept:
        """Another with the same, that goes on by itself."""
        self._read = max(self._read, self.length)
        twin = Kept(self._part, 0, self.layout.bits, self._make)  # page by page: one that ends leaves none behind
        twin.length, twin.pages, twin._own = self.length, list(self.pages), len(self.pages)
        return twin

    def cut(self, length: int, expected: int) -> bool:
        """Forgets all but the first `length` tokens; `expected` will be there in all. False where Ctrl-C came before
        there were pages for so many."""
        if length > min(self.length, len(self.pages) * KEYS):
            return False
        left = pages_of(length)
        free = max(left, self._own, pages_of(self._read))  # those from here on nobody else has
        self._room = [*self.pages[free:], *self._room]
        del self.pages[left:]
        self.length, self._expected, self.place = length, expected, None
        return True

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * (len(self.pages) + len(self._room))

    @property
    def written_bytes(self) -> int:
        """Of the tokens so far: the system gives memory when it is written."""
        return self.layout.nbytes * len(self.pages)

    def _part_ways(self, at: int, within: int) -> None:
        """What it writes from now on goes into pages of its own, of which the first may begin with a copy."""
        if within:
            self.pages[at] = self.pages[at].copy()
        self._own, self._read = min(self._own, at), min(self._read, at * KEYS)

    def _grow(self) -> None:
        there = len(self.pages)
        lacking = pages_of(self.length) - there
        if lacking > len(self._room):
            self._room += self._make(self.layout, max(lacking, pages_of(self._expected) - there) - len(self._room))
        self.pages += self._room[:lacking]
        del self._room[:lacking]


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
        kept = [np.empty_like(array) for array in self.arrays] if self._marked is None else self._marked[1]
        self._marked = None  # until all is copied
        _copy(self.arrays, kept)
        self._marked = self.length, kept

    def reaches(self) -> set[int]:
        """The lengths that it can be cut to."""
        return {self.length} if self._marked is None else {self.length, self._marked[0]}

    def cut(self, length: int, expected: int) -> bool:
        """Forgets all but the first `length` tokens, if it can."""
        if self.arrays and length != self.length:
            if self._marked is None or length != self._marked[0]:
                return False
            self.length = -1  # until all is as it was
            _copy(self._marked[1], self.arrays)
        self.length = length
        return True

    @property
    def nbytes(self) -> int:
        marked = () if self._marked is None else self._marked[1]
        return sum(array.nbytes for array in (*self.arrays, *marked))

    @property
    def written_bytes(self) -> int:
        return self.nbytes


def _copy(arrays: Iterable[npt.NDArray[np.float32]], places: Iterable[npt.NDArray[np.float32]]) -> None:
    """Copies arrays into others, so that no third ones take memory."""
    for array, place in zip(arrays, places, strict=True):
        np.copyto(place, array)


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
        """Another with the same, that goes on by itself. Pages are shared until they are written; what an encoder has
        made never is."""
        heard = None if self.heard is None else self.heard.copy()
        return State([kept.copy() for kept in self.own], self.cross, [kept.copy() for kept in self.recent], heard)

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


def remembered(
    layer: Layer, d_model: int, expected: int, bits: KvBits, make: MakePages | None = None
) -> Remembered:  # fmt: skip
    """Of a layer that has read nothing yet; `expected` tokens will come soon."""
    if isinstance(layer.mixer, (Attention, Latent)):
        return Kept(layer.mixer, expected, bits, make)
    return Fixed(layer.mixer, d_model)


def forked(states: list[State], parents: Sequence[int]) -> list[State]:
    """Of each of these its state, or where it has been given, a copy. `states` is emptied first of those that nobody
    goes on from."""
    left = {parent: states[parent] for parent in parents}
    states.clear()
    return [left[parent] if parents.index(parent) == at else left[parent].copy() for at, parent in enumerate(parents)]


def written_bytes(states: Iterable[State]) -> int:
    """Of several together: what they share counts once."""
    states = list(states)
    kept = [each for state in states for each in (*state.own, *state.cross)]
    pages = {id(page): page.nbytes for each in kept if isinstance(each, Kept) for page in each.pages}
    fixed = sum(each.nbytes for each in kept if isinstance(each, Fixed))
    return sum(pages.values()) + fixed + sum(state._beside_bytes for state in states)


def rounded(tokens: int) -> int:
    """`tokens` rounded up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def state_bytes(
    spec: ModelSpec, prompt_tokens: int, max_new_tokens: int, bits: KvBits = 16, beams: int = 1
) -> int:  # fmt: skip
    """Upper bound of the bytes that keys, values and states take while such a request runs. Beams share what was read
    of the prompt but for its last page."""
    if (room := spec.room(prompt_tokens)) is not None:
        max_new_tokens = max(1, min(max_new_tokens, room))
    first = prompt_tokens if spec.encoder is None else 1
    pages = pages_of(first + max_new_tokens)
    if beams > 1:
        pages = pages_of(first) + beams * (1 + pages_of(max_new_tokens))
    crossed = sum(_kept_bytes(kind.cross, bits) for kind in _layers(spec) if kind.cross is not None)
    kept = crossed * KEYS * pages_of(prompt_tokens) + token_bytes(spec, bits) * KEYS * pages
    return beams * fixed_bytes(spec) + kept


def growth_bytes(spec: ModelSpec, bits: KvBits = 16, beams: int = 1) -> int:
    """Upper bound of what the keys and values of the next block take, and the copies with which beams part."""
    copied = KEYS if beams > 1 else 0
    return beams * token_bytes(spec, bits) * (BLOCK_TOKENS + copied)


def fixed_bytes(spec: ModelSpec) -> int:
    """Of the states of a sequence that do not grow, in all layers of the decoder."""
    parts = [kind.mixer for kind in _layers(spec) if isinstance(kind.mixer, FixedState)]
    return 4 * sum(math.prod(shape) for part in parts for shape in part.state_shapes(spec.d_model))


def token_bytes(spec: ModelSpec, bits: KvBits = 16) -> int:
    """Bytes that the keys and values of one token take in all layers of the decoder."""
    return sum(_kept_bytes(kind.attention, bits) for kind in _layers(spec) if kind.attention is not None)


def _kept_bytes(part: Attention | Latent, bits: KvBits) -> int:
    """Of the key and the value of one token."""
    return part.kv * ((part.dim + part.value_dim) * bits // 8 + 2 * STEP_BYTES)


def _layers(spec: ModelSpec) -> list[Layer]:
    return [spec.decoder[layer] for layer in range(len(spec.decoder))]
