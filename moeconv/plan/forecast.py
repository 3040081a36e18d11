"""Packs that are not made yet: sizes, tokens a second, and the effort of converting."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import comb, log
from typing import Any, Literal

from moeconv.plan.outlook import (
    Fit,
    Host,
    Mixture,
    Parameters,
    backbone_bytes,
    compared_widths,
    dense_bits_of,
    mixture,
    quantization_of,
    uniform,
)
from moeconv.plan.problem import Storage
from moert.pack.codec import Codes, Width
from moert.pack.manifest import WIDTHS_BY_TEXT, Dense, Quantization, dense_width, stored_tensors
from moert.pack.model_spec import ModelSpec
from moert.pack.tensors import DTYPE_BITS

# Hit rates of the reference model that a model is most like. Pure but for reading hit_rates.json, which
# `python -m recipes.bench.hit_rates` makes from the traces of recipes/models, by moert's own replay.

HIT_RATES = "hit_rates.json"
Kind = Literal["encoder-decoder", "decoder"]


@dataclass(frozen=True)
class Reference:
    """A model with recorded routing. `rates`: (share of the experts' bytes that has room, hit rate under the
    eviction that `auto` takes there), by rising share; empty where a token takes all experts of a layer: then the hit
    rate is the share that has room."""

    name: str
    kind: Kind
    experts: int
    top_k: int
    layers: int
    rates: tuple[tuple[float, float], ...]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Reference:
        rates = tuple((float(share), float(rate)) for share, rate in values["rates"])
        return cls(values["name"], values["kind"], values["experts"], values["top_k"], values["layers"], rates)

    def hit_rate(self, share: float) -> float:
        """Returns the hit rate at a share of room: linear between the measured shares, 0 without room, 1 with room for
        all experts."""
        points = [(0.0, 0.0), *self.rates, (1.0, 1.0)]
        if share >= 1:
            return 1.0
        place = max(1, bisect_left(points, (max(share, 0.0), 0.0)))
        (left, low), (right, high) = points[place - 1], points[place]
        return low + (high - low) * (max(share, 0.0) - left) / (right - left)


@cache
def references() -> tuple[Reference, ...]:
    """Returns all models with recorded routing."""
    text = (files("moeconv.plan") / HIT_RATES).read_text(encoding="utf-8")
    return tuple(map(Reference.from_json, json.loads(text)["models"]))


def kind_of(spec: ModelSpec) -> Kind:
    return "encoder-decoder" if spec.encoder is not None else "decoder"


def nearest(spec: ModelSpec, known: Sequence[Reference]) -> Reference:
    """Returns the reference most like a model: of the same kind where there is one, then by the ratios of their experts
    in a layer and experts for a token. A model with routers that choose nothing gets a reference of its own."""
    if not spec.moe.chooses:
        return Reference(spec.family, kind_of(spec), spec.moe.n, spec.moe.router.top_k, len(spec.experts), ())

    def distance(one: Reference) -> tuple[bool, float]:
        moe = spec.moe
        ratios = abs(log(one.experts / moe.n)) + abs(log(one.top_k / moe.router.top_k))
        return one.kind != kind_of(spec), ratios

    return min(known, key=distance)


# Expected tokens a second of a pack that is not made yet. Pure.
# A token passes each layer in turn, and a layer ends when its computing and its reading have ended. Of a layer's
# `top_k` experts each is missing with probability 1 - hit rate. With m of them missing, all experts but the last one
# that arrives are computed meanwhile:
# layer(m) = max(compute, read(m) + compute / top_k), layer(0) = compute read(m) = miss + max((m - 1) × miss, m ×
# bytes / min(drive, m × drive with one read at a time)) token = outside + layers × Σ_m P(m) layer(m), m of
# Binomial(top_k, 1 - hit rate)
# `miss` is an expert's time beside its bytes (asking for it, waking up, checking it): of several misses, all but the
# first hide behind the drive's reading, or the other way round where experts are small. `outside` is the time of
# everything but the experts, with the runtime's own time for each layer whatever its size. Reading ahead is not
# reckoned: it gains little where a token waits for the drive.


@dataclass(frozen=True)
class Drive:
    """The speed of a drive: bytes a second with many reads at once, and with one at a time."""

    bytes_per_s: float
    alone_bytes_per_s: float

    def read_s(self, nbytes: float, count: int) -> float:
        """Returns the seconds of reading `count` pieces of `nbytes` each at once."""
        return count * nbytes / min(self.bytes_per_s, count * self.alone_bytes_per_s)


@dataclass(frozen=True)
class Processor:
    """The speed of a processor. `kernel_bytes_per_s`: bytes of weights multiplied with one token, by width;
    `trellis_bytes_per_s`: of trellis codes. `layer_s`: the time of each layer of the decoder beside its weights.
    `miss_s`: the time of a missing expert beside reading its bytes."""

    kernel_bytes_per_s: Mapping[Width, float]
    trellis_bytes_per_s: Mapping[Width, float]
    layer_s: float
    miss_s: float

    def compute_s(self, nbytes: Mapping[Width, float], codes: Codes = "plain") -> float:
        """Returns the seconds of multiplying weights with a token; `nbytes`: width → bytes of weights."""
        speeds: dict[Width, float] = {**self.kernel_bytes_per_s}
        if codes == "trellis":
            speeds.update(self.trellis_bytes_per_s)
        return sum(count / speeds[bits] for bits, count in nbytes.items())


@dataclass(frozen=True)
class Work:
    """The work of one token in the decoder. Bytes by width: `outside` of all weights that are not experts, `experts` of
    the mean expert, `file_bytes` of its file. `codes`: the experts'."""

    layers: int
    expert_layers: int
    top_k: int
    outside: Mapping[Width, float]
    experts: Mapping[Width, float]
    file_bytes: float
    codes: Codes = "plain"


