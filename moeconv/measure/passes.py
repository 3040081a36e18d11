"""Text through a model that does not fit memory: all of it goes through one layer before the next is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeconv.measure.passage import Passage
from moeconv.measure.scorers.head import Head
from moeconv.measure.scorers.stacks import StackRunner
from moeconv.measure.shelf import Load, Shelf
from moeconv.progress import Progress
from moeconv.source.archs import Description, Family
from moeconv.source.archs.errors import transformers_model
from moeconv.source.experts import Call, ExpertCalls
from moeconv.source.skeleton import Skeleton, Weight
from moert.pack.model_spec import LayerKey, ModelSpec

_STATES = 16  # of d_model numbers each, alive for a token at once while a batch goes through a layer, beside experts
PASSAGES = ("kept", "original", "plans")
"""Folders of passages: those that stay, those of the model as it was, and of one on trial."""
LEAST_TOKENS = 2048  # in a batch


@dataclass(frozen=True)
class Room:
    """Where passes keep what goes from layer to layer, and the memory that they share: `batch_bytes` for the text of a
    batch, `expert_bytes` for experts that several batches ask for."""

    folder: Path
    batch_bytes: int
    expert_bytes: int

    def batch_tokens(self, spec: ModelSpec, beside: int = 0) -> int:
        """`beside`: bytes that a token takes beside what it takes in a layer; few or none are too many then."""
        if beside:
            return self.batch_bytes // (token_bytes(spec) + beside)
        return max(LEAST_TOKENS, self.batch_bytes // token_bytes(spec))


def token_bytes(spec: ModelSpec) -> int:
    """What a token takes while its batch goes through a layer: each of its experts has a state of it, and all tokens
    may go to the same."""
    inside = spec.moe.ffn.d_ff * len(spec.moe.ffn.projections)
    return 4 * (spec.d_model * (_STATES + 2 * spec.moe.router.top_k) + inside)


@dataclass(frozen=True)
class Origin:
    """What a model is read from, piece by piece: its config in the folder `place`, the weights of the backbone by their
    canonical names, and of experts."""

    place: Path
    family: Family
    description: Description
    backbone: Weight
    experts: Load
    biases: Load


class Passes:
    """A Subject of moeconv.measure.scorers."""

    def __init__(self, origin: Origin, room: Room, show: Progress) -> None:
        self.place, self.family, self.spec = origin.place, origin.family, origin.description.spec
        self.room, self.show = room, show
        with transformers_model(self.place):
            self.skeleton = Skeleton(self.family, self.place, origin.description, origin.backbone)
        self.model: Any = self.skeleton.model
        self.shelf = Shelf(self.spec, origin.experts, origin.biases, room.expert_bytes)
        self.calls = ExpertCalls(self.model, self.family, self.spec, self.shelf)
        self.runner = StackRunner(self.model, self.family, "decoder")

    @property
    def weights_digest(self) -> str:
        """Names the weights that it has now, among those that it may have."""
        return ""

    @property
    def are_original(self) -> bool:
        """Whether these are the unquantised ones of a checkpoint."""
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
        """Final states, normed, of the scored places. ids, real, scored [rows, tokens] → [places, d_model]"""
        passage = self.passage(ids)
        self._forget_others(passage)
        self.through(passage, ids, real, what)
        return passage.entering(len(self.skeleton.layers))[scored]

    def passage(self, ids: Tensor, keeps: bool = False) -> Passage:
        """The one of these tokens through the model as it is now; `keeps`: what enters each layer stays."""
        about = json.dumps([list(ids.shape), self.weights_digest])
        digest = hashlib.sha256(ids.numpy().tobytes() + about.encode()).hexdigest()[:16]
        kind = PASSAGES[0 if keeps else 1 if self.are_original else 2]
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
    def call_of(self, passage: Passage, at: LayerKey, ids: Tensor, real: Tensor, file: Path | None = None) -> Call:
        """The same of one layer, whose input the passage has kept. Its experts are not run; what they are asked about
        lies on the disk, in `file` if one is given."""
        x = passage.aside(ids.numel(), self.spec.expert_width, file)
        chosen, weights = list[Tensor](), list[Tensor]()

        def answer(_: LayerKey, call: Call) -> Tensor:
            start = sum(map(len, chosen))
            x[start : start + len(call.x)] = call.x
            chosen.append(call.chosen)
            weights.append(call.weights)
            return torch.zeros_like(call.x)

        with self.ready(at.layer), self.calls.answering(answer):
            for batch in self.batches(ids):
                self.step(passage, at.layer, ids, real, batch)
        return Call(x, torch.cat(chosen), torch.cat(weights))

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
        with self.calls.only(real[batch]), transformers_model(self.place):
            final = self.runner.run(inputs, at, lambda _, hidden: left.append(hidden), at + 1)
        return left[0], final

    def batches(self, ids: Tensor, beside: int = 0) -> Iterator[Tensor]:
        """Places of the rows of each batch; see Room.batch_tokens."""
        rows = max(1, self.room.batch_tokens(self.spec, beside) // ids.shape[1])
        return iter(torch.split(torch.arange(len(ids)), rows))

    def _forget_others(self, passage: Passage) -> None:
        """Plans that were judged are in the journal: only the latest passage of one stays, in case this run ends."""
        for folder in (self.room.folder / PASSAGES[2]).glob("*"):
            if folder != passage.folder:
                Passage(folder, passage.shape).remove()
