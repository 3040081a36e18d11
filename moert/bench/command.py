"""The command `moert bench`: a measurement as the plain values of its JSON line, and as lines for people."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moert.bench.measure import BenchRun, BenchSettings, bound_s, measure
from moert.beside.flash.runner import EXACT
from moert.beside.gpu.device import DeviceCounters, DeviceUse
from moert.command.description import machine_facts
from moert.command.prompts import Longest, Source, read_records
from moert.engine.budget import CacheLimit, MemoryLimit, room_within
from moert.engine.registry import check_pack
from moert.errors import InputInvalid
from moert.pack.messages import in_one_line
from moert.pack.reader import MANIFEST, Pack
from moert.stats import size

PERCENTILES = (50, 90, 99)


def summarize(measured: BenchRun, hardware: dict[str, Any], pack_sha256: str) -> dict[str, Any]:
    """Returns the plain values of a measurement: seconds, bytes and shares of 1. `pack_sha256` is the hash of
    manifest.json, which has the hashes of all other files."""
    samples = measured.samples
    first_s, later_s = sum(sample.first_s for sample in samples), [s for sample in samples for s in sample.later_s]
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    manifest = measured.pack.manifest
    return {
        "hardware": hardware,
        "pack": {
            "path": str(measured.pack.root),
            "sha256": pack_sha256,
            "effective_bits": manifest.effective_bits(),
            "target_loss": None if manifest.quality is None else manifest.quality.target_loss,
        },
        "settings": _settings(measured),
        "samples": len(samples),
        "prompt_tokens": prompt_tokens,
        "new_tokens": sum(len(sample.tokens) for sample in samples),
        "prompt_tokens_per_s": prompt_tokens / first_s,
        "tokens_per_s": len(later_s) / sum(later_s) if later_s else 0.0,
        "time_to_first_token_s": first_s / len(samples),
        "first_request": {"open_s": measured.open_s, "time_to_first_token_s": measured.first_request_s},
        "token_latency_s": {f"p{q}": percentile(later_s, q) for q in PERCENTILES} if later_s else None,
        "sample_latency_s": [sample.total_s for sample in samples],
        "bytes": {
            "disk_read": measured.bytes_read,
            "read_ahead": measured.ahead_bytes,
            # Some of what is used now may have been read ahead while the engine was warmed.
            "read_ahead_used": min(measured.ahead_used_bytes, measured.ahead_bytes),
            "cache": measured.cache_bytes,
            "experts": measured.expert_bytes,
            "backbone": measured.backbone_bytes,
            "peak_process": measured.peak_bytes,
        },
        # Of the experts that layers demanded: in memory or on its way, and each of the two alone.
        "hit_rate": _share(measured.hits, measured),
        "hit_rate_in_memory": _share(measured.hits - measured.hits_in_flight, measured),
        "hit_rate_in_flight": _share(measured.hits_in_flight, measured),
        "stall_s": measured.stall_s,
        "bound": _bound(measured),
        "device": None if measured.device is None else asdict(measured.device),
        "tokens_sha256": tokens_sha256([sample.tokens for sample in samples]),
    }


def _share(demands: int, measured: BenchRun) -> float:
    return demands / measured.demands if measured.demands else 0.0


def _settings(measured: BenchRun) -> dict[str, Any]:
    """Returns the settings of a run, with the values that `auto` stood for; no eviction where all experts fit. Limits
    are given as the user gave them, and in bytes."""
    settings, limit = measured.settings.engine, measured.settings.engine.limit
    memory = limit if isinstance(limit, MemoryLimit) else None
    room = limit if isinstance(limit, CacheLimit) else None
    whole = settings.neurons == EXACT
    return {
        "memory": None if memory is None else {"asked": asked(memory), "bytes": measured.memory_bytes},
        "cache": None if room is None else {"asked": asked(room), "bytes": measured.cache_bytes},
        "io": measured.io,
        "eviction": measured.eviction if whole else None,
        "predict": settings.predict if whole else "none",
        "threads": measured.threads,
        "kernels": measured.kernels,
        "kv": settings.kv,
        "neurons": settings.neurons,
        "new_tokens": measured.settings.new_tokens,
    }


def asked(limit: MemoryLimit | CacheLimit) -> str:
    """Returns the text behind --memory or --tune cache= that asks for this limit."""
    if limit.share is not None:
        return f"{100 * limit.share:.10g}%"
    if limit.nbytes is None:
        return "auto"
    for unit, scale in (("GB", 10**9), ("MB", 10**6)):
        if limit.nbytes >= scale and limit.nbytes * 1000 % scale == 0:
            return f"{limit.nbytes / scale:.12g}{unit}"
    return str(limit.nbytes)


def _bound(measured: BenchRun) -> dict[str, Any]:
    """Returns the least time of a run. Computing is the time of the same run with all experts in memory, or if that was
    not tried or took no less, the time of this run without waiting for experts. The drive's speed was measured at
    another moment, and the time of a run is possible: so the bound is never above it. No policy can avoid
    `least_bytes`; Belady's rule reads `belady_bytes`: None where experts are not kept whole."""
    whole = measured.settings.engine.neurons == EXACT
    simulated = measured.settings.engine.device.startswith("sim:")  # then waiting is of another clock
    compute_s, compute = measured.total_s - (0.0 if simulated else measured.stall_s), "not waiting"
    if measured.resident_s is not None and measured.resident_s < compute_s:
        compute_s, compute = measured.resident_s, "in memory"
    least_s = min(bound_s(compute_s, measured.least_bytes, measured.disk_bytes_per_s), measured.total_s)
    return {
        "least_bytes": measured.least_bytes,
        "belady_hit_rate": measured.furthest_first.hit_rate if whole else None,
        "belady_bytes": measured.furthest_first.bytes_read if whole else None,
        "disk_bytes_per_s": measured.disk_bytes_per_s,
        "compute_s": compute_s,
        "compute": compute,
        "least_s": least_s,
        "total_s": measured.total_s,
        "share": least_s / measured.total_s,
    }


