"""Codes of all experts at a width, for a model that does not fit memory: made layer by layer and kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.measure.passes import LayeredModel, Passage
from moeconv.measure.scoring import Texts
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder, KeptCodes
from moeconv.quantizers.moments import LayerSample, Listener, Moments, Side, listening, summed, told, widest
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.source.archs.weights import linears_of
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call, Weights, expert_inner
from moert.pack.codec import Width
from moert.pack.layout import Neurons
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# Codes of one layer's experts from their inputs on the text, in this process or in others that see its disk.

Inner = Callable[[ExpertKey, Tensor, Weights], Tensor]
"""An expert's key, x [rows, d_model] and its weights → the inputs of its down matrix [rows, d_ff]."""


class Seen:
    """The call of one layer's experts, and the moments of their inputs: see moeconv.quantizers.moments.Moments."""

    def __init__(self, spec: ModelSpec, call: Call, wants: Wants, inner: Inner) -> None:
        self.call, self.wants, self.inner = call, wants, inner
        sample = LayerSample(widest(spec), spec.expert_width)
        sample.add(call)
        self.sample = sample.tokens(spec.moe.ffn.d_ff)  # from which each expert computes inputs of its down matrix
        entering = sample.tokens(spec.expert_width)
        self.entering = summed(entering, wants), len(entering)

    def by(self, key: ExpertKey, weights: Weights) -> tuple[int, dict[Side, Inputs]]:
        """Returns the number of tokens that an expert saw, and the moments of its matrices' inputs."""
        x = self.call.x[(self.call.chosen == key.expert).any(1)]
        inner, sampled = (self.inner(key, each, weights) for each in (x, self.sample))
        inside = summed(sampled, self.wants), len(sampled)
        return len(x), {"in": self._told(x, *self.entering), "mid": self._told(inner, *inside)}

    def _told(self, x: Tensor, sampled: Tensor, tokens: int) -> Inputs:
        moment, counted = told(summed(x, self.wants), len(x), sampled, tokens, self.wants)
        return Inputs(np.array([len(x)]), moment[None].numpy(), np.array([counted], np.float32))


@torch.inference_mode()
def code_expert(
    coder: ExpertCoder, kept: KeptCodes, key: ExpertKey, widths: Sequence[Width], own: Weights, seen: Seen | None
) -> None:
    """Makes and keeps an expert's codes at some widths. `own`: its weights; `seen`: None if the quantizer needs no
    inputs. Raises ConversionError."""
    weights = {name: one.numpy() for name, one in zip(coder.checkpoint.spec.moe.ffn.projections, own, strict=True)}
    rows, inputs = (0, None) if seen is None else seen.by(key, own)
    for bits in widths:
        kept.put(key, bits, rows, coder.coded(key, bits, weights, inputs))


# Codes by several workers.


@dataclass(frozen=True)
class CodingJob:
    """The settings of a worker. Codes go into the folder `codes`; `about` names everything that they depend on, and
    `neurons` is the one of ExpertCoder."""

    model: Path
    quantizer: str
    group_size: int | None
    codes: Path
    about: str
    neurons: Neurons | None = None


@dataclass(frozen=True)
class CodingTask:
    """Experts of one layer, each with the widths that are still to do. `asked`: the folder with the call of the layer's
    experts (see `keep`); None if the quantizer needs no inputs."""

    layer: LayerKey
    experts: tuple[tuple[ExpertKey, tuple[Width, ...]], ...]
    asked: Path | None

    @property
    def affinity(self) -> str:
        """The name of the preparation that tasks share: the moments of their layer."""
        return f"layer {self.layer}"


class CodingWorker:
    """A worker that codes experts. It opens the checkpoint for itself, and holds the call of one layer at a time,
    mapped."""

    def __init__(self, job: CodingJob) -> None:
        self.checkpoint = Checkpoint.open(job.model)
        quantizer = QUANTIZERS[job.quantizer](job.group_size)
        self.coder = ExpertCoder(self.checkpoint, quantizer, None, neurons=job.neurons)
        self.kept = KeptCodes(job.codes, job.about)
        self._seen: tuple[Path, Seen] | None = None

    def measure(self, task: CodingTask) -> int:
        """Codes a task's experts and returns their number. Raises ConversionError."""
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
    """Returns the path of a call's x [tokens, d_model], float32, in a folder."""
    return folder / "x.states"


def keep(call: Call, folder: Path) -> None:
    """Writes the rest of a call whose x lies in the file `states_in(folder)`. Raises ConversionError."""
    try:
        with states_in(folder).open("rb+") as file:
            os.fsync(file.fileno())  # others may be on other machines
        np.save(folder / "chosen.npy", call.chosen.numpy())
        np.save(folder / "weights.npy", call.weights.numpy())
    except OSError as error:
        raise ConversionError(f"can't use {folder}: {error.strerror or error}; free some space there") from None


def kept_call(folder: Path, width: int) -> Call:
    """Returns the call that `keep` has written; x is read from its file as it is used. Raises ConversionError."""
    try:
        chosen, weights = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("chosen", "weights"))
        x = np.memmap(states_in(folder), np.float32, "c", shape=(len(chosen), width))  # "c": never written back
    except (OSError, ValueError) as error:
        raise ConversionError(f"{folder} can't be read ({error}): run the same command again") from None
    return Call(torch.from_numpy(x), chosen, weights)


# Codes of all experts at a width, made layer by layer from the experts' inputs on the text, and kept.

EXPERTS_A_TASK = 2

Missing = Mapping[ExpertKey, Sequence[Width]]
"""Expert of one layer → the widths at which it has no codes yet."""
Run = Callable[[CodingJob, Sequence[CodingTask]], Iterator[tuple[CodingTask, int]]]


