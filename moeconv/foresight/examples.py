"""Examples on disk that networks are trained on: choices of routers, inputs of experts, firing neurons."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.measure.firing import Reads, heard
from moeconv.measure.scorers import Routed, Subject
from moeconv.measure.workdir import believed, digest_of, identity
from moeconv.progress import Bar
from moeconv.source.archs.description import Description
from moeconv.source.experts import Call
from moeconv.source.routers import Routers, RouterWeights, deciding_of, numbers_of, scores_of
from moeconv.strict_json import NotJson, bounded, parse
from moert.pack.codec import F16
from moert.pack.files import write_atomically
from moert.pack.model_spec import LayerKey, ModelSpec, StackName

# Numbers of trained networks, as their files hold them: in float16, or not at all.

_MOST_LOST = 2.0**-9  # of a matrix' length; rounding loses at most 2^-11 of each number


def half(numbers: Tensor) -> F16:
    """Returns the numbers in float16. Raises ConversionError where float16 does not hold them; for a bias, which may be
    tiny beside the sum that it is added to, only where a number is too large."""
    exact = numbers.detach().numpy().astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        made: F16 = exact.astype(np.float16)
        lost = np.linalg.norm(made - exact) > _MOST_LOST * np.linalg.norm(exact)
    if not np.isfinite(made).all() or (exact.ndim > 1 and lost):
        largest = np.abs(exact).max()
        raise ConversionError(
            f"float16 cannot hold the numbers of the training (the largest is {largest:.3g}): this model's "
            "numbers are too large or too small to learn from; convert it without this network"
        )
    return made


# State of an interrupted training: a folder of examples, and checkpoints.

_DONE = "examples.json"
_MOST_BYTES = 1 << 26
_SEAL_BYTES = 32  # of a checkpoint, before all else: the sha256 of the rest


def filled(folder: Path, about: str, fill: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the description that `fill` gave of the examples that it put into the empty folder. Examples with the
    same `about` and an intact seal are used again; otherwise they are made anew. Raises ConversionError if the disk
    refuses."""
    try:
        found = _said(folder)
        if found is None or found.get("about") != about or found.pop("seal", None) != _seal(folder, found):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found = {"about": about, **fill()}
            sealed = {**found, "seal": _seal(folder, found)}
            write_atomically(folder / _DONE, json.dumps(sealed).encode())
    except OSError as error:
        raise ConversionError(
            f"can't use {folder}: {error.strerror or error}; free it or give another --work"
        ) from None
    return found


def _wrong(folder: Path) -> tuple[str, str]:
    """Returns the words of an error for a folder whose files are no examples."""
    return f"{folder} holds damaged examples", "delete it, and they are made again"


def _said(folder: Path) -> dict[str, Any] | None:
    try:
        found = parse(bounded(folder / _DONE, _MOST_BYTES), finite=False)
    except (FileNotFoundError, NotJson):
        return None
    return found if isinstance(found, dict) else None


def _seal(folder: Path, said: Mapping[str, Any]) -> str:
    """Returns the hash of the description and of each file of examples."""
    files = {path.name: digest_of(path) for path in folder.iterdir() if path.name != _DONE}
    return identity(json.dumps(said, sort_keys=True), sorted(files.items()))


def load_checkpoint(path: Path, about: str) -> dict[str, Any] | None:
    """Returns the state that `save_checkpoint` wrote; None without a checkpoint, or for one of another training. Raises
    ConversionError for a checkpoint that can't be read."""
    try:
        body = path.read_bytes()
        if hashlib.sha256(body[_SEAL_BYTES:]).digest() != body[:_SEAL_BYTES]:
            raise ValueError("it was changed since it was made")
        found: dict[str, Any] = torch.load(io.BytesIO(body[_SEAL_BYTES:]), weights_only=True)
        return found if found["about"] == about else None
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConversionError(f"{path} can't be read ({text[:100]}): delete it, and training begins anew") from None


def save_checkpoint(path: Path, about: str, state: dict[str, Any]) -> None:
    """Writes a checkpoint with a seal. Raises ConversionError if the disk refuses."""
    stream = io.BytesIO()
    torch.save({"about": about, **state}, stream)
    body = stream.getvalue()
    try:
        write_atomically(path, hashlib.sha256(body).digest() + body)
    except OSError as error:
        raise ConversionError(f"can't write {path}: {error.strerror}; free some space and run again") from None


# Examples of routing on disk: the tokens of some text, with the numbers and the choice of every router.
# For a token and a layer these are the largest numbers that its router chooses by, which the truncated distillation of
# SiDA (section 3) needs, and the chosen experts.

MOST_NUMBERS = 30
_FORMATS = {"tokens": np.int32, "numbers": np.float16, "experts": np.uint16, "chosen": np.int16}
_LEAST = 1e-6  # smaller scores are raised to this before their logarithm is taken

