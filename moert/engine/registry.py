"""The registry of packages beside the core: which setting, or which file of a pack, loads which of them.

| loaded by | package | takes the place of |
|---|---|---|
| `neurons`, `keep_neurons`; experts in blocks of neurons | moert.beside.flash | Holding: who runs a layer's experts |
| `device` and the settings of it | moert.beside.gpu | Holding |
| `routing` or `predict`: hash; a hash function in the pack | moert.beside.sida | Routing: who routes, who listens |
| `profile` | moert.beside.profile | nothing: it times Holding, routers and arithmetic as they are |
| `draft` | moert.beside.drafts | nothing: tokens of one request that are read in one pass |
| `fill`, moert chat, moert serve | moert.beside.fill | nothing: experts that are read before the first request |
| `json_schema` or `grammar` of a request | moert.beside.grammar | nothing: the tokens that may come next |

Nothing else of the core imports them, or says neuron, hash function, device or profile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from moert.engine.constraint import Grammar, Matcher, Matching, Room
from moert.engine.seams import Routing
from moert.errors import SettingInvalid, said
from moert.experts.cache import ExpertCache
from moert.experts.names import (
    AUTO_PREDICTOR,
    PREDICTORS,
    Policies,
    check_tables,
    predictor_for,
    reading_ahead_pays,
)
from moert.experts.store import ExpertStore
from moert.experts.streaming import Holding
from moert.kernels.backend import Backend
from moert.models.ffn import Routers
from moert.models.model import Walk
from moert.pack.learnt import HASH, HashFunction
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack
from moert.stats import ExpertCounters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from moert.beside.drafts import Drafts
    from moert.beside.profile import Profile
    from moert.beside.wishes import Wishes

_HASH = "hash"
ROUTINGS = (_HASH,)
"""Names of routers in place of the model's own."""
_AUTO, _GATE, *_REST = PREDICTORS
PREDICTS = (_AUTO, _GATE, _HASH, *_REST)
"""Names of all predictors."""
ALL_NEURONS, KEPT_NEURONS, NO_DEVICE = "exact", "recent", "none"
"""Defaults of `neurons`, `keep_neurons` and `device`."""
NO_DRAFTS = "none"
"""Default of `draft`."""
FILLED = "used"
FILLS = ("auto", "none", FILLED)
"""Values of `fill`; with auto commands decide."""
ALONE = (NO_DEVICE, "cpu")
"""Names of `device` without any."""


def check_place(wishes: Wishes) -> None:
    """Raises SettingInvalid for settings of a device that there can't be."""
    asked = (wishes.gpu_bytes, wishes.device_keep, wishes.device_experts)
    if wishes.device not in ALONE or any(each is not None for each in asked):
        from moert.beside.gpu.opening import check_settings

        check_settings(wishes)


def check_parts(wishes: Wishes) -> None:
    """Raises SettingInvalid for settings of experts' neurons, of drafts, or of filling, that there can't be."""
    if wishes.fill not in FILLS:
        raise SettingInvalid("fill", f"{wishes.fill!r} is none of {', '.join(FILLS)}")
    if wishes.draft != NO_DRAFTS:
        from moert.beside.drafts import check_wish

        check_wish(wishes.draft)
    if (wishes.neurons, wishes.keep_neurons) != (ALL_NEURONS, KEPT_NEURONS):
        from moert.beside.flash.runner import check_settings

        check_settings(wishes)


def check_pack(pack: Pack, wishes: Wishes) -> None:
    """Raises PathsMissing, HashMissing, PredictorMissing or SettingInvalid where the pack lacks a file that settings
    need."""
    check_tables(pack, wishes.predict)
    if wishes.predict == _HASH or wishes.routing == _HASH:
        from moert.beside.sida import foresight

        if wishes.predict == _HASH:
            foresight.check_predictor(pack)
        foresight.check_function(pack, wishes.routing == _HASH)
    if wishes.neurons != ALL_NEURONS:
        from moert.beside.flash.runner import check_neurons

        check_neurons(pack, wishes.neurons)


