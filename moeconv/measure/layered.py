"""A model that does not fit memory, on trial: all text goes through one layer before the next is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeconv.artifacts import Assignment, Bits, uniform
from moeconv.errors import SettingsError
from moeconv.measure.passage import Passage
from moeconv.measure.scorers.head import Head
from moeconv.measure.scorers.stacks import StackRunner
from moeconv.measure.shelf import Shelf
from moeconv.progress import Progress
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder
from moeconv.quantizers.dense import DenseCoder
from moeconv.source.archs.errors import transformers_model
from moeconv.source.checkpoint import F32
from moeconv.source.experts import Call, ExpertCalls
from moeconv.source.skeleton import Skeleton
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

STATES_A_TOKEN = 16  # of d_model numbers each, alive at once while a batch goes through a layer
LEAST_TOKENS = 2048  # in a batch


@dataclass(frozen=True)
class Room:
    """Where passes keep what goes from layer to layer, and the memory that they share: `batch_bytes` for the text of a
    batch, `expert_bytes` for experts that several batches ask for."""

    folder: Path
    batch_bytes: int
    expert_bytes: int

    def batch_tokens(self, spec: ModelSpec) -> int:
        return max(LEAST_TOKENS, self.batch_bytes // (4 * spec.d_model * STATES_A_TOKEN))


class LayeredModel:
    """A Subject of moeconv.measure.scorers, and what Measure asks of a Trial. `coded` is told which widths are about to
    be asked of the coder, before they are."""

    def __init__(self, coder: ExpertCoder, dense: DenseCoder, room: Room, show: Progress) -> None:
        checkpoint = coder.checkpoint
        self.checkpoint, self.family, self.dense, self.coder = checkpoint, checkpoint.family, dense, coder
        self.room, self.show = room, show
        self.coded: Callable[[set[int]], None] = lambda widths: None
        self._widths: Assignment = uniform(checkpoint.spec, ORIGINAL)
        self._dense_is_stored = False
        with transformers_model(checkpoint.path):
            self.skeleton = Skeleton(self.family, checkpoint.path, checkpoint.description, self._backbone)
        self.model: Any = self.skeleton.model
        self.shelf = Shelf(self.spec, self._expert, checkpoint.biases, room.expert_bytes)
        self.calls = ExpertCalls(self.model, self.family, self.spec, self.shelf)
        self.runner = StackRunner(self.model, self.family, "decoder")

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def layers(self) -> LayeredModel:
        return self

    @property
    def stored_head(self) -> Tensor | None:
        """See moeconv.measure.loaded.LoadedModel."""
        name = "embed.weight" if self.spec.head.tied else "head.weight"
        return self.dense.stored_weight(name) if name in self.dense.names else None

    @property
    def preferring(self) -> Any:
        raise SettingsError("--resident needs a model that fits the memory: leave it out, or give more --memory")

    # What is on trial -------------------------------------------------------------------------------------------------

    def assign(self, widths: Assignment) -> None:
        """Every expert gets its widths, everything else what a pack stores of it."""
        self.coded({bits for key in widths for bits in widths[key] if bits < 16})
        self._set(widths, dense_is_stored=True)

    def restore(self) -> None:
        """The unquantised model."""
        self._set(uniform(self.spec, ORIGINAL), dense_is_stored=False)

    def original_experts(self) -> None:
        """Unquantised experts among what a pack stores of everything else."""
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

    # Passes ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def head(self) -> Iterator[Head]:
        with self.skeleton.head():
            yield Head(self.model, self.spec)

    @torch.inference_mode()
    def finals(self, ids: Tensor, real: Tensor, scored: Tensor, what: str) -> Tensor:
        """Final states, normed, of the scored places. ids, real, scored [rows, tokens] → [places, d_model]"""
        passage = self.passage(ids)
        self._forget_others(passage)
        self.through(passage, ids, real, what)
        return passage.entering(len(self.skeleton.layers))[scored]

    def passage(self, ids: Tensor, keeps: bool = False) -> Passage:
        """The one of these tokens through the model as it is now; `keeps`: what enters each layer stays."""
        about = [list(ids.shape), sorted((str(key), bits) for key, bits in self._widths.items()), self._dense_is_stored]
        digest = hashlib.sha256(ids.numpy().tobytes() + json.dumps(about).encode()).hexdigest()[:16]
        kind = "kept" if keeps else "original" if self._original else "plans"
        return Passage(self.room.folder / kind / digest, (*ids.shape, self.spec.d_model), keeps)

    def through(self, passage: Passage, ids: Tensor, real: Tensor, what: str) -> None:
        """Everything that is left of a passage; what enters behind the last layer is normed."""
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
        """What each layer's experts are asked by all rows together, layer by layer."""
        passage = self.passage(ids, keeps=True)
        with torch.inference_mode():
            self.through(passage, ids, real, what)
        for at in self.spec.moe_layers("decoder"):
            yield at, self.call_of(passage, at, ids, real)

    @torch.inference_mode()
    def call_of(self, passage: Passage, at: LayerKey, ids: Tensor, real: Tensor) -> Call:
        """The same of one layer, whose input the passage has kept. Its experts are not run."""
        seen: list[Call] = []

        def answer(_: LayerKey, call: Call) -> Tensor:
            seen.append(call)
            return torch.zeros_like(call.x)

        with self.ready(at.layer), self.calls.answering(answer):
            for batch in self.batches(ids):
                self.step(passage, at.layer, ids, real, batch)
        return Call(*(torch.cat([getattr(call, name) for call in seen]) for name in Call.__annotations__))

    @contextmanager
    def ready(self, at: int) -> Iterator[None]:
        """Inside the block one layer can run."""
        self.shelf.clear()
        with self.skeleton.layer(at), self.skeleton.embedding() if at == 0 else nullcontext():
            yield
        self.shelf.clear()

    def step(
        self, passage: Passage, at: int, ids: Tensor, real: Tensor, batch: Tensor, entering: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Some rows through one layer: what leaves it, and that normed as the model's last states are. Both [rows,
        tokens, d_model]. `entering`: what enters it, in place of what the passage has for these rows."""
        if at and entering is None:
            entering = passage.entering(at)[batch]
        inputs = {"inputs_embeds": entering} if at else {"input_ids": ids[batch]}
        left: list[Tensor] = []
        with self.calls.only(real[batch]), transformers_model(self.checkpoint.path):
            final = self.runner.run(inputs, at, lambda _, hidden: left.append(hidden), at + 1)
        return left[0], final

    def batches(self, ids: Tensor) -> Iterator[Tensor]:
        """Places of the rows of each batch."""
        rows = max(1, self.room.batch_tokens(self.spec) // ids.shape[1])
        return iter(torch.split(torch.arange(len(ids)), rows))

    @property
    def _original(self) -> bool:
        return not self._dense_is_stored and all(set(bits) == {ORIGINAL} for bits in self._widths.values())

    def _forget_others(self, passage: Passage) -> None:
        """Plans that were judged are in the journal: only the latest passage of one stays, in case this run ends."""
        for folder in (self.room.folder / "plans").glob("*"):
            if folder != passage.folder:
                Passage(folder, passage.shape).remove()
