"""Keeps a running engine inside its memory limit: the expert cache gets what everything else leaves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

from moert import memory
from moert.budget import FIRST_BYTES, Budget
from moert.models.footprint import Footprint
from moert.models.kv import BLOCK_TOKENS

TYPICAL_PROMPT_TOKENS = TYPICAL_NEW_TOKENS = 128
_SETTLED_BYTES = FIRST_BYTES + (6 << 20)  # that, and what of the budget's margin the first requests use up for good


class Cache(Protocol):
    """The expert cache; `held_bytes` is the memory that it takes, full or not."""

    @property
    def held_bytes(self) -> int: ...

    def resize(self, capacity_bytes: int) -> None: ...


class Regulator:
    """Sizes the expert cache before a request, after its prompt, and as its keys and values grow.

    What the process holds is measured each time, so that an estimate that was too low is made up for at once. A request
    is one prompt or several that run together: `prompts` has the tokens of each.
    """

    def __init__(
        self,
        footprint: Footprint,
        budget: Budget,
        cache: Cache,
        limit_bytes: int | None = None,
        cache_bytes: int | None = None,
        measure: Callable[[], int] = memory.held_bytes,
        limit_name: str = "the memory budget",
    ) -> None:
        """For a process that has its weights still to load. `limit_bytes` bounds it, or `cache_bytes` the experts; with
        neither all of them stay."""
        self.limit_bytes, self.cache_bytes, self._limit_name = limit_bytes, cache_bytes, limit_name
        self._footprint, self._budget, self._cache = footprint, budget, cache
        self._measure = measure
        self._idle_at_first: int | None = None
        self.tight = self._is_tight()
        """Whether a usual request will leave no room for all experts, so that every megabyte is wanted."""
        if self.tight:
            memory.return_early()

    def check_open(self) -> None:
        """For when the weights are still to be loaded: raises BudgetTooSmall if not even one token can be read."""
        if self.cache_bytes is not None:
            self._budget.check_cache(self.cache_bytes)
        if self.limit_bytes is not None:
            held, loading = self._measure(), self._budget.loading_bytes
            if not self._budget.fits(self.limit_bytes, held, loading + FIRST_BYTES + self._footprint.request([1], 1)):
                typical = self._footprint.request([TYPICAL_PROMPT_TOKENS], TYPICAL_NEW_TOKENS)
                what = f"a usual request ({TYPICAL_PROMPT_TOKENS} prompt tokens, {TYPICAL_NEW_TOKENS} new ones) needs"
                raise self._budget.too_small(self._limit_name, held, loading, typical, what)

    def check(self, prompts: Sequence[int], max_new_tokens: int) -> None:
        """Raises BudgetTooSmall if a request can't run to its end."""
        if self.limit_bytes is not None:
            held, needed = self._idle_bytes(), self._footprint.request(prompts, max_new_tokens)
            if not self._budget.fits(self.limit_bytes, held, needed + FIRST_BYTES):
                raise self._budget.too_small(self._limit_name, held, 0, needed, "this request needs")

    def together(self, prompts: Sequence[int], max_new_tokens: int) -> int:
        """How many of the first prompts should run at once, at least one: where experts all stay in memory for one they
        do for all of them, and otherwise half of the room that they have beside one is left to them."""
        if self.limit_bytes is None:
            return len(prompts)
        memory.return_freed()
        limit, held = self.limit_bytes, self._idle_bytes()

        def room(count: int) -> int:
            needed = self._footprint.request(prompts[:count], max_new_tokens)
            return self._budget.left_bytes(limit, held, needed + FIRST_BYTES)

        alone, all_bytes = room(1), self._budget.expert_bytes
        least = max(self._budget.layer_bytes, all_bytes if alone >= all_bytes else alone // 2)

        def too_many(count: int) -> bool:
            return room(count) < least

        return max(1, bisect_left(range(1, len(prompts) + 1), True, key=too_many))

    def smallest_memory(self, prompts: Sequence[int], max_new_tokens: int) -> int:
        """The smallest --memory, in bytes, that such a request runs in."""
        needed = self._footprint.request(prompts, max_new_tokens)
        return self._budget.smallest_bytes(self._idle_bytes(), needed + FIRST_BYTES)

    def before_prompt(self, prompts: Sequence[int], max_new_tokens: int) -> tuple[int, str | None]:
        """Makes room for a prompt. Gives the least bytes that experts will have until the end of the request, and a
        warning if each token then reads experts again.

        Raises BudgetTooSmall.
        """
        if self.limit_bytes is None:
            nbytes = self._budget.expert_bytes if self.cache_bytes is None else self.cache_bytes
            self._cache.resize(nbytes)
            return nbytes, self._warning(nbytes, f"--cache {self._budget.token_bytes}")
        memory.return_freed()
        self.check(prompts, max_new_tokens)
        others = self._others_bytes() + self._first_bytes()
        coming = self._footprint.prompt(prompts)
        self._resize(others, coming)
        most = max(coming, self._footprint.written(prompts, max_new_tokens))
        more = self._budget.token_bytes - self._budget.layer_bytes
        enough = self._budget.smallest_bytes(others, most + more)
        left = self._budget.left_bytes(self.limit_bytes, others, most)
        return self._budget.fitting_bytes(left), self._warning(left, f"--memory {enough}")

    def after_token(self, prompts: Sequence[int], new_tokens: int) -> None:
        """Gives the experts the room of the prompt's activations, and takes from them, block by block, what keys and
        values will need."""
        read = self._footprint.read(prompts, new_tokens)
        if self.limit_bytes is None or (new_tokens > 1 and all(length % BLOCK_TOKENS for length in read)):
            return
        if new_tokens == 1:
            memory.return_freed()
        self._resize(self._others_bytes(), self._footprint.next_block(prompts, new_tokens))

    def _is_tight(self) -> bool:
        if self.limit_bytes is None:
            return False
        typical = self._footprint.request([TYPICAL_PROMPT_TOKENS], TYPICAL_NEW_TOKENS)
        coming = self._budget.loading_bytes + FIRST_BYTES + typical
        return self._budget.left_bytes(self.limit_bytes, self._others_bytes(), coming) < self._budget.expert_bytes

    def _others_bytes(self) -> int:
        return self._measure() - self._cache.held_bytes

    def _idle_bytes(self) -> int:
        """What the process holds beside the expert cache, before the first request or between two.

        What requests have left allocated for good is not counted, up to _SETTLED_BYTES: FIRST_BYTES and the budget's
        margin cover it, and counting it twice would refuse a request that has run.
        """
        return self._others_bytes() - min(self._settled_bytes(), _SETTLED_BYTES)

    def _first_bytes(self) -> int:
        """What the first request is still to bring."""
        return max(0, FIRST_BYTES - self._settled_bytes())

    def _settled_bytes(self) -> int:
        """What has come to stay since the first request was about to run."""
        others = self._others_bytes()
        self._idle_at_first = others if self._idle_at_first is None else min(self._idle_at_first, others)
        return others - self._idle_at_first

    def _resize(self, others_bytes: int, coming_bytes: int) -> None:
        assert self.limit_bytes is not None
        left = self._budget.left_bytes(self.limit_bytes, others_bytes, coming_bytes)
        self._cache.resize(self._budget.fitting_bytes(left))

    def _warning(self, cache_bytes: int, enough: str) -> str | None:
        token = self._budget.token_bytes
        if cache_bytes >= token:
            return None
        return (
            f"the expert cache of {max(cache_bytes, self._budget.layer_bytes)} bytes holds less than one token demands "
            f"({token} bytes over all decoder layers), so experts are read again for each token: {enough} avoids that"
        )
