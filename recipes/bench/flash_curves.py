"""What recorded firings say of keeping neurons: what a window of tokens leaves to be loaded, and what hits under each
way of keeping blocks, beside Belady's rule. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moert.beside.flash.keeping import I64, KEEPING, Blocks, Hits, Keeping
from recipes.bench.flash_firings import Bits, Firings
from recipes.bench.result import Row

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
ROOMS = (0.1, 0.25, 0.5, 0.75)
BELADY = "Belady"
_NEVER = 1 << 40


class Loads(NamedTuple):
    """What a window of the last tokens leaves to be read, and keeps: neurons for a token, each once."""

    loaded: float
    kept: float


def window_loads(experts: I64, fired: Bits, windows: Sequence[int]) -> list[Loads]:
    """Of one layer: experts [visits], and which of the neurons of each fired, [visits, d_ff]. A window of k keeps what
    fired for any of the last k tokens."""
    visits, d_ff = fired.shape
    last: dict[int, I64] = {}
    ages, rests = np.zeros(visits + 1, np.int64), np.zeros(visits + 1, np.int64)
    for visit, expert in enumerate(experts.tolist()):
        at = last.setdefault(expert, np.full(d_ff, -1))
        seen = at[fired[visit]]
        np.add.at(ages, np.where(seen < 0, visits, visit - seen), 1)
        at[fired[visit]] = visit
    for at in last.values():
        np.add.at(rests, visits - at[at >= 0], 1)
    first = int(ages[visits])
    ages[visits] = 0
    spans = np.arange(visits + 1)
    return [
        Loads(
            (first + int(ages[k + 1 :].sum())) / visits,
            int((np.minimum(spans, k) * (ages + rests)).sum()) / visits,
        )
        for k in windows
    ]  # fmt: skip


def visits_of(experts: I64, fired: Bits, per_block: int) -> tuple[list[I64], int]:
    """The blocks that each token asks a layer for, ascending, and how many blocks an expert has."""
    visits, d_ff = fired.shape
    n_blocks = -(-d_ff // per_block)
    padded = np.zeros((visits, n_blocks * per_block), np.bool_)
    padded[:, :d_ff] = fired
    asked = padded.reshape(visits, n_blocks, per_block).any(axis=2)
    return [row.nonzero()[0] + n_blocks * int(expert) for row, expert in zip(asked, experts, strict=True)], n_blocks


def kept_hits(visits: Sequence[I64], n_blocks: int, n_slots: int, keeping: Keeping) -> Hits:
    """As the runtime keeps blocks, at first none: of a token that asks for more than there are slots, the first ones
    stay."""
    blocks, asked, hits = Blocks(n_blocks, keeping), 0, 0
    blocks.resize(n_slots)
    for wanted in visits:
        asked += len(wanted)
        hits += int(np.count_nonzero(blocks.slot_of[wanted] >= 0))
        blocks.want(wanted[:n_slots])
    return Hits(asked, hits)


def best_hits(visits: Sequence[I64], n_blocks: int, n_slots: int) -> Hits:
    """By Belady's rule, which knows the future: after each token stays what is asked for again first, of what was there
    and what has come. Nothing has to stay, so that no way of keeping hits more often."""
    again, following = list[I64](), np.full(n_blocks, _NEVER)
    for visit in range(len(visits) - 1, -1, -1):
        again.append(following[visits[visit]])
        following[visits[visit]] = visit
    needed, asked, hits = np.full(n_blocks, _NEVER), 0, 0  # when residents are needed again
    for wanted, later in zip(visits, reversed(again), strict=True):
        asked += len(wanted)
        hits += int(np.count_nonzero(needed[wanted] < _NEVER))
        needed[wanted] = later
        if np.count_nonzero(needed < _NEVER) > n_slots:
            needed[np.argpartition(needed, n_slots)[n_slots:]] = _NEVER
    return Hits(asked, hits)


def window_rows(name: str, firings: Firings) -> Iterator[Row]:
    """The mean over all layers, as shares of an expert's neurons, and of all that a layer has."""
    found = [
        window_loads(experts, firings.fired(layer), WINDOWS) for layer, experts in enumerate(firings.experts)
    ]  # fmt: skip
    yield Row(f"{name}: fire for a token", 100 * firings.share, "% of an expert's neurons")
    for place, k in enumerate(WINDOWS):
        loaded, kept = (float(np.mean([getattr(layer[place], what) for layer in found])) for what in Loads._fields)
        yield Row(f"{name}: window of {k}: loaded", 100 * loaded / firings.d_ff, "% of an expert's neurons")
        share = 100 * kept / firings.d_ff / firings.n_experts
        yield Row(f"{name}: window of {k}: kept", share, "% of a layer's neurons")


def hit_rates(firings: Firings, per_block: int, room: float) -> Mapping[str, float]:
    """Hits of all layers together, each with room for so large a part of its blocks, by the way of keeping."""
    found = {name: [0, 0] for name in (*KEEPING, BELADY)}
    for layer, experts in enumerate(firings.experts):
        visits, of_expert = visits_of(experts, firings.fired(layer), per_block)
        n_blocks = of_expert * firings.n_experts
        n_slots = max(1, int(room * n_blocks))
        hits = {name: kept_hits(visits, n_blocks, n_slots, keeping) for name, keeping in KEEPING.items()}
        hits[BELADY] = best_hits(visits, n_blocks, n_slots)
        for name, one in hits.items():
            found[name][0] += one.hits
            found[name][1] += one.asked
    return {name: hits / max(1, asked) for name, (hits, asked) in found.items()}


def hit_rows(name: str, firings: Firings, per_block: int) -> Iterator[Row]:
    yield Row(f"{name}: block", per_block, "neurons")
    for room in ROOMS:
        for way, rate in hit_rates(firings, per_block, room).items():
            yield Row(f"{name}: room for {room:.0%} of blocks: {way}", 100 * rate, "% hits")
