"""The memory of a sequence: its KV cache, keys and values of the tokens so far, in pages that forks share; and its
recurrent states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import I32, I64
from moert.kernels.pages import KEYS, STEP_BYTES, KeptPage, KvBits, PageLayout, pages_of
from moert.pack.mixers import Pooled, Stateful
from moert.pack.model_spec import Layer, ModelSpec
from moert.pack.parts import Attention, Latent

BLOCK_TOKENS = 128
"""The tokens of a block: room is reckoned for whole blocks."""

MakePages = Callable[[PageLayout, int], list[KeptPage]]
"""A function that returns as many new pages of a layout as it is called for; see moert.kernels.backend.Backend."""


class Kept:
    """The KV cache of one attention: `pages`, as many as its `length` takes.

    A copy shares the pages. On a page that both have, the original writes on behind the tokens that the copy reads, and
    the copy writes into a page of its own, as does a cache that was cut back to a place that others read. So pages are
    shared until they are written, and no more than the last one is ever copied.
    """

    def __init__(
        self, part: Attention | Latent, expected: int = 0, bits: KvBits = 16, make: MakePages | None = None
    ) -> None:
        """Makes an empty cache. `expected`: tokens that will come soon, for which room is made at once when the first
        of them does. `make`: by default it makes pages in memory."""
        self.layout = PageLayout.of(part, bits)
        self.length = 0
        self.pages: list[KeptPage] = []
        self.place: Any = None
        """A backend's record of the pages' addresses; None where it has none of the present pages."""
        self._part, self._expected, self._make = part, expected, make or PageLayout.pages
        self._room: list[KeptPage] = []  # pages for expected tokens
        self._own = 0  # it may write into pages from this one on,
        self._read = 0  # at places from this one on: copies read the tokens before

    def extend(self, new: int) -> int:
        """Makes room for `new` tokens, whose keys and values the caller writes. Returns the place of the first."""
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
        """Returns another cache with the same tokens, which goes on by itself."""
        self._read = max(self._read, self.length)
        twin = Kept(self._part, 0, self.layout.bits, self._make)  # page by page: one that ends leaves none behind
        twin.length, twin.pages, twin._own = self.length, list(self.pages), len(self.pages)
        return twin

    @property
    def parts(self) -> list[npt.NDArray[Any]]:
        """The arrays that hold its keys and values."""
        return [page.buffer for page in self.pages]

    def cut(self, length: int, expected: int) -> bool:
        """Forgets all but the first `length` tokens; `expected` will be there in all. Returns False where Ctrl-C came
        before there were pages for `length` tokens."""
        if length > min(self.length, len(self.pages) * KEYS):
            return False
        left = pages_of(length)
        free = max(left, self._own, pages_of(self._read))  # no other cache has the pages from here on
        self._room = [*self.pages[free:], *self._room][: max(0, pages_of(expected) - left)]
        del self.pages[left:]
        self.length, self._expected, self.place = length, expected, None
        return True

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * (len(self.pages) + len(self._room))

    def _part_ways(self, at: int, within: int) -> None:
        """Moves the cache to pages of its own for all further tokens; the first page may begin with a copy."""
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


POOL_ROWS = 32
"""The pools of a page."""


class Rows:
    """Rows of `features` in float32, one for `every` tokens, in pages of POOL_ROWS, only the last of which is written.
    Copies share the others."""

    def __init__(self, features: int, every: int) -> None:
        self.features, self.every, self.length = features, every, 0
        self._pages: list[npt.NDArray[np.float32]] = []

    def add(self, row: npt.NDArray[np.float32]) -> None:
        at = self.length % POOL_ROWS
        if at == 0:
            self._pages.append(np.empty((POOL_ROWS, self.features), np.float32))
        self._pages[-1][at] = row
        self.length += 1

    def expect(self, tokens: int) -> None:
        """Makes room for the rows of the first `tokens`, which the caller fills: see `pieces`."""
        self.length = tokens // self.every
        self._pages = [np.zeros((POOL_ROWS, self.features), np.float32) for _ in range(0, self.length, POOL_ROWS)]

    def pieces(self, n: int) -> list[npt.NDArray[np.float32]]:
        """Returns views of the first n rows, page by page."""
        return [page[: n - start] for page, start in zip(self._pages, range(0, n, POOL_ROWS), strict=False)]

    def copy(self) -> Rows:
        """Returns another with the same rows, which goes on by itself."""
        twin = Rows(self.features, self.every)
        twin.length, twin._pages = self.length, [*self._pages[:-1], *(page.copy() for page in self._pages[-1:])]
        return twin

    def cut(self, tokens: int) -> None:
        """Forgets all rows but those of the first `tokens`."""
        self.length = tokens // self.every
        del self._pages[-(-self.length // POOL_ROWS) :]
        self._pages[-1:] = [page.copy() for page in self._pages[-1:]]

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self._pages)


class Fixed:
    """The memory of a layer without attention to keys of each token, for any number of tokens: its recurrent state, the
    `arrays` of its mixer and its ngrams, in float32, zeros before the first token, and the `pools` that it attends to;
    nothing for a layer without a mixer. It can be cut to the length where it was marked, and to no other earlier
    one."""

    def __init__(self, part: Stateful | Layer | None, d_model: int) -> None:
        shapes = () if part is None else part.state_shapes(d_model)
        self.length = 0
        self.arrays = [np.zeros(shape, np.float32) for shape in shapes]
        mixer = part.mixer if isinstance(part, Layer) else part
        self.pools = [Rows(features, every) for features, every in pools_of(mixer)]
        self._marked: tuple[int, list[npt.NDArray[np.float32]]] | None = None

    def extend(self, new: int) -> int:
        """Counts `new` tokens, to be called before the arrays change, so that `length` is never the length of an
        earlier state. Returns the place of the first."""
        self.length += new
        return self.length - new

    @property
    def parts(self) -> list[npt.NDArray[Any]]:
        """The arrays that hold its state."""
        return [*self.arrays, *chain.from_iterable(rows.pieces(rows.length) for rows in self.pools)]

    def copy(self) -> Fixed:
        """Returns another with the same state, which goes on by itself and has no mark."""
        twin = Fixed(None, 0)
        twin.length, twin.arrays = self.length, [array.copy() for array in self.arrays]
        twin.pools = [rows.copy() for rows in self.pools]
        return twin

    def mark(self) -> None:
        """Keeps a copy of the present state, in place of the copy before."""
        kept = [np.empty_like(array) for array in self.arrays] if self._marked is None else self._marked[1]
        self._marked = None  # until all is copied
        _copy(self.arrays, kept)
        self._marked = self.length, kept

    def reaches(self) -> set[int]:
        """Returns the lengths that the state can be cut to."""
        return {self.length} if self._marked is None else {self.length, self._marked[0]}

    def cut(self, length: int, expected: int) -> bool:
        """Forgets all but the first `length` tokens. Returns False if the state can't be cut to that length."""
        if self.arrays and length != self.length:
            if self._marked is None or length != self._marked[0]:
                return False
            self.length = -1  # until all is as it was
            _copy(self._marked[1], self.arrays)
            for rows in self.pools:
                rows.cut(length)
        self.length = length
        return True

    @property
    def nbytes(self) -> int:
        marked = () if self._marked is None else self._marked[1]
        return sum(each.nbytes for each in (*self.arrays, *marked, *self.pools))


