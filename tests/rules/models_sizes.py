"""The table of docs/models.md that says what published models take: packs, memory, and tokens a second that are
expected on the stated machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from published import PUBLISHED

from moeconv.dense import dense_of
from moeconv.plan.forecast import (
    BITS_PER_WEIGHT,
    Drive,
    Prospect,
    forecast,
    nearest,
    prospect,
    references,
    stated,
    ways,
)
from moeconv.plan.outlook import Mixture
from moeconv.plan.problem import Storage
from moeconv.report.page import size
from moeconv.source.archs import FAMILIES
from moert.pack.model_spec import ModelSpec

MODELS = (
    "OLMoE-1B-7B", "LFM2-8B-A1B", "DeepSeek-V2-Lite", "gpt-oss-20b", "ERNIE-4.5-21B-A3B", "Gemma-4-26B-A4B",
    "Qwen3-30B-A3B", "Nemotron-3-Nano-30B-A3B", "Qwen3.5-35B-A3B", "Mixtral-8x7B", "Qwen3-Next-80B-A3B",
    "GLM-4.5-Air", "gpt-oss-120b", "MiniMax-M2", "DeepSeek-V3",
)  # fmt: skip
DENSE_BITS = 8
MEMORY = (4 * 10**9, 16 * 10**9)
DRIVES = (500e6, 3e9)
_HEAD = ("model", "bits", "pack", "smallest `--memory`")


def section() -> list[str]:
    """Lines, heading and all."""
    machine = stated()
    speeds, trellis = machine.processor.kernel_bytes_per_s, machine.processor.trellis_bytes_per_s
    paragraphs = (
        f"Sizes of packs of published models, and the speed at which moert is expected to write on one machine: "
        f"{machine.name}, whose kernels multiply {speeds[8] / 1e9:.0f} GB/s of weights at eight bits, and "
        f"{trellis[2] / 1e9:.0f} GB/s of trellis codes at two (reckoned from a processor without AMX). *bits* are "
        f"those of an expert's weight, in trellis codes; all other matrices have {DENSE_BITS}. Nobody has run these "
        "models here: the figures are [estimates](method.md#before-converting), "
        "[compared](benchmarks.md#before-converting) with measurements of other models. `moeconv plan MODEL` prints "
        "them for your machine, at more widths.",
    )
    lines = ["## Sizes and speeds of real models", "", "<!-- reckoned: models -->"]
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, 120, break_on_hyphens=False), ""]
    places = [f"{size(memory)}, {size(drive)}/s" for memory in MEMORY for drive in DRIVES]
    head = (*_HEAD, *places)
    lines += [_cells(head), _cells(["---"] * len(head))]
    lines += [row for name in MODELS for row in _rows(name)]
    return [*lines, "", "Speeds are in tokens per second; - means that the memory is too small.", "<!-- end -->"]


def _rows(name: str) -> Iterator[str]:
    config = PUBLISHED[name]
    found = FAMILIES[config["model_type"]].of(config).description(config, {})
    spec, storage, machine = found.spec, Storage(mxfp4=found.mxfp4, codes="trellis"), stated()
    for mixed in _mixtures(spec, storage):
        what = prospect(spec, storage, mixed, dense_of(spec, DENSE_BITS), found.computed, machine.host)
        cells = (name, f"{mixed.bits_per_weight:.1f}", size(what.fit.pack_bytes), size(what.fit.smallest_memory))
        yield _cells((*cells, *_speeds(spec, what)))


def _mixtures(spec: ModelSpec, storage: Storage) -> list[Mixture]:
    """As near to BITS_PER_WEIGHT as there are: a source of four bits and a quarter has none above."""
    return [min(ways(spec, storage), key=lambda each: abs(each.bits_per_weight - bits)) for bits in BITS_PER_WEIGHT]


def _speeds(spec: ModelSpec, what: Prospect) -> list[str]:
    like, processor = nearest(spec, references()), stated().processor
    found = [
        forecast(what, like, processor, Drive(drive, drive), memory).tokens_per_s
        for memory in MEMORY
        for drive in DRIVES
    ]
    return ["-" if speed is None else f"{speed:.2g}" for speed in found]


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
