"""Numbers of a quantized model that were trained: gains of the rows of experts' matrices, and weights of norms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from moeconv.matrices import Projection
from moeconv.source.archs.description import Description
from moert.pack.codec import F32, QuantizedMatrix, TrellisMatrix, Width
from moert.pack.model_spec import ExpertKey, StackName

Place = tuple[ExpertKey, str, Width]
"""A matrix of an expert at a width: expert, projection, width."""
MOST_GAIN = 2.0


def norms_of(description: Description) -> list[str]:
    """Returns the canonical names of the weights of norms that a checkpoint has."""
    names = [name for name in description.spec.tensors if name.endswith("norm.weight")]
    return [name for name in names if name in description.parameters]


@dataclass(frozen=True)
class Trained:
    """Trained numbers. `norms`: canonical name → the weights of a norm, in the checkpoint's type. `gains`: the factors
    of the scales of a matrix's rows [out], for the width that they were trained at."""

    norms: Mapping[str, Tensor] = field(default_factory=dict)
    gains: Mapping[Place, F32] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.norms or self.gains)

    @cached_property
    def digest(self) -> str:
        """The sha256, in hexadecimal, of all numbers."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def coded(self, key: ExpertKey, name: str, width: Width, matrix: Projection) -> Projection:
        """Returns a matrix of codes with its scales times the gains of its rows; without gains, as it is."""
        gain = self.gains.get((key, name, width))
        return matrix if gain is None else gained(matrix, gain)

    def to_bytes(self) -> bytes:
        """Returns the content of a safetensors file; equal numbers give equal bytes."""
        gains = {
            " ".join(["gain", *map(str, key), name, f"{width:g}"]): torch.from_numpy(gain)
            for (key, name, width), gain in self.gains.items()
        }
        return save({f"norm {name}": weight.contiguous() for name, weight in self.norms.items()} | gains)

    @classmethod
    def from_bytes(cls, body: bytes) -> Trained:
        """Returns the numbers that `to_bytes` wrote. Raises an exception of safetensors, KeyError or ValueError."""
        norms: dict[str, Tensor] = {}
        gains: dict[Place, F32] = {}
        for called, values in load(body).items():
            kind, *rest = called.split(" ")
            if kind == "norm":
                norms[rest[0]] = values
            else:
                stack, layer, expert, name, width = rest
                key, bits = ExpertKey(cast("StackName", stack), int(layer), int(expert)), float(width)
                gains[key, name, int(bits) if bits.is_integer() else bits] = values.numpy()
        return cls(norms, gains)


def gained(matrix: Projection, gain: F32) -> Projection:
    """Returns a matrix of codes with its scales times the gains of its rows [out]; weights of 16 bits as they are."""
    if not isinstance(matrix, (QuantizedMatrix, TrellisMatrix)):
        return matrix
    names = ("scale",) if isinstance(matrix, TrellisMatrix) else ("scale", "minimum")
    parts: dict[str, Any] = {
        each: (getattr(matrix, each).astype(np.float32) * gain[:, None]).astype(np.float16) for each in names
    }
    return replace(matrix, **parts)


NOTHING = Trained()
