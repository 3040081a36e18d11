"""The sweep over the matrices outside the experts: the loss of each unit of them alone at a smaller width."""

from __future__ import annotations

from moeconv.artifacts import DenseCosts, DenseUnit, uniform
from moeconv.conversion.measuring import Account, Bench
from moeconv.dense import TRELLIS_WIDTHS, UNQUANTIZED, dense_units, may_be_coded
from moeconv.quantizers.coder import ORIGINAL

WIDTHS = (2, 3, 4, 8)
CODED_WIDTHS = (*TRELLIS_WIDTHS, 8)
"""Widths where there are trellis codes, which lose less than plain codes of as many bits."""
LEAST_LAYERED = 4
"""The least width of units that span all layers, in a model that goes through memory layer by layer for each
measurement."""
TOKENS = 4096
"""Tokens, about, that units are measured on: a divergence needs less text than a loss does."""


def swept_beside(bench: Bench, account: Account) -> DenseCosts:
    """Returns the cost of each unit at each width, beside the unquantized model; none where the widths of these
    matrices are given, or no loss decides them. Experts are unquantized meanwhile."""
    coder, spec, layered = bench.coding.dense, bench.spec, bench.memory.layered
    if not coder.chooses:
        return {}
    units = dense_units(spec, by_layer=not layered)
    trellis, purpose = bench.coding.quantizer.codes == "trellis", bench.material.settings.purpose
    probes = [
        (unit, bits)
        for unit in units
        for bits in (CODED_WIDTHS if trellis and may_be_coded(unit, purpose) else WIDTHS)
        if abs(bits) >= LEAST_LAYERED or not layered
    ]
    measure = bench.measure("dense", bench.material.ranking, _samples(bench))
    original, base = uniform(spec, ORIGINAL), dict.fromkeys(units, UNQUANTIZED)
    costs: dict[DenseUnit, dict[int, tuple[float, float, float]]] = {unit: {} for unit in units}
    before = measure.summary(measure.reference)
    with (
        account.step("dense sweep", bench.journal),
        account.progress("dense sweep", len(probes)) as bar,
    ):
        for unit, bits in probes:
            coder.choose({**base, unit: bits})
            found = measure.summary(measure(original, f"{unit} at {bits}"))
            costs[unit][bits] = found.loss, found.nll - before.nll, found.kl
            bar.update(1)
        coder.choose({})
    return costs


def _samples(bench: Bench) -> int:
    """Returns the number of samples of the ranking text that units are measured on."""
    ranked = bench.material.ranked
    return max(1, min(ranked.samples, -(-ranked.samples * TOKENS // max(1, ranked.tokens))))
