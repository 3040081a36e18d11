"""Packs with a report of invented figures: full ones, bare ones, and large ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from random_packs import random_expert
from tiny_packs import DECODER_SHAPE, SWITCH_SHAPE

from moeconv.artifacts import (
    ConversionReport,
    CurvePoint,
    Probe,
    SensitivityTable,
    Step,
    Summary,
    SweepCost,
    Target,
    to_json,
)
from moeconv.routes import build
from moeconv.writer import PackWriter
from moert.pack.manifest import LossEstimate, Quantization
from moert.pack.model_spec import STACKS, LayerKey, ModelSpec
from moert.pack.paths import PATHS
from tests.shapes import every

SWITCH = SWITCH_SHAPE.but(encoder=every(4), decoder=every(4), d_model=8, num_experts=8, d_ff=8).spec
LARGE = DECODER_SHAPE.but(d_model=8, decoder=every(12), num_experts=16, d_ff=8, renormalise=True).spec
NASTY = '<script>alert("x")</script> & <b>bold</b>'


def full_report(spec: ModelSpec, seed: int = 0) -> ConversionReport:
    """Every part is there; the first expert saw no token and costs nothing."""
    rng = np.random.default_rng(seed)
    keys = spec.expert_keys()
    width = (2,) * len(spec.moe.ffn.projections)
    costs = {Probe(key, width): _costs(rng) for key in keys}
    coverage = {key: int(tokens) for key, tokens in zip(keys, rng.lognormal(7, 1.5, len(keys)), strict=True)}
    costs[Probe(keys[0], width)], coverage[keys[0]] = (0.0, 0.0, 0.0), 0
    size = 8_300_000
    predicted = [
        CurvePoint(int(size * s), 0.4 * (1 - s) ** 3 + 0.001, None, None, False) for s in np.linspace(0.3, 1, 30)
    ]
    measured = [
        CurvePoint(int(size * s), 0.4 * (1 - s) ** 3, loss, loss + 0.014, chosen)
        for s, loss, chosen in ((0.5, 0.071, False), (0.57, 0.046, False), (0.6, 0.031, True), (0.8, 0.004, False))
    ]
    steps = ("reference", "sweep of experts", "plan and repair", "held-out check", "pack")
    return ConversionReport(
        model="switch-tiny <8>", calibration_source="g2p", heldout_source=None, fields=None, seed=0, metric="rouge2",
        quantizer="group", group_size=64, allocation="knapsack", signal="kl", target=Target("loss", 0.05), margin=0.0,
        confidence=0.95, calibration=LossEstimate(0.82, 0.795, 0.031, 0.018, 0.045, 600), upper_bound=0.043,
        heldout=LossEstimate(0.81, 0.782, 0.0346, 0.021, 0.049, 1000), bits_histogram={2: 41, 3: 60, 4: 20, 8: 7},
        effective_bits=3.19,
        expert_bytes={"pack": 4_980_000, "int4": 8_300_000, "int8": 16_000_000, "fp16": 31_000_000},
        context=256, evaluations=14, evaluation_seconds=61.5, seconds=312.0,
        sensitivity=SensitivityTable(4, Summary(0.82, 0.002, 0.27, 0.004), costs, coverage),
        sweep_cost=SweepCost(len(keys), 1, 1.0, 8 * 10**11, 10**13, 190.0, 2), fallbacks=("E00/E000 up",),
        curve=(*predicted, *measured),
        steps=tuple(Step(name, seconds) for name, seconds in zip(steps, (22.0, 190.0, 61.5, 30.1, 4.2), strict=True)),
        samples=(
            {"input": "educates", "target": "EH JH AH K EY T S", "reference": "EH JH AH K EY T S",
             "pack": "EH D AH K EY T S"},
            {"input": NASTY, "target": "x", "reference": f"{NASTY} same", "pack": NASTY},
        ),
    )  # fmt: skip


def bare_report(spec: ModelSpec) -> ConversionReport:
    """What a conversion without calibration text knows."""
    return replace(
        full_report(spec),
        calibration_source="", metric="", allocation="", confidence=None, calibration=None, upper_bound=None,
        heldout=None, bits_histogram={16: 128}, effective_bits=16.0, evaluations=0, evaluation_seconds=0.0,
        sensitivity=None, sweep_cost=None, fallbacks=(), curve=(), steps=(), samples=(),
    )  # fmt: skip


def report_pack(out: Path, spec: ModelSpec, report: dict[str, Any] | bytes | None, paths: bool = True) -> Path:
    """A pack of random weights; `report` as JSON values or as bytes, None for a pack without one."""
    writer = PackWriter(out, spec, Quantization("group", 4, "F16", 7), "report")
    for key in spec.expert_keys():
        writer.write_expert(key, random_expert(spec, key, 4), None)
    writer.write_file("backbone.safetensors", b"nothing")
    if report is not None:
        body = report if isinstance(report, bytes) else json.dumps(report).encode()
        writer.write_file("report.json", body)
    if paths:
        writer.write_file(PATHS, build(spec.moe.n, _routes(spec)).to_bytes())
    writer.finish("tests", None)
    return out


def full_pack(out: Path, spec: ModelSpec = SWITCH) -> Path:
    return report_pack(out, spec, to_json(full_report(spec)))


def bare_pack(out: Path) -> Path:
    return report_pack(out, SWITCH, to_json(bare_report(SWITCH)), paths=False)


def _costs(rng: np.random.Generator) -> tuple[float, float, float]:
    size = float(rng.lognormal(-6.5, 1.2))
    return size + float(rng.normal()) * 5e-4, size * 0.7, size * 0.5


def _routes(spec: ModelSpec) -> dict[LayerKey, Any]:
    """Tokens that mostly keep to a few paths."""
    rng = np.random.default_rng(1)
    kinds = {stack: np.minimum(rng.geometric(0.12, 6000), 40) for stack in STACKS}
    routes = {}
    for at in spec.moe_layers():
        kind = kinds[at.stack] * 7 + at.layer * 3
        first = np.where(rng.random(6000) < 0.75, kind, rng.integers(0, 1 << 16, 6000))
        routes[at] = np.stack([(first + 5 * k) % spec.moe.n for k in range(spec.moe.router.top_k)], 1)
    return routes
