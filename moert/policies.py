"""From the names that a user gives to the policies of one pack: who leaves, who is next."""

from __future__ import annotations

from collections.abc import Mapping

from moert.errors import PathsMissing
from moert.experts.eviction import EVICTION
from moert.experts.selection import AUTO_EVICTION, Choice, choose_eviction
from moert.experts.succession import Succession
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack
from moert.pack.trace import TRACE, Trace
from moert.predict import NEED_TABLES, PREDICTORS
from moert.predict.predictor import Predictor

DEFAULT_EVICTION = AUTO_EVICTION
DEFAULT_PREDICTOR = "gate"


def eviction_for(pack: Pack, name: str, nbytes: Mapping[ExpertKey, int], capacity_bytes: int) -> Choice:
    """The policy of that name, or what `auto` is for this pack and this room for experts.

    Raises PackError if the pack's trace is damaged, and KeyError for an unknown name.
    """
    spec = pack.manifest.model
    if name == AUTO_EVICTION:
        return choose_eviction(_trace_of(pack), spec, nbytes, capacity_bytes)
    return Choice(name, EVICTION[name](spec.moe_layers(), succession_of(pack)), {})


def succession_of(pack: Pack) -> Succession | None:
    """What the pack's trace teaches; None without one. Raises PackError if it is damaged."""
    trace = _trace_of(pack)
    return None if trace is None else Succession.of(trace, pack.manifest.model)


def _trace_of(pack: Pack) -> Trace | None:
    if TRACE not in pack.manifest.files:
        return None
    trace = Trace.from_bytes(pack.read_file(TRACE))
    trace.check(pack.manifest.model)
    return trace


def predictor_for(pack: Pack, name: str) -> Predictor | None:
    """None if nothing is to be predicted. Raises PackError, PathsMissing, and KeyError for an unknown name."""
    if name not in NEED_TABLES:
        return PREDICTORS[name](None)
    if PATHS not in pack.manifest.files:
        raise PathsMissing(
            f"--predict {name} needs path tables, and the pack at {pack.root} has no {PATHS} (moeconv profile-paths "
            f"adds it); or use --predict {DEFAULT_PREDICTOR}"
        )
    tables = TransitionTable.from_bytes(pack.read_file(PATHS))
    tables.check(pack.manifest.model)
    return PREDICTORS[name](tables)
