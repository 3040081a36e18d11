"""What a pack would be that is not made yet: its size, the memory that it wants, and how fast it would write. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moeconv.plan.likeness import Reference
from moeconv.plan.mixture import Mixture, mixture, uniform
from moeconv.plan.outlook import MXFP4_WIDTHS, WIDTHS, Fit, Host, dense_bits_of, quantization_of
from moeconv.plan.pace import Drive, Processor, Work, token_s
from moeconv.plan.problem import Storage
from moert.pack.layout import DTYPE_BYTES
from moert.pack.manifest import Dense, Quantization, dense_width, stored_tensors
from moert.pack.model_spec import ModelSpec

BITS_PER_WEIGHT = (2.6, 4.3)
"""Of mixtures: what conversions at a loss of 5% gave, and what others call four bits."""
_ONCE = (".cross.k.", ".cross.v.")  # read once a request, not once a token


@dataclass(frozen=True)
class Prospect:
    """One way to convert, with what a token of the decoder then takes."""

    mixture: Mixture
    dense_bits: int
    fit: Fit
    work: Work


@dataclass(frozen=True)
class Forecast:
    """A prospect in so much memory. `bits` is the width of all experts, None for a mixture. `room_share`: of the
    experts' bytes what stays in memory, 1 where all does; None where moert would not start, as are the figures that
    follow from it. `read_bytes`: of a token, on the mean."""

    bits: int | None
    bits_per_weight: float
    dense_bits: int
    pack_bytes: int
    smallest_memory: int
    whole_memory: int
    room_share: float | None
    hit_rate: float | None
    read_bytes: int | None
    tokens_per_s: float | None


def ways(spec: ModelSpec, storage: Storage) -> list[Mixture]:
    """All experts at each width, and the mixtures of BITS_PER_WEIGHT that there can be, by rising bits."""
    widths = MXFP4_WIDTHS if storage.mxfp4 else WIDTHS
    mixed = (mixture(spec, storage, widths, bits) for bits in BITS_PER_WEIGHT)
    found = [*(uniform(spec, storage, bits) for bits in widths), *(each for each in mixed if each is not None)]
    return sorted(found, key=lambda each: each.bits_per_weight)


def prospect(
    spec: ModelSpec, storage: Storage, mixed: Mixture, dense: Dense | None, computed: Collection[str], host: Host
) -> Prospect:  # fmt: skip
    """Experts as `mixed` says, all other matrices as `dense` does, None: in the source's 16 bits."""
    quantization, names = quantization_of(storage, dense), spec.moe.ffn.projections
    widths = {bits: dict.fromkeys(names, bits) for bits in (mixed.low, mixed.high)}
    fit = Fit.of(spec, quantization, lambda key: widths[mixed.width(key)], computed, host)
    return Prospect(mixed, dense_bits_of(dense), fit, _work(spec, storage, mixed, quantization, fit))


def forecast(
    what: Prospect, like: Reference, processor: Processor | None, drive: Drive, memory_bytes: int
) -> Forecast:  # fmt: skip
    """`like`: the model whose hit rates are taken. Without a `processor`, of which nothing is known, no speed."""
    mixed, fit = what.mixture, what.fit
    try:
        share = min(1.0, fit.room_share(memory_bytes))
    except ValueError:
        share = None
    rate = None if share is None else like.hit_rate(share)
    asked = what.work.expert_layers * what.work.top_k * what.work.file_bytes
    speed = None if rate is None or processor is None else 1 / token_s(what.work, processor, drive, rate)
    return Forecast(
        mixed.low if mixed.low == mixed.high else None,
        mixed.bits_per_weight,
        what.dense_bits,
        fit.pack_bytes,
        fit.smallest_memory,
        fit.whole_memory,
        share,
        rate,
        None if rate is None else round((1 - rate) * asked),
        speed,
    )


def forecasts(
    prospects: Sequence[Prospect], like: Reference, processor: Processor | None, drive: Drive, memory_bytes: int
) -> list[Forecast]:  # fmt: skip
    """See forecast."""
    return [forecast(each, like, processor, drive, memory_bytes) for each in prospects]


def _work(spec: ModelSpec, storage: Storage, mixed: Mixture, quantization: Quantization, fit: Fit) -> Work:
    one = mixed.bits_per_weight * spec.weights_per_expert() / 8
    low, high = (4 if bits == 16 and storage.mxfp4 else bits for bits in (mixed.low, mixed.high))
    experts = {low: one * (1 - mixed.share)}
    experts[high] = experts.get(high, 0.0) + one * mixed.share
    return Work(
        layers=len(spec.stacks["decoder"]),
        expert_layers=len(spec.moe_layers("decoder")),
        top_k=spec.moe.router.top_k,
        outside=outside_bytes(spec, quantization),
        experts=experts,
        file_bytes=fit.budget.expert_bytes / len(spec.expert_keys()),
    )


def outside_bytes(spec: ModelSpec, quantization: Quantization) -> Mapping[int, float]:
    """Width → bytes of what each token of the decoder is multiplied with beside experts: not of an encoder, nor of an
    embedding of its own, of which a token reads a row. What is not quantised counts as 16 bits."""
    found: dict[int, float] = {}
    for name, parts in stored_tensors(spec, quantization).items():
        once = any(part in name for part in _ONCE)
        if name.startswith("encoder.") or once or spec.tensors[name].role in ("embed", None):
            continue
        width = dense_width(spec, quantization.dense, name) or 16
        nbytes = sum(DTYPE_BYTES[dtype or "BF16"] * math.prod(shape) for dtype, shape in parts.values())
        found[width] = found.get(width, 0.0) + nbytes
    return found
