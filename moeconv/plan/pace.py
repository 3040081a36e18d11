"""Tokens a second that a pack is expected to write, before there is one. Pure.

A token passes each layer in turn, and a layer ends when what is computed and what is read for it have ended. Of a
layer's `top_k` experts each is missing with probability 1 - hit rate. With m of them missing, all that can be computed
meanwhile is, but for the last one that arrives:

    layer(m) = max(compute, read(m) + compute / top_k),  layer(0) = compute
    read(m)  = miss + max((m - 1) × miss, m × bytes / min(drive, m × drive with one read at a time))
    token    = outside + layers × Σ_m P(m) layer(m),  m of Binomial(top_k, 1 - hit rate)

`miss` is what an expert costs beside its bytes (asking for it, waking up, checking it): of several, all but the first
one's hide behind what the drive is busy with, or the other way round where experts are small. `outside` is everything
but the experts, and what the runtime spends on each layer whatever its size. Nothing is reckoned for what moert reads a
layer ahead, which is little where the drive is what a token waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

KERNEL_BITS = (2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Drive:
    """Bytes a second, with as many reads at once as it likes and with one at a time."""

    bytes_per_s: float
    alone_bytes_per_s: float

    def read_s(self, nbytes: float, count: int) -> float:
        """For so many pieces of so many bytes, asked for at once."""
        return count * nbytes / min(self.bytes_per_s, count * self.alone_bytes_per_s)


@dataclass(frozen=True)
class Processor:
    """`kernel_bytes_per_s`: weights that are multiplied with one token, by width. `layer_s`: what each layer of the
    decoder takes beside its weights. `miss_s`: what an expert that is missing costs beside reading its bytes."""

    kernel_bytes_per_s: Mapping[int, float]
    layer_s: float
    miss_s: float

    def compute_s(self, nbytes: Mapping[int, float]) -> float:
        """Width → bytes of weights."""
        return sum(count / self.kernel_bytes_per_s[bits] for bits, count in nbytes.items())


@dataclass(frozen=True)
class Work:
    """What one token takes of the decoder. Bytes by width: `outside` of all that is not experts, `experts` of the mean
    expert, whose file has `file_bytes`."""

    layers: int
    expert_layers: int
    top_k: int
    outside: Mapping[int, float]
    experts: Mapping[int, float]
    file_bytes: float


def token_s(work: Work, processor: Processor, drive: Drive, hit_rate: float) -> float:
    """Seconds, see above. hit_rate: of the experts that a token asks for, those in memory."""
    compute_s = work.top_k * processor.compute_s(work.experts)
    outside_s = processor.compute_s(work.outside) + work.layers * processor.layer_s

    def layer_s(missing: int) -> float:
        if not missing:
            return compute_s
        transfer_s = drive.read_s(work.file_bytes, missing)
        read_s = processor.miss_s + max((missing - 1) * processor.miss_s, transfer_s)
        return max(compute_s, read_s + compute_s / work.top_k)

    expected_s = sum(
        comb(work.top_k, missing) * (1 - hit_rate) ** missing * hit_rate ** (work.top_k - missing) * layer_s(missing)
        for missing in range(work.top_k + 1)
    )
    return outside_s + work.expert_layers * expected_s
