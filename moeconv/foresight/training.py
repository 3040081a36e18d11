"""Training of a hash function on the numbers of routers: truncated knowledge distillation (SiDA, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from moeconv.foresight.examples import (
    USUAL,
    Batch,
    Examples,
    Size,
    StackBatch,
    batches,
    load_checkpoint,
    plan,
    save_checkpoint,
)
from moeconv.foresight.network import Encoded, Networks, Shape
from moeconv.progress import Progress
from moert.pack.codec import F32
from moert.pack.learnt import HashFunction
from moert.pack.model_spec import ModelSpec, StackName

CHOICE_WEIGHT = 0.005
"""Weight of the cross-entropy with the router's choice, beside the divergence."""
EPOCHS = 16
_WARM = 0.05  # of all steps, until the rate has grown
_DECAY = 0.01
_LONGEST_GRADIENT = 1.0
_PATIENCE = 4
"""Epochs without a better one after which training ends."""


@dataclass(frozen=True)
class Course:
    """The course of a hash function's training. `width`: its features; `rate`: AdamW's highest learning rate, which
    falls by a cosine; `batch`: the size of a batch."""

    width: int
    epochs: int = EPOCHS
    rate: float = 5e-3
    seed: int = 0
    batch: Size = USUAL


@dataclass(frozen=True)
class Lesson:
    """The material of a hash function's training: `embedding` [vocab_size, d_model], examples to `train` on and
    `heldout`. `about` is a digest of all that decides the result; `checkpoint`: the file that keeps the state after
    each epoch."""

    spec: ModelSpec
    embedding: Tensor
    train: Examples
    heldout: Examples
    about: str
    checkpoint: Path


def trained(lesson: Lesson, course: Course, say: Callable[[str], None], show: Progress) -> HashFunction:
    """Returns the hash function after the epoch that was best on held-out text, with its hits there. A training that
    was interrupted goes on after its last whole epoch, and ends with the same function. Raises ConversionError."""
    training = _Training(lesson, course)
    training.resume()
    a_epoch = len(plan(lesson.train, 0, course.batch))
    with show("hash function", (course.epochs - training.epoch) * a_epoch, "batch") as bar:
        while training.epoch < course.epochs and training.epoch - training.best_epoch < _PATIENCE:
            for batch in batches(lesson.train, course.seed * 1000 + training.epoch, course.batch):
                training.step(batch)
                bar.update(1)
            hits = training.finish()
            first, more = np.concatenate(list(hits.values())).mean(axis=0)
            top_k = lesson.spec.moe.router.top_k
            about = f"{first:.1%} among the first {top_k}, {more:.1%} among the first {3 * top_k}"
            say(f"epoch {training.epoch} of {course.epochs}: of held-out choices it names {about}")
    return HashFunction.from_bytes(training.best)


