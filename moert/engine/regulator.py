"""The regulator: keeps a running engine inside its memory limit, admits requests, sizes the expert cache."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from moert import machine
from moert.engine.budget import FIRST_BYTES, Budget
from moert.errors import BudgetTooSmall, said
from moert.experts.ahead import Lookahead
from moert.experts.streaming import Streaming
from moert.models.footprint import Footprint, Load, Loads
from moert.models.kv import BLOCK_TOKENS
from moert.pack.messages import in_one_line
from moert.stats import size

TYPICAL = Load(prompt_tokens=128, max_new_tokens=128)
_MOST_TOKENS = 1 << 40  # that are tried
_LEAST = Load(prompt_tokens=1, max_new_tokens=1)
_SETTLED_BYTES = FIRST_BYTES + (6 << 20)  # and the part of the budget's margin that the first requests use up for good


class Others(NamedTuple):
    """Other engines of this process, under the same limit: the bytes that they hold, measured anew by each call, and
    those that are promised to them."""

    held_bytes: Callable[[], int] = lambda: 0
    promised_bytes: int = 0


class Bounds(NamedTuple):
    """`limit_bytes` bounds the process, or `cache_bytes` the experts; with neither all of them stay. `name`: of the
    limit, in words."""

    limit_bytes: int | None = None
    cache_bytes: int | None = None
    name: str = "the memory budget"


UNBOUND = Bounds()


class Regulator:
    """The regulator of an engine: sizes the expert cache before requests begin, after their prompts, and as their KV
    caches grow.

    The memory that the process holds is measured each time, so that an estimate that was too low is made up for at
    once. `loads` are all requests that run, or will.
    """

    def __init__(
        self,
        footprint: Footprint,
        budget: Budget,
        cache: Streaming,
        bounds: Bounds = UNBOUND,
        measure: Callable[[], int] = machine.held_bytes,
        kept_bytes: Callable[[], int] = lambda: 0,
        forget: Callable[[], bool] = lambda: False,
        promised_bytes: int = 0,
    ) -> None:
        """For a process that has its weights still to load, and holds as much as `measure` says. `kept_bytes`: keys and
        values that conversations keep while none of their requests runs; `forget` frees those of one conversation that
        can be read again, and returns False where there is none. `promised_bytes` of the limit belong to other engines
        of this process, whose memory `measure` leaves out."""
        self.promised_bytes, self._reserved_bytes = promised_bytes, 0
        self.limit_bytes, self.cache_bytes, self._limit_name = bounds
        self._footprint, self._budget, self._cache = footprint, budget, cache
        self._measure, self.kept_bytes, self._forget = measure, kept_bytes, forget
        self._held_at_first = self._others_bytes(()) - budget.opened_bytes
        self._idle_at_first: int | None = None
        room_bytes = budget.expert_bytes if self.cache_bytes is None else self.cache_bytes
        if self.limit_bytes is not None:
            coming = budget.loading_bytes + budget.tokenizer.kept_bytes + FIRST_BYTES + footprint.request([TYPICAL])
            room_bytes = budget.left_bytes(self.limit_bytes, self._others_bytes(()), coming)
        self.share = room_bytes / budget.expert_bytes
        """Share of all experts that a usual request will leave room for."""
        self.tight = self.limit_bytes is not None and self.share < 1
        """Whether memory is scarce: the limit has no room for all experts beside a usual request."""
        if self.tight:
            machine.return_early()

    def check_open(self) -> None:
        """Raises BudgetTooSmall if not even one token can be read, while the weights are still to be loaded."""
        if self.cache_bytes is not None:
            self._budget.check_cache(self.cache_bytes)
        if self.limit_bytes is not None:
            held = self._held_at_first
            if not self._budget.fits(self.limit_bytes - self.promised_bytes, held, self._footprint.request([_LEAST])):
                typical = self._footprint.request([TYPICAL])
                tokens = f"{TYPICAL.prompt_tokens} prompt tokens, {TYPICAL.max_new_tokens} new ones"
                raise self._budget.too_small(self._limit_name, held, typical, f"a usual request ({tokens}) needs")

    def check(self, loads: Loads, beside: Loads = ()) -> None:
        """Raises BudgetTooSmall if these requests can't run to their ends, once the requests `beside` them have
        ended."""
        if self.limit_bytes is None:
            return
        needed = self._footprint.request(loads)
        while True:
            held = self._without_pack_bytes((*loads, *beside))
            if self._budget.fits(self.limit_bytes - self.promised_bytes, held, needed):
                return
            if not self._forget():
                fewer = self._fitting_tokens(loads, held)
                raise self._budget.too_small(self._limit_name, held, needed, "this request needs", fewer)
            machine.return_freed()

    def _fitting_tokens(self, loads: Loads, held_bytes: int) -> int:
        """Returns the most new tokens with which each of these requests could run, less than they may write now; 0 for
        none."""
        limit = (self.limit_bytes or 0) - self.promised_bytes
        most = min(max(load.max_new_tokens for load in loads), _MOST_TOKENS)

        def too_many(count: int) -> bool:
            new = [max(load.written, min(count, load.max_new_tokens)) for load in loads]
            shorter = [replace(load, max_new_tokens=few) for load, few in zip(loads, new, strict=True)]
            return not self._budget.fits(limit, held_bytes, self._footprint.request(shorter))

        return bisect_left(range(1, most), True, key=too_many)

    def together(self, running: Loads, waiting: Loads) -> int:
        """Returns how many of the first waiting requests should begin now, at least one if none runs and no room is
        reserved: where all experts stay in memory for one request they do for all, and otherwise half of the room that
        experts have beside one request is left to them."""
        if self.limit_bytes is None or not waiting:
            return len(waiting)
        machine.return_freed()
        limit, held = self._free_bytes, self._idle_bytes((*running, *waiting))
        loads = (*running, *waiting)

        def room(count: int) -> int:
            return self._budget.left_bytes(limit, held, self._footprint.request(loads[:count]) + FIRST_BYTES)

        alone, all_bytes = room(1), self._budget.expert_bytes
        least = max(self._budget.layer_bytes, all_bytes if alone >= all_bytes else alone // 2)

        def too_many(count: int) -> bool:
            return room(count) < least

        fitting = bisect_left(range(1, len(loads) + 1), True, key=too_many)
        return max(0, max(0 if self._reserved_bytes else 1, fitting) - len(running))

    @property
    def spare_bytes(self) -> int | None:
        """Memory beyond the least that a usual request runs in [bytes]; None without a limit."""
        if self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.promised_bytes - self.smallest_memory([TYPICAL]))

    def smallest_memory(self, loads: Loads, aside_bytes: int = 0) -> int:
        """Returns the smallest --memory, in bytes, that these requests run in. `aside_bytes`: taken by the process that
        renders a chat template, before they begin."""
        held = self._without_pack_bytes(loads)
        return self._budget.smallest_memory(held, self._footprint.request(loads), aside_bytes)

    def before(self, loads: Loads) -> tuple[int, str | None]:
        """Makes room for requests that begin now. Returns the least bytes that experts will have until all requests
        have ended, and a warning if each token then reads experts again.

        Raises BudgetTooSmall.
        """
        if self.limit_bytes is None:
            nbytes = self._budget.expert_bytes if self.cache_bytes is None else self.cache_bytes
            self._cache.resize(nbytes)
            return nbytes, self._warning(nbytes, said("cache", self._budget.token_bytes))
        machine.return_freed()
        self.check(loads)
        first = max(0, FIRST_BYTES - self._settled_bytes(loads))  # that the first request is still to keep for good
        others = self._others_bytes(loads) + first
        coming = self._footprint.prompt(loads)
        self._resize(others, coming)
        most = max(coming, self._footprint.written(loads))
        more = self._budget.token_bytes - self._budget.layer_bytes
        enough = self._budget.smallest_bytes(others, most + more)
        left = self._budget.left_bytes(self._free_bytes, others, most)
        return self._budget.fitting_bytes(left), self._warning(left, said("memory", enough))

    def aside(self, nbytes: int, purpose: str, loads: Loads = ()) -> None:
        """Makes room for work beside the model, until requests begin or go on; or for work beside these requests while
        they go on. Raises BudgetTooSmall."""
        if self.limit_bytes is None:
            return
        machine.return_freed()
        held, coming = self._others_bytes(loads), nbytes + (self._footprint.request(loads) if loads else 0)
        while self._budget.left_bytes(self._free_bytes, held, coming) < self._budget.layer_bytes and self._forget():
            machine.return_freed()
            held = self._others_bytes(loads)
        if self._budget.left_bytes(self._free_bytes, held, coming) < self._budget.layer_bytes:
            smallest = self._budget.smallest_bytes(held, coming)
            raise BudgetTooSmall(
                f"{self._limit_name} is too small to {purpose} beside the model: give {said('memory', smallest)} "
                f"({size(smallest)})",
                smallest,
            )
        self._resize(held, nbytes + (self._footprint.prompt(loads) if loads else 0))

    def reserve(self, nbytes: int, purpose: str, loads: Loads) -> None:
        """Makes room for work beside these requests, which stays reserved until `release`. Raises BudgetTooSmall."""
        self.aside(nbytes, purpose, loads)
        self._reserved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Gives reserved room back."""
        self._reserved_bytes -= nbytes

    def refit(self, promised_bytes: int, running: Loads, waiting: Loads) -> None:
        """Changes the room that belongs to other engines of the process. Raises BudgetTooSmall where requests that run
        or wait could not run to their ends, and changes nothing then."""
        if self.limit_bytes is None:
            return
        before, self.promised_bytes = self.promised_bytes, promised_bytes
        try:
            if running:
                self.check(running)
            for load in waiting:
                self.check([load], running)
        except BudgetTooSmall:
            self.promised_bytes = before
            raise
        machine.return_freed()
        self._resize(self._others_bytes(running), self._footprint.prompt(running) if running else 0)

    def after(self, loads: Iterable[Load]) -> None:
        """Sizes the expert cache when each request has written a token more: gives experts the room of prompts'
        activations, and takes from them, block by block, the room that keys and values will need."""
        if self.limit_bytes is None:
            return
        loads = list(loads)
        begun = any(load.written == 1 for load in loads)
        if begun:
            machine.return_freed()
        if begun or any(self._footprint.read(load) % BLOCK_TOKENS == 0 for load in loads):
            self._resize(self._others_bytes(()), self._footprint.next_block(loads))

    @property
    def _free_bytes(self) -> int:
        """The limit, but for room of other engines and of work beside the model."""
        assert self.limit_bytes is not None
        return self.limit_bytes - self.promised_bytes - self._reserved_bytes

    def _others_bytes(self, loads: Loads) -> int:
        """Returns the bytes that the process holds beside the expert cache, and beside the keys and values of these
        requests."""
        return self._measure() - self._cache.held_bytes - sum(load.held_bytes for load in loads)

    def _without_pack_bytes(self, loads: Loads) -> int:
        """Returns the bytes that the process holds without the pack and these requests, or held before the weights were
        loaded, but for memory that it has freed since."""
        idle = self._idle_bytes(loads)
        self._held_at_first = min(self._held_at_first, idle)
        return max(self._held_at_first, idle - self._budget.loaded_bytes)

    def _idle_bytes(self, loads: Loads) -> int:
        """Returns the bytes of `_others_bytes` as before the first request or between two.

        Memory that requests have left allocated for good is not counted, up to _SETTLED_BYTES: FIRST_BYTES and the
        budget's margin cover it, and counting it twice would refuse a request that has run.
        """
        return self._others_bytes(loads) - min(self._settled_bytes(loads), _SETTLED_BYTES)

    def _settled_bytes(self, loads: Loads) -> int:
        """Returns the bytes that have come to stay since the first request was about to run."""
        others = self._others_bytes(loads) - self.kept_bytes()
        self._idle_at_first = others if self._idle_at_first is None else min(self._idle_at_first, others)
        return others - self._idle_at_first

    def _resize(self, others_bytes: int, coming_bytes: int) -> None:
        left = self._budget.left_bytes(self._free_bytes, others_bytes, coming_bytes)
        self._cache.resize(self._budget.fitting_bytes(left))

    def _warning(self, cache_bytes: int, enough: str) -> str | None:
        token = self._budget.token_bytes
        if cache_bytes >= token:
            return None
        return (
            f"the expert cache of {max(cache_bytes, self._budget.layer_bytes)} bytes holds less than one token demands "
            f"({token} bytes over all decoder layers{self._budget.token_beside}), so experts are read again for each "
            f"token: {enough} avoids that"
        )


