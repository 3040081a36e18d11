"""The tensors of a checkpoint whose numbers are coded, decoded when they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moeconv.source.archs.coding import OF_ACTIVATIONS, Kind, Scheme
from moeconv.source.archs.config import ShapeDiffers
from moeconv.source.outline import CheckpointError, line
from moeconv.source.tensors import Digest, Tensors

if TYPE_CHECKING:
    import torch


_DAMAGED = (ShapeDiffers, RuntimeError, IndexError, TypeError, ValueError)
"""Errors of a decoder: its own, and those of torch for shapes and types that do not go together."""


class _Coded(NamedTuple):
    """A coded matrix: the beginning of its tensors' names, and its kind."""

    base: str
    kind: Kind


class DecodedTensors(Tensors):
    """Coded matrices under the names that they have in a checkpoint without codes, beside all other tensors."""

    as_saved = False

    def __init__(self, stored: Tensors, scheme: Scheme) -> None:
        self.stored, self.scheme = stored, scheme
        there = frozenset(stored.names)
        self._coded: Mapping[str, _Coded] = {name: _Coded(base, kind) for name, base, kind in scheme.matrices(there)}
        self._parts = {name: self._of(coded, there) for name, coded in self._coded.items()}
        self.of_activations = sorted(name for name in there if name.endswith(OF_ACTIVATIONS))
        parts = {coded.base + part for name, coded in self._coded.items() for part in self._parts[name]}
        self._names = (there - parts - {*self.of_activations}) | self._coded.keys()

    @classmethod
    def of(cls, stored: Tensors, scheme: Scheme, path: Path) -> DecodedTensors:
        """Returns the tensors of the checkpoint in `path`. Raises CheckpointError if none of them is coded so."""
        found = cls(stored, scheme)
        if not found._coded:
            raise CheckpointError(
                f"{path}: config.json says that its weights are coded by {scheme.name}, and no tensor is: fetch the "
                "checkpoint again, or take quantization_config out if its weights are plain"
            )
        return found

    @property
    def names(self) -> Collection[str]:
        return self._names

    def is_coded(self, name: str) -> bool:
        return name in self._coded

    def dtype16(self, name: str) -> torch.dtype:
        """Returns the type of 16 bits that holds a coded matrix best: the one of its scales, or bfloat16 for scales in
        more or fewer bits."""
        import torch

        scales = [part for part in self.parts(name) if part.endswith(("_scale", ".scales"))]
        in_half = bool(scales) and self.stored.fetch(scales[0]).dtype == torch.float16
        return torch.float16 if in_half else torch.bfloat16

    def parts(self, name: str) -> list[str]:
        """Returns the names of the stored tensors that a tensor is made of."""
        coded = self._coded.get(name)
        return [name] if coded is None else [coded.base + part for part in self._parts[name]]

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        """Returns one tensor, or one index of its first dimension: float32 if it is coded, else in its own dtype.
        Raises CheckpointError."""
        coded = self._coded.get(name)
        if coded is None:
            return self.stored.fetch(name, index)
        from moeconv.source.decoders import DECODERS

        parts = {part: self.stored.fetch(coded.base + part, index) for part in self._parts[name]}
        try:
            return DECODERS[coded.kind.name](parts, self.scheme)
        except _DAMAGED as error:
            raise CheckpointError(f"{name}, coded by {self.scheme.name}, is damaged: {line(error)}") from None

    def digest(self, into: Digest) -> None:
        self.stored.digest(into)

    @staticmethod
    def _of(coded: _Coded, there: Collection[str]) -> list[str]:
        return [*coded.kind.parts, *(part for part in coded.kind.more if coded.base + part in there)]
