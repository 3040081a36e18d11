"""What predictors of neurons are trained on: what enters experts, and which of their neurons fire, on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.foresight.halves import half
from moeconv.foresight.kept import believed, filled
from moeconv.measure.firing import Reads, heard
from moeconv.measure.scorers import Subject
from moeconv.progress import Bar
from moeconv.source.experts import Call
from moert.pack.model_spec import LayerKey, ModelSpec

LARGEST = 255
_FORMATS = {"x": np.float16, "chosen": np.int16, "weights": np.uint8}


class Rows(NamedTuple):
    """Of an expert: what entered it, x F32 [rows, features], and how much each neuron weighed, U8 [rows, d_ff]."""

    x: Tensor
    weights: Tensor


@dataclass(frozen=True)
class LayerFirings:
    """Of some tokens: x F16 [tokens, features], `chosen` I16 [tokens, top_k] (-1: none), and of these experts how much
    each neuron weighs, U8 [tokens, top_k, d_ff]: the length of what it adds to the layer's output, LARGEST for the
    longest of a token and an expert, rounded up; 0 where it does not fire."""

    x: npt.NDArray[np.float16]
    chosen: npt.NDArray[np.int16]
    weights: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.x)

    def some(self, tokens: npt.NDArray[np.int64]) -> Iterator[tuple[int, Rows]]:
        """Of these tokens, in this order, expert by expert."""
        chosen = np.asarray(self.chosen[tokens])
        for expert in np.unique(chosen[chosen >= 0]).tolist():
            rows, slots = np.nonzero(chosen == expert)
            yield expert, self._rows(tokens[rows], slots)

    def of(self, expert: int, most: int) -> Rows:
        """Of one expert, at most so many rows, spread over all there are."""
        rows, slots = np.nonzero(self.chosen == expert)
        if len(rows) > most:
            places = np.arange(most) * len(rows) // most
            rows, slots = rows[places], slots[places]
        return self._rows(rows, slots)

    def _rows(self, tokens: npt.NDArray[Any], slots: npt.NDArray[Any]) -> Rows:
        x = self.x[tokens].astype(np.float32)
        return Rows(torch.from_numpy(x), torch.from_numpy(np.asarray(self.weights[tokens, slots])))


Firings = Mapping[LayerKey, LayerFirings]


def token_bytes(spec: ModelSpec) -> int:
    """What firings take on the disk for each token of all stacks together, at most."""
    layers = max(len(spec.moe_layers(name)) for name in spec.stacks)
    return layers * (2 * spec.expert_width + spec.moe.router.top_k * (2 + spec.moe.ffn.d_ff))


def firings(folder: Path, about: str, subject: Subject, scorer: Reads, bar: Bar) -> Firings:
    """What a model in memory does with a scorer's text, and writes where it writes. What the folder has is taken if it
    is `about` the same. Raises ConversionError for what the disk refuses."""
    found = filled(folder, about, lambda: _collect(folder, subject, scorer, bar))
    with believed(folder):
        return {place: _opened(folder, place, *found["shapes"][str(place)]) for place in subject.spec.moe_layers()}


def _opened(folder: Path, place: LayerKey, tokens: int, *shape: int) -> LayerFirings:
    features, top_k, d_ff = shape
    shapes = {"x": (tokens, features), "chosen": (tokens, top_k), "weights": (tokens, top_k, d_ff)}
    return LayerFirings(
        **{name: np.memmap(folder / f"{place}.{name}", _FORMATS[name], "r", shape=shapes[name]) for name in _FORMATS}
    )


def _collect(folder: Path, subject: Subject, scorer: Reads, bar: Bar) -> dict[str, Any]:
    """Fills the folder. Returns of each layer its tokens, features, top_k and d_ff."""
    spec, shapes = subject.spec, dict[str, list[int]]()
    with ExitStack() as stack:
        files = {
            (place, name): stack.enter_context((folder / f"{place}.{name}").open("wb"))
            for place in spec.moe_layers()
            for name in _FORMATS
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
    """See LayerFirings."""
    calls, found = subject.calls, torch.zeros((*chosen.shape, subject.spec.moe.ffn.d_ff), dtype=torch.uint8)
    for expert in sorted(set(chosen[chosen >= 0].tolist())):
        key, (rows, slots) = place.expert(expert), torch.nonzero(chosen == expert, as_tuple=True)
        lengths = calls.inner(key, x[rows]).abs() * calls.weights(key)[-1].norm(dim=0)
        largest = lengths.amax(dim=1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)
        found[rows, slots] = (lengths / largest * LARGEST).ceil().clamp(max=LARGEST).byte()
    return found