Notify = Callable[[str], None]
"""A function that is called with one line about something that works, but not as well as a user may think."""


class Admission:
    """The Gate of an engine's sessions (see moert.engine.session), which also passes notes on to the user."""

    def __init__(self, regulator: Regulator, streaming: Streaming, ahead: Lookahead | None) -> None:
        self.notify: Notify = to_stderr
        self.notes: list[str] = []
        """Notes that are passed on when the next request begins."""
        self.smallest_room_bytes = sys.maxsize
        """The least room that experts had while a request ran."""
        self._regulator, self._streaming, self._ahead = regulator, streaming, ahead
        self._warned = self._split = False
        self._adapted_bytes = 0  # the room that reading and eviction were last adapted in

    def check(self, loads: Loads, beside: Loads = ()) -> None:
        self._regulator.check(loads, beside)

    def together(self, running: Loads, waiting: Loads) -> int:
        count = self._regulator.together(running, waiting)
        if len(running) + count > 0 and count < len(waiting) and not self._split:
            self._split = True
            self.notes.append(
                f"{len(running) + len(waiting)} prompts at once would take the experts' memory: they run "
                f"{len(running) + count} at a time"
            )
        return count

    def before(self, loads: Loads) -> None:
        room_bytes, warning = self._regulator.before(loads)
        if warning is not None and not self._warned:
            self._warned = True
            self.notes.append(warning)
        while self.notes:
            self.notify(self.notes.pop(0))
        self._streaming.expects()
        self._adapt(room_bytes)
        self._streaming.holding.begins()

    def aside(self, nbytes: int, purpose: str) -> None:
        """Makes room for work beside the model, until requests begin or go on. Raises BudgetTooSmall."""
        self._regulator.aside(nbytes, purpose)

    def passed(self) -> None:
        """Ends a pass of the model. Raises FileTruncated if bytes of experts have gone that were in use."""
        if self._streaming.holding.whole.has_mapped:
            self._streaming.holding.whole.check()
            self._streaming.cache.settle()

    def after(self, loads: Iterable[Load]) -> None:
        self._regulator.after(loads)
        if self._streaming.capacity_bytes != self._adapted_bytes:
            self._adapt(self._streaming.capacity_bytes)

    def idle(self) -> None:
        if self._ahead is not None:
            self._ahead.forget()

    def _adapt(self, room_bytes: int) -> None:
        self._adapted_bytes = self._streaming.capacity_bytes
        self.smallest_room_bytes = min(self.smallest_room_bytes, self._adapted_bytes)
        self._streaming.adapt(room_bytes, self.notify)


def to_stderr(note: str) -> None:
    print(in_one_line(f"moert: {note}"), file=sys.stderr)
