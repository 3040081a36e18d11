"""The figures of a run: every number that is printed about it comes from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol

from moert.errors import said
from moert.machine import peak_bytes

PAGE_CACHE = "page cache"


@dataclass
class ExpertCounters:
    """Counts of the expert cache and of reading ahead since the engine was opened.

    A request is the demand of one layer for one expert, once for all its tokens. `hits` are requests whose expert was
    in memory, or, for `hits_in_flight` of them, still being read ahead. `stall_s` is the time that the model waited for
    experts, `read_s` the sum of the times of all reads, also of simultaneous ones; `retries` are reads that failed and
    were tried again. Prefetched bytes count as used once a router demands their expert.
    """

    requests: int = 0
    hits: int = 0
    hits_in_flight: int = 0
    evictions: int = 0
    reads: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    retries: int = 0
    stall_s: float = 0.0
    prefetch_issued: int = 0
    prefetch_issued_bytes: int = 0
    prefetch_used: int = 0
    prefetch_used_bytes: int = 0


@dataclass
class RequestTimes:
    """Token counts and times over one or more requests. `decode_s`: the time in which tokens after the first of a
    request were written, for one or several requests at once."""

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0

    def add(self, prompt_tokens: int, new_tokens: int, first_token_s: float) -> None:
        """Adds a request that has ended."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.new_tokens += new_tokens
        self.first_token_s += first_token_s


@dataclass
class ReadAhead:
    """The results of reading ahead, counted in expert reads, but for the tokens.

    `read` were begun ahead; `used` of them were demanded by the layer that they were read for; `missed` are demanded
    experts that had to be read only then, while predictions were on.
    """

    read: int = 0
    used: int = 0
    missed: int = 0
    tokens_on: int = 0
    tokens_off: int = 0

    @property
    def precision(self) -> float:
        return self.used / self.read if self.read else 0.0

    @property
    def recall(self) -> float:
        return self.used / (self.used + self.missed) if self.used + self.missed else 0.0

    @property
    def on(self) -> float:
        """Share of the tokens with reading ahead."""
        tokens = self.tokens_on + self.tokens_off
        return self.tokens_on / tokens if tokens else 0.0


class Shown(Protocol):
    """Figures of a package beside the core, a dataclass."""

    def lines(self) -> list[str]:
        """Returns lines for people."""
        ...


