"""This machine: its memory as packs will find it, and how fast it quantizes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeconv.plan.outlook import Host

# Facts of this machine, measured in another process: this one has loaded libraries that moert never loads.

_OF_PROCESS = """
import json
from moert.command import cli, description
print(json.dumps(description.process_facts()))
"""


def facts() -> dict[str, Any]:
    """Returns the output of `moert info --system --json`."""
    return _said("-m", "moert", "info", "--system", "--json")


def host_of(found: dict[str, Any]) -> Host:
    """Returns the facts that a budget needs."""
    process, widened = found["process"], found["native_kernels"]["missing"] is not None
    return Host(process["held_bytes"], process["thread_bytes"], widened)


def this_host() -> Host:
    """Returns these facts of this machine, measured now, without its speeds, which take a second to measure."""
    return host_of(_said("-c", _OF_PROCESS))


def _said(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# Speeds of this machine, by a small timed sample: about two seconds without the imports.

_TIMES = 2  # of which the faster one counts
_GROUP = (1, 1024, 2048)  # [experts, out, in]
_BY_TEXT = (1, 256, 1024)  # slower by two orders
_TOKENS, _SIDE = 512, 1024
_BITS = 4


@dataclass(frozen=True)
class Timing:
    """Speeds: weights a second for each quantizer, at four bits; operations a second of a matrix product in 32 bits,
    the precision that models are measured in."""

    weights_per_s: dict[str, float]
    flops_per_s: float


def timing(clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Returns the speeds of this machine, measured now with torch's own number of threads."""
    import torch

    from moeconv.quantizers import QUANTIZERS, Inputs

    random = np.random.default_rng(0)
    shapes = {"group": _GROUP, "gptq": _BY_TEXT, "trellis": _BY_TEXT}
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    x = random.standard_normal((2 * _BY_TEXT[2], _BY_TEXT[2]), np.float32)
    inputs = Inputs.of(np.array([len(x)]), (x.T @ x / len(x))[None])
    a, b = torch.ones(_TOKENS, _SIDE), torch.ones(_SIDE, _SIDE)

    def fastest(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(_TIMES):
            started = clock()
            work()
            taken.append(clock() - started)
        return min(taken)

    def coding_s(name: str) -> float:
        quantizer = QUANTIZERS[name](None)
        return fastest(lambda: quantizer.quantize(weights[name], _BITS, None if name == "group" else inputs))

    seconds = {name: coding_s(name) for name in weights}
    product_s = fastest(lambda: torch.mm(a, b))
    return Timing(
        {name: weights[name].size / taken for name, taken in seconds.items()}, 2 * _TOKENS * _SIDE**2 / product_s
    )
