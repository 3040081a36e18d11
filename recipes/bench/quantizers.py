"""Quantizers beside each other: peers, a process apart for them, likelihoods, and how one is judged."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moeconv.calibration import Sample, load_splits
from moeconv.quantizers import Inputs
from moeconv.quantizers.moments import Moments, collect
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey
from recipes import talk
from recipes.bench.ggml_products import BLOCK, I_QUANTS, K_QUANTS, Traits
from recipes.bench.program import own_recipe
from recipes.bench.sized import sized

# Calls in a process of their own: one that ends with an abort, as C code may, takes nothing else with it.

T = TypeVar("T")


class Failure(Exception):
    """A call that came to nothing; one line says why."""


class Apart:
    """One process with one thread, started when it is needed and anew after it has ended. Use it as a context."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function` can be pickled, and so can all that goes in and out. Raises Failure for whatever it raises."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_one_thread)
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self.close()
            raise Failure("its process ended") from None
        except Exception as error:
            raise Failure(f"{type(error).__name__}: {' '.join(str(error).split())}") from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _one_thread() -> None:
    torch.set_num_threads(1)


# Quantizers of others, as `make build/peers/.built` installs them: hqq, llama.cpp's by its own C code, and AutoRound.
# The first two take float32 matrices [n, out, in] of one shape and return them dequantized, with the bytes that they
# store; AutoRound takes a whole model.

FOLDER = Path("build/peers")


@dataclass(frozen=True)
class Coded:
    """weights [n, out, in] as they come back, and the bytes of one of the n matrices, scales counted."""

    weights: F32
    nbytes: float


Matrices = tuple[str, int, str]  # stack, layer, projection: the matrices of all experts there


def import_peers() -> None:
    """Makes the peers' packages importable, after all others."""
    if not (FOLDER / "site").is_dir():
        raise SystemExit("the peers are not installed: run `make bench-quant`")
    sys.path.append(str(FOLDER / "site"))


def hqq(weights: F32, bits: int, group_size: int, axis: int) -> Coded:
    """hqq with its default optimiser on the CPU. Scale and zero point count, and are rounded, as float16; codes count
    `bits` each, though hqq stores ten 3-bit codes in 32 bits."""
    from hqq.core.quantize import Quantizer

    out = np.empty_like(weights)
    for i, weight in enumerate(weights):
        codes, meta = Quantizer.quantize(
            torch.from_numpy(weight), nbits=bits, group_size=group_size, axis=axis, bitpack=False, device="cpu"
        )
        scale, zero = (meta[name].half().float() for name in ("scale", "zero"))
        out[i] = ((codes - zero) * scale).view(weight.shape).numpy()
    return Coded(out, weights[0].size * (bits / 8 + 4 / group_size))


def hqq_group_size(numbers: set[int], bits: int, limit: float) -> int:
    """The smallest group that divides all `numbers` of weights and keeps to `limit` bits a weight."""
    fitting = (size for size in range(math.ceil(32 / (limit - bits)), 1025) if all(n % size == 0 for n in numbers))
    return next(fitting)


