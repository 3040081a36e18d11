"""What no cache could have avoided reading, of experts of any sizes: PFOO-L. Pure.

Berger, Beckmann, Harchol-Balter: Practical Bounds on Optimal Caching with Variable Object Sizes (2018), section 5.
An expert that is found in memory has taken up its bytes at every demand since its last one. All of them together have
no more room than the cache at all demands together. Saving as many bytes as that allows is a knapsack, and its
fractional solution saves no less than any cache can: the bytes that are left must be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moert.experts.policy import Demand
from moert.pack.model_spec import ExpertKey

I64 = npt.NDArray[np.int64]


def least_bytes(
    trace: Sequence[Demand], nbytes: Mapping[ExpertKey, int], capacity_bytes: int, held: Collection[ExpertKey] = ()
) -> int:
    """Bytes that any policy reads, whatever it keeps and however early it reads, if it holds `held` at first and runs
    experts in the order of the trace. Raises ValueError if a demanded expert alone is larger than the capacity."""
    keys = [key for demand in trace for key in demand.expert_keys()]
    if not keys:
        return 0
    place = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    demands = np.array([place[key] for key in keys], dtype=np.int64)
    sizes = np.array([nbytes[key] for key in place], dtype=np.int64)
    if sizes.max() > capacity_bytes:
        raise ValueError(f"an expert has {sizes.max()} bytes, more than the budget of {capacity_bytes}")
    waits = _waits(demands, np.array([key in held for key in place]))
    again = waits >= 0
    room = int((capacity_bytes - sizes[demands]).sum())  # the expert that is demanded is in memory too
    return int(sizes[demands].sum()) - _most_saved(sizes[demands][again], waits[again], room)


def _waits(demands: I64, held: npt.NDArray[np.bool_]) -> I64:
    """[demands]: how many other demands there were since the same expert's last one, or since the start for one that
    is `held` [experts] then; -1 for the first demand of any other."""
    order = demands.argsort(kind="stable")
    before = np.empty_like(demands)
    before[order[1:]] = order[:-1]
    first = np.ones(len(demands), dtype=np.bool_)
    first[order[1:]] = np.diff(demands[order]) > 0
    before[first] = -1
    waits: I64 = np.arange(len(demands)) - before - 1
    waits[first & ~held[demands]] = -1
    return waits


def _most_saved(sizes: I64, waits: I64, room: int) -> int:
    """A hit saves its size and takes up size × wait of the room: those with the shortest waits come first, the last one
    in part."""
    order = waits.argsort(kind="stable")
    sizes, waits = sizes[order], waits[order]
    taken = np.cumsum(sizes * waits)
    whole = int(np.searchsorted(taken, room, side="right"))
    saved = int(sizes[:whole].sum())
    if whole < len(sizes):
        saved += (room - (int(taken[whole - 1]) if whole else 0)) // int(waits[whole])
    return saved
