"""The bytes that a pack would take at each width, on the drive and in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moeconv.plan.problem import Storage, layout_bytes
from moeconv.writer import choose_page_bytes
from moert.engine.budget import FIRST_BYTES, Budget
from moert.models.footprint import Footprint, Load
from moert.pack.codec import Width
from moert.pack.layout import expert_layout
from moert.pack.manifest import WIDTHS_OF, Dense, Quantization, stored_tensors
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.tensors import DTYPE_BITS, vocabulary_takes

# Bytes of a pack, on the drive and in memory, at each width of its experts. Pure.
# The memory is reckoned by moert's own two modules, which its engine uses too.

PROMPT_TOKENS, NEW_TOKENS = 512, 256
_HEADER_BYTES = 8  # before the JSON of a safetensors file, which is filled up to a whole number of these


@dataclass(frozen=True)
class Host:
    """A machine that would run a pack: the bytes that moert holds there before it opens a pack, the bytes of its
    threads, and whether it computes with weights in float32 (it does without its native kernels)."""

    held_bytes: int
    thread_bytes: int
    widened: bool


@dataclass(frozen=True)
class Outlook:
    """One way to convert: experts at `bits`, all other matrices at `dense_bits`, in bytes.

    `expert_bytes`: of one expert's file. `token_bytes`: the most that a token reads, if none of its experts is in
    memory. `smallest_memory`: the least --memory that moert takes for a prompt of PROMPT_TOKENS and NEW_TOKENS more;
    `whole_memory`: the least --memory with which all experts stay in memory.
    """

    bits: Width
    dense_bits: int
    pack_bytes: int
    backbone_bytes: int
    expert_bytes: int
    token_bytes: int
    smallest_memory: int
    whole_memory: int


@dataclass(frozen=True)
class Parameters:
    """The numbers of weights and biases: of the whole model, and of the parts that one token goes through."""

    total: int
    active: int


def parameters(spec: ModelSpec, computed: Collection[str] = ()) -> Parameters:
    """Returns the numbers of weights and biases of a model; `computed`: tensors of the pack that no checkpoint has."""
    beside = sum(math.prod(tensor.shape) for name, tensor in spec.tensors.items() if name not in computed)
    kinds = [spec.decoder[layer].ngrams for layer in range(len(spec.decoder))]
    rows = sum(part.features for part in kinds if part is not None)
    ffn = spec.moe.ffn
    biases = sum(spec.projection_shape(name)[0] for name in ffn.projections) if ffn.bias else 0
    each, layers = spec.weights_per_expert() + biases, len(spec.experts)
    chosen = beside + rows + layers * spec.moe.router.top_k * each
    return Parameters(beside + table_numbers(spec) + layers * spec.moe.n * each, chosen)


def table_numbers(spec: ModelSpec) -> int:
    """Returns the count of numbers in tables that stay on the drive."""
    return sum(math.prod(table.shape) for table in spec.tables.values())


def outlooks(
    spec: ModelSpec, storage: Storage, denses: Sequence[Dense | None], wide: Collection[str], host: Host
) -> list[Outlook]:
    """Returns an outlook for each way to store the matrices outside the experts, and each width. `wide`: the tensors
    that have 32 bits whatever the source has."""
    found = []
    for dense in denses:
        quantization = quantization_of(storage, dense)
        backbone = backbone_bytes(spec, quantization, wide)
        found += [_outlook(spec, quantization, bits, backbone, host) for bits in compared_widths(storage)]
    return found


def compared_widths(storage: Storage) -> tuple[Width, ...]:
    """Returns the widths that packs are compared at, by rising bits; of a source in MXFP4 16 stands for its own four
    bits and a quarter."""
    widths = WIDTHS_OF[storage.codes]
    return tuple(bits for bits in widths if (bits != 8 if storage.mxfp4 else bits < 16))


@dataclass(frozen=True)
class Fit:
    """One pack in memory: its budget, and the bytes that the process holds without it and that a request takes.
    `table_bytes`: of tables that stay on the drive; `backbone_bytes`: of the backbone's file; `largest_bytes`: of the
    largest expert's."""

    table_bytes: int
    backbone_bytes: int
    largest_bytes: int
    budget: Budget
    held_bytes: int
    request_bytes: int

    @classmethod
    def of(
        cls, spec: ModelSpec, quantization: Quantization, widths: Callable[[ExpertKey], Mapping[str, Width]],
        backbone: int, host: Host,
    ) -> Fit:  # fmt: skip
        """Returns the fit of a pack with experts at their `widths` and a backbone's file of `backbone` bytes, beside a
        prompt of PROMPT_TOKENS and NEW_TOKENS more."""
        files = expert_files(spec, quantization, widths)
        budget = Budget.sized(spec, backbone, files, host.widened, host.thread_bytes)
        budget = replace(budget, tokenizer=vocabulary_takes(spec.vocab_size))
        request = Footprint(spec, host.widened).request([Load(PROMPT_TOKENS, NEW_TOKENS)])
        tables = 2 * table_numbers(spec)
        return cls(tables, backbone, max(map(max, files.values())), budget, host.held_bytes, request)

    @property
    def pack_bytes(self) -> int:
        return self.table_bytes + self.backbone_bytes + self.budget.expert_bytes

    @property
    def smallest_memory(self) -> int:
        """The least --memory that moert takes."""
        return self.budget.smallest_memory(self.held_bytes, self.request_bytes)

    @property
    def whole_memory(self) -> int:
        """The least --memory with which all experts stay in memory."""
        others = self.budget.expert_bytes - self.budget.layer_bytes
        experts = math.ceil(others / self.budget.filled)
        return self.budget.smallest_memory(self.held_bytes, self.request_bytes + experts)

    def room_share(self, memory_bytes: int) -> float:
        """Returns the share of the experts' bytes that stays in memory: at least the experts that a layer demands.
        Raises ValueError where moert could not run, with the least memory that it can run in."""
        if not self.budget.fits(memory_bytes, self.held_bytes, self.request_bytes):
            raise ValueError(f"{self.smallest_memory // 10**6}MB")
        coming = self.budget.loaded_bytes + FIRST_BYTES + self.request_bytes
        return self.budget.left_bytes(memory_bytes, self.held_bytes, coming) / self.budget.expert_bytes