def token_s(work: Work, processor: Processor, drive: Drive, hit_rate: float) -> float:
    """Returns the seconds of one token, see above. `hit_rate`: the share of demanded experts that are in memory."""
    compute_s = work.top_k * processor.compute_s(work.experts, work.codes)
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


# The stated machine, which docs/models.md reckons with. Its times of a layer and of a missing expert are used on any
# machine, since no short measurement shows them. Pure but for reading machine.json.

MACHINE = "machine.json"
SOURCE = "python -m recipes.bench.outlook_machine"
DEFAULT_DRIVE = 500e6
"""Bytes a second of an unknown drive: a SATA SSD."""


@dataclass(frozen=True)
class Machine:
    """A machine that runs packs. `name`: processor, cores and instruction set."""

    name: str
    processor: Processor
    host: Host

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Machine:
        """Returns the machine that machine.json describes."""
        of = values["processor"]
        plain, trellis = _speeds(of["kernel_bytes_per_s"]), _speeds(of["trellis_bytes_per_s"])
        processor = Processor(plain, trellis, of["layer_s"], of["miss_s"])
        return cls(values["name"], processor, Host(**values["host"]))


@cache
def stated() -> Machine:
    """Returns the machine of machine.json."""
    return Machine.from_json(json.loads((files("moeconv.plan") / MACHINE).read_text(encoding="utf-8")))


def processor_of(facts: dict[str, Any]) -> Processor | None:
    """Returns the processor by the output of `moert info --system --json`, with the stated times of layers and misses;
    None where that has measured no kernels."""
    measured = facts["kernel_bytes_per_s"]
    if measured is None:
        return None
    trellis = _speeds(facts["trellis_bytes_per_s"])
    return replace(stated().processor, kernel_bytes_per_s=_speeds(measured), trellis_bytes_per_s=trellis)


def _speeds(by_text: Mapping[str, float]) -> dict[Width, float]:
    """Returns speeds by width from those by its text."""
    return {WIDTHS_BY_TEXT[bits]: float(speed) for bits, speed in by_text.items()}


# The effort of converting in time, disk and memory, before anything is read. Pure.
# Without text the source is read once, each weight is quantized once, and the pack is written:
# time = max(source / drive, weights / quantizing) + pack / drive
# With text, in passes of the model over the text that plans are judged on:
# pass = 2 × active parameters × tokens / arithmetic sweep = experts × widths × share × 2 × active parameters ×
# tokens of the sweep / arithmetic or, by gradients: there and back for each draw, and each layer at each width
# through those behind it time = passes × max(pass, reading) + sweep + codings × weights / quantizing + (source +
# pack) / drive
# where reading is nothing if the model stays in memory in 32 bits, else source / drive.


