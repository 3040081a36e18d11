"""How unevenly routers spread tokens over experts: of the reference models, and of models of published shapes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from moeconv.source.archs import Description
from moeconv.source.archs.description import Source
from moeconv.source.outline import CONFIG, Outline
from moert.pack.parts import Router
from recipes.bench.sized import SMOKE
from tests.published import PUBLISHED

# Which tensors a checkpoint of a published shape has: names, shapes and types as they were published.

MODELS = {
    "olmoe": "OLMoE-1B-7B",
    "mixtral": "Mixtral-8x7B",
    "qwen3": "Qwen3-30B-A3B",
    "gpt-oss": "gpt-oss-20b",
    "deepseek-v3": "DeepSeek-V3",
    "opt": "OPT-1.3B",
}
"""As the command calls them → in tests/published.py."""

Kind = Literal[
    "embed", "position", "head", "router", "choice bias", "norm", "last norm", "inner norm", "bias", "written", "into",
    "attended", "out of", "expert", "threshold", "fired",
]  # fmt: skip
"""What a tensor does. "into": matrices that read the residual stream or something inside a layer; "attended", "out of"
and "expert": those that write into it, behind attention, in networks for all tokens and in experts; "written": biases
of these; "inner norm": of queries, keys and latents; "bias": all other biases, and sinks; "threshold": that before a
relu without a gate, below which a neuron stays silent; "fired" takes the place of "expert" behind it."""
_MATRICES = ("into", "attended", "out of", "expert")
_SILENT: Mapping[str, Kind] = {"expert.up.bias": "threshold", "expert.down.weight": "fired"}
Form = Literal["fp8", "fp8 scales", "fp4", "fp4 scales"]

_NARROW = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8192, "eos_token_id": 1, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
"""Sizes and ids in the place of published ones, where only shown is that a bench runs; the vocabulary is the wiki
model's, whose tokenizer these models have."""
_BLOCK, _GROUP = 128, 32
_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8 scales": torch.float32, "fp4": torch.uint8, "fp4 scales": torch.uint8}


@dataclass(frozen=True)
class Stored:
    """One tensor. `form`: how its numbers are coded, None for bfloat16; `inputs`: of a matrix, how many numbers a row
    of it has once they are decoded, otherwise 1."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    form: Form | None = None
    inputs: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """The choice biases of DeepSeek are float32, as published."""
        if self.form is None:
            return torch.float32 if self.kind == "choice bias" else torch.bfloat16
        return _DTYPES[self.form]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def config_of(model: str, layers: int | None = None) -> dict[str, Any]:
    """A key of MODELS, cut after so many layers; None for all. Raises ValueError for more than it has."""
    config = dict(PUBLISHED[MODELS[model]])
    if SMOKE:
        config |= {name: value for name, value in _NARROW.items() if name in config}
    has = config["num_hidden_layers"]
    least = config.get("first_k_dense_replace", 0) + 1
    if layers is not None and not least <= layers <= has:
        raise ValueError(f"{model} is made with {least} to {has} layers, not {layers}")
    config["num_hidden_layers"] = layers or has
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config


def described(config: Mapping[str, Any]) -> Description:
    """What moeconv makes of a config.json. Raises CheckpointError for what can't be converted."""
    return Outline.of(config, {}, Path(CONFIG)).description


def stored(config: Mapping[str, Any]) -> dict[str, Stored]:
    """All tensors of a checkpoint with this config.json, in the order of the layers; those that no pack takes (what
    predicts several tokens at once) are left out. Raises CheckpointError for what can't be converted."""
    description = described(config)
    fp8 = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    found: dict[str, Stored] = {}
    ffn = description.spec.moe.ffn
    silent = _SILENT if ffn.act.name == "relu" and ffn.bias and not ffn.gated else {}
    for canonical, source, shape in _sources(description):
        kind = silent.get(canonical) or _kind(canonical)
        for each in _parts(source, source.shape or shape, kind, description, fp8):
            found[each.name] = each
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _sources(description: Description) -> Iterator[tuple[str, Source, tuple[int, ...]]]:
    """Canonical names, where they come from, and the pack's shape."""
    spec = description.spec
    for name, tensor in spec.tensors.items():
        if name in description.backbone:
            yield name, description.backbone[name], tensor.shape
    for key in spec.expert_keys():
        for projection in spec.moe.ffn.projections:
            shape = spec.projection_shape(projection)
            yield f"expert.{projection}.weight", description.experts(key, projection), shape
            if description.biases is not None:
                yield f"expert.{projection}.bias", description.biases(key, projection), shape[:1]


