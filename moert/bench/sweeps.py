"""The runs behind the pictures: the same prompts over budgets, and with one part of the engine after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moert.bench import figures
from moert.bench.choices import choices
from moert.bench.figures import Figure, label_of, token_ms
from moert.bench.measure import BenchRun, BenchSettings, measure, silent
from moert.engine.budget import Budget, CacheLimit

BUDGETS = (0.25, 0.5, 0.75, 1.0)
_HALF = CacheLimit(share=0.5)
PRELOAD = "+ preload"


def all_figures(measured: Sequence[BenchRun], settings: BenchSettings, texts: Sequence[str] | None) -> list[Figure]:
    """Every figure of these packs; `measured` are their runs at `settings`."""
    found = [figures.latencies(measured), *map(figures.hit_rates, measured)]
    over = {}
    for each in measured:
        least, label = Budget.of(each.pack.manifest).layer_bytes, label_of(each)
        over[label] = [
            (
                f"{100 * share:g}%",
                _token_ms(each, with_cache(settings, max(least, int(share * each.expert_bytes))), texts),
            )
            for share in BUDGETS
        ]
    found += [figures.budgets(measured, over), figures.ablation(measured, _steps(measured, settings, texts))]
    if len(measured) > 1:
        found.append(figures.targets(measured))
    return found + _of_choices(measured, texts)


def _of_choices(measured: Sequence[BenchRun], texts: Sequence[str] | None) -> list[Figure]:
    found = [choices(each, texts) for each in measured]
    idle, dependence = figures.idle_experts(measured, found), figures.dependence(measured, found)
    if dependence is None:
        print("moert: no picture of how far choices depend on other tokens: no input has any others", file=sys.stderr)
        return [idle]
    return [idle, dependence]


def with_cache(settings: BenchSettings, nbytes: int) -> BenchSettings:
    return _with(settings, memory=None, cache=nbytes)


def _with(settings: BenchSettings, **changes: Any) -> BenchSettings:
    return replace(settings, engine=settings.engine.but(**changes))


def ablation_steps(settings: BenchSettings, layer_bytes: int) -> dict[str, BenchSettings]:
    """Low-bit experts read on demand; + the next layer's, foretold; + a cache for what comes again.

    `layer_bytes`: what one token can demand of a layer. The last step has the settings' own budget for experts, or half
    of them where there is none.
    """
    on_demand = _with(with_cache(settings, layer_bytes), eviction="lru", predict="none")
    preloading = _with(with_cache(settings, 2 * layer_bytes), eviction="lru")
    caching = _with(settings, memory=None, cache=settings.engine.cache or _HALF)
    return {"low bits, on demand": on_demand, PRELOAD: preloading, "+ cache": caching}


def _steps(
    measured: Sequence[BenchRun], settings: BenchSettings, texts: Sequence[str] | None
) -> dict[str, list[tuple[str, float]]]:  # fmt: skip
    """Returns pack → (step, ms a token); the name of the step that was to read ahead says where nothing was."""
    runs, idle = dict[str, list[tuple[str, float]]](), list[str]()
    for each in measured:
        label, steps = label_of(each), ablation_steps(settings, Budget.of(each.pack.manifest).layer_bytes)
        done = {
            name: measure(each.pack.root, step, texts, each.disk_bytes_per_s, silent) for name, step in steps.items()
        }
        runs[label] = [(name, token_ms(run)) for name, run in done.items()]
        idle += [] if done[PRELOAD].ahead_bytes else [label]
    where = "" if len(idle) == len(measured) else f" of {', '.join(idle)}"
    said = f"{PRELOAD} (nothing{where} was worth it)" if idle else PRELOAD
    return {label: [(said if name == PRELOAD else name, ms) for name, ms in found] for label, found in runs.items()}


def _token_ms(measured: BenchRun, settings: BenchSettings, texts: Sequence[str] | None) -> float:
    return token_ms(measure(measured.pack.root, settings, texts, measured.disk_bytes_per_s, silent))