@dataclass(frozen=True)
class Rules:
    """The passes, codings and tokens of a conversion at --loss 5%. Counted on 2026-11-24 in one of recipes/models/wiki
    with its recipe (recipes/wiki.toml), a usual conversion by a text and a loss."""

    judged_tokens: int = 96 * 256  # windows that plans are judged on, and as many are held out
    sweep_tokens: int = 4 * 256
    passes: int = 12  # references on both texts, moments, 8 plans of the search, the chosen one on held-out text
    training_passes: int = 17  # where the model fits: 8 plans of the search with trained scales, and 9 for training
    sweep_widths: int = 2  # those on both sides of the target
    sweep_share: float = 0.43  # operations of the sweep, of full evaluations: docs/results/sweep.json, wiki
    codings: int = 3  # each weight at the sweep's base and at the two widths, where codes stay
    codings_anew: int = 13  # where they do not: these, and again for 8 plans, the held-out text and the pack
    exact_probes: int = 4096  # more of them are reckoned from gradients: moeconv.conversion.measuring
    draws: int = 16  # moeconv.sweep.fisher: each goes back through a layer at about twice the cost of going forth
    scale_tokens: int = 8 * 256  # moeconv.sweep.fisher
    code_shares: tuple[float, ...] = (2 / 4, 3 / 4, 1.0)  # of a pack of 4 bits: codes that layers leave on the drive
    kept_bytes: int = 256 << 20  # of codes that stay: CACHE_BYTES of moeconv.quantizers.coder
    float32_bytes: int = 4  # a parameter in memory while it is measured


RULES = Rules()


@dataclass(frozen=True)
class Tools:
    """The speed and memory of this machine. `weights_per_s` by quantizer (moeconv.conversion.host measures it),
    `flops_per_s` of a model's forward pass in 32 bits, `drive_bytes_per_s` for large reads and writes, `memory_bytes`
    for the process."""

    weights_per_s: Mapping[str, float]
    flops_per_s: float
    drive_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Subject:
    """The model that is converted: its shape, `source_bytes` of its checkpoint, and `pack_bytes` of its pack."""

    spec: ModelSpec
    parameters: Parameters
    source_bytes: int
    pack_bytes: int

    @property
    def expert_weights(self) -> int:
        return len(self.spec.expert_keys()) * self.spec.weights_per_expert()


@dataclass(frozen=True)
class Effort:
    """The effort of a conversion. `disk_bytes` must be free, the source not counted. `read_bytes`: all reads of the
    source. `sweep_s`: the sweep's part of the `seconds`. `memory_bytes`: of the model, whether or not it stays in
    memory; 0 without text."""

    quantizer: str
    seconds: float
    sweep_s: float
    disk_bytes: int
    read_bytes: int
    memory_bytes: int


def without_text(subject: Subject, tools: Tools, quantizer: str) -> Effort:
    """Returns the effort of a conversion to one width or a size, with nothing measured."""
    coding_s = subject.expert_weights / tools.weights_per_s[quantizer]
    seconds = max(subject.source_bytes / tools.drive_bytes_per_s, coding_s)
    seconds += subject.pack_bytes / tools.drive_bytes_per_s
    return Effort(quantizer, seconds, 0.0, subject.pack_bytes, subject.source_bytes, 0)


def with_text(subject: Subject, tools: Tools, quantizer: str) -> Effort:
    """Returns the effort of a conversion for a loss: with the exact sweep, or with gradients where there are many
    experts or the model does not fit the memory."""
    token_s = 2 * subject.parameters.active / tools.flops_per_s
    memory = RULES.float32_bytes * subject.parameters.total
    reads = 1 if memory <= tools.memory_bytes else RULES.passes
    read_s = subject.source_bytes / tools.drive_bytes_per_s
    pass_s = RULES.judged_tokens * token_s
    probes = len(subject.spec.expert_keys()) * RULES.sweep_widths
    if reads == 1 and probes <= RULES.exact_probes:
        sweep_s = probes * RULES.sweep_share * RULES.sweep_tokens * token_s
    else:
        there_and_back = 1 + 2 * RULES.draws + RULES.sweep_widths + 1
        behind = len(subject.spec.moe_layers()) * (RULES.sweep_widths + 1) / 2
        sweep_s = (there_and_back * RULES.sweep_tokens + behind * RULES.scale_tokens) * token_s
    if reads == 1:
        passes_s = (RULES.passes + RULES.training_passes) * pass_s + read_s
    else:
        passes_s = RULES.passes * max(pass_s, read_s)
    kept = reads > 1 or subject.pack_bytes <= RULES.kept_bytes
    codings = RULES.codings if kept else RULES.codings_anew
    on_drive = subject.pack_bytes * sum(RULES.code_shares) if reads > 1 else moments_bytes(subject.spec, quantizer)
    coding_s = codings * subject.expert_weights / tools.weights_per_s[quantizer]
    seconds = passes_s + sweep_s + coding_s + subject.pack_bytes / tools.drive_bytes_per_s
    return Effort(
        quantizer, seconds, sweep_s, subject.pack_bytes + round(on_drive),
        reads * subject.source_bytes, memory,
    )  # fmt: skip


