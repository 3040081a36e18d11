"""Codes of one layer's experts from what the text asks of them, in this process or in others that see its disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.quantizers.kept import KeptCodes
from moeconv.quantizers.moments import Side, summed, told, widest
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.quantizers.sample import LayerSample
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call, Weights, expert_inner
from moert.pack.layout import Neurons
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

Inner = Callable[[ExpertKey, Tensor, Weights], Tensor]
"""What enters an expert's down matrix: its key, x [rows, d_model], its weights → [rows, d_ff]."""


class Seen:
    """What one layer's experts were asked, and the moments of it: see moeconv.quantizers.moments.Moments."""

    def __init__(self, spec: ModelSpec, call: Call, wants: Wants, inner: Inner) -> None:
        self.call, self.wants, self.inner = call, wants, inner
        sample = LayerSample(widest(spec), spec.expert_width)
        sample.add(call)
        self.sample = sample.tokens(spec.moe.ffn.d_ff)  # of which each expert makes what enters its down matrix
        entering = sample.tokens(spec.expert_width)
        self.entering = summed(entering, wants), len(entering)

    def by(self, key: ExpertKey, weights: Weights) -> tuple[int, dict[Side, Inputs]]:
        """Tokens that an expert saw, and the moments of what its matrices saw."""
        x = self.call.x[(self.call.chosen == key.expert).any(1)]
        inner, sampled = (self.inner(key, each, weights) for each in (x, self.sample))
        inside = summed(sampled, self.wants), len(sampled)
        return len(x), {"in": self._told(x, *self.entering), "mid": self._told(inner, *inside)}

    def _told(self, x: Tensor, sampled: Tensor, tokens: int) -> Inputs:
        moment, counted = told(summed(x, self.wants), len(x), sampled, tokens, self.wants)
        return Inputs(np.array([len(x)]), moment[None].numpy(), np.array([counted], np.float32))


@torch.inference_mode()
def code_expert(
    coder: ExpertCoder, kept: KeptCodes, key: ExpertKey, widths: Sequence[int], own: Weights, seen: Seen | None
) -> None:
    """Makes and keeps an expert's codes at some widths. `own`: its weights; `seen`: None where the quantizer needs
    nothing. Raises ConversionError."""
    weights = {name: one.numpy() for name, one in zip(coder.checkpoint.spec.moe.ffn.projections, own, strict=True)}
    rows, inputs = (0, None) if seen is None else seen.by(key, own)
    for bits in widths:
        kept.put(key, bits, rows, coder.coded(key, bits, weights, inputs))


# Shared out -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodingJob:
    """What a worker is made from. Codes go into the folder `codes`; `about` names all that they are decided by, and
    `neurons` is as of ExpertCoder."""

    model: Path
    quantizer: str
    group_size: int | None
    codes: Path
    about: str
    neurons: Neurons | None = None


@dataclass(frozen=True)
class CodingTask:
    """Experts of one layer, each with the widths that are still to do. `asked`: the folder with what the layer's
    experts were asked (`keep`); None where the quantizer needs nothing."""

    layer: LayerKey
    experts: tuple[tuple[ExpertKey, tuple[int, ...]], ...]
    asked: Path | None

    @property
    def affinity(self) -> str:
        """What a worker prepares for it: the moments of its layer."""
        return f"layer {self.layer}"


class CodingWorker:
    """Opens the checkpoint for itself; of what was asked it has one layer at a time, mapped."""

    def __init__(self, job: CodingJob) -> None:
        self.checkpoint = Checkpoint.open(job.model)
        quantizer = QUANTIZERS[job.quantizer](job.group_size)
        self.coder = ExpertCoder(self.checkpoint, quantizer, None, neurons=job.neurons)
        self.kept = KeptCodes(job.codes, job.about)
        self._seen: tuple[Path, Seen] | None = None

    def measure(self, task: CodingTask) -> int:
        """How many experts were coded. Raises ConversionError."""
        seen = None if task.asked is None else self._seen_in(task.asked)
        projections = self.checkpoint.spec.moe.ffn.projections
        for key, widths in task.experts:
            source = self.checkpoint.expert(key)
            own = tuple(torch.from_numpy(source[name]) for name in projections)
            code_expert(self.coder, self.kept, key, widths, own, seen)
        return len(task.experts)

    def _seen_in(self, folder: Path) -> Seen:
        if self._seen is None or self._seen[0] != folder:
            self._seen = None
            call, wants = kept_call(folder, self.checkpoint.spec.expert_width), self.coder.quantizer.wants
            with torch.inference_mode():
                self._seen = folder, Seen(self.checkpoint.spec, call, wants, self._inner)
        return self._seen[1]

    def _inner(self, key: ExpertKey, x: Tensor, weights: Weights) -> Tensor:
        ffn = self.checkpoint.spec.moe.ffn
        biases = self.checkpoint.biases(key) if ffn.bias else {}
        return expert_inner(x, weights, tuple(torch.from_numpy(values) for values in biases.values()), ffn)


def states_in(folder: Path) -> Path:
    """The file of a call's x [tokens, d_model], float32."""
    return folder / "x.states"


def keep(call: Call, folder: Path) -> None:
    """Writes the rest of a call whose x lies in `states_in` the folder. Raises ConversionError."""
    try:
        with states_in(folder).open("rb+") as file:
            os.fsync(file.fileno())  # others may be on other machines
        np.save(folder / "chosen.npy", call.chosen.numpy())
        np.save(folder / "weights.npy", call.weights.numpy())
    except OSError as error:
        raise ConversionError(f"can't use {folder}: {error.strerror or error}; free some space there") from None


def kept_call(folder: Path, width: int) -> Call:
    """What `keep` has written; x is read from the file as it is used. Raises ConversionError."""
    try:
        chosen, weights = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("chosen", "weights"))
        x = np.memmap(states_in(folder), np.float32, "c", shape=(len(chosen), width))  # "c": never written back
    except (OSError, ValueError) as error:
        raise ConversionError(f"{folder} can't be read ({error}): run the same command again") from None
    return Call(torch.from_numpy(x), chosen, weights)
