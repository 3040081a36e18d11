"""A model that does not fit memory, on trial: the original layer by layer, with what a pack would give back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moeconv.artifacts import Assignment, Bits, uniform
from moeconv.errors import SettingsError
from moeconv.measure.passes import Origin, Passes, Room
from moeconv.progress import Progress
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder
from moeconv.quantizers.dense import DenseCoder
from moeconv.source.checkpoint import F32
from moert.pack.model_spec import ExpertKey


class LayeredModel(Passes):
    """What Measure asks of a Trial, too. `coded` is told which widths are about to be asked of the coder, before they
    are."""

    def __init__(self, coder: ExpertCoder, dense: DenseCoder, room: Room, show: Progress) -> None:
        self.checkpoint, self.dense, self.coder = coder.checkpoint, dense, coder
        self.coded: Callable[[set[int]], None] = lambda widths: None
        self._widths: Assignment = uniform(self.checkpoint.spec, ORIGINAL)
        self._dense_is_stored = False
        checkpoint = self.checkpoint
        origin = Origin(
            checkpoint.path, checkpoint.family, checkpoint.description, self._backbone, self._expert, checkpoint.biases
        )
        super().__init__(origin, room, show)

    @property
    def stored_head(self) -> Tensor | None:
        """See moeconv.measure.loaded.LoadedModel."""
        name = "embed.weight" if self.spec.head.tied else "head.weight"
        return self.dense.stored_weight(name) if name in self.dense.names else None

    @property
    def weights_digest(self) -> str:
        widths = sorted((str(key), bits) for key, bits in self._widths.items())
        return json.dumps([widths, self._dense_is_stored])

    @property
    def are_original(self) -> bool:
        return not self._dense_is_stored and all(set(bits) == {ORIGINAL} for bits in self._widths.values())

    @property
    def preferring(self) -> Any:
        raise SettingsError("--resident needs a model that fits the memory: leave it out, or give more --memory")

    def assign(self, widths: Assignment) -> None:
        """Every expert gets its widths, everything else what a pack stores of it."""
        self.coded({bits for key in widths for bits in widths[key] if bits < 16})
        self._set(widths, dense_is_stored=True)

    def restore(self) -> None:
        """The unquantised model."""
        self._set(uniform(self.spec, ORIGINAL), dense_is_stored=False)

    def original_experts(self) -> None:
        """Unquantised experts among what a pack stores of everything else."""
        self._set(uniform(self.spec, ORIGINAL), dense_is_stored=True)

    def _set(self, widths: Assignment, *, dense_is_stored: bool) -> None:
        self._widths, self._dense_is_stored = widths, dense_is_stored
        self.shelf.clear()

    def _expert(self, key: ExpertKey) -> Mapping[str, F32]:
        bits: Bits = self._widths[key]
        return self.checkpoint.expert(key) if set(bits) == {ORIGINAL} else self.coder.weights(key, bits)

    def _backbone(self, name: str) -> Tensor:
        stored = self._dense_is_stored and name in self.dense.names
        return self.dense.stored_weight(name) if stored else self.dense.source(name)
