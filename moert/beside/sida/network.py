"""The network of a pack's hash function: predicts all layers' routers from the tokens alone (SiDA, Du et al. 2023).

SPEC.md defines its results. Tokens of one sequence or of many, at once or one after the other: each gets the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moert.errors import NotFinite, said
from moert.kernels.backend import Backend, Floats, Matrix
from moert.pack.codec import F32
from moert.pack.learnt import HASH, LSTM_LAYERS, HashFunction, Lstm, StackHash
from moert.pack.model_spec import StackName

F16 = npt.NDArray[np.float16]

_ROOM = 64  # tokens that keys and values have room for at first
_AT_ONCE = 256  # tokens of a prompt that are read at once, so that intermediate values stay small
_WORKING = 24  # rows of w that are held for each of these while they are read, gates of the LSTM included


class Grown:
    """An array of rows that grows: [length, width]."""

    def __init__(self, width: int) -> None:
        self._room, self.length = np.empty((0, width), np.float32), 0

    def add(self, rows: F32) -> None:
        end = self.length + len(rows)
        if end > len(self._room):
            room = np.empty((max(end, 2 * len(self._room), _ROOM), self._room.shape[1]), np.float32)
            room[: self.length] = self.rows
            self._room = room
        self._room[self.length : end] = rows
        self.length = end

    @property
    def rows(self) -> F32:
        return self._room[: self.length]

    @property
    def nbytes(self) -> int:
        return self._room.nbytes


@dataclass
class Recalled:
    """The network's memory of a sequence that it reads forward: states [layers, 2, w], keys and values of its tokens,
    and those of the sequence that an encoder has read."""

    states: F32
    keys: Grown
    values: Grown
    encoded: tuple[F32, F32] | None = None

    @property
    def nbytes(self) -> int:
        encoded = 0 if self.encoded is None else sum(each.nbytes for each in self.encoded)
        return self.states.nbytes + self.keys.nbytes + self.values.nbytes + encoded


class Reader:
    """The network of one stack."""

    def __init__(self, stack: StackHash, backend: Backend) -> None:
        def matrix(weights: F16, bias: F16 | None = None) -> Matrix:
            widened = None if bias is None else bias.astype(np.float32)
            return backend.matrix(Floats("F32", weights.astype(np.float32)), widened)

        self.width, self._backend = stack.width, backend
        self._compress = matrix(stack.compress, stack.compress_bias)
        self._lstm = [[_Cells(part, matrix(part.inputs, part.bias)) for part in layer] for layer in stack.lstm]
        self._own = {name: matrix(weights) for name, weights in stack.own.items()}
        self._encoded = {name: matrix(weights) for name, weights in stack.encoded.items()}
        self._heads = [matrix(weights, bias) for weights, bias in zip(stack.heads, stack.head_bias, strict=True)]

    def on(self, backend: Backend) -> Reader:
        """Returns the same network with another backend of its kind; weights are shared."""
        twin = copy.copy(self)
        twin._backend = backend
        return twin

    def begin(self) -> Recalled:
        """Returns the memory of a sequence before its first token."""
        return Recalled(np.zeros((LSTM_LAYERS, 2, self.width), np.float32), Grown(self.width), Grown(self.width))

    def encode(self, rows: F32, counts: Sequence[int]) -> F32:
        """Returns y [tokens, w] of rows [tokens, d_model], whole sequences of `counts` tokens one after the other."""
        x = self._compressed(rows)
        for layer in self._lstm:
            parts = [
                self._backend.lstm(
                    self._linear(x, cells.inputs), cells.recurrent,
                    np.zeros((len(counts), 2, len(cells.recurrent)), np.float32), counts, backward,
                )
                for cells, backward in zip(layer, (False, True), strict=False)
            ]  # fmt: skip
            x = parts[0] if len(parts) == 1 else np.ascontiguousarray(np.concatenate(parts, axis=1))
        ends = np.cumsum(counts, dtype=np.int32)
        spans = np.repeat(np.stack([ends - np.asarray(counts, np.int32), ends], axis=1), counts, axis=0)
        query, key, value = (self._linear(x, self._own[name]) for name in ("query", "key", "value"))
        found: F32 = x + self._backend.attend_sparsely(query, key, value, np.ascontiguousarray(spans))
        return found

    def shown(self, encoded: F32) -> tuple[F32, F32]:
        """Returns keys and values in this network of a sequence's y in the encoder's network, [tokens, its w]."""
        return self._linear(encoded, self._encoded["key"]), self._linear(encoded, self._encoded["value"])

    def read(self, rows: F32, counts: Sequence[int], recalled: Sequence[Recalled]) -> F32:
        """Returns y [tokens, w] of rows [tokens, d_model], `counts` for each sequence, that follow its recalled
        tokens."""
        if len(rows) <= _AT_ONCE:
            return self._read(rows, counts, recalled)
        parts, start = [], 0
        for count, each in zip(counts, recalled, strict=True):
            for at in range(start, start + count, _AT_ONCE):
                piece = rows[at : min(at + _AT_ONCE, start + count)]
                parts.append(self._read(piece, [len(piece)], [each]))
            start += count
        return np.concatenate(parts)

    def numbers(self, y: F32) -> F32:
        """Returns the predicted numbers of all routers, [tokens, layers, experts], from y [tokens, w]. Raises
        NotFinite."""
        return _finite(np.stack(self._backend.linears(y, self._heads), axis=1))

    def of_layer(self, y: F32, place: int) -> F32:
        """Returns the same for one layer, [tokens, experts]. Raises NotFinite."""
        return _finite(self._linear(y, self._heads[place]))

    def _read(self, rows: F32, counts: Sequence[int], recalled: Sequence[Recalled]) -> F32:
        x = self._compressed(rows)
        for place, (cells,) in enumerate(self._lstm):
            states = np.stack([each.states[place] for each in recalled])
            x = self._backend.lstm(self._linear(x, cells.inputs), cells.recurrent, states, counts)
            for each, state in zip(recalled, states, strict=True):
                each.states[place] = state
        query, key, value = (self._linear(x, self._own[name]) for name in ("query", "key", "value"))
        asked = self._linear(x, self._encoded["query"]) if self._encoded else None
        y: F32 = x.copy()
        start = 0
        for count, each in zip(counts, recalled, strict=True):
            own = slice(start, start + count)
            start += count
            before = each.keys.length
            each.keys.add(key[own])
            each.values.add(value[own])
            seen = np.arange(before + 1, before + count + 1, dtype=np.int32)
            spans = np.stack([np.zeros_like(seen), seen], axis=1)
            y[own] += self._backend.attend_sparsely(query[own], each.keys.rows, each.values.rows, spans)
            if asked is not None and each.encoded is not None:
                keys, values = each.encoded
                spans = np.tile(np.array([0, len(keys)], np.int32), (count, 1))
                y[own] += self._backend.attend_sparsely(asked[own], keys, values, spans)
        return y

    def _compressed(self, rows: F32) -> F32:
        return self._linear(rows, self._compress)

    def _linear(self, x: F32, matrix: Matrix) -> F32:
        if len(x) <= _AT_ONCE:
            return self._backend.linear(x, matrix)
        return np.concatenate(
            [self._backend.linear(x[start : start + _AT_ONCE], matrix) for start in range(0, len(x), _AT_ONCE)]
        )


def _finite(numbers: F32) -> F32:
    if not np.isfinite(numbers).all():
        raise NotFinite(
            f"{HASH} gives numbers that are not finite for this text: run with {said('predict', 'none')} and without "
            "its routing, or train it again (moeconv train-hash)"
        )
    return numbers


class _Cells:
    """One direction of a layer of the LSTM."""

    def __init__(self, part: Lstm, inputs: Matrix) -> None:
        self.inputs, self.recurrent = inputs, part.recurrent.astype(np.float32)


def readers(function: HashFunction, backend: Backend) -> dict[StackName, Reader]:
    """Returns the networks of all stacks."""
    return {name: Reader(stack, backend) for name, stack in function.stacks.items()}


def network_bytes(file_bytes: int) -> int:
    """Returns an upper bound of the bytes that the networks of a file of `file_bytes` take: as stored, and widened to
    float32."""
    return 3 * file_bytes


def recalled_bytes(function: HashFunction, prompt_tokens: int, new_tokens: int) -> int:
    """Returns an upper bound of the bytes that a request takes: its memory, and intermediate values of its prompt."""
    found, behind = 0, "encoder" in function.stacks
    if behind:
        found += 4 * function.stacks["encoder"].width * _WORKING * prompt_tokens
    if (decoder := function.stacks.get("decoder")) is not None:
        read = new_tokens if behind else prompt_tokens + new_tokens
        rows = 2 * 2 * max(1 + read, _ROOM) + read + _WORKING * min(read, _AT_ONCE)
        found += 4 * decoder.width * (2 * LSTM_LAYERS + rows + (2 * prompt_tokens if behind else 0))
    return found


@dataclass
class Heard:
    """The tokens of one sequence, of which the first `done` are in `recalled`: those behind are read when the next
    forecast is needed."""

    begin: Callable[[], Recalled]
    ids: list[int] = field(default_factory=list)
    done: int = 0
    recalled: Recalled | None = None
    encoded: tuple[F32, F32] | None = None

    def recall(self) -> Recalled:
        if self.recalled is None:
            self.recalled, self.done = self.begin(), 0
            self.recalled.encoded = self.encoded
        return self.recalled

    def copy(self) -> Heard:
        """Returns an independent copy."""
        twin = copy.copy(self)
        twin.ids, twin.recalled = list(self.ids), copy.deepcopy(self.recalled)
        return twin

    def cut(self, length: int) -> None:
        """Forgets all but the first `length` tokens, which are read anew if the network had read more."""
        del self.ids[length:]
        if self.done > length:
            self.recalled, self.done = None, 0

    @property
    def nbytes(self) -> int:
        return 0 if self.recalled is None else self.recalled.nbytes
