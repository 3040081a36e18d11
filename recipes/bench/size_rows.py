"""Rows of `make bench-size`: what a conversion took beside what it is to take, and what a larger one would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recipes.bench.result import Row
from recipes.bench.size_run import Ran

SHARE = 0.9
"""Of the bound: what is as good as an aim in seconds."""


@dataclass(frozen=True)
class Aim:
    """What a whole model is to take; None for what was not said. Memory is that of the group: a process's own figure
    has all that it mapped of files in it, however little of them is kept."""

    wall_s: float | None
    memory_bytes: int | None


def rows_of(name: str, ran: Ran, aim: Aim, bound_s: float | None = None) -> list[Row]:
    """Of one conversion that ended well. An aim in seconds is met too by what reaches SHARE of the bound."""
    wall = Row(f"{name}: time", ran.wall_s, "s")
    if aim.wall_s is not None:
        near = bound_s is not None and bound_s >= SHARE * ran.wall_s
        wall = Row(wall.name, ran.wall_s, "s", aim=f"≤ {aim.wall_s:g}", met=ran.wall_s <= aim.wall_s or near)
    charged = Row(f"{name}: most memory of the group, page cache included", ran.group_peak_bytes / 1e9, "GB")
    rows = [
        wall,
        Row(f"{name}: most memory of the process, mapped files included", ran.resident_peak_bytes / 1e9, "GB"),
        charged if aim.memory_bytes is None else charged.at_most(aim.memory_bytes / 1e9),
        Row(f"{name}: time of all cores", ran.cpu_s, "s"),
        Row(f"{name}: read from the disk", ran.read_bytes / 1e9, "GB"),
    ]
    if bound_s is not None:
        rows.append(Row(f"{name}: bound", bound_s, "s"))
        rows.append(Row(f"{name}: share of the bound", bound_s / ran.wall_s, "of its speed"))
    return rows


def step_rows(name: str, ran: Ran, pass_s: float | None = None) -> list[Row]:
    """Of each step of a conversion, beside the least that one pass of the text through the model takes, if known."""
    rows = []
    for step, seconds in ran.steps.items():
        rows.append(Row(f"{name}: {step}", seconds, "s"))
        if pass_s is not None:
            rows.append(Row(f"{name}: {step}, in passes at their bound", seconds / pass_s, "passes"))
    return rows


def line(walls_s: Mapping[int, float]) -> tuple[float, float]:
    """Layers → seconds as a beginning and what each layer adds, least squares of relative differences. Raises
    ValueError for fewer than two."""
    if len(walls_s) < 2:
        raise ValueError("a line goes through two points or more")
    layers, seconds = (np.array(values, np.float64) for values in zip(*sorted(walls_s.items()), strict=True))
    system = np.stack([1 / seconds, layers / seconds], 1)
    (start, each), *_ = np.linalg.lstsq(system, np.ones(len(seconds)), rcond=None)
    return float(start), float(each)


def growth_rows(name: str, walls_s: Mapping[int, float], whole: int) -> list[Row]:
    """Of a model cut after different numbers of layers: how far from a line it is, and what all layers would take. That
    is called extrapolated where they were not run."""
    start, each = line(walls_s)
    furthest = max(abs(seconds / (start + each * layers) - 1) for layers, seconds in walls_s.items())
    rows = [Row(f"{name}, {layers} layers: time", seconds, "s") for layers, seconds in sorted(walls_s.items())]
    rows.append(Row(f"{name}: each layer", each, "s"))
    rows.append(Row(f"{name}: beside its layers", start, "s"))
    if len(walls_s) > 2:
        rows.append(Row(f"{name}: furthest from a line", furthest, "of the time").at_most(0.1))
    least, most = min(walls_s), max(walls_s)
    alone = walls_s[most] / (most * walls_s[least] / least)
    rows.append(Row(f"{name}: time of {most} layers, of as many times {least}", alone, "×").at_most(1.2))
    if whole not in walls_s:
        taken = ", ".join(map(str, sorted(walls_s)))
        rows.append(Row(f"{name}: all {whole} layers, extrapolated from {taken}", start + each * whole, "s"))
    return rows
