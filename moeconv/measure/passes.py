"""Passes of text through a model that does not fit memory: all text goes through one layer, then through the next."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeconv.artifacts import Assignment, Bits, uniform
from moeconv.dense import head_of
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.scorers import Head, StackRunner
from moeconv.progress import Progress
from moeconv.quantizers.coder import ORIGINAL, DenseCoder, ExpertCoder
from moeconv.source.archs import Description, Family
from moeconv.source.archs.config import transformers_model
from moeconv.source.archs.weights import Rows
from moeconv.source.experts import Biases, Call, ExpertCalls, Weights
from moeconv.source.skeleton import Skeleton, Weight
from moert.kernels.library import crc32
from moert.machine import reserve
from moert.pack.codec import F32, Width
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# Text on its way through the layers: the input of each layer is kept on disk, so that a killed run goes on there.

_FLOAT = 4
_SUM = np.dtype("<u4")


class Leaving:
    """Room for states [rows, tokens, d_model] on the disk, and a checksum of each row, made as the row is written. Rows
    that are not written are zeros."""

    def __init__(self, states: Tensor, begin: int) -> None:
        """`begin`: the checksum before the first byte of a row."""
        self._states, self._begin = states, begin
        zeros = crc32(np.zeros(states[:1].numel(), np.float32).view(np.uint8).data, begin)
        self.sums = np.full(len(states), zeros, _SUM)

    def __setitem__(self, rows: Tensor, states: Tensor) -> None:
        """Writes rows, each once. rows [n]; states [n, tokens, d_model]."""
        states = states.detach().float().contiguous()
        self._states[rows] = states
        for row, values in zip(rows.tolist(), states.numpy(), strict=True):
            self.sums[row] = crc32(values.reshape(-1).view(np.uint8).data, self._begin)


class Passage:
    """The states [rows, tokens, features] of a text between layers, in float32: a file for each layer that they enter,
    with a checksum of each row at its end. Files are mapped, so that they take memory only if some is free. `keeps`:
    all files stay, else the latest alone. `other`: a layer, and the number of features of states that enter it, if that
    differs from the one in `shape`.

    Every method raises ConversionError, in one line, if the disk refuses, and for a file that was changed since it was
    made.
    """

    def __init__(
        self, folder: Path, shape: tuple[int, int, int], keeps: bool = False, other: tuple[int, int] | None = None
    ) -> None:  # fmt: skip
        self.folder, self.shape, self.keeps, self.other = folder, shape, keeps, other
        self._believed: set[int] = set()  # layers whose file this object has written, or checked
        with self._using():
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def reached(self) -> int:
        """Returns the last layer whose input is on disk (with `keeps`, together with all inputs before it); 0 if there
        is none yet, and tokens enter."""
        files = self.folder.glob("*.states")
        there = {at for path in files if path.stat().st_size == self._nbytes(at := int(path.stem))}
        if not self.keeps:
            return max(there, default=0)
        return next(layer for layer in count() if layer + 1 not in there)

    def shape_of(self, layer: int) -> tuple[int, int, int]:
        """Returns the shape of the states that enter a layer."""
        if self.other is None or self.other[0] != layer:
            return self.shape
        return (*self.shape[:2], self.other[1])

    def _nbytes(self, layer: int) -> int:
        """Returns the bytes of a file: the states that enter a layer, and their checksums."""
        return states_bytes(*self.shape_of(layer)) + self.shape[0] * _SUM.itemsize

    def entering(self, layer: int) -> Tensor:
        """Returns the states that enter a layer, read from the file as they are used."""
        shape = self.shape_of(layer)
        with self._using():
            mapped = np.memmap(self._file(layer), np.float32, "c", shape=shape)  # "c": never written back
            if layer not in self._believed:
                self._check(layer, mapped)
        return torch.from_numpy(mapped)

    @contextmanager
    def leaving(self, layer: int) -> Iterator[Leaving]:
        """Gives room for the states that leave the layer before `layer`; they are kept if the block ends without an
        error."""
        fresh = self._file(layer).with_suffix(".fresh")
        with self._using():
            with fresh.open("wb") as file:
                # a full disk is said here, and not by a signal
                reserve(file, self._nbytes(layer))
            mapped = np.memmap(fresh, np.float32, "r+", shape=self.shape_of(layer))
        left = Leaving(torch.from_numpy(mapped), self._begin(layer))
        yield left
        with self._using():
            mapped.flush()
            with fresh.open("rb+") as file:
                file.seek(states_bytes(*self.shape_of(layer)))
                file.write(left.sums.tobytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._file(layer))
            self._believed.add(layer)
            if not self.keeps:
                self._file(layer - 1).unlink(missing_ok=True)

    def _check(self, layer: int, states: np.ndarray) -> None:
        """Raises ConversionError unless every row has its checksum."""
        path, begin = self._file(layer), self._begin(layer)
        sums = np.fromfile(path, _SUM, offset=states_bytes(*self.shape_of(layer)))
        found = [crc32(row.reshape(-1).view(np.uint8).data, begin) for row in states]
        if found != sums.tolist():
            raise ConversionError(f"{path} was changed since it was made: delete it, and it is made again")
        self._believed.add(layer)

    def _begin(self, layer: int) -> int:
        """Returns the checksum that rows begin with, so that a file in another's place is seen."""
        return crc32(f"{self.folder.name}/{layer}".encode())

    def aside(self, rows: int, width: int, file: Path | None = None) -> Tensor:
        """Returns room on the disk for states [rows, width]: it vanishes with this tensor, or stays in a `file`."""
        stays, file = file is not None, file or self.folder / "aside"
        with self._using():
            with file.open("wb") as made:
                reserve(made, max(1, states_bytes(1, rows, width)))
            mapped = np.memmap(file, np.float32, "r+", shape=(rows, width))
            if not stays:
                file.unlink()
        return torch.from_numpy(mapped)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, layer: int) -> Path:
        return self.folder / f"{layer:03}.states"

    @contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConversionError(
                f"can't use {self.folder}: {error.strerror or error}; free some space there"
            ) from None