class Beside:
    """The packages that settings and a pack load for one engine."""

    def __init__(self, pack: Pack, wishes: Wishes, policies: Policies, note: Callable[[str], None]) -> None:
        """`note` gets a line where something was left aside. Raises PackError, HashMissing, PredictorMissing or
        SettingInvalid."""
        self._pack, self._wishes, self._own, self._note = pack, wishes, policies, note
        self._reads_whole = wishes.neurons == ALL_NEURONS
        self._predict = wishes.predict if self._reads_whole else "none"
        if not self._reads_whole:
            from moert.beside.flash.runner import check_neurons

            check_neurons(pack, wishes.neurons)
        self._function = self._hash_function()
        self._profile: Profile | None = None

    def holding(self, whole: ExpertStore, backend: Backend, counters: ExpertCounters) -> Holding:
        """Returns how experts are held and run. Raises PackError, DeviceMissing or SettingInvalid."""
        held = self._held(whole, backend, counters)
        if self._wishes.profile is None:
            return held
        from moert.beside.profile import Profile

        self._profile = Profile(self._wishes.profile, counters)
        return self._profile.holding(held)

    def _held(self, whole: ExpertStore, backend: Backend, counters: ExpertCounters) -> Holding:
        wishes = self._wishes
        if wishes.device not in ALONE:
            from moert.beside.gpu.tiers import held_on_device

            found = held_on_device(self._pack, whole, backend, wishes, self._note)
            if found is not None:
                return found
        if self._pack.has_neurons:
            from moert.beside.flash.runner import held_in_blocks

            return held_in_blocks(self._pack, whole, backend, counters, wishes.keep_neurons, wishes.neurons)
        return Holding(self._pack, whole, backend)

    def routing(self, backend: Backend, spare: Callable[[], Backend | None]) -> Routing:
        """Returns who routes and who listens. `spare` opens a backend that nobody else makes use of. Raises PackError
        or PathsMissing."""
        own, name, pack = self._own.predictor, self._predict, self._pack
        if self._function is None:
            return Routing(own or predictor_for(pack, name))
        from moert.beside.sida.foresight import Asked, Foreseeing

        takes = name == _HASH or (name == AUTO_PREDICTOR and reading_ahead_pays(pack))
        predicts = name if own is None and takes else None
        asked = Asked(predicts, self._wishes.routing == _HASH)
        found = Foreseeing(pack, self._function, backend, asked, spare())
        self._function = None
        if predicts is None:
            found.predictor = own or predictor_for(pack, name)
        return found

    def drafts(self, exact: bool) -> Drafts | None:
        """Returns the drafts of answers, if there are any. `exact`: routers choose experts as the model's own do."""
        if self._wishes.draft == NO_DRAFTS:
            return None
        from moert.beside.drafts import drafts_for

        return drafts_for(self._wishes.draft, self._pack.manifest.model, exact, self._note)

    def fills(self) -> bool:
        """Returns whether the cache may be filled before the first request: where it holds whole experts, for this
        processor alone."""
        found, wish = self._wishes.device in ALONE and not self._pack.has_neurons, self._wishes.fill
        if wish == FILLED and not found:
            self._note(f"{said('fill', wish)} has no effect here: it reads whole experts for the processor alone")
        return found and wish != "none"

    def arithmetic(self, backend: Backend) -> Backend:
        """Returns the backend of a model."""
        return backend if self._profile is None else self._profile.arithmetic(backend)

    @property
    def walk(self) -> Walk | None:
        """Yields the layers of a model; None: nobody listens."""
        return None if self._profile is None else self._profile.walk

    def watch(self, routers: Routers) -> None:
        """Listens to the routers of a model."""
        if self._profile is not None:
            self._profile.watch(routers)

    def _hash_function(self) -> HashFunction | None:
        """Returns the pack's hash function, if it predicts or routes."""
        routes = self._wishes.routing == _HASH
        named = routes or self._predict == _HASH
        taken = self._predict == AUTO_PREDICTOR and reading_ahead_pays(self._pack)
        if not named and not (taken and HASH in self._pack.manifest.files):
            return None
        from moert.beside.sida.foresight import check_predictor, function_of

        if self._predict == _HASH and self._own.predictor is None:
            check_predictor(self._pack)
        return function_of(self._pack, named, routes, self._note)


def fill(pack: Pack, cache: ExpertCache, note: Callable[[str], None]) -> None:
    """Has experts read into an empty cache until a request begins. Raises PackError."""
    from moert.beside import fill as filling

    filling.fill(pack, cache, note)


def hash_memory(pack: Pack, function: HashFunction | None) -> tuple[int, Callable[[int, int], int] | None]:
    """Returns the memory of a hash function under the default settings: of its weights, and of a prompt [bytes]."""
    if function is None or not reading_ahead_pays(pack):
        return 0, None
    from moert.beside.sida.network import network_bytes, recalled_bytes

    return network_bytes(pack.manifest.files[HASH].nbytes), partial(recalled_bytes, function)


def hash_function(pack: Pack) -> HashFunction | None:
    """Returns a pack's hash function; None without one. Raises PackError."""
    if HASH not in pack.manifest.files:
        return None
    from moert.beside.sida.foresight import function_of

    return function_of(pack, named=True, routes=False, notify=lambda note: None)


def check_grammar(grammar: Grammar) -> None:
    """Raises SettingInvalid for a grammar that can't be, whatever the tokenizer, or where a package is missing."""
    from moert.beside import grammar as grammars

    grammars.check_grammar(grammar)


def check_apart(grammar: Grammar, room: Room) -> None:
    """Compiles a stranger's grammar in a process of its own, within bounds. `room`: makes room for this process. Raises
    SettingInvalid for one that can't be, or costs too much."""
    from moert.beside import grammar as grammars

    with room(grammars.apart_bytes(grammar), "compile a grammar"):
        grammars.check_apart(grammar)


def matching(tokenizer: Callable[[], Tokenizer], spec: ModelSpec) -> Matching:
    """Returns a function that makes matchers of grammars for a tokenizer and a model."""
    made = list[Any]()

    def matcher(grammar: Grammar, room: Room) -> Matcher:
        from moert.beside.grammar import Matchers

        if not made:
            made.append(Matchers(tokenizer, spec.vocab_size, spec.tokens.eos))
        found: Matcher = made[0].of(grammar, room)
        return found

    return matcher


def measured_devices() -> dict[str, Any]:
    """Returns the costs of devices that were measured here, DeviceCosts by name."""
    from moert.beside.gpu.device import known_costs

    return dict(known_costs())
