"""Examples in batches: samples of like length together, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeconv.foresight.examples import Examples, Part, StackExamples
from moert.pack.model_spec import StackName


class Size(NamedTuple):
    """Of a batch at most: samples, and tokens with what fills them up."""

    rows: int = 32
    tokens: int = 2048


USUAL = Size()


@dataclass(frozen=True)
class StackBatch:
    """ids and real [rows, tokens], filled up on the right; of the tokens that are there, row by row, numbers and
    experts [n, layers, most] and chosen [n, layers, top_k]."""

    ids: Tensor
    real: Tensor
    numbers: Tensor
    experts: Tensor
    chosen: Tensor


Batch = Mapping[StackName, StackBatch]


def batches(examples: Examples, seed: int | None = None, size: Size = USUAL) -> Iterator[Batch]:
    """Every sample once; without a seed in order of length."""
    for rows in plan(examples, seed, size):
        yield {stack: _batch(part, rows) for stack, part in examples.stacks.items()}


def plan(examples: Examples, seed: int | None, size: Size = USUAL) -> list[list[int]]:
    """Places of the samples of each batch."""
    longest = np.max([stack.lengths for stack in examples.stacks.values()], axis=0)
    if seed is None:
        return list(_cut(np.argsort(longest, kind="stable").tolist(), longest.tolist(), size))
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(longest)), longest))
    found = list(_cut(order.tolist(), longest.tolist(), size))
    return [found[place] for place in rng.permutation(len(found))]


def _cut(order: Sequence[int], lengths: Sequence[int], size: Size) -> Iterator[list[int]]:
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) == size.rows or (len(batch) + 1) * lengths[place] > size.tokens):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _batch(stack: StackExamples, rows: Sequence[int]) -> StackBatch:
    parts = [stack.sample(row) for row in rows]
    lengths = torch.from_numpy(stack.lengths[list(rows)])
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    joined = Part(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    ids = torch.zeros(real.shape, dtype=torch.long)
    ids[real] = torch.from_numpy(joined.tokens.astype(np.int64))
    return StackBatch(
        ids, real, torch.from_numpy(joined.numbers.astype(np.float32)),
        torch.from_numpy(joined.experts.astype(np.int64)), torch.from_numpy(joined.chosen.astype(np.int64)),
    )  # fmt: skip
