"""Who is next: policies that name the experts of the next layer before its router has decided. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moert.pack.paths import TransitionTable
from moert.predict.gate import GateAhead
from moert.predict.popularity import Popularity
from moert.predict.predictor import Predictor
from moert.predict.transitions import Transitions

PREDICTORS: Mapping[str, Callable[[TransitionTable | None], Predictor | None]] = {
    "transitions": lambda tables: Transitions(_needed(tables)),
    "gate": lambda tables: GateAhead(),
    "popularity": lambda tables: Popularity(_needed(tables)),
    "none": lambda tables: None,
}
"""Name → predictor, given the pack's tables if it has any; None where nothing is to be predicted. Oracle and Shuffled
are not here: they are for measuring."""

NEED_TABLES = frozenset({"transitions", "popularity"})


def _needed(tables: TransitionTable | None) -> TransitionTable:
    if tables is None:
        raise ValueError(f"{' and '.join(sorted(NEED_TABLES))} need path tables")
    return tables
