"""How much all experts of a layer cost together at a width, measured: it sets the scale of what gradients say of them.

From what enters a layer on, some windows go through the rest of the model once for each width, all layers' variants
side by side, so that every layer is read once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeconv.artifacts import Bits, uniform
from moeconv.measure.journal import Journal, identity
from moeconv.measure.layered import LayeredModel
from moeconv.measure.passage import Leaving, Passage
from moeconv.measure.scorers.build import spread
from moeconv.measure.scorers.text import Texts
from moeconv.progress import Bar
from moeconv.quantizers.coder import ORIGINAL
from moert.pack.model_spec import LayerKey

WINDOWS = 8


@dataclass(frozen=True)
class Measured:
    """Nats in sum over the windows, for each layer with experts and each pattern; and what it took, in expert rows and
    in time."""

    nats: Mapping[LayerKey, tuple[float, ...]]
    flops: int
    seconds: float


class LayerScales:
    """`patterns` are the widths that all experts of a layer get at once."""

    def __init__(self, model: LayeredModel, texts: Texts, patterns: Sequence[Bits], windows: int = WINDOWS) -> None:
        self.model, self.patterns = model, patterns
        self.places = torch.tensor(spread(len(texts.ids), windows))
        self.texts, self.all_ids = texts.select(self.places.tolist()), texts.ids
        self.n_layers = len(model.skeleton.layers)
        self.at_work = model.spec.moe_layers("decoder")

    def run(self, journal: Journal, about: str, bar: Bar) -> Measured:
        """Behind a pass of all of the text whose states were kept. Raises ConversionError."""
        name = identity(about, "scales", self.places.tolist(), [list(bits) for bits in self.patterns])

        def measured() -> dict[str, Any]:
            calls, started = self.model.calls, time.perf_counter()
            rows = calls.rows
            nats = self._measured(name, bar)
            return {"nats": nats, "flops": calls.flops(calls.rows - rows), "seconds": time.perf_counter() - started}

        entry = journal.remember(name, measured)
        with journal.believed():
            nats = dict(zip(self.at_work, map(tuple, entry["nats"]), strict=True))
            return Measured(nats, entry["flops"], entry["seconds"])

    @torch.inference_mode()
    def _measured(self, name: str, bar: Bar) -> list[list[float]]:
        model, many = self.model, len(self.places)
        model.original_experts()
        states = model.passage(self.all_ids, keeps=True)
        count = len(self.at_work) * len(self.patterns)
        moving = Passage(model.room.folder / "scales" / name[:16], (count * many, *states.shape[1:]))
        bar.update(moving.reached)
        for at in range(moving.reached, self.n_layers):
            with moving.leaving(at + 1) as left:
                if at:
                    self._go_on(moving, at, left)
                self._set_out(states, at, left)
            bar.update(1)
        found = self._judged(states, moving)
        moving.remove()
        return found

    def _variants(self, at: int) -> list[int]:
        """First rows of those that set out at a layer."""
        before = sum(one.layer < at for one in self.at_work) * len(self.patterns)
        here = len(self.patterns) if any(one.layer == at for one in self.at_work) else 0
        return [(before + number) * len(self.places) for number in range(here)]

    def _go_on(self, moving: Passage, at: int, left: Leaving) -> None:
        """What set out at layers before goes through this one, whose experts are as they were."""
        rows = sum(one.layer < at for one in self.at_work) * len(self.patterns) * len(self.places)
        if not rows:
            return
        self.model.original_experts()
        ids, real = (part.repeat(rows // len(self.places), 1) for part in (self.texts.ids, self.texts.real))
        with self.model.ready(at):
            for batch in self.model.batches(ids):
                hidden, final = self.model.step(moving, at, ids, real, batch)
                left[batch] = final if at + 1 == self.n_layers else hidden

    def _set_out(self, states: Passage, at: int, left: Leaving) -> None:
        """The layer with all of its experts at each pattern of widths."""
        for start, bits in zip(self._variants(at), self.patterns, strict=False):
            widths = uniform(self.model.spec, ORIGINAL) | {
                key: bits for key in self.model.spec.expert_keys() if key.at == ("decoder", at)
            }
            self.model.assign(widths)
            with self.model.ready(at):
                for batch in self.model.batches(self.texts.ids):
                    entering = states.entering(at)[self.places[batch]] if at else None
                    hidden, final = self.model.step(states, at, self.texts.ids, self.texts.real, batch, entering)
                    left[start + batch] = final if at + 1 == self.n_layers else hidden

    def _judged(self, states: Passage, moving: Passage) -> list[list[float]]:
        scored, targets = self.texts.scored, self.texts.targets()[self.texts.scored]
        ends, many = moving.entering(self.n_layers), len(self.places)
        with self.model.head() as head:
            reference = head.reference(states.entering(self.n_layers)[self.places][scored])
            nats = [
                float(head.judge(ends[start : start + many][scored], targets, reference)[1].double().sum())
                for start in range(0, len(ends), many)
            ]
        width = len(self.patterns)
        return [nats[start : start + width] for start in range(0, len(nats), width)]
