"""model.safetensors and its index: which tensors a checkpoint has, and one of them read."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save

from moeconv.errors import ConversionError
from moeconv.source.tensors import INDEX, SINGLE, FileTensors
from tests.fuzz.described import described, file_of
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder

_PART = "model-00001-of-00001.safetensors"


def _file() -> bytes:
    return save(
        {"a.weight": np.ones((2, 3), np.float16), "b": np.zeros(4, np.float32), "c": np.ones((2, 2, 2), np.uint8)}
    )


def read(body: bytes) -> None:
    """An object with a weight_map is an index, beside a part that is sound; all else the only file."""
    root = folder() / "checkpoint"
    root.mkdir(exist_ok=True)
    if b'"weight_map"' in body:
        (root / SINGLE).unlink(missing_ok=True)
        (root / INDEX).write_bytes(body)
        (root / _PART).write_bytes(_file())
    else:
        (root / INDEX).unlink(missing_ok=True)
        (root / SINGLE).write_bytes(file_of(body))
    tensors = FileTensors(root)
    for name in sorted(tensors.names)[:4]:
        tensors.fetch(name)
        tensors.fetch(name, 0)


def seeds() -> list[bytes]:
    names = dict.fromkeys(("a.weight", "b", "c"), _PART)
    index = json.dumps({"metadata": {"total_size": 36}, "weight_map": names}, separators=(",", ":"))
    return [index.encode(), described(_file()), _file()]


TARGET = Target(read, (ConversionError,), seeds)