@dataclass(frozen=True)
class Shared:
    """Workers that code: `workers` starts them for the length of a with block and gives the function that runs tasks
    (see moeconv.sweep.cluster.runner_for)."""

    job: CodingJob
    workers: Callable[[], AbstractContextManager[Run]]


class LayerCoding:
    """The coding of all experts, layer by layer. The quantizer sees the experts' inputs on `texts`. `likely` are widths
    that will be needed one after the other: as soon as one is needed, all are made, as another pass of the text would
    take longer. A killed run goes on with the experts that are still to do. `shared`: None for coding in this
    process."""

    def __init__(
        self, model: LayeredModel, kept: KeptCodes, texts: Texts, likely: Set[Width] = frozenset(),
        shared: Shared | None = None,
    ) -> None:  # fmt: skip
        self.model, self.kept, self.texts, self.likely, self.shared = model, kept, texts, likely, shared
        self._complete: set[Width] = set()

    def ensure(self, widths: set[Width]) -> None:
        """Makes the missing codes of every expert at each of these widths. Raises ConversionError."""
        if not widths <= self._complete:
            widths = widths | self.likely if widths & self.likely else widths
            left = self._left(sorted(widths - self._complete))
            if left:
                self._code(left)
            self._complete |= widths

    def _left(self, widths: Sequence[Width]) -> dict[LayerKey, dict[ExpertKey, list[Width]]]:
        left: dict[LayerKey, dict[ExpertKey, list[Width]]] = {}
        for key in self.model.spec.expert_keys():
            missing = [bits for bits in widths if not self.kept.has(key, bits)]
            if missing:
                left.setdefault(key.at, {})[key] = missing
        return left

    def _code(self, left: Mapping[LayerKey, Missing]) -> None:
        model, ids, real = self.model, self.texts.ids, self.texts.real
        model.original_experts()
        states = model.passage(ids, keeps=True)
        if self._wants_text:
            with torch.inference_mode():
                model.through(states, ids, real, "what enters each layer")
        widths = sorted({bits for experts in left.values() for missing in experts.values() for bits in missing})
        coded = self._here(left, states) if self.shared is None else self._by_workers(self.shared, left, states)
        with model.show(f"coding at {', '.join(map(str, widths))} bits", sum(map(len, left.values())), "expert") as bar:
            for count in coded:
                bar.update(count)

    @property
    def _wants_text(self) -> bool:
        return self.model.coder.quantizer.wants != "nothing"

    def _here(self, left: Mapping[LayerKey, Missing], states: Passage) -> Iterator[int]:
        """Codes experts in this process; yields 1 after each."""
        model = self.model
        for at, experts in left.items():
            seen = None
            if self._wants_text:
                call = model.call_of(states, at, self.texts.ids, self.texts.real)
                seen = Seen(model.spec, call, model.coder.quantizer.wants, model.calls.inner)
            model.shelf.expect(list(experts))
            for key, missing in experts.items():
                code_expert(model.coder, self.kept, key, missing, model.shelf.weights(key), seen)
                self.kept.finish(key, missing)
                yield 1
            model.shelf.clear()

    def _by_workers(self, shared: Shared, left: Mapping[LayerKey, Missing], states: Passage) -> Iterator[int]:
        """Codes experts by workers, yields the number of experts of each finished task; passes stay in this process."""
        asked = self.model.room.folder.absolute() / "asked"
        try:
            with shared.workers() as run:
                for at, experts in left.items():
                    folder = self._asked(asked / str(at), states, at) if self._wants_text else None
                    due = [(key, tuple(widths)) for key, widths in experts.items()]
                    parts = (due[start : start + EXPERTS_A_TASK] for start in range(0, len(due), EXPERTS_A_TASK))
                    tasks = [CodingTask(at, tuple(part), folder) for part in parts]
                    for task, count in run(shared.job, tasks):
                        for key, widths in task.experts:
                            self.kept.finish(key, widths)
                        yield count
                    shutil.rmtree(asked, ignore_errors=True)
        finally:
            shutil.rmtree(asked, ignore_errors=True)

    def _asked(self, folder: Path, states: Passage, at: LayerKey) -> Path:
        """Writes the call of a layer's experts into a folder, and returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        keep(self.model.call_of(states, at, self.texts.ids, self.texts.real, states_in(folder)), folder)
        return folder


# Moments of the inputs of matrices outside the experts, layer by layer.


@torch.inference_mode()
def collect_beside(model: LayeredModel, texts: Texts, names: Sequence[str], path: Path) -> None:
    """Writes a file with the moments of the inputs of the named matrices in layers on the texts, in the unquantized
    model. Raises ConversionError."""
    model.original_experts()  # as LayerCoding does, which goes on from the same states
    ids, real = texts.ids, texts.real
    states = model.passage(ids, keeps=True)
    model.through(states, ids, real, "what enters each layer")
    inside = [name for name in names if name != "head.weight"]
    linears = linears_of(model.model, model.checkpoint.description, inside)
    layers = {name: model.family.place(int(name.split(".")[1])) for name in linears}
    of_layer: dict[str, Tensor] = {}  # sums that are not written yet

    def sums(name: str) -> Tensor:
        if name not in of_layer:
            at = layers[name]
            listeners = {each: Listener(model.calls, linears[each]) for each, layer in layers.items() if layer == at}
            with listening(listeners.values()):
                model.answered(states, at, ids, real, lambda _, call: torch.zeros_like(call.x))
            of_layer.update((each, listener.sums) for each, listener in listeners.items())
            bar.update(1)
        return of_layer.pop(name)

    with model.show("inputs outside the experts", len({*layers.values()}), "layer") as bar:
        Moments.save_beside(path, int(real.sum()), {name: one.in_features for name, one in linears.items()}, sums)
