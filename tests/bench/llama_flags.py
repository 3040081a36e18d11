"""CMake options that compile llama.cpp for this processor without AMX: `python tests/bench/llama_flags.py` prints them.

Compiled with -march=native (GGML_NATIVE) on a machine with AMX, llama.cpp of llama-cpp-python 0.3.36 ends with a
segmentation fault. Here each extension that ggml has code for is named, AMX alone is left out, so that the same
processor runs everything else that the native build would.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

EXTENSIONS = {
    "SSE42": {"sse4_2"},
    "AVX": {"avx"},
    "F16C": {"f16c"},
    "FMA": {"fma"},
    "BMI2": {"bmi2"},
    "AVX2": {"avx2"},
    "AVX_VNNI": {"avx_vnni"},
    "AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"},
    "AVX512_VBMI": {"avx512vbmi"},
    "AVX512_VNNI": {"avx512_vnni"},
    "AVX512_BF16": {"avx512_bf16"},
}
"""ggml's options of x86 → what Linux calls the extensions that each compiles for."""
LEFT_OUT = ("AMX_TILE", "AMX_INT8", "AMX_BF16")


def options(machine: str, flags: Collection[str]) -> list[str]:
    """For a machine as `uname -m` calls it and, on x86, the flags of /proc/cpuinfo. Elsewhere the native build runs."""
    if machine != "x86_64":
        return ["-DGGML_NATIVE=ON"]
    chosen = [f"-DGGML_{name}={'ON' if needed <= set(flags) else 'OFF'}" for name, needed in EXTENSIONS.items()]
    return ["-DGGML_NATIVE=OFF", *chosen, *(f"-DGGML_{name}=OFF" for name in LEFT_OUT)]


def processor_flags(cpuinfo: str) -> set[str]:
    """The flags of the first processor in a text like /proc/cpuinfo; none where it has no such line."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def main() -> None:
    print(*options(platform.machine(), processor_flags(Path("/proc/cpuinfo").read_text())))


if __name__ == "__main__":
    main()
