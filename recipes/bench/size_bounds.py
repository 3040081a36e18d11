"""What disk and cores allow a conversion: how fast bytes come and go, products are made, experts are coded."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder, batches
from moeconv.source.checkpoint import Checkpoint
from moert.pack.model_spec import ExpertKey
from recipes.bench.size_run import forget
from recipes.bench.sized import sized

READ_BYTES, WRITTEN_BYTES, BLOCK = sized(1 << 30, 64 << 20), sized(512 << 20, 16 << 20), 8 << 20
RUNS, CODED_BATCHES = sized((5, 3), (1, 1))


@dataclass(frozen=True)
class Bounds:
    """`flops_per_s`: of products of matrices, two for each multiplication and addition, by the type's name."""

    read_bytes_per_s: float
    written_bytes_per_s: float
    flops_per_s: dict[str, float]


def measured(model: Path, out: Path) -> Bounds:
    """Of the disk that a checkpoint is on, the one that packs go to, and all cores. `model` has a file of weights."""
    found = {name: product_flops_per_s(kind, 2048, (1024, 2048)) for name, kind in _KINDS.items()}
    return Bounds(read_bytes_per_s(model), written_bytes_per_s(out), found)


_KINDS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def read_bytes_per_s(folder: Path) -> float:
    """From the beginning of its first file of weights, which the page cache has been asked to forget."""
    forget(folder)
    file, done, block = min(folder.glob("*.safetensors")), 0, bytearray(BLOCK)
    started = time.perf_counter()
    with open(file, "rb", buffering=0) as handle:
        while done < READ_BYTES and (n := handle.readinto(block)):
            done += n
    return done / (time.perf_counter() - started)


def written_bytes_per_s(folder: Path) -> float:
    """Until they are on the disk."""
    file, block = folder / "written", os.urandom(BLOCK)
    try:
        started = time.perf_counter()
        with open(file, "wb", buffering=0) as handle:
            for _ in range(WRITTEN_BYTES // BLOCK):
                handle.write(block)
            os.fsync(handle.fileno())
        return WRITTEN_BYTES / (time.perf_counter() - started)
    finally:
        file.unlink(missing_ok=True)


def product_flops_per_s(kind: torch.dtype, tokens: int, matrix: tuple[int, int]) -> float:
    """x [tokens, in] with a matrix [out, in], the fastest of some."""
    x, weight = torch.randn(tokens, matrix[1]).to(kind), torch.randn(matrix).to(kind)
    return 2 * tokens * matrix[0] * matrix[1] / min(_times_s(lambda: torch.nn.functional.linear(x, weight)))


def coding_s(model: Path, quantizer: str, bits: int) -> float:
    """Seconds for one expert, of several as a conversion codes them, when its weights are in memory already."""
    checkpoint = Checkpoint.open(model)
    wanted = [(key, (bits,) * len(checkpoint.spec.moe.ffn.projections)) for key in _experts(checkpoint)]
    some = batches(checkpoint.spec, wanted)[:CODED_BATCHES]
    each = []
    for batch in some:
        for key, _ in batch:
            checkpoint.expert(key)
        coder = ExpertCoder(checkpoint, QUANTIZERS[quantizer](None), None)
        started = time.perf_counter()
        coder.prepare(batch)
        each.append((time.perf_counter() - started) / len(batch))
    return statistics.median(each)


def _experts(checkpoint: Checkpoint) -> Sequence[ExpertKey]:
    return checkpoint.spec.expert_keys()[: checkpoint.spec.moe.n]


def _times_s(work: Callable[[], object]) -> list[float]:
    """The first is left out."""
    found = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return found[1:]