I64 = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Routing of some tokens, one after the other: tokens [n]; numbers and experts [n, layers, most], the largest
    first; chosen [n, layers, top_k], -1 where a token was dropped."""

    tokens: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.float16]
    experts: npt.NDArray[np.uint16]
    chosen: npt.NDArray[np.int16]

    def at(self, places: slice) -> Part:
        return Part(self.tokens[places], self.numbers[places], self.experts[places], self.chosen[places])


@dataclass(frozen=True)
class StackExamples:
    """Examples of one stack, sample by sample: `lengths` and `starts` [samples], in tokens of `whole`."""

    lengths: I64
    starts: I64
    whole: Part

    def sample(self, place: int) -> Part:
        return self.whole.at(slice(int(self.starts[place]), int(self.starts[place] + self.lengths[place])))


@dataclass(frozen=True)
class Examples:
    """Examples of each stack with experts; a sample has the same place in each."""

    stacks: Mapping[StackName, StackExamples]

    def __len__(self) -> int:
        return len(next(iter(self.stacks.values())).lengths)

    @property
    def tokens(self) -> int:
        return sum(int(stack.lengths.sum()) for stack in self.stacks.values())


def stacks_of(spec: ModelSpec) -> list[StackName]:
    """Returns the stacks with experts."""
    return [name for name in spec.stacks if spec.moe_layers(name)]


def numbers_kept(spec: ModelSpec) -> int:
    """Returns the number of numbers of each router that are kept for a token."""
    return min(MOST_NUMBERS, spec.moe.n)


def token_bytes(spec: ModelSpec) -> int:
    """Returns the bytes that examples take on the disk for each token of the longer of the stacks."""
    layers = max(len(spec.moe_layers(name)) for name in stacks_of(spec))
    return 4 + layers * (4 * numbers_kept(spec) + 2 * spec.moe.router.top_k)


def collected(
    folder: Path, about: str, subject: Subject, description: Description, scorer: Reads, bar: Bar
) -> Examples:
    """Returns the model's routing of a scorer's text. Examples that the folder has are used again if they have the same
    `about`; otherwise they are made anew. Raises ConversionError if the disk refuses."""
    found = filled(folder, about, lambda: _collect(folder, subject, description, scorer, bar))
    with believed(*_wrong(folder)):
        return _opened(folder, found["lengths"], subject.spec)


def _shapes(spec: ModelSpec, stack: StackName) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array for one token."""
    layers, most = len(spec.moe_layers(stack)), numbers_kept(spec)
    top_k = spec.moe.router.top_k
    return {"tokens": (), "numbers": (layers, most), "experts": (layers, most), "chosen": (layers, top_k)}


def _opened(folder: Path, lengths_of: Mapping[StackName, list[int]], spec: ModelSpec) -> Examples:
    stacks: dict[StackName, StackExamples] = {}
    for stack in stacks_of(spec):
        lengths = np.array(lengths_of[stack], np.int64)
        total = int(lengths.sum())
        arrays = [
            np.memmap(folder / f"{stack}.{name}", _FORMATS[name], "r", shape=(total, *shape))
            for name, shape in _shapes(spec, stack).items()
        ]
        stacks[stack] = StackExamples(lengths, np.cumsum(lengths) - lengths, Part(*arrays))
    return Examples(stacks)


def _collect(folder: Path, subject: Subject, description: Description, scorer: Reads, bar: Bar) -> dict[str, Any]:
    """Fills the folder; returns the number of tokens of each sample, by stack."""
    spec, lengths = subject.spec, {stack: list[int]() for stack in stacks_of(subject.spec)}
    routers = Routers(subject.model, description, spec.moe_layers())
    with ExitStack() as open_files:
        files = {
            (stack, name): open_files.enter_context((folder / f"{stack}.{name}").open("wb"))
            for stack in lengths
            for name in _FORMATS
        }
        read = open_files.enter_context(reading(subject))
        open_files.enter_context(routers.listening())
        for routed in scorer.routes():
            for stack in lengths:
                lengths[stack] += routed.lengths[stack]
                for name, array in _part(routers, read[stack], routed, stack)._asdict().items():
                    array.tofile(files[stack, name])
            bar.update(len(routed.samples))
    return {"lengths": lengths}


@contextmanager
def reading(subject: Subject) -> Iterator[dict[StackName, Tensor]]:
    """Yields the tokens that each stack has read last [rows, tokens], up to date inside the block."""
    read: dict[StackName, Tensor] = {}

    def hear(stack: StackName, module: Any, _: Any, named: dict[str, Any]) -> None:
        read[stack] = named["input_ids"]

    with ExitStack() as hooks:
        for stack in subject.spec.stacks:
            tower = subject.family.tower(subject.model, stack)
            hooks.callback(tower.register_forward_pre_hook(partial(hear, stack), with_kwargs=True).remove)
        yield read


