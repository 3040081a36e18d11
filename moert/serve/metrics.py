"""Figures of the server in the text format of Prometheus."""

from __future__ import annotations

from moert.machine import held_bytes
from moert.serve.worker import Worker
from moert.stats import RunStats

_FIGURES = {
    "requests_total": ("counter", "Requests that have ended.", "requests"),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were read.", "prompt_tokens"),
    "new_tokens_total": ("counter", "Tokens that were written.", "new_tokens"),
    "tokens_per_second": ("gauge", "Tokens a second behind the first of each answer.", "tokens_per_s"),
    "expert_requests_total": ("counter", "Demands of a layer for an expert.", "expert_requests"),
    "expert_hits_total": ("counter", "Demands whose expert was in memory or on its way.", "expert_hits"),
    "expert_read_bytes_total": ("counter", "Bytes of experts that were read.", "bytes_read"),
    "expert_stall_seconds_total": ("counter", "Time that the model waited for experts.", "stall_s"),
    "expert_room_bytes": ("gauge", "Room for experts in memory.", "cache_bytes"),
    "expert_bytes": ("gauge", "Bytes of all experts.", "expert_bytes"),
    "memory_limit_bytes": ("gauge", "Limit of the process's memory.", "memory_bytes"),
}
"""Name → its kind, its help, and the field of RunStats."""


def metrics_text(stats: RunStats, worker: Worker) -> str:
    """Returns all figures."""
    found = [(name, *rest[:2], getattr(stats, rest[2])) for name, rest in _FIGURES.items()]
    found += [
        ("held_bytes", "gauge", "Memory of the process.", held_bytes()),
        ("clients", "gauge", "Clients whose answers run or wait.", worker.unfinished),
        ("clients_refused_total", "counter", "Clients that were refused because too many waited.", worker.refused),
        ("prefix_bytes", "gauge", "Memory of kept prefixes.", worker.prefix_bytes),
    ]
    lines = []
    for name, kind, words, value in found:
        if value is not None:
            lines += [f"# HELP moert_{name} {words}", f"# TYPE moert_{name} {kind}", f"moert_{name} {value}"]
    return "\n".join(lines) + "\n"
