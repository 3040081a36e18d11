"""Second moments of the inputs of matrices: of experts, drawn towards a sample of their layer's tokens for those that
saw few, and of the matrices outside the experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moeconv.errors import ConversionError
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.source.experts import Call, ExpertCalls
from moeconv.source.tensors import Part, write_tensors
from moert.pack.codec import F32
from moert.pack.files import atomic_write
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# A sample of a layer's tokens: the moments of each of its experts are drawn towards it.

SAMPLED = 4  # tokens for each input of the matrices
_WORTH = 0.2  # of a token of the layer, beside one of the expert's own
_TOGETHER = 0.8  # own tokens for each input that a sample counts for at most, if a quantizer wants products
_SQUARES = 16.0  # own tokens that a sample counts for at most, if it wants squares, which need fewer tokens


class LayerSample:
    """A sample of one layer's tokens, evenly spread over all tokens of its calls, padding left out: SAMPLED tokens for
    each input of the widest matrix at most, and at least half as many if the text has enough. It does not depend on the
    batches."""

    def __init__(self, size: int, width: int) -> None:
        """`size`: inputs of the widest matrix; `width`: numbers in a token's input to the layer's experts."""
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
        """Returns as many tokens of the sample as the moments of `size` inputs need. [tokens, in]"""
        found = torch.cat(self._parts)
        return found[:: max(1, -(-len(found) // (SAMPLED * size)))]


def worth(tokens: int, in_features: int, wants: Wants) -> float:
    """Returns the weight of one of `tokens` sampled tokens, where a token that the expert saw itself has weight 1."""
    most = _SQUARES if wants == "squares" else _TOGETHER * in_features
    return min(_WORTH, most / max(1, tokens))


# Moments of the experts' inputs on calibration text: an artefact that quantizers weigh their errors with.

SCHEMA = "3"
Side = Literal["in", "mid"]
SIDES: tuple[Side, ...] = ("in", "mid")
"""The inputs of gate and up, and the inputs of down."""
BESIDE = "beside."
"""The beginning of the names of moments outside the experts."""


def side_of(projection: str) -> Side:
    return "mid" if projection == "down" else "in"


def summed(x: Tensor, wants: Wants) -> Tensor:
    """Returns the sum of x xᵀ [in, in] or of x**2 [in] over the tokens of x [tokens, in], float32."""
    x = x.float()
    return x.T @ x if wants == "products" else x.square().sum(0)


def told(own: Tensor, rows: int, sampled: Tensor, tokens: int, wants: Wants) -> tuple[Tensor, float]:
    """Returns the mean over an expert's own tokens and its layer's sample together, and the number of tokens that it
    counts as. `own`, `sampled`: sums over `rows` own and `tokens` sampled tokens, [in] or [in, in]."""
    each = worth(tokens, len(own), wants)
    counted = rows + each * tokens
    return (own + each * sampled) / (counted or 1.0), counted


class MomentsError(ConversionError):
    """A file of moments in the work directory can't be used. Delete it: it is made again."""


class Sliced(Protocol):
    """An array in memory, or in a file that is read slice by slice."""

    def __getitem__(self, experts: slice, /) -> npt.NDArray[Any]: ...


class Moments:
    """The moments of all experts: the tokens that each saw, and the mean of x**2 ("squares") or x xᵀ ("products") of
    its inputs x, drawn towards the mean for a sample of its layer's tokens.

    `tensors` maps "D03.rows" to int64 [experts], "D03.in" (inputs of gate and up) and "D03.mid" (inputs of down) to
    float32 [experts, in] or [experts, in, in], "D03.in-counted" and "D03.mid-counted" to the numbers of tokens behind
    these means, float32 [experts]; "beside.NAME" of a matrix outside the experts to float32 [1, in, in], and
    "beside.NAME.rows" to int64 [1]: arrays in memory after `collect`, which takes `moments_bytes`; parts of an open
    file after `load`, which are read only where a method needs them.
    """

    def __init__(self, wants: Wants, tensors: Mapping[str, Sliced]) -> None:
        self.wants = wants
        self.tensors = tensors

    def rows(self, key: ExpertKey) -> int:
        """Returns the number of tokens that the expert saw."""
        return int(self._of(key, "rows")[0])

    def inputs(self, keys: Sequence[ExpertKey], projection: str) -> Inputs:
        """Returns the moments of the inputs of these experts' "gate", "up" or "down" matrices."""
        side = side_of(projection)
        whats = ("rows", side, f"{side}-counted")
        return Inputs(*(np.concatenate([self._of(key, what) for key in keys]) for what in whats))

    def beside(self, name: str) -> Inputs | None:
        """Returns the moments of the inputs of a matrix outside the experts; None where none were seen."""
        place = f"{BESIDE}{name}"
        if place not in self.tensors:
            return None
        moment = self.tensors[place][:]
        return Inputs.of(self.tensors[f"{place}.rows"][:], moment) if moment.any() else None

    def _of(self, key: ExpertKey, what: str) -> npt.NDArray[Any]:
        return self.tensors[f"{key.at}.{what}"][key.expert : key.expert + 1]

    @property
    def digest(self) -> str:
        """sha256 of all figures."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            alone = name.startswith(BESIDE)
            for expert in range(1 if alone else len(self.tensors[name.split(".")[0] + ".rows"][:])):
                digest.update(self.tensors[name][expert : expert + 1].tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Writes a safetensors file, whole or not at all; equal moments give equal bytes. Raises MomentsError."""
        whole = {name: torch.from_numpy(tensor[:]) for name, tensor in self.tensors.items()}
        parts = [Part(name, one.dtype, tuple(one.shape), lambda one=one: one) for name, one in whole.items()]  # type: ignore[misc]
        _write(path, self.wants, parts)

    @staticmethod
    def save_beside(path: Path, rows: int, sizes: Mapping[str, int], sums: Callable[[str], Tensor]) -> None:
        """Writes a file with moments outside the experts alone: of matrices of so many inputs (`sizes`), each over
        `rows` tokens. `sums` returns the sum of x xᵀ for a name, asked for in alphabetical order. Raises
        MomentsError."""
        parts = [
            Part(f"{BESIDE}{name}", torch.float32, (1, size, size), lambda name=name: sums(name) / rows)  # type: ignore[misc]
            for name, size in sizes.items()
        ]
        counts = [Part(f"{part.name}.rows", torch.int64, (1,), lambda: torch.tensor([rows])) for part in parts]
        _write(path, "products", [*parts, *counts])

    @classmethod
    def load(cls, path: Path) -> Moments:
        """Opens a file of moments and reads its header. Raises MomentsError for a file that `save` did not write."""
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