def _part(routers: Routers, ids: Tensor, routed: Routed, stack: StackName) -> Part:
    """Returns the routing of the tokens that were read last; rows of `ids` are filled up on the right."""
    real = (torch.arange(ids.shape[1]) < torch.tensor(routed.lengths[stack])[:, None]).flatten()
    places = [at for at in routers.layers if at.stack == stack]
    said = torch.stack([_to_learn(routers, routed, at, real) for at in places], dim=1)
    largest = said.topk(min(MOST_NUMBERS, said.shape[-1]), dim=-1)
    chosen = torch.stack([routed.experts[at] for at in places], dim=1)
    return Part(
        ids.flatten()[real].numpy().astype(np.int32),
        half(largest.values),
        largest.indices.numpy().astype(np.uint16),
        chosen.numpy().astype(np.int16),
    )


def _to_learn(routers: Routers, routed: Routed, at: LayerKey, real: Tensor) -> Tensor:
    """Returns the numbers that the network is to learn of a layer [tokens, experts]."""
    numbers = foretold(routers.heard[at][real], routers.layers[at])
    if routers.layers[at].part.by_token is None:
        return numbers
    return torch.full_like(numbers, math.log(_LEAST)).scatter(1, routed.experts[at].long(), 0.0)


def foretold(x: Tensor, layer: RouterWeights) -> Tensor:
    """Returns the numbers that the network is to learn of a layer [tokens, experts]: the router's weight · x for its
    input x [tokens, d_model], or where experts are chosen by more than this, numbers in the order of the choice."""
    numbers = numbers_of(x, layer)
    part, experts = layer.part, numbers.shape[1] - layer.part.identities
    if part.score == "softmax" or (layer.choice_bias is None and part.groups is None):
        return numbers[:, :experts]
    deciding = torch.from_numpy(deciding_of(scores_of(numbers, layer).numpy(), layer))
    return deciding[:, :experts].clamp(min=_LEAST).log()


# Examples for predictors of neurons on disk: the inputs of experts, and their firing neurons.

LARGEST = 255
_FIRED = {"x": np.float16, "chosen": np.int16, "weights": np.uint8}


class Rows(NamedTuple):
    """Rows of an expert: its inputs x F32 [rows, features], and the weight of each neuron U8 [rows, d_ff]."""

    x: Tensor
    weights: Tensor


@dataclass(frozen=True)
class LayerFirings:
    """Firings of a layer for some tokens: x F16 [tokens, features], `chosen` I16 [tokens, top_k] (-1: none), and the
    weight of each neuron of these experts U8 [tokens, top_k, d_ff]: the length of the vector that it adds to the
    layer's output, LARGEST for the longest of a token and an expert, rounded up; 0 where it does not fire."""

    x: npt.NDArray[np.float16]
    chosen: npt.NDArray[np.int16]
    weights: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.x)

    def some(self, tokens: npt.NDArray[np.int64]) -> Iterator[tuple[int, Rows]]:
        """Yields each expert that these tokens go to, with its rows in the order of the tokens."""
        chosen = np.asarray(self.chosen[tokens])
        for expert in np.unique(chosen[chosen >= 0]).tolist():
            rows, slots = np.nonzero(chosen == expert)
            yield expert, self._rows(tokens[rows], slots)

    def of(self, expert: int, most: int) -> Rows:
        """Returns at most `most` rows of one expert, spread over all of its rows."""
        rows, slots = np.nonzero(self.chosen == expert)
        if len(rows) > most:
            places = np.arange(most) * len(rows) // most
            rows, slots = rows[places], slots[places]
        return self._rows(rows, slots)

    def _rows(self, tokens: npt.NDArray[Any], slots: npt.NDArray[Any]) -> Rows:
        x = self.x[tokens].astype(np.float32)
        return Rows(torch.from_numpy(x), torch.from_numpy(np.asarray(self.weights[tokens, slots])))


Firings = Mapping[LayerKey, LayerFirings]


def firing_bytes(spec: ModelSpec) -> int:
    """Returns the most bytes that firings take on the disk for each token of all stacks together."""
    layers = max(len(spec.moe_layers(name)) for name in spec.stacks)
    return layers * (2 * spec.expert_width + spec.moe.router.top_k * (2 + spec.moe.ffn.d_ff))


def firings(folder: Path, about: str, subject: Subject, scorer: Reads, bar: Bar) -> Firings:
    """Returns the firings of a model in memory on a scorer's text, with the text that it writes where it writes.
    Firings that the folder has are used again if they have the same `about`. Raises ConversionError if the disk
    refuses."""
    found = filled(folder, about, lambda: _collect_firings(folder, subject, scorer, bar))
    with believed(*_wrong(folder)):
        return {place: _mapped(folder, place, *found["shapes"][str(place)]) for place in subject.spec.moe_layers()}


