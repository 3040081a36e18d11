"""What networks are trained on: the tokens of some text, and what every router said of each, on disk.

Of a token and a layer these are the largest numbers that its router chooses by, which is what the truncated
distillation of SiDA (section 3) wants, and its choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.foresight.halves import half
from moeconv.foresight.kept import believed, filled
from moeconv.measure.scorers import Routed, Subject
from moeconv.progress import Bar
from moeconv.source.archs.description import Description
from moeconv.source.routers import Routers, RouterWeights, deciding_of, numbers_of, scores_of
from moert.pack.model_spec import ModelSpec, StackName

MOST_NUMBERS = 30
_FORMATS = {"tokens": np.int32, "numbers": np.float16, "experts": np.uint16, "chosen": np.int16}
_LEAST = 1e-6  # of a score that a logarithm is taken of

I64 = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Of some tokens, one after the other: tokens [n]; numbers and experts [n, layers, most], the largest first; chosen
    [n, layers, top_k], -1 where a token was dropped."""

    tokens: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.float16]
    experts: npt.NDArray[np.uint16]
    chosen: npt.NDArray[np.int16]

    def at(self, places: slice) -> Part:
        return Part(self.tokens[places], self.numbers[places], self.experts[places], self.chosen[places])


@dataclass(frozen=True)
class StackExamples:
    """Of one stack, sample by sample: `lengths` [samples], in tokens of `whole`."""

    lengths: I64
    starts: I64
    whole: Part

    def sample(self, place: int) -> Part:
        return self.whole.at(slice(int(self.starts[place]), int(self.starts[place] + self.lengths[place])))


@dataclass(frozen=True)
class Examples:
    """By stack with experts; a sample has the same place in each."""

    stacks: Mapping[StackName, StackExamples]

    def __len__(self) -> int:
        return len(next(iter(self.stacks.values())).lengths)

    @property
    def tokens(self) -> int:
        return sum(int(stack.lengths.sum()) for stack in self.stacks.values())


class Routing(Protocol):
    """A scorer of moeconv.measure.scorers."""

    @property
    def n_samples(self) -> int: ...

    def routes(self) -> Iterator[Routed]: ...


def stacks_of(spec: ModelSpec) -> list[StackName]:
    """Those with experts."""
    return [name for name in spec.stacks if spec.moe_layers(name)]


def numbers_kept(spec: ModelSpec) -> int:
    """How many numbers of each router are kept of a token."""
    return min(MOST_NUMBERS, spec.moe.n)


def token_bytes(spec: ModelSpec) -> int:
    """What examples take on the disk for each token of the longer of the stacks."""
    layers = max(len(spec.moe_layers(name)) for name in stacks_of(spec))
    return 4 + layers * (4 * numbers_kept(spec) + 2 * spec.moe.router.top_k)


def collected(
    folder: Path, about: str, subject: Subject, description: Description, scorer: Routing, bar: Bar
) -> Examples:
    """What the model says of a scorer's text. What the folder has is taken if it is `about` the same; it is made anew
    otherwise. Raises ConversionError for what the disk refuses."""
    found = filled(folder, about, lambda: _collect(folder, subject, description, scorer, bar))
    with believed(folder):
        return _opened(folder, found["lengths"], subject.spec)


def _shapes(spec: ModelSpec, stack: StackName) -> dict[str, tuple[int, ...]]:
    """Of a token."""
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


def _collect(folder: Path, subject: Subject, description: Description, scorer: Routing, bar: Bar) -> dict[str, Any]:
    """Fills the folder. Returns the tokens of each sample, by stack."""
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
    """Inside the block: what tokens each stack has read last. [rows, tokens]"""
    read: dict[StackName, Tensor] = {}

    def hear(stack: StackName, module: Any, _: Any, named: dict[str, Any]) -> None:
        read[stack] = named["input_ids"]

    with ExitStack() as hooks:
        for stack in subject.spec.stacks:
            tower = subject.family.tower(subject.model, stack)
            hooks.callback(tower.register_forward_pre_hook(partial(hear, stack), with_kwargs=True).remove)
        yield read


def _part(routers: Routers, ids: Tensor, routed: Routed, stack: StackName) -> Part:
    """Of what was read last; rows are filled up on the right."""
    real = (torch.arange(ids.shape[1]) < torch.tensor(routed.lengths[stack])[:, None]).flatten()
    places = [at for at in routers.layers if at.stack == stack]
    said = torch.stack([foretold(routers.heard[at][real], routers.layers[at]) for at in places], dim=1)
    largest = said.topk(min(MOST_NUMBERS, said.shape[-1]), dim=-1)
    chosen = torch.stack([routed.experts[at] for at in places], dim=1)
    return Part(
        ids.flatten()[real].numpy().astype(np.int32),
        half(largest.values),
        largest.indices.numpy().astype(np.uint16),
        chosen.numpy().astype(np.int16),
    )


def foretold(x: Tensor, layer: RouterWeights) -> Tensor:
    """What the network is to say of a layer whose router reads x [tokens, d_model]: weight · x, or where experts are
    chosen by more than this, a number in the order of what they are chosen by. [tokens, experts]"""
    numbers = numbers_of(x, layer)
    part = layer.part
    if part.score == "softmax" or (layer.choice_bias is None and part.groups is None):
        return numbers
    deciding = torch.from_numpy(deciding_of(scores_of(numbers, layer).numpy(), layer))
    return deciding.clamp(min=_LEAST).log()
