"""Numbers for tensors of published shapes: random, but for what matters to a conversion as in trained models.

What was measured in the wiki and wikids models of recipes/models: matrices of experts are Gaussian (kurtosis 3.0) with
a deviation of 0.9 to 2.2 over √inputs, norms spread by a tenth around 0.5 to 1, the last is around 1.4, and routers
send 1.5 to 2.4 even shares to the busiest expert of a layer, 32% to 45% to the busiest quarter (recipes/bench/skew.py).
A few channels of the residual stream are far larger than the others, in all tokens with one sign, and norms make them
smaller again. Through them routers prefer some experts whatever the token is.

Neurons behind a relu are silent for most tokens, and most of what fires is few of them: 3% fire in OPT-6.7B (arXiv
2312.11514), and 26% of all do four fifths of it in OPT-30B (arXiv 2312.12456). Here each has a threshold of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch

from moert.pack.parts import Router
from recipes.bench.shape_list import Kind, Stored

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
