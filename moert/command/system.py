"""What `moert info --system` says: this machine, and what of it the native kernels use."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moert.devices.calibration import known_costs
from moert.experts.drive.probe import remembered
from moert.kernels import library
from moert.kernels.speed import MOST_BYTES, kernel_speeds
from moert.machine.control_groups import ROOT, text
from moert.machine.cores import affinity, quota_of, usable_cores
from moert.machine.memory import held_bytes, machine_memory, thread_bytes
from moert.stats import size

_ROOM = 4  # of what is free, the part of it that kernels are measured in


def system_facts(root: Path = ROOT) -> dict[str, Any]:
    """Everything as plain values; null where this system does not tell. `root` is where /proc and /sys are."""
    return {
        "processor": _processor(root),
        "cores": {
            "machine": os.cpu_count(),
            "affinity": affinity(),
            "quota": quota_of(root),
            "usable": usable_cores(root),
        },
        "threads": usable_cores(root),
        **process_facts(root),
        "instruction_sets": _instruction_sets(),
        "memory": asdict(machine_memory(root)),
        "transparent_huge_pages": _huge_pages(root),
        "kernel_bytes_per_s": _kernel_speeds(root),
        "drive": _drive(root),
        "devices": _devices(),
    }


def process_facts(root: Path = ROOT) -> dict[str, Any]:
    """Those of them that say how much memory a pack finds taken. Nothing is measured."""
    from moert import engine  # noqa: F401 - what it imports takes memory

    return {
        "process": {"held_bytes": held_bytes(root), "thread_bytes": thread_bytes(usable_cores(root), root)},
        "native_kernels": {"path": str(library.PATH), "missing": library.missing()},
    }


def system_lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    cores, memory, missing = facts["cores"], facts["memory"], facts["native_kernels"]["missing"]
    quota = "no quota" if cores["quota"] is None else f"a quota of {cores['quota']:g}"
    limit = "" if memory["limit_bytes"] is None else f", limited to {size(memory['limit_bytes'])}"
    sets = facts["instruction_sets"]
    names = [f"  {each['name']:<14} {each['why']}" for each in sets]
    return [
        f"processor        {facts['processor']}",
        f"cores            {cores['usable']} usable: {cores['affinity']} by affinity, {quota}, "
        f"{_or_unknown(cores['machine'])} in the machine",
        f"threads          {facts['threads']} by default",
        f"kernels          {'native' if missing is None else library.missing_note()}",
        *names,
        f"memory           {_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} of it available{limit}; "
        f"{_size(memory['free_bytes'])} free for this process",
        f"this process     {size(facts['process']['held_bytes'])} without a pack, "
        f"{size(facts['process']['thread_bytes'])} more for threads",
        f"huge pages       {_or_unknown(facts['transparent_huge_pages'])} (transparent)",
        f"weights          {_speeds(facts['kernel_bytes_per_s'])}",
        f"drive            {_drive_line(facts['drive'])}",
        *_device_lines(facts["devices"]),
    ]


def _instruction_sets() -> list[dict[str, Any]]:
    loaded = library.load()
    if loaded is None:
        return []
    chosen = loaded.choose()
    return [
        {
            "name": each.name,
            "runs": each.runs,
            "chosen": each.number == chosen,
            "why": _why(each.number == chosen, each.runs),
        }
        for each in loaded.instruction_sets
    ]


def _kernel_speeds(root: Path) -> dict[str, float] | None:
    """Width → bytes/s, measured now; null without native kernels, or without memory to measure in."""
    loaded, free = library.load(), machine_memory(root).free_bytes
    if loaded is None:
        return None
    room = MOST_BYTES if free is None else min(MOST_BYTES, free // _ROOM)
    try:
        return {str(bits): speed for bits, speed in kernel_speeds(loaded, usable_cores(root), room).items()}
    except (library.NativeFailed, MemoryError):
        return None


def _drive(root: Path) -> dict[str, Any] | None:
    """The drive under the current directory, as it was measured when moert first read from it; null if it never did."""
    known = remembered(Path.cwd(), root=root)
    if known is None:
        return None
    alone = max((speed for way, speed in known.speeds.items() if way.threads == 1), default=None)
    best = known.speeds[known.settings]
    return {
        "io": str(known.settings),
        "bytes_per_s": best,
        "alone_bytes_per_s": best if alone is None else alone,
        "piece_bytes": known.piece_bytes,
    }


def _devices() -> dict[str, Any]:
    """Devices that were measured here when moert first used them: what things take there."""
    return {name: asdict(costs) for name, costs in known_costs().items()}


def _device_lines(devices: dict[str, Any]) -> list[str]:
    found = []
    for name, costs in devices.items():
        at_four, at_sixteen = costs["widths"][4], costs["widths"][16]
        found.append(
            f"device           {name}: {costs['copy_bytes_per_s'] / 1e9:.1f} GB/s to it, "
            f"{1e6 * (costs['launch_s'] + costs['pass_s']):.0f} µs to begin and fetch, "
            f"{1e-9 / at_four['weight_s']:.0f} billion weights a second at 4 bits, "
            f"{1e-9 / at_sixteen['weight_s']:.0f} at 16"
        )
    return found or ["device           none was measured; --device says which to use"]


def _speeds(speeds: dict[str, float] | None) -> str:
    if speeds is None:
        return "not measured"
    each = ", ".join(f"{speed / 1e9:.1f} GB/s at {bits} bits" for bits, speed in speeds.items())
    return f"multiplied with one token: {each}"


def _drive_line(drive: dict[str, Any] | None) -> str:
    if drive is None:
        return "not measured; moert measures it when it first reads experts there"
    best, alone = (f"{drive[name] / 1e6:,.0f} MB/s" for name in ("bytes_per_s", "alone_bytes_per_s"))
    pieces = f", in pieces of {size(drive['piece_bytes'])}" if drive["piece_bytes"] else ""
    return f"{best} here ({drive['io']}), {alone} where one thread reads{pieces}"


def _why(chosen: bool, runs: bool) -> str:
    if chosen:
        return "chosen: the best that this processor has"
    return "available" if runs else "not on this processor"


def _processor(root: Path) -> str:
    for line in text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _huge_pages(root: Path) -> str | None:
    """The mode in brackets, as in "always [madvise] never"."""
    words = text(root / "sys/kernel/mm/transparent_hugepage/enabled").split()
    return next((word[1:-1] for word in words if word.startswith("[")), None)


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else size(nbytes)


def _or_unknown(value: object) -> object:
    return "unknown" if value is None else value