def _parts(source: Source, shape: tuple[int, ...], kind: Kind, description: Description, fp8: bool) -> Iterator[Stored]:
    """The tensors that one source is made of; one index of the first dimension becomes all experts of a layer."""
    stack = () if source.index is None else (description.spec.moe.n,)
    inputs = shape[-1] if len(shape) > 1 else 1
    if description.mxfp4 and stack and len(shape) > 1:
        groups = (*stack, shape[0], shape[1] // _GROUP)
        yield Stored(f"{source.name}_blocks", (*groups, _GROUP // 2), kind, "fp4", inputs)
        yield Stored(f"{source.name}_scales", groups, kind, "fp4 scales", inputs)
    elif fp8 and kind in _MATRICES:
        yield Stored(source.name, shape, kind, "fp8", inputs)
        blocks_each_way = (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))
        yield Stored(f"{source.name}_scale_inv", blocks_each_way, kind, "fp8 scales", inputs)
    else:
        yield Stored(source.name, (*stack, *shape), kind, None, inputs)


def _kind(canonical: str) -> Kind:
    first = canonical.partition(".")[0]
    part = canonical.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if first in ("embed", "head"):
        return "embed" if first == "embed" else "head"
    if part == "positions":
        return "position"
    if canonical.endswith(".bias"):
        return "written" if part in ("o", "down") else "bias"
    if canonical == "decoder.norm.weight":
        return "last norm"
    if part in ("mixer_norm", "ffn_norm"):
        return "norm"
    if part.endswith("norm"):
        return "inner norm"
    if part == "choice_bias":
        return "choice bias"
    if part == "sinks":
        return "bias"
    if part == "router":
        return "router"
    if part == "down":
        return "expert" if first == "expert" else "out of"
    return "attended" if part == "o" else "into"


def _place(name: str) -> tuple[int, int, int, str]:
    """The embedding, then the layers with what all tokens need and then the experts by number, then the rest."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if layer is None:
        return (-1 if "embed" in name else 1 << 20), 0, 0, name
    return int(layer[1]), int(".experts" in name), int(expert[1]) if expert else 0, name


# Numbers for tensors of published shapes: random, but for what matters to a conversion as in trained models.
# What was measured in the wiki and wikids models of recipes/models: matrices of experts are Gaussian (kurtosis 3.0)
# with a deviation of 0.9 to 2.2 over √inputs, norms spread by a tenth around 0.5 to 1, the last is around 1.4, and
# routers send 1.5 to 2.4 even shares to the busiest expert of a layer, 32% to 45% to the busiest quarter
# (`skew`). A few channels of the residual stream are far larger than the others, in all tokens with
# one sign, and norms make them smaller again. Through them routers prefer some experts whatever the token is.
# Neurons behind a relu are silent for most tokens, and most of what fires is few of them: 3% fire in OPT-6.7B
# (arXiv 2312.11514), and 26% of all do four fifths of it in OPT-30B (arXiv 2312.12456). Here each has a threshold
# of its own.

POOL = 2**25 - 39
"""Numbers in a pool: a prime, so that no row of a matrix begins where another does when a tensor goes round."""
OUTLIER, IN_NORM, PER_FEATURES = 10.0, 0.3, 512
"""Size of an outlier channel in embeddings whose others are near 1; what norms multiply it with; one is in so many."""
GROWTH = 4.0
"""What all layers together add to the residual stream's mean square, which begins near 1: in the wiki model it grows
fivefold behind the first layer. However many layers there are, each adds as much."""
PREFERENCE = 0.15
"""Deviation of what routers prefer experts by, in logits; what they say to tokens has about 1."""
_GAINS: dict[Kind, float] = {
    "embed": 1.0, "head": 2.0, "router": 1.2, "into": 1.2, "attended": 1.4, "out of": 3.3, "expert": 3.3, "bias": 0.1,
    "fired": 11.0, "written": 0.1, "position": 0.5,
}  # fmt: skip
"""Deviation of matrices, over √inputs; of those that write into the stream over √layers too."""
_WRITING = ("attended", "out of", "expert", "fired")
_THRESHOLD = (-2.15, 0.6)  # mean and deviation, where what meets it has about 1
_CENTRES: dict[Kind, float] = {"norm": 0.85, "last norm": 1.4, "inner norm": 1.0}
_SPREAD = 0.12  # of norms, of the logarithm
_CHOICE = (0.25, 0.06)  # choice biases of wikids: mean and deviation
_FP8_STEP, _FP4_STEP, _FP4_BIAS = 64.0, 2.5, 127
_FP4_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the numbers of E2M1


def random_of(seed: int, *of: str | int) -> np.random.Generator:
    """A generator that follows from a seed and names alone."""
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32("/".join(map(str, of)).encode())]))


@dataclass(frozen=True)
class Numbers:
    """Numbers that follow from the seed, a tensor's name and a place in it alone. `features`: of the residual stream;
    `depth`: layers of the model as published; `mixed`: what experts of one token are worth together (see `mixed`);
    `tied`: whether the embedding is the head."""

    seed: int
    features: int
    depth: int
    mixed: float
    tied: bool = False

    @cached_property
    def pool(self) -> torch.Tensor:
        """Standard normal numbers, bfloat16 [POOL]: drawn once, as drawing each anew takes longer than a disk does."""
        random = np.random.Generator(np.random.SFC64([self.seed]))
        found, step = torch.empty(POOL, dtype=torch.bfloat16), 1 << 20
        for at in range(0, POOL, step):
            drawn = random.standard_normal(min(step, POOL - at), dtype=np.float32)
            found[at : at + len(drawn)] = torch.from_numpy(drawn)
        return found

    @cached_property
    def fp8(self) -> torch.Tensor:
        """The pool's numbers in steps of 1/64, float8_e4m3fn [POOL]."""
        return torch.cat([(part.float() * _FP8_STEP).to(torch.float8_e4m3fn) for part in _pieces(self.pool)])

    @cached_property
    def fp4(self) -> torch.Tensor:
        """Pairs of the pool's numbers as two codes of E2M1 to a byte, uint8 [POOL // 2]."""
        edges, found = torch.tensor(_FP4_EDGES), []
        for part in _pieces(self.pool[: POOL // 2 * 2]):
            values = part.float() * _FP4_STEP
            codes = torch.bucketize(values.abs(), edges, out_int32=True) | (values < 0).int() << 3
            found.append((codes[0::2] | codes[1::2] << 4).to(torch.uint8))
        return torch.cat(found)

    @cached_property
    def outliers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which channels are larger, int64 [n], and their signs, float32 [n]."""
        random, n = random_of(self.seed, "outliers"), max(1, round(self.features / PER_FEATURES))
        channels = np.sort(random.choice(self.features, n, replace=False))
        return torch.from_numpy(channels), torch.from_numpy(random.choice([-1.0, 1.0], n).astype(np.float32))

    def rows(self, of: Stored, start: int, stop: int) -> torch.Tensor:
        """Those of its first dimension, as they are stored."""
        shape = (stop - start, *of.shape[1:])
        if of.form == "fp8":
            return self._cut(self.fp8.view(torch.uint8), of, start, stop).view(torch.float8_e4m3fn).view(shape)
        if of.form == "fp4":
            return self._cut(self.fp4, of, start, stop).view(shape)
        if of.form is not None:
            return self._scales(of)[start:stop]
        if of.kind in ("norm", "last norm", "inner norm", "choice bias", "threshold"):
            return self._vector(of)[start:stop]
        found = self._cut(self.pool, of, start, stop, self._deviation(of)).view(shape)
        if of.kind == "embed":
            self._enlarge(found)
        return self._prefer(found, of, start) if of.kind == "router" and len(shape) == 2 else found

    def _cut(self, pool: torch.Tensor, of: Stored, start: int, stop: int, factor: float | None = None) -> torch.Tensor:
        """Neighbours in the pool, times the factor, from a place that follows from the name, and goes round at its end;
        each expert of a stack begins at a place of its own. [numbers]"""
        size = prod(of.shape[1:])
        found = torch.empty((stop - start) * size, dtype=pool.dtype)
        if len(of.shape) > 2:
            for row, into in zip(range(start, stop), found.view(stop - start, size), strict=True):
                _fill(into, pool, self._place(of.name, row), factor)
        else:
            _fill(found, pool, self._place(of.name) + start * size, factor)
        return found

    def _place(self, *of: str | int) -> int:
        return int(random_of(self.seed, *of).integers(POOL))

    def _deviation(self, of: Stored) -> float:
        gain = _GAINS[of.kind]
        if of.kind in _WRITING:
            gain *= self.depth**-0.5 * self._stream
        if of.kind == "expert":
            gain /= self.mixed
        if of.kind in ("embed", "position", "written"):
            return float(gain * self._stream)
        return float(gain if of.kind == "bias" else gain * of.inputs**-0.5)

    @property
    def _stream(self) -> float:
        """What numbers of the residual stream begin with: those of a head, where that is the embedding."""
        return float(_GAINS["head"] * self.features**-0.5 if self.tied else 1.0)

    def _vector(self, of: Stored) -> torch.Tensor:
        drawn = random_of(self.seed, of.name).standard_normal(of.shape, dtype=np.float32)
        if of.kind == "choice bias":
            return torch.from_numpy(_CHOICE[0] + np.float32(_CHOICE[1]) * drawn)
        if of.kind == "threshold":
            return torch.from_numpy(_THRESHOLD[0] + np.float32(_THRESHOLD[1]) * drawn).to(torch.bfloat16)
        found = torch.from_numpy(_CENTRES[of.kind] * np.exp(np.float32(_SPREAD) * drawn))
        if of.kind == "last norm" and self.tied:  # or the head would say the token that was read
            found *= torch.from_numpy(random_of(self.seed, of.name, "signs").choice(np.float32([-1, 1]), of.shape))
        if of.kind != "inner norm":
            found[self.outliers[0]] = IN_NORM * (_CENTRES[of.kind] if of.kind == "last norm" else 1.0)
        return found.to(torch.bfloat16)

    def _scales(self, of: Stored) -> torch.Tensor:
        random, deviation = random_of(self.seed, of.name), self._deviation(of)
        if of.form == "fp8 scales":
            drawn = random.standard_normal(of.shape, dtype=np.float32)
            return torch.from_numpy(np.float32(deviation / _FP8_STEP) * np.exp(np.float32(0.2) * drawn))
        nearest = _FP4_BIAS + round(float(np.log2(deviation / _FP4_STEP)))
        steps = random.choice(np.array([-1, 0, 0, 0, 1], np.int8), of.shape)
        return torch.from_numpy((nearest + steps).astype(np.uint8))

    def _enlarge(self, rows: torch.Tensor) -> None:
        """Outlier channels of embeddings [tokens, features], in place: of one sign, a tenth more or less."""
        channels, signs = self.outliers
        apart = 1 + 0.1 * rows[:, channels].float() / self._stream
        rows[:, channels] = (apart * OUTLIER * self._stream * signs).to(rows.dtype)

    def _prefer(self, rows: torch.Tensor, of: Stored, start: int) -> torch.Tensor:
        """Rows of a router [experts, features] that like what outlier channels always say, or dislike it."""
        channels, signs = self.outliers
        liked = PREFERENCE * random_of(self.seed, of.name).standard_normal(of.shape[0], dtype=np.float32)
        weights = (
            torch.from_numpy(liked)[start : start + len(rows), None] * signs / (len(signs) * self._normed(of.name))
        )
        rows[:, channels] = weights.to(rows.dtype)
        return rows

    def _normed(self, router: str) -> float:
        """About what a router sees in an outlier channel: less in later layers, where the others are larger."""
        layer = int(router.partition(".layers.")[2].partition(".")[0])
        square = 1 + OUTLIER**2 / PER_FEATURES + GROWTH * (layer + 0.5) / self.depth
        return float(OUTLIER * IN_NORM / square**0.5)


def mixed(router: Router, num_experts: int) -> float:
    """√(Σ p²) of a token's weights p, whose experts write into the stream independently of each other, where routers
    answer with about standard normal logits."""
    logits = torch.from_numpy(random_of(0, "mixed").standard_normal((512, num_experts)))
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(1)
    best = scores.topk(router.top_k, 1).values
    weights = best / best.sum(1, keepdim=True) if router.renormalise else best
    return float((weights * router.factor).square().sum(1).mean().sqrt())


def _pieces(pool: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of a million numbers: what they become on the way takes more room than they do."""
    return (pool[at : at + (1 << 20)] for at in range(0, len(pool), 1 << 20))


def _fill(into: torch.Tensor, pool: torch.Tensor, place: int, factor: float | None) -> None:
    done = 0
    while done < len(into):
        at = (place + done) % len(pool)
        part = pool[at : at + len(into) - done]
        some = into[done : done + len(part)]
        if factor is None:
            some.copy_(part)
        else:
            torch.mul(part, factor, out=some)
        done += len(part)


Choices = npt.NDArray[np.int64]  # [tokens, top_k], of one layer


@dataclass(frozen=True)
class Skew:
    """Of one layer. `busiest`: what the most used expert gets, in even shares; `quarter`: share of all choices that
    the most used quarter of the experts gets; `unused`: share of the experts that no token goes to."""

    busiest: float
    quarter: float
    unused: float


def skew(choices: Choices, num_experts: int) -> Skew:
    counts = np.sort(np.bincount(choices.ravel(), minlength=num_experts))[::-1]
    quarter = counts[: -(-num_experts // 4)].sum() / counts.sum()
    return Skew(counts[0] / counts.mean(), float(quarter), float((counts == 0).mean()))


@contextmanager
def heard(model: Any) -> Iterator[list[Choices]]:
    """What the routers of a model of transformers select, by layer, when it is run on one text within the block."""
    found: list[Choices] = []
    routers = [module for name, module in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]

    def hear(module: Any, inputs: Any, output: Any) -> None:
        found.append(output[-1].reshape(-1, output[-1].shape[-1]).numpy())

    handles = [router.register_forward_hook(hear) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def of_model(model: Any, windows: Sequence[Sequence[int]], num_experts: int) -> list[Skew]:
    """Of each layer, over all windows."""
    texts = []
    for ids in windows:
        with heard(model) as choices, torch.no_grad():
            model(torch.tensor([list(ids)]))
        texts.append(choices)
    return [skew(np.concatenate(of_layer), num_experts) for of_layer in zip(*texts, strict=True)]
