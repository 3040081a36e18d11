"""Makes the eviction policy and the predictor of a pack from the names that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moert.errors import PathsMissing
from moert.experts.policy.eviction import EVICTION
from moert.experts.policy.selection import AUTO_EVICTION, Choice, choose_eviction
from moert.experts.policy.succession import Succession
from moert.pack.errors import FormatTooNew, HeaderInvalid
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack
from moert.pack.trace import TRACE, Trace
from moert.predict import NEED_TABLES, PREDICTORS
from moert.predict.predictor import Predictor
from moert.wording import said

EVICTIONS = (AUTO_EVICTION, *EVICTION)
DEFAULT_EVICTION = AUTO_EVICTION
DEFAULT_PREDICTOR = "gate"


def eviction_for(
    pack: Pack, name: str, nbytes: Mapping[ExpertKey, int], capacity_bytes: int, notify: Callable[[str], None]
) -> Choice:
    """The policy of that name, or what `auto` is for this pack and this room for experts.

    `notify` hears of a trace that is not one of this model: no answer depends on it, so it is left aside. Raises
    PackError if the trace is damaged, and KeyError for an unknown name.
    """
    spec = pack.manifest.model
    if name == AUTO_EVICTION:
        return choose_eviction(_trace_of(pack, notify), spec, nbytes, capacity_bytes)
    return Choice(name, EVICTION[name](spec.moe_layers(), succession_of(pack, notify)), {})


def succession_of(pack: Pack, notify: Callable[[str], None]) -> Succession | None:
    """What the pack's trace teaches; None without one of this model, of which `notify` hears. Raises PackError if it is
    damaged."""
    trace = _trace_of(pack, notify)
    return None if trace is None else Succession.of(trace, pack.manifest.model)


def _trace_of(pack: Pack, notify: Callable[[str], None]) -> Trace | None:
    if TRACE not in pack.manifest.files:
        return None
    body = pack.read_file(TRACE)
    try:
        trace = Trace.from_bytes(body)
        trace.check(pack.manifest.model)
    except (HeaderInvalid, FormatTooNew) as error:
        notify(f"{error}; the run goes on without it")
        return None
    return trace


def predictor_for(pack: Pack, name: str) -> Predictor | None:
    """None if nothing is to be predicted. Raises PackError, PathsMissing, and KeyError for an unknown name."""
    if name not in NEED_TABLES:
        return PREDICTORS[name](None)
    if PATHS not in pack.manifest.files:
        raise PathsMissing(
            f"{said('predictor', name)} needs path tables, and the pack at {pack.root} has no {PATHS} (moeconv "
            f"profile-paths adds it); or use {said('predictor', DEFAULT_PREDICTOR)}"
        )
    tables = TransitionTable.from_bytes(pack.read_file(PATHS))
    tables.check(pack.manifest.model)
    return PREDICTORS[name](tables)
