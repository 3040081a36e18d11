"""What converting takes: time, disk and memory, before anything is read. Pure.

Without text the source is read once, each weight is quantised once, and the pack is written:

    time = max(source / drive, weights / quantising) + pack / drive

With text, in passes of the model over what plans are judged on:

    pass  = 2 × active parameters × tokens / arithmetic
    sweep = experts × widths × share × 2 × active parameters × tokens of the sweep / arithmetic
            or, by gradients: there and back for each draw, and each layer at each width through those behind it
    time  = passes × max(pass, reading) + sweep + codings × weights / quantising + (source + pack) / drive

where reading is nothing if the model stays in memory in 32 bits, else source / drive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moeconv.plan.outlook import Parameters
from moert.pack.model_spec import ModelSpec


@dataclass(frozen=True)
class Rules:
    """How often a conversion at --loss 5% does what. Counted on 2026-11-24 in one of recipes/models/wiki with its
    recipe (recipes/wiki.toml), which is what a person gets who gives a text and a loss."""

    judged_tokens: int = 96 * 256  # windows that plans are judged on, and as many are held out
    sweep_tokens: int = 4 * 256
    passes: int = 12  # references on both texts, moments, 8 plans of the search, the chosen one on held-out text
    sweep_widths: int = 2  # those on both sides of the target
    sweep_share: float = 0.43  # operations of the sweep, of full evaluations: docs/results/sweep.json, wiki
    codings: int = 3  # each weight at the sweep's base and at the two widths, where codes stay
    codings_anew: int = 13  # where they do not: these, and again for 8 plans, the held-out text and the pack
    exact_probes: int = 4096  # more of them are reckoned from gradients: moeconv.conversion.bench
    draws: int = 16  # moeconv.sweep.fisher: each goes back through a layer at about twice the cost of going forth
    scale_tokens: int = 8 * 256  # moeconv.sweep.scales
    code_shares: tuple[float, ...] = (2 / 4, 3 / 4, 1.0)  # of a pack of 4 bits: codes that layers leave on the drive
    kept_bytes: int = 256 << 20  # of codes that stay: CACHE_BYTES of moeconv.quantizers.coder
    float32_bytes: int = 4  # a parameter in memory while it is measured


RULES = Rules()


@dataclass(frozen=True)
class Tools:
    """How fast this machine is. `weights_per_s` by quantizer (moeconv.conversion.timing measures it), `flops_per_s` of
    a model's forward pass in 32 bits, `drive_bytes_per_s` for large reads and writes, `memory_bytes` for the
    process."""

    weights_per_s: Mapping[str, float]
    flops_per_s: float
    drive_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Subject:
    """The model that is converted: its shape, `source_bytes` of its checkpoint, and `pack_bytes` of what it becomes."""

    spec: ModelSpec
    parameters: Parameters
    source_bytes: int
    pack_bytes: int

    @property
    def expert_weights(self) -> int:
        return len(self.spec.expert_keys()) * self.spec.weights_per_expert()


@dataclass(frozen=True)
class Effort:
    """`disk_bytes`: that must be free, the source not counted. `read_bytes`: of the source in all. `sweep_s`: of the
    `seconds`, those of the sweep. `memory_bytes`: of the model, where it stays in memory; 0 where it passes through."""

    quantizer: str
    seconds: float
    sweep_s: float
    disk_bytes: int
    read_bytes: int
    memory_bytes: int


def without_text(subject: Subject, tools: Tools, quantizer: str = "group") -> Effort:
    """One width for all, or a size, with nothing measured."""
    coding_s = subject.expert_weights / tools.weights_per_s[quantizer]
    seconds = max(subject.source_bytes / tools.drive_bytes_per_s, coding_s)
    seconds += subject.pack_bytes / tools.drive_bytes_per_s
    return Effort(quantizer, seconds, 0.0, subject.pack_bytes, subject.source_bytes, 0)


def with_text(subject: Subject, tools: Tools, quantizer: str = "gptq") -> Effort:
    """For a loss: with the exact sweep of one width at a time, or by gradients where there are many experts or the
    model does not fit the memory."""
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
    passes_s = RULES.passes * (pass_s if reads == 1 else max(pass_s, read_s)) + (read_s if reads == 1 else 0.0)
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
    """On the drive, of what the quantizer wants to know of each expert's inputs: products of them, or their squares."""
    power = {"gptq": 2, "group": 1}.get(quantizer, 0)
    sides = spec.expert_width**power + spec.moe.ffn.d_ff**power if power else 0
    return 4 * len(spec.expert_keys()) * sides
