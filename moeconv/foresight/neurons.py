"""Predictors of neurons: their network, their training, and a model that computes only named neurons."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from moeconv.foresight.examples import Firings, LayerFirings, half, load_checkpoint, save_checkpoint
from moeconv.foresight.training import pace
from moeconv.measure.trial import Trial
from moeconv.order import NeuronOrder
from moeconv.progress import Bar, Progress
from moeconv.source.experts import Biases, Weights
from moert.pack.codec import F16, F32, WIDTHS
from moert.pack.layout import U32, Coding, Neurons, neuron_layout
from moert.pack.learnt import Kept, LayerPredictor, NeuronPredictor
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# The network of a predictor of neurons in torch, layer by layer: scores of low rank, to be trained and to name by.

_CHUNK = 4096  # tokens
_RIDGE = 1e-4
"""Share of the mean variance of the inputs that is added to all variances: some inputs may never vary."""
_SURE = 0.05
"""Least share of a neuron's own spread that scores of low rank are taken to leave out."""
_LOGIT = 1.7
"""sigmoid(1.7 z) is about the normal distribution's share below z."""


class LayerNetwork(nn.Module):
    """The network of one layer: score of neuron i of expert e = heads[e, i] · (compress · x) + bias[e, i]; compress [r,
    features], heads [experts, d_ff, r], bias [experts, d_ff]."""

    def __init__(self, compress: Tensor, heads: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.compress, self.heads, self.bias = map(nn.Parameter, (compress, heads, bias))

    def compressed(self, x: Tensor) -> Tensor:
        """Returns compress · x [rows, r] for x [rows, features]."""
        return x @ self.compress.T

    def scores(self, expert: int, compressed: Tensor) -> Tensor:
        """Returns the scores of an expert's neurons [rows, d_ff] for compressed [rows, r]."""
        return compressed @ self.heads[expert].T + self.bias[expert]

    @classmethod
    def of(cls, layer: LayerPredictor) -> LayerNetwork:
        """Returns the network of a stored predictor, not to be trained."""
        found = cls(_single(layer.compress), _single(layer.heads), torch.tensor(layer.bias))
        return found.requires_grad_(False)

    def stored(self) -> tuple[F16, F16, npt.NDArray[np.float32]]:
        """Returns compress, heads and bias as a LayerPredictor has them."""
        return half(self.compress), half(self.heads), self.bias.detach().numpy().copy()


def _single(values: F16) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def begun(rank: int, first: list[tuple[Weights, Biases]], firings: LayerFirings) -> LayerNetwork:
    """Returns a network before training: the one of rank `rank` that best approximates the products of the first
    matrices of all experts of a layer, since their signs say which neurons fire. `first`: the matrices and biases of
    each expert.

    With x of mean m and covariance L·Lᵀ it follows from the singular vectors of the stacked W·L; scores are in units of
    the spread that rank r leaves out, so that they are logits.
    """
    mean, covariance = _moments(firings)
    lower = torch.linalg.cholesky(covariance)
    stacked = [weights[0].double() @ lower for weights, _ in first]
    gram = torch.stack([matrix.T @ matrix for matrix in stacked]).sum(0)
    chosen = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # [features, r]
    compress = torch.linalg.solve_triangular(lower.T, chosen, upper=True).T
    heads, bias = [], []
    for matrix, (weights, biases) in zip(stacked, first, strict=True):
        head = matrix @ chosen
        whole, kept = matrix.square().sum(1), head.square().sum(1)
        left_out = (whole - kept).clamp(min=0).maximum(whole * _SURE**2).sqrt().clamp(min=1e-9)
        unit = _LOGIT / left_out
        constant = weights[0].double() @ mean - head @ (compress @ mean)
        bias.append((constant + (biases[0].double() if biases else 0)) * unit)
        heads.append(head * unit[:, None])
    return LayerNetwork(compress.float().contiguous(), torch.stack(heads).float(), torch.stack(bias).float())


def _moments(firings: LayerFirings) -> tuple[Tensor, Tensor]:
    """Returns the mean and the covariance of the inputs of a layer's experts."""
    features = firings.x.shape[1]
    total, products = torch.zeros(features, dtype=torch.double), torch.zeros((features, features), dtype=torch.double)
    for start in range(0, len(firings), _CHUNK):
        x = torch.from_numpy(firings.x[start : start + _CHUNK].astype(np.float64))
        total += x.sum(0)
        products += x.T @ x
    mean = total / len(firings)
    covariance = products / len(firings) - torch.outer(mean, mean)
    ridge = _RIDGE * covariance.diagonal().mean().clamp(min=1e-9)
    return mean, covariance + ridge * torch.eye(features, dtype=torch.double)


def in_blocks(named: Tensor, per_block: int) -> Tensor:
    """Returns which blocks of `per_block` neurons hold a named one [rows, blocks]; named [rows, d_ff]."""
    padded = nn.functional.pad(named, (0, -named.shape[1] % per_block))
    return padded.view(len(named), -1, per_block).any(-1)


# A model of which only the neurons that a predictor names are computed, and all others of their blocks.

_WIDEST = max(WIDTHS)
_ANY_PAGE = 4096  # bytes: the number of neurons of a block does not depend on it


class NamedNeurons:
    """A Naming of moeconv.source.experts, by a predictor. `per_block`: the number of neurons in an expert's blocks,
    `order`: the order of neurons in blocks (None: their own)."""

    def __init__(
        self, predictor: NeuronPredictor, per_block: Callable[[ExpertKey], int], order: NeuronOrder | None = None
    ) -> None:  # fmt: skip
        self._networks = {place: LayerNetwork.of(layer) for place, layer in predictor.layers.items()}
        self._thresholds = {place: layer.threshold for place, layer in predictor.layers.items()}
        self._per_block = per_block
        self._orders = {} if order is None else {
            place: torch.from_numpy(rows.astype(np.int64)) for place, rows in order.layers.items()
        }  # fmt: skip

    @torch.inference_mode()
    def computed(self, key: ExpertKey, x: Tensor) -> Tensor:
        """Returns which neurons of an expert are computed for x [rows, features]; see Naming."""
        network, size = self._networks[key.at], self._per_block(key)
        scores = network.scores(key.expert, network.compressed(x))
        named = scores >= float(self._thresholds[key.at][key.expert])
        if not self._orders:
            return _in_blocks_of(named, size)
        order = self._orders[key.at][key.expert]
        found = torch.empty_like(named)
        found[:, order] = _in_blocks_of(named[:, order], size)
        return found


def _in_blocks_of(named: Tensor, size: int) -> Tensor:
    """Returns which neurons lie in a block of `size` with a named one [rows, d_ff]; named [rows, d_ff]."""
    return in_blocks(named, size).repeat_interleave(size, dim=1)[:, : named.shape[1]]


def per_block(spec: ModelSpec, bits: tuple[int, ...], coding: Coding, neurons: Neurons) -> int:
    """Returns the number of neurons in a block of an expert of these widths; see moert.pack.layout.neuron_layout."""
    widths = dict(zip(spec.moe.ffn.projections, bits, strict=True))
    return neuron_layout(spec, widths, coding, _ANY_PAGE, neurons).per_block


@dataclass(frozen=True)
class PredictedNeurons:
    """An Instead of moeconv.measure.trial that computes only named neurons, with blocks of the widths on trial.
    `order`: the order of neurons in the pack (None: their own), which the predictor does not have yet."""

    predictor: NeuronPredictor
    neurons: Neurons
    order: NeuronOrder | None = None

    @cached_property
    def rule(self) -> Any:
        digest = hashlib.sha256(self.predictor.to_bytes()).hexdigest()
        order = [] if self.order is None else [self.order.digest]
        return ["neurons", digest, self.neurons.piece_bytes, *order]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        coder = trial.coder
        coding = Coding(coder.quantizer.group_size, "MXFP4" if coder.mxfp4 else "F16")

        def size(key: ExpertKey) -> int:
            bits = tuple(
                min(_WIDEST, int(width)) for width in trial.widths(key)
            )  # unquantized, a pack has them at 16 bits
            return per_block(trial.spec, bits, coding, self.neurons)

        with trial.calls.during(naming=NamedNeurons(self.predictor, size, self.order)):
            yield


# Training of a predictor of neurons, layer by layer: balanced cross-entropy with the firing neurons, then thresholds.

NEURON_EPOCHS = 10
MISSED = 0.02
BATCH = 512  # tokens
MOST_ROWS = 8192
"""Most rows of an expert that its threshold is set on."""
_PATIENCE = 2
"""Epochs without a better one after which a layer's training ends."""


@dataclass(frozen=True)
class NeuronCourse:
    """The course of a predictor's training. `rate`: Adam's highest learning rate, which falls by a cosine; `missed`:
    the largest share of firing neurons' weight that thresholds leave unnamed."""

    rank: int
    epochs: int = NEURON_EPOCHS
    missed: float = MISSED
    rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True)