def _mapped(folder: Path, place: LayerKey, tokens: int, *shape: int) -> LayerFirings:
    features, top_k, d_ff = shape
    shapes = {"x": (tokens, features), "chosen": (tokens, top_k), "weights": (tokens, top_k, d_ff)}
    return LayerFirings(
        **{name: np.memmap(folder / f"{place}.{name}", _FIRED[name], "r", shape=shapes[name]) for name in _FIRED}
    )


def _collect_firings(folder: Path, subject: Subject, scorer: Reads, bar: Bar) -> dict[str, Any]:
    """Fills the folder; returns the number of tokens, features, top_k and d_ff of each layer."""
    spec, shapes = subject.spec, dict[str, list[int]]()
    with ExitStack() as stack:
        files = {
            (place, name): stack.enter_context((folder / f"{place}.{name}").open("wb"))
            for place in spec.moe_layers()
            for name in _FIRED
        }

        def write(place: LayerKey, call: Call) -> None:
            there = (call.chosen >= 0).any(dim=1)
            x, chosen = call.x[there], call.chosen[there]
            parts = {
                "x": half(x),
                "chosen": chosen.short().numpy(),
                "weights": _weights(subject, place, x, chosen).numpy(),
            }
            for name, part in parts.items():
                part.tofile(files[place, name])
            shape = shapes.setdefault(str(place), [0, x.shape[1], chosen.shape[1], spec.moe.ffn.d_ff])
            shape[0] += len(x)

        heard(subject, scorer, write, bar)
    return {"shapes": shapes}


def _weights(subject: Subject, place: LayerKey, x: Tensor, chosen: Tensor) -> Tensor:
    """Returns the weights of neurons [tokens, top_k, d_ff]; see LayerFirings."""
    calls, found = subject.calls, torch.zeros((*chosen.shape, subject.spec.moe.ffn.d_ff), dtype=torch.uint8)
    for expert in sorted(set(chosen[chosen >= 0].tolist())):
        key, (rows, slots) = place.expert(expert), torch.nonzero(chosen == expert, as_tuple=True)
        lengths = calls.inner(key, x[rows]).abs() * calls.weights(key)[-1].norm(dim=0)
        largest = lengths.amax(dim=1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)
        found[rows, slots] = (lengths / largest * LARGEST).ceil().clamp(max=LARGEST).byte()
    return found


# Examples in batches: samples of similar length together, in an order that a seed decides.


class Size(NamedTuple):
    """The largest size of a batch: samples, and tokens with their padding."""

    rows: int = 32
    tokens: int = 2048


USUAL = Size()


@dataclass(frozen=True)
class StackBatch:
    """A batch of one stack: ids and real [rows, tokens], filled up on the right; numbers and experts [n, layers, most]
    and chosen [n, layers, top_k] of the real tokens, row by row."""

    ids: Tensor
    real: Tensor
    numbers: Tensor
    experts: Tensor
    chosen: Tensor


Batch = Mapping[StackName, StackBatch]


def batches(examples: Examples, seed: int | None = None, size: Size = USUAL) -> Iterator[Batch]:
    """Yields batches with every sample once; without a seed in order of length."""
    for rows in plan(examples, seed, size):
        yield {stack: _batch(part, rows) for stack, part in examples.stacks.items()}


def plan(examples: Examples, seed: int | None, size: Size = USUAL) -> list[list[int]]:
    """Returns the places of the samples of each batch."""
    longest = np.max([stack.lengths for stack in examples.stacks.values()], axis=0)
    if seed is None:
        return list(_cut(np.argsort(longest, kind="stable").tolist(), longest.tolist(), size))
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(longest)), longest))
    found = list(_cut(order.tolist(), longest.tolist(), size))
    return [found[place] for place in rng.permutation(len(found))]


def _cut(order: Sequence[int], lengths: Sequence[int], size: Size) -> Iterator[list[int]]:
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) == size.rows or (len(batch) + 1) * lengths[place] > size.tokens):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _batch(stack: StackExamples, rows: Sequence[int]) -> StackBatch:
    parts = [stack.sample(row) for row in rows]
    lengths = torch.from_numpy(stack.lengths[list(rows)])
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    joined = Part(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    ids = torch.zeros(real.shape, dtype=torch.long)
    ids[real] = torch.from_numpy(joined.tokens.astype(np.int64))
    return StackBatch(
        ids, real, torch.from_numpy(joined.numbers.astype(np.float32)),
        torch.from_numpy(joined.experts.astype(np.int64)), torch.from_numpy(joined.chosen.astype(np.int64)),
    )  # fmt: skip
