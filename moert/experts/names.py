"""The eviction policy and the predictor of a pack, made from the names that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from moert.errors import PathsMissing, said
from moert.experts.cache import HANDED_OVER_BYTES
from moert.experts.policy import EVICTION, EvictionPolicy, Succession
from moert.experts.predictors import GateAhead, Predictor, Transitions
from moert.experts.replay import AUTO_EVICTION, DEFAULT
from moert.pack.errors import FormatTooNew, HeaderInvalid
from moert.pack.model_spec import ModelSpec
from moert.pack.paths import PATHS, TRACE, Trace, TransitionTable
from moert.pack.reader import Pack

AUTO_PREDICTOR, _TRANSITIONS = "auto", "transitions"
PREDICTORS = (AUTO_PREDICTOR, "gate", _TRANSITIONS, "none")
"""Names of predictors. Packages beside the core have more (moert.engine.registry)."""

_F = TypeVar("_F", bound="_OfAModel")

EVICTIONS = (AUTO_EVICTION, *EVICTION)
DEFAULT_EVICTION = AUTO_EVICTION
DEFAULT_PREDICTOR = AUTO_PREDICTOR


class Policies(NamedTuple):
    """Policies that a program brings: baselines and controls that no setting names.

    `predictor` and `eviction` take the place of those that settings name. Without `weighed`, the likeliest experts are
    read ahead whether or not that saves time.
    """

    predictor: Predictor | None = None
    eviction: EvictionPolicy | None = None
    weighed: bool = True


class _OfAModel(Protocol):
    """The content of one of a pack's optional files."""

    def check(self, spec: ModelSpec) -> None: ...


def eviction_for(
    pack: Pack, name: str, share: float, notify: Callable[[str], None]
) -> tuple[str, EvictionPolicy]:  # fmt: skip
    """Returns the policy of that name, which learns from the pack's trace, and its name. `auto` is the one that the
    pack records for `share` of its experts in memory (Trace.eviction_at), or the default where it records none that is
    known here.

    `notify` is called where the trace is not one of this model: no answer depends on it, so it is left aside. Raises
    PackError if the trace is damaged, and KeyError for an unknown name.
    """
    spec, trace = pack.manifest.model, trace_of(pack, notify)
    if name == AUTO_EVICTION:
        recorded = None if trace is None else trace.eviction_at(share)
        name = recorded if recorded is not None and recorded in EVICTION else DEFAULT
    return name, EVICTION[name](spec.moe_layers(), None if trace is None else Succession.of(trace, spec))


def succession_of(pack: Pack, notify: Callable[[str], None]) -> Succession | None:
    """Returns the succession counted in the pack's trace; None without a trace of this model (`notify` is called for
    one of another). Raises PackError if the trace is damaged."""
    trace = trace_of(pack, notify)
    return None if trace is None else Succession.of(trace, pack.manifest.model)


def trace_of(pack: Pack, notify: Callable[[str], None]) -> Trace | None:
    """Returns the pack's trace; None and errors as in succession_of."""
    return of_this_model(pack, TRACE, Trace.from_bytes, notify) if TRACE in pack.manifest.files else None


def of_this_model(
    pack: Pack, name: str, read: Callable[[bytes], _F], notify: Callable[[str], None] | None = None
) -> _F | None:
    """Returns the content of a file of the pack. If it is not for this model, calls `notify` and returns None; without
    `notify` raises HeaderInvalid or FormatTooNew. Raises PackError if it is damaged."""
    body = pack.read_file(name)
    try:
        found = read(body)
        found.check(pack.manifest.model)
    except (HeaderInvalid, FormatTooNew) as error:
        if notify is None:
            raise
        notify(f"{error}; the run goes on without it")
        return None
    return found


def predictor_for(pack: Pack, name: str) -> Predictor | None:
    """Returns the predictor of that name, one of PREDICTORS. None if nothing is to be predicted, as of AUTO_PREDICTOR
    where experts are small: handing their reads to other threads takes longer than reading them. Raises PackError or
    PathsMissing."""
    check_tables(pack, name)
    if name == "none" or (name == AUTO_PREDICTOR and not reading_ahead_pays(pack)):
        return None
    if name != _TRANSITIONS:
        return GateAhead()
    tables = TransitionTable.from_bytes(pack.read_file(PATHS))
    tables.check(pack.manifest.model)
    return Transitions(tables)


def reading_ahead_pays(pack: Pack) -> bool:
    """Returns whether experts are so large, on the mean, that handing reads over takes less time than reading."""
    return pack.manifest.mean_expert_bytes >= HANDED_OVER_BYTES


def check_tables(pack: Pack, name: str) -> None:
    """Raises PathsMissing where the pack lacks what a predictor needs."""
    if name == _TRANSITIONS and PATHS not in pack.manifest.files:
        raise PathsMissing(
            f"{said('predict', name)} needs path tables, and the pack at {pack.root} has no {PATHS} (moeconv "
            f"profile-paths adds it); or use {said('predict', DEFAULT_PREDICTOR)}"
        )
