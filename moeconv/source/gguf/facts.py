"""The metadata of a GGUF file that describe its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from moeconv.source.gguf.container import Container
from moert.pack.codec import F32
from moert.pack.model_spec import MOST_LAYERS

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What a file says of its model. Keys and tensors are named without the architecture and without the layer. All
    methods raise CheckpointError."""

    container: Container
    numbers: Callable[[str], F32]
    """The name of a small tensor → its numbers."""

    @property
    def arch(self) -> str:
        return self.container.metadata.need("general.architecture", str)

    def count(self, key: str, default: int | None = None) -> int:
        return self._one(key, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._one(key, float, default)

    def said(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.container.metadata.values

    def flag(self, key: str, default: bool) -> bool:
        return self._one(key, bool, default)

    def _one(self, key: str, kind: type[T], default: T | None) -> T:
        metadata, name = self.container.metadata, f"{self.arch}.{key}"
        found = metadata.get(name, kind, default)
        return metadata.need(name, kind) if found is None else found

    def each(self, key: str) -> list[int]:
        """Returns a number for each layer, which may be one for all."""
        name, metadata = f"{self.arch}.{key}", self.container.metadata
        if isinstance(metadata.values.get(name), list):
            return self.of_layers(name, int) or []
        return [metadata.need(name, int)] * self.layers

    def bounds(self, key: str) -> list[float] | None:
        """Returns a number for each layer; None if there are none."""
        return self.of_layers(f"{self.arch}.{key}", float)

    def of_layers(self, name: str, kind: type[T]) -> list[T] | None:
        """Returns a list of the metadata with a value for each layer; None if there is none. It may have values for
        layers behind the last one."""
        found = self.container.metadata.listed(name, kind)
        if found is not None and len(found) not in (self.layers, self.blocks):
            raise self.container.metadata.wrong(name, f"should have {self.layers:,} values, it has {len(found):,}")
        return None if found is None else [*found][: self.layers]

    @cached_property
    def blocks(self) -> int:
        found = self.count("block_count")
        if not 1 <= found <= MOST_LAYERS:
            raise self.container.metadata.wrong(f"{self.arch}.block_count", f"is {found}, expected 1 to {MOST_LAYERS}")
        return found

    @property
    def layers(self) -> int:
        """The layers without those behind the last one that predict tokens after the next, of which some files say how
        many the model has, and count none."""
        key = "nextn_predict_layers"
        if not 0 <= (more := self.count(key, 0)) < self.blocks:
            raise self.container.metadata.wrong(f"{self.arch}.{key}", f"is {more} of {self.blocks} layers")
        at, tensors = f"blk.{self.blocks - more}.", self.container.tensors
        usual = f"{at}attn_norm.weight" in tensors and f"{at}nextn.eh_proj.weight" not in tensors
        return self.blocks if usual else self.blocks - more

    def has(self, tensor: str) -> list[bool]:
        """Returns for each layer whether it has a tensor."""
        return [f"blk.{layer}.{tensor}" in self.container.tensors for layer in range(self.layers)]

    def some(self, tensor: str) -> bool:
        return any(self.has(tensor))

    @property
    def heads(self) -> int:
        return max(self.each("attention.head_count"))

    @property
    def head_dim(self) -> int:
        return self.count("attention.key_length", self.count("embedding_length") // max(self.heads, 1))
