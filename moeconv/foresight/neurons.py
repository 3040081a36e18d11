"""Trains a predictor of neurons, layer by layer: balanced cross-entropy with what fires, then thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import softplus

from moeconv.foresight.firings import Firings, LayerFirings
from moeconv.foresight.kept import load_checkpoint, save_checkpoint
from moeconv.foresight.lowrank import LayerNetwork, begun, in_blocks
from moeconv.foresight.training import pace
from moeconv.progress import Bar, Progress
from moeconv.source.experts import Biases, Weights
from moert.pack.codec import F32
from moert.pack.layout import U32
from moert.pack.model_spec import LayerKey
from moert.pack.neurons import Kept, LayerPredictor, NeuronOrder, NeuronPredictor

EPOCHS = 10
MISSED = 0.02
BATCH = 512  # tokens
MOST_ROWS = 8192
"""Of an expert, which its threshold is set on."""
_PATIENCE = 2
"""Epochs without a better one, after which a layer's training ends."""


@dataclass(frozen=True)
class NeuronCourse:
    """How a predictor is trained: `rate` that Adam begins with, and falls from by a cosine; `missed`: the share of
    firing neurons' weight that thresholds leave unnamed at most."""

    rank: int
    epochs: int = EPOCHS
    missed: float = MISSED
    rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True)
class NeuronLesson:
    """What it is trained for. `first`: weights and biases of all experts of a layer; `per_block`: of each expert of a
    layer the neurons of a block. `about` is a digest of all that decides the result; `folder`: where what was learnt
    of each layer is kept after each epoch."""

    train: Firings
    heldout: Firings
    first: Callable[[LayerKey], list[tuple[Weights, Biases]]]
    per_block: Mapping[LayerKey, list[int]]
    about: str
    folder: Path
    order: NeuronOrder | None = None
    """In which neurons lie in blocks; None: their own."""

    @property
    def tokens(self) -> int:
        """That were read to learn, of all stacks."""
        return _tokens(self.train)

    @property
    def heldout_tokens(self) -> int:
        return _tokens(self.heldout)


def _tokens(firings: Firings) -> int:
    stacks = {place.stack: len(layer) for place, layer in firings.items()}
    return sum(stacks.values())


