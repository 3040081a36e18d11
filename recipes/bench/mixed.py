"""`make bench-mixed`: attention, or all that lies outside the experts, at one width by the experts at another.

The table of mixed quantization of Mixtral-offloading (Eliseev and Mazur 2023, Table 1) on the decoders among the
reference models: what experts and the rest take, and the perplexity on held-out text. `--dense-bits attention=4` is
what is called attention there (matrices of queries, keys, values and output); `--dense-bits 4` is all that a pack can
quantize outside the experts. Measured as a conversion by the model's recipe measures its result; no pack is written,
since the format says what one takes. Writes build/bench/mixed.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moeconv.artifacts import uniform
from moeconv.conversion.measuring import Bench, References, evaluated
from moeconv.plan.problem import Plan
from moeconv.plan.search import uniform_bytes, weights_of
from moeconv.promise.judging import estimate
from moert.pack.manifest import LossEstimate
from recipes.bench.conversions import opened, run_models
from recipes.bench.program import as_program, own_recipe
from recipes.bench.result import Row
from recipes.bench.sized import sized

FOLDER = Path("build/bench/mixed")
MODELS = sized(("wiki", "wikids"), ("wiki",))
EXPERTS = sized((16, 4, 3, 2), (16, 4))
NARROWER = sized((8, 4, 3, 2), (4,))
ATTENTION, ALL = "attention", "all"
MB = 1e6


class Outside(NamedTuple):
    """What lies outside the experts: `part` of it (ATTENTION or ALL) at so many bits, the rest of it at 16."""

    part: str
    bits: int

    def __str__(self) -> str:
        return f"{self.part} at {self.bits}"

    @property
    def dense_bits(self) -> int | Mapping[str, int]:
        """As --dense-bits takes it."""
        return self.bits if self.part == ALL else {self.part: self.bits}


SETTINGS = (Outside(ALL, 16), *(Outside(part, bits) for part in (ATTENTION, ALL) for bits in NARROWER))


class Measured(NamedTuple):
    """Bytes of all experts, and of all that lies outside them, scales counted; effective bits of an expert's weight;
    what both lose together."""

    experts: int
    outside: int
    expert_bits: float
    loss: LossEstimate


def measured(name: str, outside: Outside) -> dict[int, Measured]:
    """By the width of all experts, with this outside them. Raises ConversionError."""
    settings = replace(own_recipe(name, FOLDER).settings, dense_bits=outside.dense_bits)
    found = {}
    with opened(settings) as bench:
        if bench.moments is not None:
            bench.collect_moments(bench.moments)
        references = References.of(bench)
        for bits in EXPERTS:
            found[bits] = _measured(bench, references, bits)
            print(f"{name}, {outside}, experts at {bits}: {found[bits].loss.value:.1f}", file=sys.stderr, flush=True)
    return found


def _measured(bench: Bench, references: References, bits: int) -> Measured:
    spec, heldout = bench.spec, references.heldout
    nbytes = uniform_bytes(spec, bits, bench.coding.storage)
    evaluation = evaluated(heldout, Plan(uniform(spec, bits), nbytes, 0.0))
    loss = estimate(heldout, evaluation, references.judge.used.heldout, bench.settings.seed)
    return Measured(nbytes, bench.coding.dense.backbone_bytes()[0], 8 * nbytes / weights_of(spec), loss)


def expert_rows(name: str, found: Mapping[int, Measured]) -> list[Row]:
    """What does not depend on what lies outside; `found` by the width of all experts."""
    rows = [Row(f"{name}, unquantized: perplexity", found[EXPERTS[0]].loss.reference, "")]
    for bits, one in found.items():
        rows += [
            Row(f"{name}, experts at {bits}: size", one.experts / MB, "MB"),
            Row(f"{name}, experts at {bits}: effective", one.expert_bits, "bits a weight"),
        ]
    return rows


def cell_rows(name: str, outside: Outside, bits: int, found: Measured) -> list[Row]:
    """A cell of the table."""
    where, loss = f"{name}, {outside}, experts at {bits}", found.loss
    return [
        Row(f"{where}: perplexity", loss.value, "", n=loss.samples),
        Row(f"{where}: loss", 100 * loss.loss, "%").within(100 * loss.low, 100 * loss.high, loss.samples),
        Row(f"{where}: size", (found.experts + found.outside) / MB, "MB"),
    ]


def rows_of(name: str) -> list[Row]:
    """Raises ConversionError."""
    rows: list[Row] = []
    for outside in SETTINGS:
        found = measured(name, outside)
        rows = rows or expert_rows(name, found)
        rows.append(Row(f"{name}, {outside}: size outside", found[EXPERTS[0]].outside / MB, "MB"))
        rows += [row for bits, one in found.items() for row in cell_rows(name, outside, bits, one)]
    return rows


def main() -> int:
    return run_models("mixed", "Widths outside the experts by widths of the experts.", MODELS, FOLDER, rows_of)


if __name__ == "__main__":
    as_program(main)
