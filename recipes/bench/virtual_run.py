"""moeconv's command line, for which some folders are checkpoints whose weights are made when they are read.

`python -m recipes.bench.virtual_run quantize DIR --bits 4`, with DIR from
`python -m recipes.bench.shapes MODEL --virtual`. Only the process itself knows of them, not the workers of a cluster.
"""

from __future__ import annotations

import json
from pathlib import Path

from moeconv.command import cli
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CONFIG
from recipes.bench.virtual import VirtualTensors

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