def moments_bytes(spec: ModelSpec, quantizer: str) -> int:
    """Returns the bytes on the drive of the moments that the quantizer needs of each expert's inputs: their products,
    or their squares."""
    power = {"gptq": 2, "trellis": 2, "group": 1}.get(quantizer, 0)
    sides = spec.expert_width**power + spec.moe.ffn.d_ff**power if power else 0
    return 4 * len(spec.expert_keys()) * sides


# Forecasts of a pack that is not made yet: its size, its memory, and its tokens a second. Pure.

BITS_PER_WEIGHT = (2.0, 4.3)
"""Bits of mixtures: those of conversions at a loss of 5%, and those that other programs call four bits."""
_ONCE = (".cross.k.", ".cross.v.")  # read once a request, not once a token


@dataclass(frozen=True)
class Prospect:
    """One way to convert, with the work of a token of the decoder."""

    mixture: Mixture
    dense_bits: int
    fit: Fit
    work: Work


@dataclass(frozen=True)
class Forecast:
    """A prospect in an amount of memory. `bits` is the width of all experts, None for a mixture. `room_share`: the
    share of the experts' bytes that stays in memory; None where moert would not start, like the figures that follow
    from it. `read_bytes`: the mean for a token."""

    bits: Width | None
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
    """Returns the mixtures of all experts at each width and those of BITS_PER_WEIGHT that are possible, by rising
    bits."""
    widths = compared_widths(storage)
    mixed = (mixture(spec, storage, widths, bits) for bits in BITS_PER_WEIGHT)
    found = [*(uniform(spec, storage, bits) for bits in widths), *(each for each in mixed if each is not None)]
    return sorted(found, key=lambda each: each.bits_per_weight)


def prospect(
    spec: ModelSpec, storage: Storage, mixed: Mixture, dense: Dense | None, wide: Collection[str], host: Host
) -> Prospect:  # fmt: skip
    """Returns the prospect of experts at the widths of `mixed` and all other matrices at those of `dense` (None: in the
    source's 16 bits)."""
    quantization, names = quantization_of(storage, dense), spec.moe.ffn.projections
    widths = {bits: dict.fromkeys(names, bits) for bits in (mixed.low, mixed.high)}
    backbone = backbone_bytes(spec, quantization, wide)
    fit = Fit.of(spec, quantization, lambda key: widths[mixed.width(key)], backbone, host)
    return Prospect(mixed, dense_bits_of(dense), fit, _work(spec, storage, mixed, quantization, fit))


def forecast(
    what: Prospect, like: Reference, processor: Processor | None, drive: Drive, memory_bytes: int
) -> Forecast:  # fmt: skip
    """Returns the forecast for a prospect. `like`: the model that the hit rates are taken from. Without a `processor`
    the forecast has no speed."""
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
        codes=storage.codes,
    )


def outside_bytes(spec: ModelSpec, quantization: Quantization) -> Mapping[Width, float]:
    """Returns, by width, the bytes of the weights beside experts that each token of the decoder is multiplied with:
    without an encoder, and without an embedding of its own, of which a token reads a row. Weights that are not
    quantized count as 16 bits."""
    found: dict[Width, float] = {}
    for name, parts in stored_tensors(spec, quantization).items():
        once = any(part in name for part in _ONCE)
        if name.startswith("encoder.") or once or spec.tensors[name].role in ("embed", None):
            continue
        width = dense_width(spec, quantization.dense, name) or 16
        nbytes = sum(DTYPE_BITS[dtype or "BF16"] // 8 * math.prod(shape) for dtype, shape in parts.values())
        found[width] = found.get(width, 0.0) + nbytes
    return found