class NeuronLesson:
    """The material of a predictor's training. `first`: weights and biases of all experts of a layer; `per_block`: the
    number of neurons in a block of each expert of a layer. `about` is a digest of all that decides the result;
    `folder`: keeps a checkpoint of each layer after each epoch."""

    train: Firings
    heldout: Firings
    first: Callable[[LayerKey], list[tuple[Weights, Biases]]]
    per_block: Mapping[LayerKey, list[int]]
    about: str
    folder: Path
    order: NeuronOrder | None = None
    """Order of neurons in blocks; None: their own."""

    @property
    def tokens(self) -> int:
        """The number of tokens to learn from, of all stacks."""
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
    """Returns, for each layer, the network after the epoch that was best on held-out text, with its thresholds and the
    shares that it names there. A training that was interrupted goes on after its last whole epoch, and ends the same.
    Raises ConversionError."""
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
    """Returns the named shares as text for a person."""
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
        """Returns the best network as it is stored, with thresholds from the text that it was trained on, and the
        shares that it names on held-out text."""
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
    """Yields the places of all tokens, in parts."""
    for start in range(0, len(firings), BATCH):
        yield np.arange(start, min(len(firings), start + BATCH))


def _gains(firings: LayerFirings, experts: int) -> F32:
    """Returns the factors that make an expert's firing neurons, by their weights, count as much as its silent ones
    [experts]."""
    silent, weights = np.zeros(experts), np.zeros(experts)
    for tokens in _chunks(firings):
        for expert, rows in firings.some(tokens):
            silent[expert] += int((rows.weights == 0).sum())
            weights[expert] += int(rows.weights.sum())
    return np.where(weights > 0, silent / np.maximum(weights, 1), 0).astype(np.float32)