def states_bytes(rows: int, tokens: int, d_model: int) -> int:
    """Returns the bytes of states on the disk, between two layers."""
    return rows * tokens * d_model * _FLOAT


# Experts in the order of their use, read one ahead by a thread; as many of the present layer stay as fit the room.

Load = Callable[[ExpertKey], Mapping[str, F32]]
"""Key → an expert's matrices or biases, by projection."""


class Shelf:
    """A Supply of moeconv.source.experts that reads experts ahead and keeps up to `room_bytes` of them. `load` runs in
    another thread too."""

    def __init__(self, spec: ModelSpec, load: Load, biases: Load, room_bytes: int) -> None:
        self.spec, self._load, self._load_biases, self.room_bytes = spec, load, biases, room_bytes
        self._reader = ThreadPoolExecutor(1, "experts")
        self._kept: dict[ExpertKey, Weights] = {}
        self._held_bytes = 0
        self._coming: deque[ExpertKey] = deque()
        self._next: tuple[ExpertKey, Future[Weights]] | None = None

    def weights(self, key: ExpertKey) -> Weights:
        if key in self._kept:
            return self._kept[key]
        found = self._fetched(key)
        self._read_next()
        nbytes = sum(weight.nbytes for weight in found)
        if self._held_bytes + nbytes <= self.room_bytes:
            self._kept[key] = found
            self._held_bytes += nbytes
        return found

    def biases(self, key: ExpertKey) -> Biases:
        found = self._load_biases(key) if self.spec.moe.ffn.bias else {}
        return tuple(torch.from_numpy(values) for values in found.values())

    def expect(self, keys: Sequence[ExpertKey]) -> None:
        self._coming = deque(key for key in keys if key not in self._kept)
        self._read_next()

    def clear(self) -> None:
        """Drops all experts: another layer follows, or other weights."""
        self._kept.clear()
        self._held_bytes = 0
        self._coming.clear()
        self._next = None

    def _fetched(self, key: ExpertKey) -> Weights:
        if self._next is not None and self._next[0] == key:
            (_, found), self._next = self._next, None
            return found.result()
        return self._loaded(key)

    def _read_next(self) -> None:
        while self._coming and self._coming[0] in self._kept:
            self._coming.popleft()
        if self._coming and self._next is None:
            key = self._coming.popleft()
            self._next = key, self._reader.submit(self._loaded, key)

    def _loaded(self, key: ExpertKey) -> Weights:
        found = self._load(key)
        return tuple(torch.from_numpy(found[name]) for name in self.spec.moe.ffn.projections)


