"""What is each expert worth? Step one of EdgeMoE §3.2: the expert alone at INT2, all others at INT4 (its Fig. 7a)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moeconv.artifacts import SensitivityTable
from moeconv.measure import Measure
from moert.pack.model_spec import ExpertKey

BASE_BITS, PROBE_BITS = 4, 2

Progress = Callable[[Iterable[ExpertKey], int], Iterable[ExpertKey]]


def sweep(measure: Measure, keys: Sequence[ExpertKey], progress: Progress) -> SensitivityTable:
    """Measures every expert that the journal does not know yet. `progress(iterable, total)` shows how far it is.

    Experts are visited from the last layer to the first, so that what precedes the changed layer is reused.
    """
    base = dict.fromkeys(keys, BASE_BITS)
    base_measured = measure(base, f"all at {BASE_BITS}")
    assignments = {key: {**base, key: PROBE_BITS} for key in keys}
    missing = [key for key in keys if not measure.known(assignments[key])]
    if missing:
        measure.keep(base)
    for key in progress(reversed(missing), len(missing)):
        measure(assignments[key], f"{key} at {PROBE_BITS}, others at {BASE_BITS}")
    measured = {key: measure(assignments[key], "") for key in keys}
    return SensitivityTable(
        BASE_BITS,
        PROBE_BITS,
        base_measured,
        {key: found.loss - base_measured.loss for key, found in measured.items()},
        {key: found.nll - base_measured.nll for key, found in measured.items()},
    )