def percentile(values: Sequence[float], q: float) -> float:
    """Returns the smallest value that q percent of all are not above (nearest rank). Raises ValueError without any."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(q / 100 * len(values)) - 1)]


def tokens_sha256(samples: Sequence[Sequence[int]]) -> str:
    """Returns a hash that is equal for runs that wrote the same tokens, whatever their settings."""
    return hashlib.sha256(json.dumps([list(tokens) for tokens in samples]).encode()).hexdigest()


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """Returns the same values in lines for people."""
    nbytes, bound, latency = summary["bytes"], summary["bound"], summary["token_latency_s"]
    hardware, device = summary["hardware"], summary["device"]
    lines = [
        f"pack             {summary['pack']['path']}, {summary['pack']['effective_bits']:.2f} bits per expert weight",
        f"machine          {hardware['processor']}, {hardware['cores']} cores",
        f"prompts          {summary['samples']} of {summary['prompt_tokens']} tokens in all, "
        f"{summary['prompt_tokens_per_s']:.1f} tokens/s, first token after {summary['time_to_first_token_s']:.3f} s",
        f"first request    {summary['first_request']['time_to_first_token_s']:.3f} s to its first token, after "
        f"{summary['first_request']['open_s']:.3f} s to open the pack",
        f"settings         eviction {summary['settings']['eviction'] or 'not needed'}, "
        f"predict {summary['settings']['predict']}, io {summary['settings']['io']}, "
        f"threads {summary['settings']['threads']}, kernels {summary['settings']['kernels']}"
        + ("" if summary["settings"]["neurons"] == EXACT else f", neurons {summary['settings']['neurons']}"),
        f"writing          {summary['tokens_per_s']:.2f} tokens/s",
    ]
    if latency is not None:
        each = ", ".join(f"{name[1:]}% within {1000 * seconds:.1f} ms" for name, seconds in latency.items())
        lines.append(f"token latency    {each}")
    if device is not None:
        use = DeviceUse(**{**device, "counters": DeviceCounters(**device["counters"])})
        lines += use.lines()
    evicting = []
    if bound["belady_bytes"] is not None:
        evicting = [
            "eviction         knowing the future, without reading ahead: "
            f"{100 * bound['belady_hit_rate']:.1f}% in memory, {size(bound['belady_bytes'])} read; no policy reads "
            f"less than {size(bound['least_bytes'])}"
        ]
    return [
        *lines,
        f"read from disk   {size(nbytes['disk_read'])}, ahead of demand {size(nbytes['read_ahead'])} and of it "
        f"{size(nbytes['read_ahead_used'])} used; waited {summary['stall_s']:.3f} s",
        f"in memory        cache {size(nbytes['cache'])} of {size(nbytes['experts'])} of experts, "
        f"other weights {size(nbytes['backbone'])}, peak of the process {size(nbytes['peak_process'])}",
        f"in time          {100 * summary['hit_rate_in_memory']:.1f}% of experts in memory, "
        f"{100 * summary['hit_rate_in_flight']:.1f}% on the way when they were needed",
        *evicting,
        f"bound            {bound['least_s']:.3f} s of {bound['total_s']:.3f} s: {100 * bound['share']:.0f}% of what "
        f"computing ({bound['compute_s']:.3f} s {bound['compute']}) and this disk "
        f"({bound['disk_bytes_per_s'] / 1e6:.0f} MB/s) allow",
    ]


def bench(
    packs: Sequence[Path], settings: BenchSettings, texts: Sequence[str] | None = None, as_json: bool = False
) -> list[BenchRun]:
    """Measures packs and prints for each, as soon as it was measured, a table and one JSON line, or that line alone.
    Returns the measurements. Raises PackError, RunError."""
    for path in packs:
        engine = settings.engine
        pack = Pack.open(path, room_within(engine.limit))
        check_pack(pack, engine)
    measured = list[BenchRun]()
    for path in packs:
        measured.append(measure(path, settings, texts))
        _show(summary_of(measured[-1]), as_json)
    return measured


def _show(summary: dict[str, Any], as_json: bool) -> None:
    if not as_json:
        print("\n".join(map(in_one_line, summary_lines(summary))), end="\n\n")
    print(json.dumps(summary), flush=True)


def texts_of(prompt: str | None, path: Path | None, longest: Longest) -> list[str] | None:
    """Returns the prompts of --prompt or --input; None for the built-in texts. Raises InputInvalid."""
    if prompt is not None and path is not None:
        raise InputInvalid("--prompt and --input exclude each other: give one of them")
    if path is None:
        return None if prompt is None else [prompt]
    return [record.prompt for record in read_records(Source(path, longest), sys.stdin, lambda text: None)]


def summary_of(measured: BenchRun) -> dict[str, Any]:
    """Returns the plain values of the JSON line."""
    manifest = (measured.pack.root / MANIFEST).read_bytes()
    facts = machine_facts()
    hardware = {
        "processor": facts["processor"],
        "cores": facts["cores"]["usable"],
        "memory_bytes": facts["memory"]["total_bytes"],
        "memory_limit_bytes": facts["memory"]["limit_bytes"],
        "instruction_set": next((each["name"] for each in facts["instruction_sets"] if each["chosen"]), None),
        "platform": sys.platform,
    }
    return summarize(measured, hardware, hashlib.sha256(manifest).hexdigest())