# Passes: all text goes through one layer before the next layer is read.

_STATES = 16  # of all streams' numbers, alive for a token at once while a batch goes through a layer, beside experts

PASSAGES = ("kept", "original", "plans")
"""Folders of passages: those that stay, those of the unquantized model, and those of a model on trial."""
LEAST_TOKENS = 2048  # in a batch


@dataclass(frozen=True)
class Room:
    """The folder where passes keep states between layers, and the memory that they share: `batch_bytes` for the text of
    a batch, `expert_bytes` for experts that several batches use."""

    folder: Path
    batch_bytes: int
    expert_bytes: int

    def batch_tokens(self, spec: ModelSpec, beside: int = 0) -> int:
        """Returns the tokens of a batch. `beside`: bytes that a token takes beside those in a layer; the result may
        then be small, or 0."""
        if beside:
            return self.batch_bytes // (token_bytes(spec) + beside)
        return max(LEAST_TOKENS, self.batch_bytes // token_bytes(spec))


def token_bytes(spec: ModelSpec) -> int:
    """Returns the bytes that a token takes while its batch goes through a layer: each of its experts has a state of it,
    and all tokens may go to the same expert."""
    inside = spec.moe.ffn.d_ff * len(spec.moe.ffn.projections)
    return 4 * (spec.stream_width * _STATES + spec.d_model * 2 * spec.moe.router.top_k + inside)


@dataclass(frozen=True)
class Origin:
    """The source of a model that is read piece by piece: its config in the folder `place`, and readers of the
    backbone's weights, by their canonical names, of rows of tables, and of experts."""

    place: Path
    family: Family
    description: Description
    backbone: Weight
    rows: Rows
    experts: Load
    biases: Load


class Passes:
    """A Subject of moeconv.measure.scorers that runs layer by layer."""

    def __init__(self, origin: Origin, room: Room, show: Progress) -> None:
        self.place, self.family, self.spec = origin.place, origin.family, origin.description.spec
        self.room, self.show = room, show
        with transformers_model(self.place):
            self.skeleton = Skeleton(self.family, self.place, origin.description, origin.backbone, origin.rows)
        self.model: Any = self.skeleton.model
        self.shelf = Shelf(self.spec, origin.experts, origin.biases, room.expert_bytes)
        self.calls = ExpertCalls(self.model, self.family, self.spec, self.shelf)
        self.runner = StackRunner(self.model, self.family, "decoder")

    @property
    def weights_digest(self) -> str:
        """A name for the model's present weights, among all that it may have."""
        return ""

    @property
    def are_original(self) -> bool:
        """True if the present weights are the unquantized ones of a checkpoint."""
        return False

    @property
    def layers(self) -> Passes:
        return self

    @property
    def stored_head(self) -> Tensor | None:
        """None: its head never changes."""
        return None

    @contextmanager
    def head(self) -> Iterator[Head]:
        with self.skeleton.head():
            yield Head(self.model, self.spec)

    @torch.inference_mode()
    def finals(self, ids: Tensor, real: Tensor, scored: Tensor, what: str) -> Tensor:
        """Returns the final states, normed, of the scored places [places, d_model]. ids, real, scored [rows, tokens]"""
        passage = self.passage(ids)
        self._forget_others(passage)
        self.through(passage, ids, real, what)
        return passage.entering(len(self.skeleton.layers))[scored]

    def passage(self, ids: Tensor, keeps: bool = False) -> Passage:
        """Returns the passage of these tokens through the model with its present weights; `keeps`: the input of each
        layer stays."""
        about = json.dumps([list(ids.shape), self.weights_digest])
        digest = hashlib.sha256(ids.numpy().tobytes() + about.encode()).hexdigest()[:16]
        kind = PASSAGES[0 if keeps else 1 if self.are_original else 2]
        ends = len(self.skeleton.layers), self.spec.d_model
        return Passage(self.room.folder / kind / digest, (*ids.shape, self.spec.stream_width), keeps, ends)

    def through(self, passage: Passage, ids: Tensor, real: Tensor, what: str) -> None:
        """Runs the layers that are left of a passage; its states behind the last layer are normed."""
        n_layers = len(self.skeleton.layers)
        with self.show(what, n_layers, "layer") as bar:
            bar.update(passage.reached)
            for at in range(passage.reached, n_layers):
                with passage.leaving(at + 1) as left, self.ready(at):
                    for batch in self.batches(ids):
                        hidden, final = self.step(passage, at, ids, real, batch)
                        left[batch] = final if at + 1 == n_layers else hidden
                bar.update(1)

    def calls_of(self, ids: Tensor, real: Tensor, what: str) -> Iterator[tuple[LayerKey, Call]]:
        """Yields the call of each layer's experts, for all rows together, layer by layer."""
        passage = self.passage(ids, keeps=True)
        with torch.inference_mode():
            self.through(passage, ids, real, what)
        for at in self.spec.moe_layers("decoder"):
            yield at, self.call_of(passage, at, ids, real)

    @torch.inference_mode()
    def call_of(self, passage: Passage, at: LayerKey, ids: Tensor, real: Tensor, file: Path | None = None) -> Call:
        """Returns the call of one layer's experts, whose input the passage has kept. Its experts are not run; the
        call's x lies on the disk, in `file` if one is given."""
        x = passage.aside(ids.numel(), self.spec.expert_width, file)
        chosen, weights = list[Tensor](), list[Tensor]()

        def answer(_: LayerKey, call: Call) -> Tensor:
            start = sum(map(len, chosen))
            x[start : start + len(call.x)] = call.x
            chosen.append(call.chosen)
            weights.append(call.weights)
            return torch.zeros_like(call.x)

        self.answered(passage, self.family.place(at.layer), ids, real, answer)
        return Call(x, torch.cat(chosen), torch.cat(weights))

    def answered(
        self, passage: Passage, at: int, ids: Tensor, real: Tensor, answer: Callable[[LayerKey, Call], Tensor]
    ) -> None:
        """Runs all rows through one layer, whose input the passage has kept, with the results of `answer` [tokens,
        d_model] in place of its experts' own."""
        with self.ready(at), self.calls.during(answer=answer):
            for batch in self.batches(ids):
                self.step(passage, at, ids, real, batch)

    @contextmanager
    def ready(self, at: int) -> Iterator[None]:
        """Fills in the weights of one layer, without experts, for the length of a with block."""
        self.shelf.clear()
        with self.skeleton.layer(at), self.skeleton.embedding() if at == 0 else nullcontext():
            yield
        self.shelf.clear()

    def step(
        self, passage: Passage, at: int, ids: Tensor, real: Tensor, batch: Tensor, entering: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns a layer's output for some rows, and this output normed as the model's last states are, both [rows,
        tokens, features]. `entering`: the layer's input, in place of the passage's states of these rows."""
        if at and entering is None:
            entering = passage.entering(at)[batch]
        inputs = {"inputs_embeds": entering} if at else {"input_ids": ids[batch]}
        left: list[Tensor] = []
        with self.calls.during(active=real[batch]), transformers_model(self.place):
            final = self.runner.run(inputs, at, lambda _, hidden: left.append(hidden), at + 1)
        return left[0], final

    def batches(self, ids: Tensor, beside: int = 0) -> Iterator[Tensor]:
        """Yields the places of the rows of each batch; see Room.batch_tokens."""
        rows = max(1, self.room.batch_tokens(self.spec, beside) // ids.shape[1])
        return iter(torch.split(torch.arange(len(ids)), rows))

    def _forget_others(self, passage: Passage) -> None:
        """Removes the passages of all plans but the present one, which stays in case this run ends: scores of judged
        plans are in the journal."""
        for folder in (self.room.folder / PASSAGES[2]).glob("*"):
            if folder != passage.folder:
                shutil.rmtree(folder, ignore_errors=True)


# A model that does not fit memory, on trial: the original layer by layer, with the weights that a pack gives back.


class LayeredModel(Passes):
    """A model on trial that runs layer by layer; it has the methods of a Trial that Measure calls. It calls `coded`
    with the widths of an assignment before it uses the coder at these widths."""

    def __init__(self, coder: ExpertCoder, dense: DenseCoder, room: Room, show: Progress) -> None:
        self.checkpoint, self.dense, self.coder = coder.checkpoint, dense, coder
        self.coded: Callable[[set[Width]], None] = lambda widths: None
        self._widths: Assignment = uniform(self.checkpoint.spec, ORIGINAL)
        self._dense_is_stored = False
        checkpoint = self.checkpoint
        origin = Origin(
            checkpoint.path, checkpoint.family, checkpoint.description, self._backbone, checkpoint.rows, self._expert,
            checkpoint.biases,
        )  # fmt: skip
        super().__init__(origin, room, show)

    @property
    def stored_head(self) -> Tensor | None:
        """See moeconv.measure.trial.LoadedModel."""
        name = head_of(self.spec)
        return self.dense.stored_weight(name) if name in self.dense.names else None

    @property
    def weights_digest(self) -> str:
        widths = sorted((str(key), bits) for key, bits in self._widths.items())
        chosen = [[*unit, bits] for unit, bits in self.dense.chosen.items()] if self._dense_is_stored else []
        return json.dumps([widths, self._dense_is_stored, *chosen])

    @property
    def are_original(self) -> bool:
        return not self._dense_is_stored and all(set(bits) == {ORIGINAL} for bits in self._widths.values())

    @property
    def preferring(self) -> Any:
        raise SettingsError("--resident needs a model that fits the memory: leave it out, or give more --memory")

    def assign(self, widths: Assignment) -> None:
        """Gives every expert its widths, and all other matrices the weights that a pack gives back."""
        self.coded({bits for key in widths for bits in widths[key] if bits < 16})
        self._set(widths, dense_is_stored=True)

    def restore(self) -> None:
        """Brings back the unquantized model."""
        self._set(uniform(self.spec, ORIGINAL), dense_is_stored=False)

    def original_experts(self) -> None:
        """Gives every expert its original weights, and all other matrices the weights that a pack gives back."""
        self._set(uniform(self.spec, ORIGINAL), dense_is_stored=True)

    def _set(self, widths: Assignment, *, dense_is_stored: bool) -> None:
        self._widths, self._dense_is_stored = widths, dense_is_stored
        self.shelf.clear()

    def _expert(self, key: ExpertKey) -> Mapping[str, F32]:
        bits: Bits = self._widths[key]
        return self.checkpoint.expert(key) if set(bits) == {ORIGINAL} else self.coder.weights(key, bits)

    def _backbone(self, name: str) -> Tensor:
        stored = self._dense_is_stored and name in self.dense.names
        return self.dense.stored_weight(name) if stored else self.dense.source(name)