def _write(path: Path, wants: Wants, parts: Sequence[Part]) -> None:
    about = {"format": "moeconv moments", "schema": SCHEMA, "wants": wants}
    try:
        with atomic_write(path) as fresh, fresh.open("wb") as file:
            write_tensors(file, parts, about)
    except OSError as error:
        raise MomentsError(f"can't write {path} ({' '.join(str(error).split())}): free some space there") from None


def moments_bytes(spec: ModelSpec, wants: Wants, beside: Sequence[str] = ()) -> int:
    """Returns the bytes of memory that `collect` takes beside the model and the batch that runs. `beside`: names of the
    matrices outside the experts that it collects, too."""
    sampled = 0 if wants == "nothing" else SAMPLED * widest(spec) * spec.expert_width
    return file_bytes(spec, wants) + len(spec.moe_layers()) * 4 * sampled + beside_bytes(spec, beside)


def beside_bytes(spec: ModelSpec, names: Iterable[str]) -> int:
    """Returns the bytes of the moments of matrices outside the experts, in memory and in a file."""
    return sum(4 * spec.tensors[name].shape[1] ** 2 for name in names)


def file_bytes(spec: ModelSpec, wants: Wants) -> int:
    """Returns the bytes of a file of moments of experts."""
    power = {"nothing": 0, "squares": 1, "products": 2}[wants]
    an_expert = spec.expert_width**power + spec.moe.ffn.d_ff**power if power else 0
    return len(spec.moe_layers()) * 4 * spec.moe.n * an_expert


def widest(spec: ModelSpec) -> int:
    return max(spec.expert_width, spec.moe.ffn.d_ff)


@torch.inference_mode()
def collect(
    calls: ExpertCalls, run: Callable[[], object], wants: Wants, beside: Mapping[str, nn.Linear] = MappingProxyType({})
) -> Moments:
    """Returns the moments of every expert's inputs while `run()` sends text through the unquantized model, padding left
    out; and the products of the inputs of matrices outside the experts, `beside`, by name.

    `wants` is "squares" or "products".
    """
    layers = {place: _Layer(calls, place, wants) for place in calls.spec.moe_layers()}
    others = {name: Listener(calls, module) for name, module in beside.items()}
    with calls.during(watch=lambda place, call: layers[place].see(call)), listening(others.values()):
        run()
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, other in others.items():
        if other.rows:
            tensors[f"{BESIDE}{name}"] = (other.sums / other.rows)[None].numpy()
            tensors[f"{BESIDE}{name}.rows"] = np.array([other.rows])
    for at, layer in layers.items():
        tensors[f"{at}.rows"] = layer.rows.numpy()
        for side in SIDES:
            tensors[f"{at}.{side}"], tensors[f"{at}.{side}-counted"] = layer.mean(side)
    return Moments(wants, tensors)


class Listener:
    """The sum of x xᵀ over the inputs x of a linear module, padding left out, and their number."""

    def __init__(self, calls: ExpertCalls, module: nn.Linear) -> None:
        self.calls, self.module, self.rows = calls, module, 0
        self.sums = torch.zeros(module.in_features, module.in_features)

    def see(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        """Adds the inputs of a call of the module: its forward pre-hook."""
        (given,) = inputs
        x, real = given.reshape(-1, given.shape[-1]), self.calls.now.active
        if real is not None and real.numel() == len(x):
            x = x[real.reshape(-1)]
        self.rows += len(x)
        self.sums += summed(x, "products")


@contextmanager
def listening(listeners: Iterable[Listener]) -> Iterator[None]:
    """Makes each listener see all calls of its module inside a with block."""
    hooks = [each.module.register_forward_pre_hook(each.see) for each in listeners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Layer:
    """The sums over the tokens of each of one layer's experts, and the layer's sample."""

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
            self.sums["in"][expert] += summed(x, self.wants)
            self.sums["mid"][expert] += summed(self.calls.inner(self.place.expert(expert), x), self.wants)

    def mean(self, side: Side) -> tuple[F32, F32]:
        """Returns the mean for each expert, and the number of tokens that it counts as [experts]; it overwrites the
        sums, to save memory."""
        sums, counted = self.sums.pop(side), torch.zeros(len(self.rows))
        x = self.sample.tokens(sums.shape[1])
        sampled = summed(x, self.wants)
        for expert, rows in enumerate(self.rows.tolist()):
            if side == "mid":
                sampled = summed(self.calls.inner(self.place.expert(expert), x), self.wants)
            sums[expert], counted[expert] = told(sums[expert], rows, sampled, len(x), self.wants)
        return sums.numpy(), counted.numpy()
