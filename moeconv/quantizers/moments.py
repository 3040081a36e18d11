"""What the experts' inputs look like: second moments, and some tokens of experts that get few."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.errors import ConversionError
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.source.experts import Call, ExpertCalls
from moert.pack.codec import F32
from moert.pack.files import atomic_write
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# Some tokens of a layer, of which each of its experts is told too: what an expert saw is drawn to it.

SAMPLED = 4  # tokens for each input of the matrices
_WORTH = 0.2  # of a token of the layer, beside one of the expert's own
_TOGETHER = 0.8  # own tokens for each input that a sample counts for at most, where products are wanted
_SQUARES = 16.0  # and where squares are, which fewer tokens tell


class LayerSample:
    """Tokens of one layer, evenly spread over all that it was asked about, padding left out: `SAMPLED * size` at most,
    and half as many at least where there were so many. The same however the text was cut into batches."""

    def __init__(self, size: int, width: int) -> None:
        """`size`: inputs of the widest matrix; `width` of what the layer is asked about."""
        self.room = SAMPLED * size
        self._stride, self._seen = 1, 0
        self._parts: list[Tensor] = [torch.empty(0, width)]

    def add(self, call: Call) -> None:
        for there in torch.split((call.chosen >= 0).any(1).nonzero()[:, 0], self.room):  # a call may not fit memory
            first = -self._seen % self._stride
            self._seen += len(there)
            self._parts.append(call.x[there[first :: self._stride]].float())
            while sum(map(len, self._parts)) > self.room:
                self._parts = [torch.cat(self._parts)[::2].clone()]
                self._stride *= 2

    def tokens(self, size: int) -> Tensor:
        """As many as tell about `size` inputs [tokens, in]"""
        found = torch.cat(self._parts)
        return found[:: max(1, -(-len(found) // (SAMPLED * size)))]


def worth(tokens: int, in_features: int, wants: Wants) -> float:
    """What one of so many sampled tokens counts beside one that the expert saw itself."""
    most = _SQUARES if wants == "squares" else _TOGETHER * in_features
    return min(_WORTH, most / max(1, tokens))


# What the experts' inputs look like on calibration text: an artefact that quantisers weigh their errors with.

SCHEMA = "2"
Side = Literal["in", "mid"]
SIDES: tuple[Side, ...] = ("in", "mid")
"""What enters gate and up, and what enters down."""


def side_of(projection: str) -> Side:
    return "mid" if projection == "down" else "in"


def summed(x: Tensor, wants: Wants) -> Tensor:
    """x [tokens, in] → the sum of x xᵀ or of x**2 over the tokens, float32."""
    x = x.float()
    return x.T @ x if wants == "products" else x.square().sum(0)


def told(own: Tensor, rows: int, sampled: Tensor, tokens: int, wants: Wants) -> tuple[Tensor, float]:
    """Sums over the tokens that an expert saw, and over those of its layer's sample [in] or [in, in] → the mean of
    both, and how many tokens it counts as."""
    each = worth(tokens, len(own), wants)
    counted = rows + each * tokens
    return (own + each * sampled) / (counted or 1.0), counted


class MomentsError(ConversionError):
    """A file of moments that can't be used."""


class Sliced(Protocol):
    """An array, or one that is still in a file."""

    def __getitem__(self, experts: slice, /) -> npt.NDArray[Any]: ...


class Moments:
    """For each expert the tokens it saw, and the mean of x**2 ("squares") or x xᵀ ("products") of its inputs x, drawn
    to what it would be for a sample of its layer's tokens.

    `tensors` maps "D03.rows" to int64 [experts], "D03.in" (inputs of gate and up) and "D03.mid" (inputs of down) to
    float32 [experts, in] or [experts, in, in], "D03.in-counted" and "D03.mid-counted" to the tokens that these are
    means of, float32 [experts]: arrays in memory after `collect`, which takes `moments_bytes`; parts of an open file
    after `load`, of which no more is read than is asked for.
    """

    def __init__(self, wants: Wants, tensors: Mapping[str, Sliced]) -> None:
        self.wants = wants
        self.tensors = tensors

    def rows(self, key: ExpertKey) -> int:
        """Tokens that the expert saw."""
        return int(self._of(key, "rows")[0])

    def inputs(self, keys: Sequence[ExpertKey], projection: str) -> Inputs:
        """Moments of the inputs of these experts' "gate", "up" or "down" matrices."""
        side = side_of(projection)
        whats = ("rows", side, f"{side}-counted")
        return Inputs(*(np.concatenate([self._of(key, what) for key in keys]) for what in whats))

    def _of(self, key: ExpertKey, what: str) -> npt.NDArray[Any]:
        return self.tensors[_name(key.at, what)][key.expert : key.expert + 1]

    @property
    def digest(self) -> str:
        """sha256 of all figures."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            for expert in range(len(self.tensors[name.split(".")[0] + ".rows"][:])):
                digest.update(self.tensors[name][expert : expert + 1].tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """A safetensors file, whole or not at all; equal moments give equal bytes. Raises MomentsError."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        try:
            with atomic_write(path) as fresh:
                save_file(self._arrays, fresh, self._about)
                _sort_metadata(fresh)
        except (OSError, SafetensorError) as error:
            raise MomentsError(f"can't write {path} ({' '.join(str(error).split())}): free some space there") from None

    @property
    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: tensor[:] for name, tensor in self.tensors.items()}

    @property
    def _about(self) -> dict[str, str]:
        return {"format": "moeconv moments", "schema": SCHEMA, "wants": self.wants}

    @classmethod
    def load(cls, path: Path) -> Moments:
        """Reads the header alone. Raises MomentsError for a file that is not what `save` wrote."""
        from safetensors import safe_open

        try:
            with safe_open(path, framework="np") as handle:
                about = handle.metadata() or {}
                tensors = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        except Exception as error:
            raise MomentsError(f"{path} can't be read ({' '.join(str(error).split())}): delete it") from None
        if about.get("schema") != SCHEMA or about.get("wants") not in ("squares", "products"):
            raise MomentsError(f"{path} was written by another version: delete it, and it will be measured again")
        return cls(about["wants"], tensors)