class _Training:
    def __init__(self, lesson: Lesson, course: Course) -> None:
        self.lesson, self.course = lesson, course
        torch.manual_seed(course.seed)
        shapes = {name: Shape.of(lesson.spec, name, course.width) for name in lesson.train.stacks}
        self.networks = Networks(shapes, 1 / float(lesson.embedding.square().mean().sqrt()))
        self.parameters = [part for part in self.networks.parameters() if part.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, course.rate, weight_decay=_DECAY)
        self.steps = course.epochs * len(plan(lesson.train, 0, course.batch))
        self.done = self.epoch = self.best_epoch = 0
        self.best, self.best_hits = b"", -1.0

    def step(self, batch: Batch) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.course.rate * pace(self.done / self.steps)
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, _LONGEST_GRADIENT)
        self.optimizer.step()
        self.done += 1

    def finish(self) -> dict[StackName, F32]:
        """Ends an epoch with a checkpoint; returns the hits on held-out text."""
        self.epoch += 1
        hits = hits_of(self._stored(None), self.lesson.embedding, self.lesson.heldout)
        mean = float(np.concatenate(list(hits.values())).mean())
        if mean > self.best_hits:
            self.best, self.best_hits, self.best_epoch = self._stored(hits).to_bytes(), mean, self.epoch
        self._save()
        return hits

    def resume(self) -> None:
        """Takes the state of a checkpoint, if one exists. Raises ConversionError for a checkpoint that can't be
        read."""
        if (found := load_checkpoint(self.lesson.checkpoint, self.lesson.about)) is None:
            return
        self.networks.load_state_dict(found["networks"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.done, self.epoch, self.best_epoch, self.best_hits = found["progress"]
        self.best = found["best"].numpy().tobytes()

    def _save(self) -> None:
        kept = {
            "networks": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.done, self.epoch, self.best_epoch, self.best_hits),
            "best": torch.frombuffer(bytearray(self.best), dtype=torch.uint8),
        }
        save_checkpoint(self.lesson.checkpoint, self.lesson.about, kept)

    def _stored(self, hits: dict[StackName, F32] | None) -> HashFunction:
        layers = {name: self.networks.stack(name).shape.layers for name in self.networks.names}
        none: dict[StackName, F32] = {name: np.zeros((count, 2), np.float32) for name, count in layers.items()}
        return self.networks.function(none if hits is None else hits)

    def _loss(self, batch: Batch) -> Tensor:
        said = foretell(self.networks, self.lesson.embedding, batch)
        return torch.stack([distillation(said[name], batch[name]) for name in self.networks.names]).sum()


def pace(done: float) -> float:
    """Returns the share of the highest rate after the share `done` of all steps."""
    return min(1.0, (done + 1e-3) / _WARM) * (1 + math.cos(math.pi * done)) / 2


def foretell(networks: Networks, embedding: Tensor, batch: Batch) -> dict[StackName, Tensor]:
    """Returns the numbers of the networks for the real tokens of each stack, row by row [n, layers, experts]."""
    found: dict[StackName, Tensor] = {}
    encoded: Encoded | None = None
    for name in networks.names:
        part = batch[name]
        said, y, _ = networks.read(name, embedding[part.ids], part.real, encoded)
        if name == "encoder":
            encoded = Encoded(y, part.real)
        found[name] = said[part.real]
    return found


def distillation(said: Tensor, batch: StackBatch) -> Tensor:
    """Returns the divergence of the network's numbers from the router's distribution over the experts of its largest
    numbers, with a little of the cross-entropy with its choice over all experts; means over tokens and layers."""
    wanted = batch.numbers.log_softmax(-1)
    given = said.gather(-1, batch.experts).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - given)).sum(-1).mean()
    there = batch.chosen >= 0
    surprise = -said.log_softmax(-1).gather(-1, batch.chosen.clamp(min=0))
    return divergence + CHOICE_WEIGHT * (surprise * there).sum() / there.sum().clamp(min=1)


@torch.inference_mode()
def hits_of(function: HashFunction, embedding: Tensor, heldout: Examples) -> dict[StackName, F32]:
    """Returns the hits of the function as it is stored; see StackHash.hits."""
    networks = Networks.of(function)
    totals: dict[StackName, list[Tensor]] = {}
    for batch in batches(heldout):
        for name, said in foretell(networks, embedding, batch).items():
            totals.setdefault(name, []).append(_counted(said, batch[name].chosen))
    return {name: _shares(torch.stack(counts).sum(0)) for name, counts in totals.items()}


def _counted(said: Tensor, chosen: Tensor) -> Tensor:
    """Returns the numbers of choices among the first top_k, among the first 3 · top_k, and of all [layers, 3]; said [n,
    layers, experts], chosen [n, layers, top_k]."""
    top_k, experts = chosen.shape[-1], said.shape[-1]
    order = said.topk(min(3 * top_k, experts), dim=-1).indices
    found, there = order[..., None] == chosen[..., None, :], chosen >= 0
    among = (found[..., :top_k, :].any(-2), found.any(-2), there)
    return torch.stack([(one & there).sum((0, 2)) for one in among], dim=-1)


def _shares(counts: Tensor) -> F32:
    shares: F32 = (counts[:, :2] / counts[:, 2:].clamp(min=1)).numpy().astype(np.float32)
    return shares
