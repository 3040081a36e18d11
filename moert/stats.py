"""Every number that is printed about a run comes from here."""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class ExpertCounters:
    """What the expert cache and the prefetcher did since the engine was opened.

    A request is one layer asking for one expert once, for all its tokens. `stall_s` is the time that the model waited
    for experts. Prefetched bytes are used once a router asks for them.
    """

    requests: int = 0
    hits: int = 0
    evictions: int = 0
    reads: int = 0
    bytes_read: int = 0
    stall_s: float = 0.0
    prefetch_issued: int = 0
    prefetch_issued_bytes: int = 0
    prefetch_used: int = 0
    prefetch_used_bytes: int = 0


@dataclass
class RequestTimes:
    """Token counts and times over one or more requests. `decode_s` starts at each request's first new token."""

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0

    def add(self, prompt_tokens: int, new_tokens: int, first_token_s: float, total_s: float) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.new_tokens += new_tokens
        self.first_token_s += first_token_s
        self.decode_s += max(0.0, total_s - first_token_s)


@dataclass(frozen=True)
class RunStats:
    """One run in numbers. Bytes are bytes, times seconds; rates that nothing was measured for are 0.

    `tokens_per_s` counts the tokens after each request's first one. `time_to_first_token_s` is a mean over the
    requests. `prefetch_wasted_bytes` were read ahead and not asked for so far.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    tokens_per_s: float
    time_to_first_token_s: float
    expert_requests: int
    expert_hits: int
    hit_rate: float
    evictions: int
    reads: int
    bytes_read: int
    stall_s: float
    prefetch_issued_bytes: int
    prefetch_used_bytes: int
    prefetch_wasted_bytes: int
    peak_rss_bytes: int
    memory_bytes: int | None
    cache_bytes: int
    expert_bytes: int

    def to_dict(self) -> dict[str, int | float | None]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: one figure a line."""
        budget = "none (everything stays resident)" if self.memory_bytes is None else size(self.memory_bytes)
        return [
            f"tokens           {self.prompt_tokens} read, {self.new_tokens} written in {self.requests} request(s)",
            f"speed            {self.tokens_per_s:.2f} tokens/s after the first token",
            f"first token      {self.time_to_first_token_s:.3f} s",
            f"expert requests  {self.expert_requests}, {100 * self.hit_rate:.1f}% in memory",
            f"read             {size(self.bytes_read)} in {self.reads} reads, {self.evictions} evictions",
            f"stall            {self.stall_s:.3f} s",
            f"prefetch         {size(self.prefetch_issued_bytes)}, of it {size(self.prefetch_used_bytes)} used, "
            f"{size(self.prefetch_wasted_bytes)} wasted",
            f"budget           {budget}; expert cache {size(self.cache_bytes)} of {size(self.expert_bytes)} of experts",
            f"peak memory      {size(self.peak_rss_bytes)} (the whole process)",
        ]


def run_stats(
    times: RequestTimes, counters: ExpertCounters, memory_bytes: int | None, cache_bytes: int, expert_bytes: int
) -> RunStats:
    later_tokens = times.new_tokens - times.requests
    return RunStats(
        requests=times.requests,
        prompt_tokens=times.prompt_tokens,
        new_tokens=times.new_tokens,
        tokens_per_s=later_tokens / times.decode_s if times.decode_s > 0 and later_tokens > 0 else 0.0,
        time_to_first_token_s=times.first_token_s / times.requests if times.requests else 0.0,
        expert_requests=counters.requests,
        expert_hits=counters.hits,
        hit_rate=counters.hits / counters.requests if counters.requests else 0.0,
        evictions=counters.evictions,
        reads=counters.reads,
        bytes_read=counters.bytes_read,
        stall_s=counters.stall_s,
        prefetch_issued_bytes=counters.prefetch_issued_bytes,
        prefetch_used_bytes=counters.prefetch_used_bytes,
        prefetch_wasted_bytes=counters.prefetch_issued_bytes - counters.prefetch_used_bytes,
        peak_rss_bytes=peak_rss_bytes(),
        memory_bytes=memory_bytes,
        cache_bytes=cache_bytes,
        expert_bytes=expert_bytes,
    )


def peak_rss_bytes() -> int:
    """The most physical memory that this process has held, as the system counts it.

    What getrusage says on Linux can be the peak of the process that started this one, so it comes second.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def size(nbytes: int) -> str:
    """Bytes for people: 1.50 GB, 20.3 MB (powers of 1000)."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"