def room_share(
    spec: ModelSpec, quantization: Quantization, widths: Callable[[ExpertKey], Mapping[str, Width]],
    wide: Collection[str], host: Host, memory_bytes: int,
) -> float:  # fmt: skip
    """Returns the share of all experts, each with its `widths`, that stays in memory where moert gets `memory_bytes`:
    see Fit."""
    return Fit.of(spec, quantization, widths, backbone_bytes(spec, quantization, wide), host).room_share(memory_bytes)


def _outlook(spec: ModelSpec, quantization: Quantization, bits: Width, backbone: int, host: Host) -> Outlook:
    widths = dict.fromkeys(spec.moe.ffn.projections, bits)
    fit = Fit.of(spec, quantization, lambda key: widths, backbone, host)
    return Outlook(
        bits=bits,
        dense_bits=dense_bits_of(quantization.dense),
        pack_bytes=fit.pack_bytes,
        backbone_bytes=fit.backbone_bytes,
        expert_bytes=fit.largest_bytes,
        token_bytes=fit.budget.token_bytes,
        smallest_memory=fit.smallest_memory,
        whole_memory=fit.whole_memory,
    )


def quantization_of(storage: Storage, dense: Dense | None) -> Quantization:
    """Returns the quantization that a conversion would write into the manifest, for a source in bfloat16."""
    return Quantization("", storage.group_size, "BF16", 0, dense, storage.mxfp4, storage.neurons, storage.codes)


def dense_bits_of(dense: Dense | None) -> int:
    return 16 if dense is None else max(dense.bits.values())


def expert_files(
    spec: ModelSpec, quantization: Quantization, widths: Callable[[ExpertKey], Mapping[str, Width]]
) -> dict[LayerKey, list[int]]:
    """Returns the bytes of each expert's file: at the same widths they differ at most by the length of its name."""
    page, known = choose_page_bytes(spec), dict[tuple[float, ...], int]()
    files: dict[LayerKey, list[int]] = {}
    for at, experts in spec.experts.items():
        sizes, name = files.setdefault(at, []), len(str(at))
        for key in map(at.expert, range(experts.n)):
            bits = widths(key)
            alike = (name, len(str(key.expert)), *bits.values())
            if alike not in known:
                layout = expert_layout(spec, key, bits, quantization.coding, page, quantization.neurons)
                known[alike] = layout.file_bytes
            sizes.append(known[alike])
    return files


def backbone_bytes(spec: ModelSpec, quantization: Quantization, wide: Collection[str] = ()) -> int:
    """Returns the bytes of the backbone's file, for a source in 16 bits; tensors that are `wide` have 32."""
    header: dict[str, object] = {}
    end = 0
    for name, parts in stored_tensors(spec, quantization).items():
        for part, (dtype, shape) in parts.items():
            kind = dtype or ("F32" if name in wide else "BF16")
            start, end = end, end + DTYPE_BITS[kind] // 8 * math.prod(shape)
            header[part] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    return end + _HEADER_BYTES + -(-text // _HEADER_BYTES) * _HEADER_BYTES


# Widths for all experts before anything is measured: one for all, or two with the wanted mean of bits. Pure.


@dataclass(frozen=True)
class Mixture:
    """A `share` of the experts at the width `high`, spread evenly over all layers, all others at `low`.

    `bits_per_weight`: scales and minima counted. `per_layer`: experts in each layer.
    """

    low: Width
    high: Width
    share: float
    bits_per_weight: float
    per_layer: int

    def width(self, key: ExpertKey) -> Width:
        """Returns the width of one expert: only the number of experts with the higher one matters, not which."""
        place = key.layer * self.per_layer + key.expert
        return self.high if int((place + 1) * self.share) > int(place * self.share) else self.low


def effective_bits(spec: ModelSpec, storage: Storage, bits: Width) -> float:
    """Returns the bits of an expert's weight at this width, scales and minima counted."""
    nbytes = layout_bytes(spec, storage)
    return 8 * sum(nbytes(name, bits) for name in spec.moe.ffn.projections) / spec.weights_per_expert()


def uniform(spec: ModelSpec, storage: Storage, bits: Width) -> Mixture:
    """Returns the mixture with all experts at one width."""
    return Mixture(bits, bits, 0.0, effective_bits(spec, storage, bits), spec.moe.n)


def mixture(spec: ModelSpec, storage: Storage, widths: Sequence[Width], bits_per_weight: float) -> Mixture | None:
    """Returns the mixture of the two `widths` nearest below and above. None where all are wider or all are narrower:
    then no pack has this mean of bits."""
    found = sorted((effective_bits(spec, storage, bits), bits) for bits in widths)
    for (less, low), (more, high) in pairwise(found):
        if less <= bits_per_weight <= more:
            return Mixture(low, high, (bits_per_weight - less) / (more - less), bits_per_weight, spec.moe.n)
    return None