def trained_neurons(
    lesson: NeuronLesson, course: NeuronCourse, say: Callable[[str], None], show: Progress
) -> NeuronPredictor:
    """Of each layer the network after the epoch that did best on held-out text, with its thresholds and what it names
    there. One that was interrupted goes on after its last whole epoch, and ends the same. Raises ConversionError."""
    layers, batches = {}, sum(-(-len(firings) // BATCH) for firings in lesson.train.values())
    with show("predictor of neurons", course.epochs * batches, "batch") as bar:
        for place, firings in lesson.train.items():
            training, a_epoch = _LayerTraining(lesson, course, place), -(-len(firings) // BATCH)
            bar.update(training.epoch * a_epoch)
            while not training.is_over:
                training.run_epoch(bar)
            bar.update((course.epochs - training.epoch) * a_epoch)
            layers[place] = training.finished()
            say(f"{place} after {training.best_epoch} of {training.epoch} epochs: {kept_text(layers[place].kept)}")
    counts = np.bincount([count for layer in lesson.per_block.values() for count in layer])
    return NeuronPredictor(layers, course.missed, int(counts.argmax()))


def kept_text(kept: Kept) -> str:
    """For a person."""
    return f"names {kept.firing:.1%} of what fires, {kept.neurons:.1%} of neurons, {kept.blocks:.1%} of blocks"


class _LayerTraining:
    def __init__(self, lesson: NeuronLesson, course: NeuronCourse, place: LayerKey) -> None:
        self.lesson, self.course, self.place = lesson, course, place
        self.train, self.heldout = lesson.train[place], lesson.heldout[place]
        experts = lesson.first(place)
        self.gains = _gains(self.train, len(experts))
        self.path, self.about = lesson.folder / f"{place}.pt", f"{lesson.about} {place}"
        found = load_checkpoint(self.path, self.about)
        if found is None:
            self.network = begun(course.rank, experts, self.train)
            self.epoch = self.best_epoch = 0
            self.best, self.best_loss = self._copy(), balanced(self.network, self.heldout, self.gains)
        else:
            self.network = _network(found["network"])
            self.epoch, self.best_epoch, self.best_loss = found["progress"]
            self.best = found["best"]
        self.optimizer = torch.optim.Adam(self.network.parameters(), course.rate)
        if found is not None:
            self.optimizer.load_state_dict(found["optimizer"])

    @property
    def is_over(self) -> bool:
        return self.epoch == self.course.epochs or self.epoch - self.best_epoch >= _PATIENCE

    def run_epoch(self, bar: Bar) -> None:
        count = -(-len(self.train) // BATCH)
        order = np.random.default_rng([self.course.seed, self.epoch]).permutation(len(self.train))
        for number in range(count):
            rate = self.course.rate * pace((self.epoch * count + number) / (self.course.epochs * count))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad()
            tokens = np.sort(order[number * BATCH : (number + 1) * BATCH])
            total, neurons = _loss(self.network, self.train, tokens, self.gains)
            (total / max(1, neurons)).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            bar.update(1)
        self.epoch += 1
        loss = balanced(self.network, self.heldout, self.gains)
        if loss < self.best_loss:
            self.best, self.best_loss, self.best_epoch = self._copy(), loss, self.epoch
        kept = {
            "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "best": self.best,
            "progress": (self.epoch, self.best_epoch, self.best_loss),
        }  # fmt: skip
        save_checkpoint(self.path, self.about, kept)

    def finished(self) -> LayerPredictor:
        """As it is stored: thresholds on the text that it was trained on, and what is named of the held-out text."""
        compress, heads, bias = _network(self.best).stored()
        unset = LayerPredictor(compress, heads, bias, np.zeros(len(heads), np.float32), Kept(0, 0, 0))
        network = LayerNetwork.of(unset)
        threshold = thresholds(network, self.train, self.course.missed)
        order = None if self.lesson.order is None else self.lesson.order.layers[self.place]
        kept = kept_of(network, threshold, self.heldout, self.lesson.per_block[self.place], order)
        return LayerPredictor(compress, heads, bias, threshold, kept)

    def _copy(self) -> dict[str, Tensor]:
        return {name: values.detach().clone() for name, values in self.network.state_dict().items()}


def _network(state: Mapping[str, Tensor]) -> LayerNetwork:
    return LayerNetwork(state["compress"], state["heads"], state["bias"])


def _chunks(firings: LayerFirings) -> Iterator[npt.NDArray[np.int64]]:
    """All tokens, in parts."""
    for start in range(0, len(firings), BATCH):
        yield np.arange(start, min(len(firings), start + BATCH))


def _gains(firings: LayerFirings, experts: int) -> F32:
    """What makes an expert's firing neurons, by their weights, worth as much as those that do not fire. [experts]"""
    silent, weights = np.zeros(experts), np.zeros(experts)
    for tokens in _chunks(firings):
        for expert, rows in firings.some(tokens):
            silent[expert] += int((rows.weights == 0).sum())
            weights[expert] += int(rows.weights.sum())
    return np.where(weights > 0, silent / np.maximum(weights, 1), 0).astype(np.float32)


def _loss(
    network: LayerNetwork, firings: LayerFirings, tokens: npt.NDArray[np.int64], gains: F32
) -> tuple[Tensor, int]:
    """Balanced cross-entropy, summed over the neurons of the experts that these tokens have; and how many these are."""
    total, neurons = torch.zeros(()), 0
    for expert, rows in firings.some(tokens):
        scores = network.scores(expert, network.compressed(rows.x))
        fires = rows.weights > 0
        worth = torch.where(fires, rows.weights * float(gains[expert]), 1.0)
        total = total + (softplus(torch.where(fires, -scores, scores)) * worth).sum()
        neurons += scores.numel()
    return total, neurons


@torch.inference_mode()
def balanced(network: LayerNetwork, firings: LayerFirings, gains: F32) -> float:
    """The mean of the balanced cross-entropy over all tokens."""
    found = [_loss(network, firings, tokens, gains) for tokens in _chunks(firings)]
    return sum(float(total) for total, _ in found) / max(1, sum(neurons for _, neurons in found))


@torch.inference_mode()
def thresholds(network: LayerNetwork, firings: LayerFirings, missed: float) -> F32:
    """Of each expert the largest threshold that leaves at most the share `missed` of its firing neurons' weight
    unnamed; one below all scores where nothing is known of it. [experts]"""
    found = np.full(len(network.heads), np.finfo(np.float32).min, np.float32)
    for expert in range(len(found)):
        rows = firings.of(expert, MOST_ROWS)
        fires = rows.weights > 0
        if fires.any():
            scores = network.scores(expert, network.compressed(rows.x))[fires].numpy()
            found[expert] = threshold_of(scores, rows.weights[fires].numpy(), missed)
    return found


def threshold_of(scores: F32, weights: npt.NDArray[np.uint8], missed: float) -> float:
    """The largest of these scores [n] such that those below it have at most the share `missed` of the weights [n]."""
    order = np.argsort(scores, kind="stable")
    below = np.cumsum(weights[order], dtype=np.int64) - weights[order]  # of a score, all before it
    first = int(np.searchsorted(below, missed * int(weights.sum(dtype=np.int64)), side="right")) - 1
    return float(scores[order][first])


@torch.inference_mode()
def kept_of(
    network: LayerNetwork, threshold: F32, firings: LayerFirings, per_block: list[int], order: U32 | None = None
) -> Kept:
    """What is named of a text; `per_block` of each expert, `order` [experts, d_ff] of its neurons in blocks."""
    fired = named_fired = named = neurons = blocks = named_blocks = 0
    for tokens in _chunks(firings):
        for expert, rows in firings.some(tokens):
            names = network.scores(expert, network.compressed(rows.x)) >= float(threshold[expert])
            fires = rows.weights > 0
            fired += int(fires.sum())
            named_fired += int((names & fires).sum())
            named += int(names.sum())
            neurons += names.numel()
            placed = names if order is None else names[:, torch.from_numpy(order[expert].astype(np.int64))]
            touched = in_blocks(placed, per_block[expert])
            named_blocks += int(touched.sum())
            blocks += touched.numel()
    return Kept(named_fired / max(1, fired), named / max(1, neurons), named_blocks / max(1, blocks))