def _loss(
    network: LayerNetwork, firings: LayerFirings, tokens: npt.NDArray[np.int64], gains: F32
) -> tuple[Tensor, int]:
    """Returns the balanced cross-entropy, summed over the neurons of the experts of these tokens; and their number."""
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
    """Returns the mean of the balanced cross-entropy over the neurons of all tokens."""
    found = [_loss(network, firings, tokens, gains) for tokens in _chunks(firings)]
    return sum(float(total) for total, _ in found) / max(1, sum(neurons for _, neurons in found))


@torch.inference_mode()
def thresholds(network: LayerNetwork, firings: LayerFirings, missed: float) -> F32:
    """Returns, for each expert, the largest threshold that leaves at most the share `missed` of its firing neurons'
    weight unnamed; one below all scores where none of its neurons fired [experts]."""
    found = np.full(len(network.heads), np.finfo(np.float32).min, np.float32)
    for expert in range(len(found)):
        rows = firings.of(expert, MOST_ROWS)
        fires = rows.weights > 0
        if fires.any():
            scores = network.scores(expert, network.compressed(rows.x))[fires].numpy()
            found[expert] = threshold_of(scores, rows.weights[fires].numpy(), missed)
    return found


def threshold_of(scores: F32, weights: npt.NDArray[np.uint8], missed: float) -> float:
    """Returns the largest score of these [n] such that the scores below it have at most the share `missed` of the
    weights [n]."""
    order = np.argsort(scores, kind="stable")
    below = np.cumsum(weights[order], dtype=np.int64) - weights[order]  # for each score, of all scores before it
    first = int(np.searchsorted(below, missed * int(weights.sum(dtype=np.int64)), side="right")) - 1
    return float(scores[order][first])


@torch.inference_mode()
def kept_of(
    network: LayerNetwork, threshold: F32, firings: LayerFirings, per_block: list[int], order: U32 | None = None
) -> Kept:
    """Returns the shares that are named on a text; `per_block`: for each expert, `order`: of neurons in blocks
    [experts, d_ff]."""
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
