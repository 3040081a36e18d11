"""Who is next: policies that name the experts of the next layer before its router has decided. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moert.pack.paths import TransitionTable
from moert.predict.foresight import Foresight
from moert.predict.gate import GateAhead
from moert.predict.hash import HashAhead, HashAndGate
from moert.predict.predictor import Predictor
from moert.predict.transitions import Transitions

AUTO_PREDICTOR = "auto"


@dataclass(frozen=True)
class Known:
    """What a pack has for predictors: its tables, and its hash function at work."""

    tables: TransitionTable | None = None
    foresight: Foresight | None = None


PREDICTORS: Mapping[str, Callable[[Known], Predictor | None]] = {
    AUTO_PREDICTOR: lambda known: GateAhead() if known.foresight is None else HashAndGate(known.foresight),
    "gate": lambda known: GateAhead(),
    "hash": lambda known: HashAhead(_foresight(known)),
    "transitions": lambda known: Transitions(_tables(known)),
    "none": lambda known: None,
}
"""Name → predictor; None where nothing is to be predicted."""

NEED_TABLES = frozenset({"transitions"})
NEED_HASH = frozenset({"hash"})
TAKE_HASH = frozenset({AUTO_PREDICTOR, *NEED_HASH})
"""These look several layers ahead where there is a hash function."""


def _tables(known: Known) -> TransitionTable:
    if known.tables is None:
        raise ValueError(f"{' and '.join(sorted(NEED_TABLES))} needs path tables")
    return known.tables


def _foresight(known: Known) -> Foresight:
    if known.foresight is None:
        raise ValueError(f"{' and '.join(sorted(NEED_HASH))} needs a hash function")
    return known.foresight
