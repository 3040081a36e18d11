"""What the experts' inputs look like on calibration text: an artefact that quantisers weigh their errors with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.scorers.experts import Call, ExpertCalls
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, Stack

SCHEMA = "1"
Place = tuple[Stack, int]  # a layer with experts
_SIDES = ("in", "mid")  # what enters gate and up, and what enters down


class MomentsError(ConversionError):
    """A file of moments that can't be used."""


class Moments:
    """For each expert the tokens it saw, and the mean of x**2 ("squares") or x xᵀ ("products") of its inputs x.

    `tensors` maps "D03.rows" to int64 [experts], "D03.in" (inputs of gate and up) and "D03.mid" (inputs of down) to
    float32 [experts, in] or [experts, in, in].
    """

    def __init__(self, wants: Wants, tensors: dict[str, npt.NDArray[Any]]) -> None:
        self.wants = wants
        self.tensors = tensors

    def rows(self, key: ExpertKey) -> int:
        """Tokens that the expert saw."""
        return int(self.tensors[_name(key.stack, key.layer, "rows")][key.expert])

    def inputs(self, key: ExpertKey, projection: str) -> Inputs:
        """Of one expert's "gate", "up" or "down" matrix (n = 1)."""
        return self.layer_inputs(key.stack, key.layer, projection, slice(key.expert, key.expert + 1))

    def layer_inputs(self, stack: Stack, layer: int, projection: str, experts: slice = slice(None)) -> Inputs:
        """Of that matrix of several experts of a layer."""
        side = "mid" if projection == "down" else "in"
        rows: npt.NDArray[np.int64] = self.tensors[_name(stack, layer, "rows")][experts]
        moment: F32 = self.tensors[_name(stack, layer, side)][experts]
        return Inputs(rows, moment)

    @property
    def digest(self) -> str:
        """sha256 of all figures."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode() + self.tensors[name].tobytes())
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """A safetensors file."""
        from safetensors.numpy import save

        return save(self.tensors, {"format": "moeconv moments", "schema": SCHEMA, "wants": self.wants})

    @classmethod
    def load(cls, path: Path) -> Moments:
        """Raises MomentsError for a file that is not what `save` wrote."""
        from safetensors import safe_open

        try:
            with safe_open(path, framework="np") as handle:
                about = handle.metadata() or {}
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except Exception as error:
            raise MomentsError(f"{path} can't be read ({' '.join(str(error).split())}): delete it") from None
        if about.get("schema") != SCHEMA or about.get("wants") not in ("squares", "products"):
            raise MomentsError(f"{path} was written by another version: delete it, and it will be measured again")
        return cls(about["wants"], tensors)


def _name(stack: Stack, layer: int, what: str) -> str:
    return f"{stack[0].upper()}{layer:02d}.{what}"


@torch.inference_mode()
def collect(calls: ExpertCalls, run: Callable[[], object], wants: Wants) -> Moments:
    """Sums up what every expert is given while `run()` sends text through the unquantised model, padding left out.

    `wants` is "squares" or "products".
    """
    layers = {place: _Layer(calls, place, wants) for place in calls.spec.moe_layers()}
    with calls.watching(lambda place, call: layers[place].see(call)):
        run()
    tensors: dict[str, npt.NDArray[Any]] = {}
    for (stack, at), layer in layers.items():
        tensors[_name(stack, at, "rows")] = layer.rows.numpy()
        for side in _SIDES:
            tensors[_name(stack, at, side)] = layer.mean(side)
    return Moments(wants, tensors)


class _Layer:
    """Sums over the tokens of one layer's experts."""

    def __init__(self, calls: ExpertCalls, place: Place, wants: Wants) -> None:
        self.calls, self.place = calls, place
        self.products = wants == "products"
        spec = calls.spec
        self.rows = torch.zeros(spec.moe.num_experts, dtype=torch.int64)
        sizes = {"in": spec.d_model, "mid": spec.moe.d_ff}
        self.sums = {
            side: torch.zeros(spec.moe.num_experts, *([size] * (2 if self.products else 1)))
            for side, size in sizes.items()
        }

    def see(self, call: Call) -> None:
        for expert in np.unique(call.chosen[call.chosen >= 0].numpy()).tolist():
            x = call.x[(call.chosen == expert).any(1)]
            self.rows[expert] += len(x)
            self._add(expert, "in", x)
            self._add(expert, "mid", self.calls.inner(ExpertKey(*self.place, expert), x))

    def _add(self, expert: int, side: str, x: Tensor) -> None:
        """x [tokens, in] of one expert."""
        x = x.float()
        self.sums[side][expert] += x.T @ x if self.products else x.square().sum(0)

    def mean(self, side: str) -> F32:
        sums = self.sums[side]
        count = self.rows.clamp(min=1).float().view(-1, *[1] * (sums.dim() - 1))
        mean: F32 = (sums / count).numpy()
        return mean