def _sort_metadata(path: Path) -> None:
    """In the header of a safetensors file: the library writes it in an order that differs from process to process."""
    with path.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":")).encode().ljust(length))


def moments_bytes(spec: ModelSpec, wants: Wants) -> int:
    """Memory that `collect` takes beside the model and the batch that runs."""
    sampled = 0 if wants == "nothing" else SAMPLED * widest(spec) * spec.expert_width
    return file_bytes(spec, wants) + len(spec.moe_layers()) * 4 * sampled


def file_bytes(spec: ModelSpec, wants: Wants) -> int:
    """What moments take where they are kept."""
    power = {"nothing": 0, "squares": 1, "products": 2}[wants]
    an_expert = spec.expert_width**power + spec.moe.ffn.d_ff**power if power else 0
    return len(spec.moe_layers()) * 4 * spec.moe.n * an_expert


def widest(spec: ModelSpec) -> int:
    return max(spec.expert_width, spec.moe.ffn.d_ff)


def _name(at: LayerKey, what: str) -> str:
    return f"{at}.{what}"


@torch.inference_mode()
def collect(calls: ExpertCalls, run: Callable[[], object], wants: Wants) -> Moments:
    """Sums up what every expert is given while `run()` sends text through the unquantised model, padding left out.

    `wants` is "squares" or "products".
    """
    layers = {place: _Layer(calls, place, wants) for place in calls.spec.moe_layers()}
    with calls.watching(lambda place, call: layers[place].see(call)):
        run()
    tensors: dict[str, npt.NDArray[Any]] = {}
    for at, layer in layers.items():
        tensors[_name(at, "rows")] = layer.rows.numpy()
        for side in SIDES:
            tensors[_name(at, side)], tensors[_name(at, f"{side}-counted")] = layer.mean(side)
    return Moments(wants, tensors)


class _Layer:
    """Sums over the tokens of one layer's experts."""

    def __init__(self, calls: ExpertCalls, place: LayerKey, wants: Wants) -> None:
        self.calls, self.place = calls, place
        self.wants = wants
        spec = calls.spec
        self.rows = torch.zeros(spec.moe.n, dtype=torch.int64)
        self.sample = LayerSample(widest(spec), spec.expert_width)
        sizes: dict[Side, int] = {"in": spec.expert_width, "mid": spec.moe.ffn.d_ff}
        self.sums = {
            side: torch.zeros(spec.moe.n, *([size] * (2 if wants == "products" else 1))) for side, size in sizes.items()
        }

    def see(self, call: Call) -> None:
        self.sample.add(call)
        for expert in np.unique(call.chosen[call.chosen >= 0].numpy()).tolist():
            x = call.x[(call.chosen == expert).any(1)]
            self.rows[expert] += len(x)
            self._add(expert, "in", x)
            self._add(expert, "mid", self.calls.inner(ExpertKey(*self.place, expert), x))

    def _add(self, expert: int, side: Side, x: Tensor) -> None:
        """x [tokens, in] of one expert."""
        self.sums[side][expert] += summed(x, self.wants)

    def mean(self, side: Side) -> tuple[F32, F32]:
        """The mean for each expert, and what it counts as; it overwrites the sums, to save memory."""
        sums, counted = self.sums.pop(side), torch.zeros(len(self.rows))
        x = self.sample.tokens(sums.shape[1])
        sampled = summed(x, self.wants)
        for expert, rows in enumerate(self.rows.tolist()):
            if side == "mid":
                sampled = summed(self.calls.inner(self.place.expert(expert), x), self.wants)
            sums[expert], counted[expert] = told(sums[expert], rows, sampled, len(x), self.wants)
        return sums.numpy(), counted.numpy()
