"""Checkpoints of published shapes whose tensors are made when they are read: moeconv's Tensors, without a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

from moeconv.source.outline import CheckpointError
from moeconv.source.tensors import Digest
from recipes.bench.shape_list import Stored, described, stored
from recipes.bench.shape_numbers import Numbers, mixed

SEED = 20261124
MAKING = 1
"""Goes up when the same seed makes other numbers."""


class VirtualTensors:
    """Those of one config.json: the same each time, and the same in a model that is cut after some layers."""

    def __init__(self, config: Mapping[str, Any], depth: int, seed: int = SEED) -> None:
        """`depth`: layers of the model as published. Raises CheckpointError for what can't be converted."""
        self.stored: Mapping[str, Stored] = stored(config)
        spec = described(config).spec
        of_token = mixed(spec.moe.router, spec.moe.n)
        self.numbers = Numbers(seed, config["hidden_size"], depth, of_token, spec.head.tied)
        self._what = json.dumps([MAKING, seed, depth, config], sort_keys=True)

    @property
    def names(self) -> Collection[str]:
        return self.stored.keys()

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.stored.values())

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        """One tensor, or one index of its first dimension, in its own dtype. Raises CheckpointError."""
        of = self.stored.get(name)
        if of is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}: it is incomplete")
        if index is None:
            return self.numbers.rows(of, 0, of.shape[0])
        return self.numbers.rows(of, index, index + 1)[0]

    def digest(self, into: Digest) -> None:
        """Adds what the numbers follow from."""
        into.update(self._what.encode())
