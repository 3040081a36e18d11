"""Makes the eviction policy and the predictor of a pack from the names that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moert.errors import HashMissing, PathsMissing, SettingInvalid
from moert.experts.cache.cache import HANDED_OVER_BYTES
from moert.experts.policy.eviction import EVICTION, Foreseen
from moert.experts.policy.selection import AUTO_EVICTION, Choice, choose_eviction
from moert.experts.policy.succession import Succession
from moert.pack.errors import FormatTooNew, HeaderInvalid
from moert.pack.hash import HASH, HashFunction
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack
from moert.pack.trace import TRACE, Trace
from moert.predict import AUTO_PREDICTOR, NEED_HASH, NEED_TABLES, PREDICTORS, Known
from moert.predict.foresight import Foresight
from moert.predict.predictor import Predictor
from moert.wording import said

FORESEEN = "foreseen"
EVICTIONS = (AUTO_EVICTION, *EVICTION, FORESEEN)
DEFAULT_EVICTION = AUTO_EVICTION
DEFAULT_PREDICTOR = AUTO_PREDICTOR


def eviction_for(
    pack: Pack, name: str, nbytes: Mapping[ExpertKey, int], capacity_bytes: int, notify: Callable[[str], None],
    foresight: Foresight | None = None,
) -> Choice:  # fmt: skip
    """The policy of that name, or what `auto` is for this pack and this room for experts.

    `notify` hears of a trace that is not one of this model: no answer depends on it, so it is left aside. Raises
    PackError if the trace is damaged, and KeyError for an unknown name.
    """
    spec = pack.manifest.model
    if name == AUTO_EVICTION:
        return choose_eviction(_trace_of(pack, notify), spec, nbytes, capacity_bytes)
    if name == FORESEEN:
        assert foresight is not None
        return Choice(name, Foreseen(spec.moe_layers(), foresight, succession_of(pack, notify)), {})
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


def predictor_for(pack: Pack, name: str, foresight: Foresight | None) -> Predictor | None:
    """None if nothing is to be predicted, as of AUTO_PREDICTOR where experts are small: handing their reads to other
    threads takes longer than reading them. `foresight`: the pack's, see hash_for. Raises PackError, PathsMissing, and
    KeyError for an unknown name."""
    check_predictor(pack, name)
    if name == AUTO_PREDICTOR and pack.manifest.mean_expert_bytes < HANDED_OVER_BYTES:
        return None
    tables = None
    if name in NEED_TABLES:
        tables = TransitionTable.from_bytes(pack.read_file(PATHS))
        tables.check(pack.manifest.model)
    return PREDICTORS[name](Known(tables, foresight))


def check_predictor(pack: Pack, name: str) -> None:
    """Raises PathsMissing or HashMissing where the pack lacks what a predictor needs."""
    if name in NEED_TABLES and PATHS not in pack.manifest.files:
        raise PathsMissing(
            f"{said('predictor', name)} needs path tables, and the pack at {pack.root} has no {PATHS} (moeconv "
            f"profile-paths adds it); or use {said('predictor', DEFAULT_PREDICTOR)}"
        )
    if name in NEED_HASH:
        _check_hash(pack, said("predictor", name), said("predictor", DEFAULT_PREDICTOR))


def hash_for(
    pack: Pack, predictor: str, eviction: str, routes: bool, notify: Callable[[str], None]
) -> HashFunction | None:
    """The pack's hash function, if any of these names asks for it, or it `routes`: takes the place of the routers.

    `notify` hears of one that is not for this model where nobody named it: it is left aside then. Raises PackError,
    HashMissing, or SettingInvalid where its numbers can't take the routers' place.
    """
    check_hash(pack, eviction, routes)
    named = predictor in NEED_HASH or eviction == FORESEEN or routes
    taken = predictor == AUTO_PREDICTOR and pack.manifest.mean_expert_bytes >= HANDED_OVER_BYTES
    if HASH not in pack.manifest.files or not (named or taken):
        return None
    body = pack.read_file(HASH)
    try:
        function = HashFunction.from_bytes(body)
        function.check(pack.manifest.model)
    except (HeaderInvalid, FormatTooNew) as error:
        if named:
            raise
        notify(f"{error}; the run goes on without it")
        return None
    return function


def check_hash(pack: Pack, eviction: str, routes: bool) -> None:
    """Raises HashMissing, or SettingInvalid where the function's numbers can't take the routers' place."""
    if eviction == FORESEEN:
        _check_hash(pack, said("eviction", eviction), said("eviction", AUTO_EVICTION))
    if routes:
        _check_hash(pack, said("routing", "hash"), said("routing", "exact"))
        score = pack.manifest.model.moe.router.score
        if score != "softmax":
            raise SettingInvalid("routing", f"'hash' needs routers that weigh by a softmax, not by {score}")


def _check_hash(pack: Pack, asked: str, instead: str) -> None:
    if HASH not in pack.manifest.files:
        raise HashMissing(
            f"{asked} needs a hash function, and the pack at {pack.root} has no {HASH} (moeconv train-hash adds it); "
            f"or use {instead}"
        )
