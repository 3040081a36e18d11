"""Checkpoints whose weights are made when they are read, and moeconv's command line with such checkpoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from moeconv.command import cli
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CONFIG, CheckpointError
from moeconv.source.tensors import Digest, Tensors
from recipes.bench.shape_numbers import Numbers, Stored, described, mixed, stored

# Checkpoints of published shapes whose tensors are made when they are read: moeconv's Tensors, without a file.

SEED = 20261124
MAKING = 1
"""Goes up when the same seed makes other numbers."""


class VirtualTensors(Tensors):
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


# moeconv's command line, for which some folders are checkpoints whose weights are made when they are read.
# `python -m recipes.bench.virtual quantize DIR --bits 4`, with DIR from `python -m recipes.bench.shapes MODEL
# --virtual`. Only the process itself knows of them, not the workers of a cluster.

VIRTUAL = "virtual.json"
"""Beside the config.json of such a folder: {"depth": layers as published, "seed": …}."""


def mark(folder: Path, depth: int, seed: int) -> None:
    """Says that the folder's weights are made when they are read."""
    (folder / VIRTUAL).write_text(json.dumps({"depth": depth, "seed": seed}) + "\n")


def tensors_of(folder: Path) -> VirtualTensors | None:
    """Those of a folder that is marked; None for any other."""
    if not (folder / VIRTUAL).is_file():
        return None
    marked = json.loads((folder / VIRTUAL).read_text())
    config = json.loads((folder / CONFIG).read_text())
    return VirtualTensors(config, marked["depth"], marked["seed"])


def install() -> None:
    """From now on Checkpoint.open knows such folders, in this process."""
    on_disk = Checkpoint.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[Checkpoint], path_or_hub_id: str | Path, names_only: bool = False) -> Checkpoint:
        tensors = tensors_of(Path(path_or_hub_id))
        if tensors is not None:
            return cls.of(Path(path_or_hub_id), tensors, names_only)
        found: Checkpoint = on_disk(cls, path_or_hub_id, names_only)
        return found

    Checkpoint.open = classmethod(opened)  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    install()
    cli.main()
