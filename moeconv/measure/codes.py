"""Codes of all experts at a width, made layer by layer from what the text asks of each, and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from moeconv.measure.coding import CodingJob, CodingTask, Seen, code_expert, keep, states_in
from moeconv.measure.layered import LayeredModel
from moeconv.measure.passage import Passage
from moeconv.measure.scorers.text import Texts
from moeconv.quantizers.kept import KeptCodes
from moert.pack.model_spec import ExpertKey, LayerKey

EXPERTS_A_TASK = 2

Missing = Mapping[ExpertKey, Sequence[int]]
"""Experts of one layer, and the widths at which they have no codes yet."""
Run = Callable[[CodingJob, Sequence[CodingTask]], Iterator[tuple[CodingTask, int]]]


@dataclass(frozen=True)
class Shared:
    """Workers that code: `workers` opens what runs tasks (see moeconv.sweep.runners.runner_for) for the length of a
    with block."""

    job: CodingJob
    workers: Callable[[], AbstractContextManager[Run]]


class LayerCoding:
    """`texts` are what the quantizer looks at. `likely` are widths that will be asked for one after the other: where
    one of them is, all are made, as looking at the text again would take longer. A run that was killed goes on with
    the experts that are still to do. `shared`: None for coding in this process."""

    def __init__(
        self, model: LayeredModel, kept: KeptCodes, texts: Texts, likely: Set[int] = frozenset(),
        shared: Shared | None = None,
    ) -> None:  # fmt: skip
        self.model, self.kept, self.texts, self.likely, self.shared = model, kept, texts, likely, shared
        self._complete: set[int] = set()

    def ensure(self, widths: set[int]) -> None:
        """Every expert at each of these widths, of which the model is then asked. Raises ConversionError."""
        if not widths <= self._complete:
            widths = widths | self.likely if widths & self.likely else widths
            left = self._left(sorted(widths - self._complete))
            if left:
                self._code(left)
            self._complete |= widths

    def _left(self, widths: Sequence[int]) -> dict[LayerKey, dict[ExpertKey, list[int]]]:
        left: dict[LayerKey, dict[ExpertKey, list[int]]] = {}
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
        """Gives how many experts were coded since it last did."""
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
        """The same; passes stay in this process."""
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
        """What a layer's experts are asked, on the disk."""
        folder.mkdir(parents=True, exist_ok=True)
        keep(self.model.call_of(states, at, self.texts.ids, self.texts.real, states_in(folder)), folder)
        return folder
