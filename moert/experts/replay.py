"""Replays of demands through eviction policies: hits in a given room, Belady's rule, and the policy that does best.

Pure. Belady's rule knows the future: the expert that is needed again last leaves first, and no policy hits more often
where all experts have the same size. With mixed sizes some other choice may; a bound that no choice can beat is in
moert.bench.measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from moert.experts.policy import I64, Demand, Recorder, place_of
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.paths import DROPPED, Trace


@dataclass(frozen=True)
class Replay:
    """The cost of a trace under a policy and a budget."""

    demands: int
    hits: int
    misses: int
    bytes_read: int
    evictions: int
    peak_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.demands if self.demands else 0.0


def code_of(key: ExpertKey) -> int:
    """Returns the number that stands for an expert in a recorder."""
    return place_of(key.at) << 16 | key.expert


def recorder_of(trace: Sequence[Demand]) -> Recorder:
    """Returns a recorder of a whole trace."""
    found = Recorder(sum(len(demand.experts) for demand in trace))
    for demand in trace:
        found.add(demand)
    return found


def belady(
    recorder: Recorder, nbytes: Mapping[ExpertKey, int], capacity_bytes: int
) -> tuple[Replay, npt.NDArray[np.int64]]:
    """Returns the replay of the recorded demands under Belady's rule (1966), starting with nothing in memory, and the
    bytes that each demand reads [demands], in order; 0 for a hit.

    Of experts that are never needed again the largest leaves first. Raises ValueError if some demanded expert alone is
    larger than the capacity.
    """
    codes = recorder.codes()
    names, experts = np.unique(codes, return_inverse=True)
    size_of = {code_of(key): size for key, size in nbytes.items()}
    sizes = np.array([size_of[name] for name in names.tolist()], dtype=np.int64)
    if len(sizes) and sizes.max() > capacity_bytes:
        raise ValueError(f"an expert has {sizes.max()} bytes, more than the budget of {capacity_bytes}")
    missed, evictions, peak = _evict_the_furthest(experts, sizes, capacity_bytes)
    read = sizes[experts] * missed
    misses = int(missed.sum())
    return Replay(len(codes), len(codes) - misses, misses, int(read.sum()), evictions, peak), read


def _evict_the_furthest(demands: I64, sizes: I64, capacity_bytes: int) -> tuple[npt.NDArray[np.bool_], int, int]:
    """Returns which demands miss [demands], the evictions, and the most bytes held at once; `demands` are indices into
    `sizes`."""
    size_of = sizes.tolist()
    needed_at = [0] * len(sizes)  # when each resident is needed again; 0 for an expert that is not resident
    furthest: list[tuple[int, int]] = []  # a heap of (-when, expert), also of residents that were used since
    missed = bytearray(len(demands))
    used = evictions = peak = 0
    for at, (expert, when) in enumerate(zip(demands.data, _next_uses(demands, sizes).data, strict=True)):
        if not needed_at[expert]:
            missed[at] = 1
            used += size_of[expert]
            while used > capacity_bytes:
                soonest, leaving = heappop(furthest)
                if needed_at[leaving] == -soonest:
                    needed_at[leaving] = 0
                    used -= size_of[leaving]
                    evictions += 1
            peak = max(peak, used)
        needed_at[expert] = when
        heappush(furthest, (-when, expert))
        if len(furthest) > 4 * len(needed_at):
            furthest = [(-when, expert) for expert, when in enumerate(needed_at) if when]
            heapify(furthest)
    return np.frombuffer(missed, dtype=np.bool_), evictions, peak


def _next_uses(demands: I64, sizes: I64) -> I64:
    """Returns for each demand when the same expert is demanded next; if never, after all demands, the largest last."""
    never = len(demands) + np.lexsort((np.arange(len(sizes)), sizes)).argsort()
    found = never[demands]
    order = demands.argsort(kind="stable")
    again = np.diff(demands[order]) == 0
    found[order[:-1][again]] = order[1:][again]
    return found


AUTO_EVICTION = "auto"
DEFAULT = "expected"
"""The policy where no record names the best one. In the replays of recipes/LOG.md no other is as good on the whole:
within a point of the best at every room on g2p, the best by 6 to 7 points on wiki."""
OF_PREFERENCES = "layer-lru"
"""The policy for cache-aware routing, whose demands no trace in a pack shows."""


def demands_of(trace: Trace, spec: ModelSpec, decoder_tokens: int | None = None) -> Iterator[Demand]:
    """Yields the demands of a trace: for each sample its encoder in one pass, then its decoder token by token.

    Ends before the decoder has read more than `decoder_tokens`. The trace must be one of this model (Trace.check).
    """
    left = trace.decoder_tokens if decoder_tokens is None else decoder_tokens
    for index in range(trace.n_samples):
        for name, experts in trace.sample(index).items():
            layers = spec.moe_layers(name)
            if name == "encoder":
                yield from _one_pass(layers, experts)
                continue
            for token in experts[:left]:
                yield from _one_pass(layers, token[None])
            left -= len(experts)
        if left <= 0 and decoder_tokens is not None:
            return


def _one_pass(layers: Sequence[LayerKey], tokens: npt.NDArray[np.uint16]) -> Iterator[Demand]:
    """Yields the demand of each layer by tokens [tokens, layers, top_k] that go through the stack at once."""
    for place, at in enumerate(layers):
        needed = sorted({*tokens[:, place].ravel().tolist()} - {DROPPED})
        if needed:
            yield Demand(at, tuple(needed))
