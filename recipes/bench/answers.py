"""`make bench-answers`: what models write, with all experts at so many bits by each quantizer.

A divergence says how far the numbers move; users see answers. Here the share of spellings that are exact (g2p) and the
F1 of marks set in a text (marks) stand beside the bits of an expert's weight, scales counted, on held-out text, as a
conversion by the model's recipe measures its result. Writes build/bench/answers.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeconv.artifacts import uniform
from moeconv.conversion.measuring import References, evaluated
from moeconv.dense import SOURCE
from moeconv.plan.problem import Plan
from moeconv.plan.search import uniform_bytes, weights_of
from moeconv.promise.judging import estimate
from recipes.bench.conversions import opened, run_models
from recipes.bench.program import as_program, own_recipe
from recipes.bench.result import Row
from recipes.bench.sized import sized

FOLDER = Path("build/bench/answers")
MODELS: Mapping[str, Mapping[str, Any]] = sized({"g2p": {"metric": "exact_match"}, "marks": {}}, {"g2p": {}})
"""With what is otherwise than in their recipes."""
WIDTHS: Mapping[str, tuple[float, ...]] = sized(
    {"group": (2, 3), "gptq": (2, 3), "trellis": (1, 1.5, 2, 2.5, 3)}, {"gptq": (2,)}
)


def rows_of(name: str, quantizer: str) -> Iterator[Row]:
    """Raises ConversionError."""
    recipe = own_recipe(name, FOLDER).settings
    settings = replace(recipe, quantizer=quantizer, bits=WIDTHS[quantizer], dense_bits=SOURCE, **MODELS[name])
    with opened(settings) as bench:
        if bench.moments is not None:
            bench.collect_moments(bench.moments)
        references = References.of(bench)
        heldout = references.heldout
        for bits in WIDTHS[quantizer]:
            nbytes = uniform_bytes(bench.spec, bits, bench.coding.storage)
            evaluation = evaluated(heldout, Plan(uniform(bench.spec, bits), nbytes, 0.0))
            loss = estimate(heldout, evaluation, references.judge.used.heldout, settings.seed)
            where = f"{name}, {quantizer} at {bits:g}"
            print(f"{where}: {loss.value:.4f} of {loss.reference:.4f}", file=sys.stderr, flush=True)
            yield Row(f"{where}: effective", 8 * nbytes / weights_of(bench.spec), "bits a weight")
            yield Row(f"{where}: {heldout.metric.name}", loss.value, "", n=loss.samples)
            yield Row(f"{where}: loss", 100 * loss.loss, "%").within(100 * loss.low, 100 * loss.high, loss.samples)
        yield Row(f"{name}, unquantized, {quantizer}: {heldout.metric.name}", loss.reference, "", n=loss.samples)


def rows_of_all(name: str) -> Iterator[Row]:
    """Raises ConversionError."""
    for quantizer in WIDTHS:
        yield from rows_of(name, quantizer)


def main() -> int:
    return run_models("answers", "What models write, by the quantizer of their experts.", MODELS, FOLDER, rows_of_all)


if __name__ == "__main__":
    as_program(main)
