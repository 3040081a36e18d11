"""A machine that is looked at without a measurement: what `moert info --system --json` says, and how fast it codes."""

from __future__ import annotations

from typing import Any

from moeconv.conversion.host import Timing

MACHINE: dict[str, Any] = {
    "process": {"held_bytes": 45_000_000, "thread_bytes": 1 << 20},
    "native_kernels": {"missing": None},
    "memory": {"free_bytes": 20_000_000_000},
    "kernel_bytes_per_s": {"2": 2e10, "3": 2e10, "4": 2e10, "8": 2e10, "16": 2e10},
    "trellis_bytes_per_s": {"1": 1e10, "1.5": 1e10, "2": 1e10, "2.5": 1e10, "3": 1e10, "4": 1e10},
    "drive": None,
}
TIMED = Timing({"group": 4e7, "gptq": 5e5, "trellis": 3e5}, 1e11)
