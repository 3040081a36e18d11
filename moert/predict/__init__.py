"""Who is next: policies that name the experts of the next layer before its router has decided. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moert.pack.paths import TransitionTable
from moert.predict.none import NoPrediction
from moert.predict.popularity import Popularity
from moert.predict.predictor import Predictor
from moert.predict.transitions import Transitions

PREDICTORS: Mapping[str, Callable[[TransitionTable], Predictor]] = {
    "transitions": Transitions,
    "popularity": Popularity,
    "none": lambda tables: NoPrediction(),
}
"""Name → predictor, given the pack's tables. The oracle is not here: it needs the future."""