def pools_of(part: object) -> list[tuple[int, int]]:
    """Returns the features of each kind of pool that a mixer keeps, and the tokens that one stands for."""
    if not isinstance(part, Pooled) or part.pools is None:
        return []
    return [(features, part.pools.every) for features in part.kept.values()]


def _copy(arrays: Iterable[npt.NDArray[np.float32]], places: Iterable[npt.NDArray[np.float32]]) -> None:
    """Copies arrays into others, so that no third ones take memory."""
    for array, place in zip(arrays, places, strict=True):
        np.copyto(place, array)


class Recent:
    """The recent experts of one sequence and layer: the `experts` [k] that its tokens went to last, the latest first,
    of one token ascending, -1 behind the last. They depend on the tokens of the sequence alone, and not on how many of
    them were read at once, or which experts are in memory.

    The first `exact` tokens are routed as the model would. Their choices are recorded, 2 bytes a choice, so that all
    tokens behind any of them can be forgotten; later tokens are forgotten all together or not at all.
    """

    def __init__(self, k: int, top_k: int) -> None:
        self.experts: I32 = np.full(k, -1, np.int32)
        self.length = self.exact = 0
        self._chosen: npt.NDArray[np.int16] = np.empty((0, top_k), np.int16)

    def add(self, chosen: I64) -> None:
        """Records that the next tokens, routed exactly, went to chosen [tokens, top_k]; -1 for none."""
        end = self.length + len(chosen)
        if end > len(self._chosen):
            room = np.empty((-(-end // BLOCK_TOKENS) * BLOCK_TOKENS, chosen.shape[1]), np.int16)
            room[: self.length] = self._chosen[: self.length]
            self._chosen = room
        self._chosen[self.length : end] = chosen
        self._use(chosen)
        self.length = end

    def went(self) -> None:
        """Counts a token that was routed by `experts`, where its own experts are first already."""
        self.length += 1

    def reach(self, length: int) -> int:
        """Returns the most of the first `length` tokens that it can be cut to."""
        return min(length, self.exact, self.length)

    def cut(self, length: int) -> None:
        """Forgets all but the first `length` tokens, which are as many as it reaches."""
        assert self.reach(length) == length
        self.length = length
        self.experts[:] = -1
        self._use(self._chosen[:length].astype(np.int64))

    def copy(self) -> Recent:
        """Returns another with the same experts, which goes on by itself."""
        twin = Recent(len(self.experts), self._chosen.shape[1])
        twin.length, twin.exact, twin._chosen = self.length, self.exact, self._chosen.copy()
        twin.experts = self.experts.copy()
        return twin

    @property
    def part(self) -> npt.NDArray[np.int16]:
        """The array [tokens, top_k] that all follows from."""
        return self._chosen[: self.length]

    @property
    def nbytes(self) -> int:
        return self._chosen.nbytes + self.experts.nbytes

    def _use(self, chosen: I64) -> None:
        latest = np.concatenate([chosen[::-1].reshape(-1), self.experts])
        latest = latest[latest >= 0]
        _, first = np.unique(latest, return_index=True)
        kept = latest[np.sort(first)][: len(self.experts)]
        self.experts[: len(kept)] = kept


def recent_bytes(spec: ModelSpec, prompt_tokens: int) -> int:
    """Returns an upper bound of the bytes that a sequence with such a prompt takes in all layers, while its room
    grows."""
    moe, layers = spec.moe, sum(at.stack == "decoder" for at in spec.moe_layers())
    choices = 2 * moe.router.top_k * (prompt_tokens + BLOCK_TOKENS)
    return layers * (2 * choices + 4 * moe.n)


Remembered = Kept | Fixed
"""The memory of one layer."""


class Heard(Protocol):
    """The memory that a Foresees has of the tokens of a sequence, `ids`."""

    ids: list[int]

    def copy(self) -> Heard: ...

    def cut(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        ...

    @property
    def nbytes(self) -> int: ...


@dataclass
class State:
    """All memory of a running sequence: for each decoder layer its memory of the tokens read, and with an encoder the
    keys and values of the encoder's output."""

    own: list[Remembered]
    cross: list[Kept] = field(default_factory=list)
    recent: list[Recent] = field(default_factory=list)
    """The recent experts of each decoder layer with experts, where routers prefer some (cache-aware routing)."""
    heard: Heard | None = None
    """The memory of a Foresees, where one predicts the layers' demand."""

    @property
    def length(self) -> int:
        """Returns the number of tokens that the decoder has read."""
        return self.own[0].length

    def copy(self) -> State:
        """Returns another state with the same tokens, which goes on by itself. Pages are shared until they are written;
        pages of an encoder's output never are."""
        heard = None if self.heard is None else self.heard.copy()
        return State([kept.copy() for kept in self.own], self.cross, [kept.copy() for kept in self.recent], heard)

    @property
    def parts(self) -> list[npt.NDArray[Any]]:
        """The arrays that hold all of a decoder's state, in an order that depends on the model alone."""
        return [*chain.from_iterable(kept.parts for kept in self.own), *(kept.part for kept in self.recent)]

    def expect(self, ids: Sequence[int]) -> None:
        """Makes room in a new state for the memory of these tokens: the caller fills its `parts`, and then calls
        `cut`."""
        for kept in self.own:
            kept.extend(len(ids))
        for rows in chain.from_iterable(kept.pools for kept in self._fixed):
            rows.expect(len(ids))
        for recent in self.recent:
            recent.add(np.full((len(ids), recent.part.shape[1]), -1, np.int64))
        if self.heard is not None:
            self.heard.ids += ids

    def exact_until(self, length: int) -> None:
        """Declares the first `length` tokens a prompt, which is routed exactly."""
        for kept in self.recent:
            kept.exact = length

    def mark(self) -> None:
        """Makes sure that the state can be cut to its present length later, whatever kinds of memory it has."""
        for kept in self._fixed:
            kept.mark()

    def reach(self, length: int) -> int:
        """Returns the most of the first `length` tokens that the state can be cut to."""
        length = min((kept.reach(length) for kept in self.recent), default=length)
        lengths = [kept.reaches() for kept in self._fixed]
        return max((each for each in set.intersection(*lengths) if each <= length), default=0) if lengths else length

    def cut(self, length: int, expected: int = 0) -> bool:
        """Forgets all tokens that the decoder has read but the first `length`, as many as the state reaches. Returns
        False where that fails; then the state is to be thrown away."""
        for kept in self.recent:
            kept.cut(length)
        if self.heard is not None:
            self.heard.cut(length)
        return all(kept.cut(length, expected) for kept in self.own)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in (*self.own, *self.cross)) + self._beside_bytes

    @property
    def _beside_bytes(self) -> int:
        return sum(kept.nbytes for kept in self.recent) + (0 if self.heard is None else self.heard.nbytes)

    @property
    def is_fixed(self) -> bool:
        """Whether some of it can be cut to few lengths."""
        return bool(self._fixed)

    @property
    def _fixed(self) -> list[Fixed]:
        return [kept for kept in self.own if isinstance(kept, Fixed) and kept.arrays]


def remembered(
    layer: Layer, d_model: int, expected: int, bits: KvBits, make: MakePages | None = None
) -> Remembered:  # fmt: skip
    """Returns the memory of a layer that has read nothing yet; `expected` tokens will come soon."""
    if isinstance(layer.mixer, (Attention, Latent)):
        return Kept(layer.mixer, expected, bits, make)
    return Fixed(layer, d_model)


def forked(states: list[State], parents: Sequence[int]) -> list[State]:
    """Returns for each of `parents`, places in `states`, its state, or a copy where that was returned before. `states`
    is emptied first, so that states without a successor are gone."""
    left = {parent: states[parent] for parent in parents}
    states.clear()
    return [left[parent] if parents.index(parent) == at else left[parent].copy() for at, parent in enumerate(parents)]


def written_bytes(states: Iterable[State]) -> int:
    """Returns the bytes of several states together, but for pages without tokens: the system gives memory when it is
    written. Pages that they share count once."""
    states = list(states)
    kept = [each for state in states for each in (*state.own, *state.cross)]
    pages = {id(page): page.nbytes for each in kept if isinstance(each, Kept) for page in each.pages}
    fixed = sum(each.nbytes for each in kept if isinstance(each, Fixed))
    return sum(pages.values()) + fixed + sum(state._beside_bytes for state in states)


def rounded(tokens: int) -> int:
    """Returns `tokens` rounded up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def state_bytes(
    spec: ModelSpec, prompt_tokens: int, max_new_tokens: int, bits: KvBits = 16, beams: int = 1
) -> int:  # fmt: skip
    """Returns an upper bound of the bytes that keys, values and recurrent states of one request take. Beams share the
    tokens read of the prompt but for its last page."""
    if (room := spec.room(prompt_tokens)) is not None:
        max_new_tokens = max(1, min(max_new_tokens, room))
    first = prompt_tokens if spec.encoder is None else 1
    pages = pages_of(first + max_new_tokens)
    if beams > 1:
        pages = pages_of(first) + beams * (1 + pages_of(max_new_tokens))
    crossed = sum(_kept_bytes(kind.cross, bits) for kind in _layers(spec) if kind.cross is not None)
    kept = crossed * KEYS * pages_of(prompt_tokens) + token_bytes(spec, bits) * KEYS * pages
    return beams * (fixed_bytes(spec) + _pool_bytes(spec, first + max_new_tokens)) + kept


def growth_bytes(spec: ModelSpec, bits: KvBits = 16, beams: int = 1) -> int:
    """Returns an upper bound of the bytes of the keys and values of the next block, and of the copies with which beams
    part."""
    copied = KEYS if beams > 1 else 0
    return beams * (token_bytes(spec, bits) * (BLOCK_TOKENS + copied) + _pool_bytes(spec, BLOCK_TOKENS))


def fixed_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of a sequence's recurrent states, which do not grow, in all layers of the decoder."""
    return 4 * sum(math.prod(shape) for kind in _layers(spec) for shape in kind.state_shapes(spec.d_model))


def _pool_bytes(spec: ModelSpec, tokens: int) -> int:
    """Returns an upper bound of the bytes that `tokens` more tokens add to pools, in all layers of the decoder."""
    kinds = [each for kind in _layers(spec) for each in pools_of(kind.mixer)]
    return sum(4 * n * POOL_ROWS * (1 + -(-tokens // (every * POOL_ROWS))) for n, every in kinds)


def token_bytes(spec: ModelSpec, bits: KvBits = 16) -> int:
    """Returns the bytes of the keys and values of one token in all layers of the decoder."""
    return sum(_kept_bytes(kind.attention, bits) for kind in _layers(spec) if kind.attention is not None)


def _kept_bytes(part: Attention | Latent, bits: KvBits) -> int:
    """Returns the bytes of the key and the value of one token."""
    return part.kv * ((part.dim + part.value_dim) * bits // 8 + 2 * STEP_BYTES)


def _layers(spec: ModelSpec) -> list[Layer]:
    return [spec.decoder[layer] for layer in range(len(spec.decoder))]