@dataclass(frozen=True)
class RunStats:
    """One run in numbers. Bytes are bytes, times seconds; rates that nothing was measured for are 0.

    `tokens_per_s` counts the tokens after each request's first one, over the time in which any of them were written.
    `time_to_first_token_s` is a mean over the requests. `prefetch_wasted_bytes` were read ahead and not demanded so
    far; `prefetch_precision` is the share of experts read ahead that were demanded next, `prefetch_recall` the share of
    the experts missing in a layer that had been read ahead, `prefetch_on` the share of written tokens with reading
    ahead. A hit was in memory when its layer demanded it, or else on its way: `expert_hits_in_flight` of the
    `expert_hits` were still being read ahead then, and the layer waited for them. `hit_rate` counts both.
    `belady_hit_rate` is the hit rate, without reading ahead, of always evicting the expert that is needed again last,
    over the first `belady_demands` requests, with the present room for experts: the highest that eviction can reach
    where all experts have one size. `io` says how experts are read: PAGE_CACHE where files in the system's page cache
    are read from there. `smallest_cache_bytes` is the least room that experts had while a request ran. `routing` is
    exact, hash, or the share of the experts that the cache-aware routing in use is made for. `neurons` is exact, or
    predicted: then, of all neurons of the experts that tokens went to, `neurons_named` is the share that the predictor
    named, and `neurons_computed` the share that was computed with the blocks of these; `neurons_fired` is the share of
    all that gave anything but zero.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    tokens_per_s: float
    time_to_first_token_s: float
    expert_requests: int
    expert_hits: int
    expert_hits_in_flight: int
    hit_rate: float
    evictions: int
    reads: int
    bytes_read: int
    retries: int
    stall_s: float
    prefetch_issued_bytes: int
    prefetch_used_bytes: int
    prefetch_wasted_bytes: int
    prefetch_precision: float
    prefetch_recall: float
    prefetch_on: float
    peak_rss_bytes: int
    memory_bytes: int | None
    cache_bytes: int
    smallest_cache_bytes: int
    expert_bytes: int
    eviction: str
    io: str
    routing: str
    belady_demands: int
    belady_hit_rate: float
    neurons: str = "exact"
    neurons_named: float = 0.0
    neurons_computed: float = 0.0
    neurons_fired: float = 0.0
    block_requests: int = 0
    block_hits: int = 0
    device: Shown | None = None
    profile: Shown | None = None
    drafts: Shown | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns lines for people, one figure a line."""
        asked, late = max(1, self.expert_requests), self.expert_hits_in_flight
        hits = f"{100 * (self.expert_hits - late) / asked:.1f}% in memory, {100 * late / asked:.1f}% on the way"
        way = "through the system's page cache" if self.io == PAGE_CACHE else said("io", self.io)
        reads = f"{self.reads} reads ({way})" + (f", {self.retries} tried again" if self.retries else "")
        return [
            f"tokens           {self.prompt_tokens} read, {self.new_tokens} written in {self.requests} request(s)",
            f"speed            {self.tokens_per_s:.2f} tokens/s after the first token",
            f"first token      after {self.time_to_first_token_s:.3f} s",
            f"experts          asked for {self.expert_requests} times, {hits}",
            *self._eviction_lines(),
            *self._neuron_lines(),
            f"read from disk   {size(self.bytes_read)} in {reads}; waited {self.stall_s:.3f} s",
            *self._ahead_lines(),
            *([] if self.drafts is None else self.drafts.lines()),
            *([] if self.device is None else self.device.lines()),
            *([] if self.profile is None else self.profile.lines()),
            f"room             {self._room_text()}",
            f"peak memory      {size(self.peak_rss_bytes)} (the whole process)",
        ]

    def _eviction_lines(self) -> list[str]:
        if not self.evictions:
            return []
        best = f"{100 * self.belady_hit_rate:.1f}% (of the first {self.belady_demands})"
        made = f"{self.evictions} times, eviction {self.eviction}"
        return [f"made room        {made}; knowing the future, without reading ahead: {best}"]

    def _neuron_lines(self) -> list[str]:
        if not self.block_requests:
            return []
        hits, fired = 100 * self.block_hits / self.block_requests, f"{100 * self.neurons_fired:.1f}% fired"
        if self.neurons_computed:
            asked = (
                f"{100 * self.neurons_named:.1f}% named, {100 * self.neurons_computed:.1f}% computed with their blocks"
            )
            fired = f"{asked}, {fired}"
        return [f"neurons          {fired}; blocks asked for {self.block_requests} times, {hits:.1f}% in memory"]

    def _ahead_lines(self) -> list[str]:
        if not self.prefetch_issued_bytes:
            return []
        return [
            f"read ahead       {size(self.prefetch_issued_bytes)}, of it {size(self.prefetch_used_bytes)} used; "
            f"guesses {100 * self.prefetch_precision:.0f}% right, {100 * self.prefetch_recall:.0f}% complete; "
            f"on for {100 * self.prefetch_on:.0f}% of written tokens"
        ]

    def _room_text(self) -> str:
        process = f"{'no limit' if self.memory_bytes is None else size(self.memory_bytes)} for the process"
        least = f", once only {size(self.smallest_cache_bytes)}" if self.smallest_cache_bytes < self.cache_bytes else ""
        return f"{process}; experts have {size(self.cache_bytes)}{least}, all are {size(self.expert_bytes)}"


def run_stats(
    times: RequestTimes, counters: ExpertCounters, ahead: ReadAhead, waited_s: float = 0.0, **further: Any
) -> RunStats:  # fmt: skip
    """Returns the figures of a run. `waited_s`: for data beside whole experts; `further`: the fields of RunStats that
    none of these has."""
    later_tokens = times.new_tokens - times.requests
    return RunStats(
        requests=times.requests,
        prompt_tokens=times.prompt_tokens,
        new_tokens=times.new_tokens,
        tokens_per_s=later_tokens / times.decode_s if times.decode_s > 0 and later_tokens > 0 else 0.0,
        time_to_first_token_s=times.first_token_s / times.requests if times.requests else 0.0,
        expert_requests=counters.requests,
        expert_hits=counters.hits,
        expert_hits_in_flight=counters.hits_in_flight,
        hit_rate=counters.hits / counters.requests if counters.requests else 0.0,
        evictions=counters.evictions,
        reads=counters.reads,
        bytes_read=counters.bytes_read,
        retries=counters.retries,
        stall_s=counters.stall_s + waited_s,
        prefetch_issued_bytes=counters.prefetch_issued_bytes,
        prefetch_used_bytes=counters.prefetch_used_bytes,
        prefetch_wasted_bytes=counters.prefetch_issued_bytes - counters.prefetch_used_bytes,
        prefetch_precision=ahead.precision,
        prefetch_recall=ahead.recall,
        prefetch_on=ahead.on,
        peak_rss_bytes=peak_bytes(),
        **further,
    )


def size(nbytes: int) -> str:
    """Returns a size for people: 1.50 GB, 20.30 MB (powers of 1000)."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"
