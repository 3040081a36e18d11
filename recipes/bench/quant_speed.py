"""Weights a second on one core: ours, hqq and llama.cpp's, on one large matrix and on many small ones."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from moeconv.quantizers import QUANTIZERS, Inputs
from moert.pack.codec import F32
from recipes.bench.peers import Ggml, hqq
from recipes.bench.result import Row, row_of_runs
from recipes.bench.sized import sized

SHAPES = sized({"1024 × 4096": (1, 1024, 4096), "64 experts of 256 × 128": (64, 256, 128)}, {"64 × 256": (1, 64, 256)})
RUNS = sized(3, 1)
SLOW_S = 10.0  # what takes longer is run once after the turn that is not counted
AIM = 50.0  # million weights a second, for `group` at 4 bits


def rows() -> list[Row]:
    """The methods take turns; the first turn is not counted."""
    torch.set_num_threads(1)
    found = []
    for name, shape in SHAPES.items():
        methods = _methods(np.random.default_rng(0).standard_normal(shape, np.float32))
        times: dict[str, list[float]] = {method: [] for method in methods}
        for turn in range(RUNS + 1):
            for method, call in methods.items():
                if turn > 1 and times[method][0] > SLOW_S:
                    continue
                start = time.perf_counter()
                call()
                times[method].append(time.perf_counter() - start)
        for method, (_, *taken) in times.items():
            rates = [np.prod(shape) / seconds / 1e6 for seconds in taken]
            row = row_of_runs(f"speed, {method}, {name}", [float(rate) for rate in rates], "million weights/s")
            found.append(row.at_least(AIM) if method.startswith("group") else row)
    return found


def _methods(weights: F32) -> dict[str, Callable[[], object]]:
    """At 4 bits, with inputs known where that makes a difference."""
    n, _, in_features = weights.shape
    x = np.random.default_rng(1).standard_normal((2 * in_features, in_features), np.float32)
    counts = np.full(n, len(x))
    square = Inputs.of(counts, np.repeat(np.square(x).mean(0)[None], n, axis=0))
    product = Inputs.of(counts, np.repeat((x.T @ x / len(x))[None], n, axis=0))
    formats = {name: Ggml(name) for name in ("Q4_K", "IQ2_XS", "IQ3_S", "IQ4_XS")}
    return {
        "channel": lambda: QUANTIZERS["channel"](0).quantize(weights, 4, None),
        "group": lambda: QUANTIZERS["group"](64).quantize(weights, 4, square),
        "gptq": lambda: QUANTIZERS["gptq"](64).quantize(weights, 4, product),
        "hqq": lambda: hqq(weights, 4, 64, 1),
        "Q4_K, no data": lambda: formats["Q4_K"].encode(weights, None),
    } | {
        f"{name}, imatrix": lambda ggml=ggml: ggml.encode(weights, square.moment)  # type: ignore[misc]
        for name, ggml in formats.items()
    }
