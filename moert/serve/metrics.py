"""Figures of the server in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
_OF_WORKERS = {
    "clients": ("gauge", "Clients whose answers run or wait.", "unfinished"),
    "clients_refused_total": ("counter", "Clients that were refused because too many waited.", "refused"),
    "prefix_bytes": ("gauge", "Memory of kept prefixes.", "prefix_bytes"),
}
"""The same of Worker."""


def metrics_text(models: Mapping[str, tuple[RunStats, Worker]], wanted: Sequence[tuple[str, int]]) -> str:
    """Returns all figures: those of the models in memory by name, and those of the process. `wanted`: the models that
    wait for memory, and the requests that wait for each."""
    lines = list[str]()

    def add(name: str, kind: str, words: str, values: Iterable[tuple[str, float | None]]) -> None:
        found = [f"moert_{name}{label} {value}" for label, value in values if value is not None]
        if found:
            lines.extend([f"# HELP moert_{name} {words}", f"# TYPE moert_{name} {kind}", *found])

    for name, (kind, words, field) in _FIGURES.items():
        add(name, kind, words, [(_label(model), getattr(stats, field)) for model, (stats, _) in models.items()])
    for name, (kind, words, field) in _OF_WORKERS.items():
        add(name, kind, words, [(_label(model), getattr(worker, field)) for model, (_, worker) in models.items()])
    add("held_bytes", "gauge", "Memory of the process.", [("", held_bytes())])
    add("models_loaded", "gauge", "Models in memory.", [("", len(models))])
    add("clients_for_memory", "gauge", "Clients that wait until a model is in memory.", [
        (_label(model), count) for model, count in wanted
    ])  # fmt: skip
    return "\n".join(lines) + "\n"


def _label(model: str) -> str:
    escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{model="{escaped}"}}'
