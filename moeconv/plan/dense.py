"""The matrices outside the experts in the problem of allocation, and the bytes that it saves: of the pack, in memory,
or read for a token. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from moeconv.artifacts import PURPOSES, SIGNALS, DenseCosts, DenseUnit, SensitivityTable
from moeconv.dense import UNQUANTIZED, USUAL, may_be_coded, unit_bytes
from moeconv.plan.problem import Option, Problem, Unit, options
from moert.pack.model_spec import ExpertKey, ModelSpec

_LEAST = 1e-3


@dataclass(frozen=True)
class Beside:
    """The matrices outside the experts in a problem: the costs of their units at each width, none where their widths
    are fixed. `purpose`: one of PURPOSES."""

    costs: DenseCosts = field(default_factory=dict)
    purpose: str = PURPOSES[0]

    def joined(self, experts: Problem, spec: ModelSpec, table: SensitivityTable, signal: str) -> Problem:
        """Returns the problem of experts and of all units, each option with the bytes that `purpose` counts."""
        weigh = _weights(spec, table, self.purpose)
        return Problem({
            unit: tuple(_weighed(option, weigh(unit.key)) for option in found)
            for unit, found in {**experts.units, **self._units(spec, signal)}.items()
        })  # fmt: skip

    def _units(self, spec: ModelSpec, signal: str) -> dict[Unit, tuple[Option, ...]]:
        place = SIGNALS.index(signal) if signal in SIGNALS else SIGNALS.index("kl")
        widths = sorted({bits for costs in self.costs.values() for bits in costs} | {UNQUANTIZED})
        sizes = {bits: unit_bytes(spec, list(self.costs), bits) for bits in widths}
        return {
            Unit(unit, ()): options([
                *(Option(bits, sizes[bits][unit], costs[bits][place]) for bits in self._offered(unit)),
                Option(UNQUANTIZED, sizes[UNQUANTIZED][unit], 0.0),
            ])
            for unit, costs in self.costs.items()
        }  # fmt: skip

    def _offered(self, unit: DenseUnit) -> list[int]:
        """Returns the widths to choose from: below USUAL those of trellis codes, which lose less, or plain ones, by the
        purpose and by which were measured. All units of a role have the same codes so."""
        small = {bits for bits in self.costs[unit] if bits < USUAL}
        wanted = {bits for bits in small if (bits < 0) == may_be_coded(unit, self.purpose)} or small
        return [bits for bits in self.costs[unit] if bits in wanted or bits == USUAL]


ONLY_EXPERTS = Beside()


def _weighed(option: Option, weight: float) -> Option:
    return option if weight == 1 else replace(option, nbytes=max(1, round(option.nbytes * weight)))


def _weights(spec: ModelSpec, table: SensitivityTable, purpose: str) -> Callable[[ExpertKey | DenseUnit], float]:
    """Returns a function from an expert or a unit to the weight of its bytes.

    In memory must stay all matrices outside the experts, and of these a token's of one layer at a time; other experts
    may stay, and need not. A token reads all matrices, but one row of an embedding, and each expert as often as text
    goes to it.
    """
    experts = spec.moe
    if purpose == "memory":
        demanded = experts.router.top_k / (experts.n * len(spec.experts))
        return lambda key: 1.0 if isinstance(key, DenseUnit) else demanded
    if purpose == "speed":
        tokens: dict[object, int] = {}
        for key, count in table.coverage.items():
            tokens[key.at] = tokens.get(key.at, 0) + count
        shares = {
            key: max(_LEAST, experts.router.top_k * count / max(1, tokens[key.at]))
            for key, count in table.coverage.items()
        }

        def read(key: ExpertKey | DenseUnit) -> float:
            if isinstance(key, DenseUnit):
                return _LEAST if key.role == "embed" else 1.0
            return shares.get(key, experts.router.top_k / experts.n)

        return read
    return lambda key: 1.0
