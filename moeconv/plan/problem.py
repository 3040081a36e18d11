"""The question of allocation: which units there are, what each may become, and what that costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moeconv.artifacts import Assignment, Bits, Probe, SensitivityTable
from moeconv.errors import SettingsError, WeightsUnusable
from moeconv.plan.isotonic import falling
from moeconv.plan.shrinkage import Costs, shrunk
from moert.pack.codec import Form16
from moert.pack.layout import Neurons, expert_layout
from moert.pack.model_spec import ExpertKey, ModelSpec


class Unit(NamedTuple):
    """What gets a width of its own: these projections (by their place in `spec.moe.ffn.projections`) of one expert."""

    key: ExpertKey
    projections: tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """All projections of a unit at `bits`: the bytes of its tensors, and what it costs beside the sweep's base."""

    bits: int
    nbytes: int
    cost: float


@dataclass(frozen=True)
class Plan:
    """Widths for all experts. `cost` is predicted: the sum over units, as if effects added up."""

    assignment: Assignment
    nbytes: int
    cost: float


@dataclass(frozen=True)
class Problem:
    """For each unit its options, as `options` makes them: by rising bytes, with costs that never rise."""

    units: Mapping[Unit, tuple[Option, ...]]

    def plan(self, choices: Sequence[int]) -> Plan:
        """`choices` [units] are places among each unit's options."""
        widths: dict[ExpertKey, dict[int, int]] = {}
        chosen = [options[choice] for options, choice in zip(self.units.values(), choices, strict=True)]
        for unit, option in zip(self.units, chosen, strict=True):
            widths.setdefault(unit.key, {}).update(dict.fromkeys(unit.projections, option.bits))
        assignment = {key: tuple(bits for _, bits in sorted(found.items())) for key, found in widths.items()}
        return Plan(assignment, sum(option.nbytes for option in chosen), sum(option.cost for option in chosen))

    def priced(self, assignment: Assignment) -> Plan:
        """Any assignment of all experts as a plan. Raises KeyError for a width that is no option."""
        choices = []
        for unit, found in self.units.items():
            bits = {assignment[unit.key][place] for place in unit.projections}
            fitting = [place for place, option in enumerate(found) if {option.bits} == bits]
            if not fitting:
                raise KeyError(f"{unit.key} has no option of {sorted(bits)} bits")
            choices.append(fitting[0])
        return self.plan(choices)


def options(measured: Iterable[Option]) -> tuple[Option, ...]:
    """By rising bytes, the costs smoothed so that more bytes never cost more.

    Costs are measured and noisy: a narrow width may seem better than a wide one, and better than the base. Isotonic
    regression pools such widths; where the narrow one is as good as the wide one, no allocator then pays for bytes.
    Costs that are not finite belong to widths that break the model; those are left out.
    """
    ordered = sorted((one for one in measured if math.isfinite(one.cost)), key=lambda one: (one.nbytes, one.bits))
    smooth = falling([one.cost for one in ordered])
    return tuple(Option(one.bits, one.nbytes, cost) for one, cost in zip(ordered, smooth, strict=True))


def problem(
    spec: ModelSpec,
    table: SensitivityTable,
    signal: str,
    widths: Iterable[int],
    projection_bytes: Callable[[str, int], int],
) -> Problem:
    """What `table` found, with the noise taken out of its costs (see shrinkage). Experts that hardly a token reached
    cost no less than the middle one of their layer, so that none gets few bits by luck.

    Units are single projections where the table probed them one at a time, else whole experts.
    `projection_bytes(projection, bits)` are the bytes of one projection with its scales. Raises SettingsError for a
    width that was not measured, WeightsUnusable for an expert that no width leaves with a finite cost.
    """
    n_projections, allowed = len(spec.moe.ffn.projections), sorted(set(widths))
    single = any(len(set(probe.bits)) > 1 for probe in table.costs)
    parts = [(place,) for place in range(n_projections)] if single else [tuple(range(n_projections))]
    keys = spec.expert_keys()
    units: dict[Unit, tuple[Option, ...]] = {Unit(key, part): () for key in keys for part in parts}
    for part in parts:
        probes = [[Probe(key, _bits(n_projections, part, bits, table.base_bits)) for bits in allowed] for key in keys]
        measured = shrunk(np.array([[_cost(table, probe, signal) for probe in row] for row in probes]))
        costs = _as_the_layer(measured, keys, set(table.barely_seen()))
        sizes = [sum(projection_bytes(spec.moe.ffn.projections[place], bits) for place in part) for bits in allowed]
        for key, row in zip(keys, costs.tolist(), strict=True):
            found = options(Option(*one) for one in zip(allowed, sizes, row, strict=True))
            if not found:
                raise WeightsUnusable(
                    f"{key}: at {allowed} bits every measured cost is infinite or no number: check its weights"
                )
            units[Unit(key, part)] = found
    return Problem(units)


class Storage(NamedTuple):
    """How a pack stores experts; see moert.pack.manifest.Quantization."""

    group_size: int = 0
    mxfp4: bool = False
    neurons: Neurons | None = None

    @property
    def form16(self) -> Form16:
        return "MXFP4" if self.mxfp4 else "F16"


def layout_bytes(spec: ModelSpec, storage: Storage) -> Callable[[str, int], int]:
    """(projection, bits) → bytes of that projection's tensors in an expert file, scales and minima counted."""
    key = spec.expert_keys()[0]
    sizes: dict[tuple[str, int], int] = {}

    def nbytes(projection: str, bits: int) -> int:
        if (projection, bits) not in sizes:
            widths = dict.fromkeys(spec.moe.ffn.projections, bits)
            layout = expert_layout(spec, key, widths, storage.group_size, storage.form16, 4096, storage.neurons)
            own = [slot for slot in layout.slots if slot.name.startswith(f"{projection}.")]
            placed = layout.neurons
            sizes[projection, bits] = (
                sum(slot.stop - slot.start for slot in own) if placed is None else placed.matrix_bytes(projection)
            )
        return sizes[projection, bits]

    return nbytes


def _as_the_layer(costs: Costs, keys: Sequence[ExpertKey], barely_seen: Set[ExpertKey]) -> Costs:
    """costs [experts, widths]"""
    found: Costs = costs.copy()
    seen = np.array([key not in barely_seen for key in keys])
    for at in {key.at for key in barely_seen}:
        here = np.array([key.at == at for key in keys])
        if (here & seen).any():
            found[here & ~seen] = np.maximum(costs[here & ~seen], np.median(costs[here & seen], axis=0))
    return found


def _bits(n_projections: int, part: tuple[int, ...], bits: int, base: int) -> Bits:
    return tuple(bits if place in part else base for place in range(n_projections))


def _cost(table: SensitivityTable, probe: Probe, signal: str) -> float:
    try:
        return table.cost(probe, signal)
    except KeyError:
        raise SettingsError(
            f"{probe} was not measured: sweep with these --bits first, or leave the width out"
        ) from None