class Ggml:
    """One of llama.cpp's formats by its own functions (ggml-base), called as its tool `quantize` does.

    Raises RuntimeError where the library's numbers of formats are not those of this file.
    """

    def __init__(self, name: str) -> None:
        self.name, self._number = name, (K_QUANTS | I_QUANTS)[name]
        (path,) = (FOLDER / "ggml").rglob("libggml-base.so")
        library = ctypes.CDLL(str(path))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        library.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
        self._traits = library.ggml_get_type_traits(self._number).contents
        if (self._traits.name.decode().upper(), self._traits.block) != (name.upper(), BLOCK):
            raise RuntimeError(f"ggml's format {self._number} is {self._traits.name.decode()}, not {name}")
        library.ggml_quantize_init(self._number)  # grids of the i-quants: up to some seconds
        self._quantize = library.ggml_quantize_chunk
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
        self._quantize.restype = ctypes.c_size_t

    def encode(self, weights: F32, importance: F32 | None) -> np.ndarray:
        """weights [n, out, in] and, as imatrix, the mean square of each input [n, in] → blocks [n, bytes].

        Where a row is no multiple of a block, as many rows as make one are handed over as a single row, and the
        importance is repeated for each of them. An expert that saw no token has importance 1 throughout, as in
        llama.cpp.
        """
        n, in_features = len(weights), weights.shape[2]
        joined = math.lcm(in_features, BLOCK)
        size = weights[0].size
        if size % joined:
            raise ValueError(f"{size} weights in rows of {in_features} don't fill blocks of {BLOCK}")
        out = np.empty((n, size // BLOCK * self._traits.block_bytes), np.uint8)
        for i in range(n):
            matrix, row = np.ascontiguousarray(weights[i]), None
            if importance is not None:
                known = importance[i] if importance[i].any() else np.ones_like(importance[i])
                row = np.tile(known, joined // in_features).astype(np.float32)
            pointer = None if row is None else row.ctypes.data
            self._quantize(self._number, matrix.ctypes.data, out[i].ctypes.data, 0, size // joined, joined, pointer)
        return out

    def decode(self, blocks: np.ndarray) -> F32:
        """blocks [n, bytes] → weights [n, size], by ggml's own to_float."""
        out = np.empty((len(blocks), blocks.shape[1] // self._traits.block_bytes * BLOCK), np.float32)
        for row, values in zip(np.ascontiguousarray(blocks), out, strict=True):
            self._traits.to_float(row.ctypes.data, values.ctypes.data, values.size)
        return out


def gguf(weights: F32, name: str, importance: F32 | None) -> Coded:
    """Raises RuntimeError where ggml's dequantized weights of the first matrix are not those of the package gguf."""
    from gguf import GGMLQuantizationType, dequantize

    ggml = Ggml(name)
    blocks = ggml.encode(weights, importance)
    back = ggml.decode(blocks)
    if not np.allclose(back[:1], dequantize(blocks[:1], GGMLQuantizationType[name]), rtol=1e-5, atol=1e-7):
        raise RuntimeError(f"{name}: ggml and the package gguf read the same blocks differently")
    return Coded(back.reshape(weights.shape), blocks.shape[1])


TUNED = ("wiki", "wikids")
"""Models that AutoRound tunes: decoders, whose fused experts it takes apart into linear modules."""
STEPS = sized(200, 1)
"""Steps of AutoRound in each layer; 200 is its default."""
AUTOROUND_GROUP = 32
"""The weights that share a scale and a zero point: of the groups in AutoRound's recipes the one that divides all
rows."""


def without_autoround() -> str | None:
    """Returns why AutoRound has no rows; None where it is installed. Its package needs Python 3.11."""
    return None if find_spec("auto_round") else "AutoRound is not installed: it needs Python 3.11 or later"


def autoround(path: Path, windows: npt.NDArray[np.int64], bits: int, steps: int = STEPS) -> dict[Matrices, Coded]:
    """Returns the experts of a decoder as the package AutoRound (Cheng et al. 2023, arXiv 2309.05516) tunes them on
    `windows` [windows, tokens].

    The whole algorithm is the package's own: it takes fused experts apart, goes through the model layer by layer, and
    changes the rounding and the range of each group by signed gradients, so that the layer's output comes near that of
    the unquantized layer, with quantized layers before it. Its settings are its defaults, except for zero points
    (`sym=False`), float32 throughout, and `windows` in place of its own text; matrices outside the experts stay as they
    are. A scale counts 16 bits, a zero point `bits`. Raises RuntimeError if other weights changed.
    """
    from auto_round import AutoRound
    from auto_round.logger import logger
    from transformers import PreTrainedTokenizerFast

    logger.setLevel(logging.ERROR)
    checkpoint = Checkpoint.open(path)
    model: Any = checkpoint.family.load(path, torch.float32)
    experts = {place: checkpoint.family.experts_module(model, place) for place in checkpoint.spec.moe_layers()}
    outside = {name: module.weight.clone() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tuner = AutoRound(
        model, PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json")), bits=bits,
        group_size=AUTOROUND_GROUP, sym=False, iters=steps, ignore_layers=",".join(outside), amp=False,
        dataset=DataLoader(list(torch.from_numpy(windows)), batch_size=8), nsamples=len(windows),
        seqlen=windows.shape[1], device_map="cpu", enable_torch_compile=False,
    )  # fmt: skip
    tuned, _ = tuner.quantize()
    if not all(torch.equal(tuned.get_submodule(name).weight, weight) for name, weight in outside.items()):
        raise RuntimeError("AutoRound changed weights outside the experts")
    size = bits + (16 + bits) / AUTOROUND_GROUP
    coded: dict[Matrices, Coded] = {}
    for (stack, layer), module in experts.items():
        for projection in checkpoint.spec.moe.ffn.projections:
            each = [module.get_submodule(f"{number}.{projection}_proj") for number in range(checkpoint.spec.moe.n)]
            weights = np.stack([linear.weight.detach().numpy() for linear in each])
            coded[stack, layer, projection] = Coded(weights, weights[0].size * size / 8)
    return coded


# Teacher-forced likelihood of calibration text under a transformers model, and the divergence from a reference.

CONTEXT = 256
_BATCH_TOKENS = 4096

Batch = dict[str, Tensor]  # what the model takes, with labels


@dataclass
class Text:
    """Batches of one split, of which document each of their rows is, in their order, and the unquantized model's
    log-probabilities of them once `judge` has been called."""

    batches: list[Batch]
    documents: Sequence[int]
    reference: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Likelihoods:
    """Of each document the sum of nats and of divergences, and the tokens that they are of; all [documents]."""

    nats: npt.NDArray[np.float64]
    kls: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]

    @property
    def nll(self) -> float:
        """Nats a token; the perplexity is its exponential."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def kl(self) -> float:
        """Nats a token."""
        return float(self.kls.sum() / self.tokens.sum())


def windows(samples: Sequence[Sample], model_dir: Path, count: int) -> tuple[list[Batch], list[int]]:
    """`count` windows of running text, spread evenly over all samples, and which sample each is from.

    A window lies within one sample, and no two overlap; the first token is context only.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    found: list[tuple[int, list[int]]] = []
    for number, sample in enumerate(samples):
        ids = tokenizer.encode(sample.source, add_special_tokens=False).ids
        found += [(number, ids[at : at + CONTEXT]) for at in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    if len(found) < count:
        raise ValueError(f"the text has {len(found)} windows of {CONTEXT} tokens, {count} are needed")
    chosen = [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]
    whole = torch.tensor([ids for _, ids in chosen])
    batches = [{"input_ids": part, "labels": part} for part in whole.split(_BATCH_TOKENS // CONTEXT)]
    return batches, [number for number, _ in chosen]


def pairs(samples: Sequence[Sample], model_dir: Path) -> tuple[list[Batch], list[int]]:
    """Inputs and targets, and which document each is from: a sample is one where it names none.

    Those of equal lengths share a batch, so that there is no padding.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    numbers: dict[object, int] = {}
    alike: dict[tuple[int, int], list[tuple[list[int], list[int], int]]] = defaultdict(list)
    for place, sample in enumerate(samples):
        source, target = tokenizer.encode(sample.source).ids, tokenizer.encode(sample.target).ids
        document = numbers.setdefault(sample.document or place, len(numbers))
        alike[len(source), len(target)].append((source, target, document))
    batches: list[Batch] = []
    found: list[int] = []
    for (length, _), rows in sorted(alike.items()):
        many = max(1, _BATCH_TOKENS // length)
        for start in range(0, len(rows), many):
            sources, targets, documents = zip(*rows[start : start + many], strict=True)
            batches.append({"input_ids": torch.tensor(sources), "labels": torch.tensor(targets)})
            found += documents
    return batches, found


@torch.inference_mode()
def run(model: Any, batches: Sequence[Batch]) -> None:
    """Sends the text through the model, for its hooks to see."""
    for batch in batches:
        logits_of(model, batch)


@torch.inference_mode()
def judge(model: Any, text: Text) -> Likelihoods:
    """The first call sets the reference that the divergences of later ones are measured against."""
    first = not text.reference
    nats, kls, tokens = [], [], []
    for index, batch in enumerate(text.batches):
        logits, labels = logits_of(model, batch)
        logs = logits.log_softmax(-1)
        if first:
            text.reference.append(logs)
        was = text.reference[index]
        nats.append(-logs.gather(2, labels[..., None]).squeeze(2).double().sum(1))
        kls.append((was.exp() * (was - logs)).sum(-1).double().sum(1))
        tokens.append(torch.full((len(labels),), labels.shape[1], dtype=torch.float64))
    names, places = np.unique(text.documents, return_inverse=True)
    return Likelihoods(
        *(np.bincount(places, torch.cat(part).numpy(), len(names)) for part in (nats, kls, tokens))
    )  # fmt: skip


def logits_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [rows, tokens, vocab] and the tokens they predict [rows, tokens]."""
    ids, labels = batch["input_ids"], batch["labels"]
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, labels=labels).logits, labels
    return model(input_ids=ids, use_cache=False).logits[:, :-1], labels[:, 1:]


# A reference model with its text, and what becomes of it when all its experts are quantized in some way.

SPLITS = ("calibration", "heldout")
SIZES = sized(
    {"g2p": (1000, 800), "marks": (400, 200), "wiki": (64, 40), "wikids": (64, 40), "smollm2": (64, 24)},
    {"wiki": (2, 2)},
)
"""Samples or windows whose inputs the quantizers see, and others, of each split, that the loss is measured on."""
DOCUMENTS = {"g2p": "words", "marks": "articles", "wiki": "articles", "wikids": "articles", "smollm2": "articles"}
"""What is resampled whole."""
PUBLISHED = "smollm2"
"""A dense model of `make talk`: the network of each layer is one expert. It judges on Wikipedia's text, as wiki."""
FITTING = ", fitting rows"
"""Ends a subject's name where only the matrices are quantized whose rows are whole blocks of llama.cpp's formats."""

Method = Callable[[F32, Inputs], Coded]  # weights [n, out, in] and what is known of their inputs, with products


@dataclass(frozen=True)
class Quantized:
    """All experts' matrices in one way; `name` says which."""

    method: str
    name: str
    coded: Mapping[Matrices, Coded]
    bits: float  # effective bits a weight, scales counted


@dataclass(frozen=True)
class Result:
    """`error` is the share of the weights' norm that is lost."""

    model: str
    method: str
    name: str
    bits: float
    error: float
    judged: Mapping[str, Likelihoods]


class Subject:
    """One reference model; `unquantized` has what each split gives before anything was changed."""

    def __init__(self, name: str) -> None:
        self.name = name
        model, fitting = name.removesuffix(FITTING), name.endswith(FITTING)
        checkpoint = Checkpoint.open(talk.model(talk.FOLDER) if model == PUBLISHED else Path("recipes/models") / model)
        self.path, self.family, self.spec = checkpoint.path, checkpoint.family, checkpoint.spec
        self.sha256 = checkpoint.sha256
        self.model: Any = checkpoint.model(torch.float32)
        self.seen, texts = _texts(model, self.path, SIZES[model])
        calls = ExpertCalls(self.model, self.family, self.spec)
        self.moments: Moments = collect(calls, lambda: run(self.model, self.seen), "products")
        self.weights: dict[Matrices, F32] = {
            (stack, layer, projection): np.stack(
                [
                    self.family.expert_weight(self.model, ExpertKey(stack, layer, expert), projection).numpy().copy()
                    for expert in range(self.spec.moe.n)
                ]
            )
            for stack, layer in self.spec.moe_layers()
            for projection in self.spec.moe.ffn.projections
        }
        if fitting:
            self.weights = {at: w for at, w in self.weights.items() if w.shape[2] % BLOCK == 0}
        self.texts = texts
        self.unquantized = {split: judge(self.model, text) for split, text in texts.items()}
        self._kept: dict[str, Quantized] = {}

    @property
    def sizes(self) -> set[int]:
        """Weights of one matrix of each shape."""
        return {weights[0].size for weights in self.weights.values()}

    def quantize(self, method: str, name: str, function: Method) -> Quantized:
        """All experts; what was asked for before of ours under the same name is remembered."""
        if name in self._kept:
            return self._kept[name]
        coded = {}
        for (stack, layer, projection), weights in self.weights.items():
            keys = [ExpertKey(stack, layer, expert) for expert in range(len(weights))]  # type: ignore[arg-type]
            coded[stack, layer, projection] = function(weights, self.moments.inputs(keys, projection))
        whole = self.whole(method, name, coded)
        if method == "ours":
            self._kept[name] = whole
        return whole

    def whole(self, method: str, name: str, coded: Mapping[Matrices, Coded]) -> Quantized:
        """All experts, from all their matrices."""
        return Quantized(method, name, coded, self._bits({at: each.nbytes for at, each in coded.items()}))

    def mix(self, name: str, low: Quantized, high: Quantized, limit: float) -> Quantized:
        """Every so many-th expert of each layer as in `high`, the others as in `low`, to fill `limit` bits a weight.

        Which ones is not chosen by what they cost: that is the allocation's part.
        """
        share = (limit - low.bits) / (high.bits - low.bits)
        n = self.spec.moe.n
        coded, nbytes, start = {}, {}, 0.0
        for at, first in low.coded.items():
            steps = np.floor(start + share * np.arange(n + 1))
            taken = np.diff(steps).astype(bool)
            start = (start + share * n) % 1
            second = high.coded[at]
            mixed = np.where(taken[:, None, None], second.weights, first.weights)
            nbytes[at] = float(np.where(taken, second.nbytes, first.nbytes).mean())
            coded[at] = Coded(mixed, nbytes[at])
        return Quantized(low.method, name, coded, self._bits(nbytes))

    def measure(self, quantized: Quantized) -> Result:
        """Writes the weights into the model and judges both splits."""
        lost = whole = 0.0
        for at, coded in quantized.coded.items():
            weights = self.weights[at]
            lost += float(np.square(coded.weights - weights, dtype=np.float64).sum())
            whole += float(np.square(weights, dtype=np.float64).sum())
            stack, layer, projection = at
            for expert, weight in enumerate(coded.weights):
                key = ExpertKey(stack, layer, expert)  # type: ignore[arg-type]
                self.family.expert_weight(self.model, key, projection).copy_(torch.from_numpy(weight))
        judged = {split: judge(self.model, text) for split, text in self.texts.items()}
        return Result(self.name, quantized.method, quantized.name, quantized.bits, (lost / whole) ** 0.5, judged)

    def _bits(self, nbytes: Mapping[Matrices, float]) -> float:
        experts = self.spec.moe.n
        weights = sum(matrices.size for matrices in self.weights.values())
        return 8 * experts * sum(nbytes.values()) / weights


def _texts(name: str, path: Path, sizes: tuple[int, int]) -> tuple[Sequence[Batch], dict[str, Text]]:
    """What the quantizers see, and what each split is judged on. `path` has the model's tokenizer."""
    recipe = "wiki" if name == PUBLISHED else name
    settings = own_recipe(recipe, Path("build")).settings
    assert settings.calib is not None
    splits = load_splits(settings.calib, None, seed=0)
    seen, judged = sizes
    if not splits.seq2seq:  # every other article to the quantizers
        first, _ = windows(splits.calibration[::2], path, seen)
        others = {"calibration": splits.calibration[1::2], "heldout": splits.heldout}
        return first, {split: Text(*windows(part, path, judged)) for split, part in others.items()}
    parts = {"calibration": splits.calibration[seen : seen + judged], "heldout": splits.heldout[:judged]}
    judging = {split: Text(*pairs(part, path)) for split, part in parts.items()}
    return pairs(splits.calibration[:seen], path)[0], judging
