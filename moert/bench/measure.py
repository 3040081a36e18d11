"""Measures runs of a pack on some prompts: all counts, times and bounds that `moert bench` prints."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.beside.gpu.device import DeviceUse
from moert.beside.gpu.simulated import PROFILES
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.regulator import Notify
from moert.engine.settings import EngineSettings
from moert.experts.policy import Demand
from moert.experts.probe import drive_of, read_for
from moert.experts.replay import belady, recorder_of
from moert.machine import drop_page_cache, machine_memory
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import RunStats

# Bounds: the least time of a run, and the hits of a policy that knows the future. Pure.


@dataclass(frozen=True)
class FurthestFirst:
    """The reads of Belady's rule in a trace: always evicting the expert that is needed again last."""

    demands: int
    misses: int
    bytes_read: int

    @property
    def hit_rate(self) -> float:
        return 1 - self.misses / self.demands if self.demands else 0.0


def furthest_first(
    trace: Sequence[Demand], nbytes: Mapping[ExpertKey, int], cache_bytes: int, held: Sequence[ExpertKey] = ()
) -> FurthestFirst:
    """Replays the trace by Belady's rule, with `held` in memory before it.

    The rule is the best eviction where all experts have the same size. With mixed sizes another choice may read a
    little less, so that this is a figure to compare with and no bound: `least_bytes` is the bound. Raises ValueError if
    an expert alone is larger than the cache.
    """
    before = [Demand(key.at, (key.expert,)) for key in held]  # as if each had been read before
    read = belady(recorder_of([*before, *trace]), nbytes, cache_bytes)[1][len(before) :]
    return FurthestFirst(len(read), int((read > 0).sum()), int(read.sum()))


def bound_s(compute_s: float, least_bytes: int, bytes_per_s: float | None) -> float:
    """Returns the least time [s]: reading and computing can at best overlap entirely. Without a speed reading costs no
    time."""
    return max(compute_s, least_bytes / bytes_per_s if bytes_per_s else 0.0)


# The bytes that no cache could have avoided reading, of experts of any sizes: PFOO-L. Pure.
# Berger, Beckmann, Harchol-Balter: Practical Bounds on Optimal Caching with Variable Object Sizes (2018), section
# 5. An expert that is found in memory has taken up its bytes at every demand since its last one. All of them
# together have no more room than the cache at all demands together. Saving as many bytes as that allows is a
# knapsack, and its fractional solution saves no less than any cache can: the bytes that are left must be read.

I64 = npt.NDArray[np.int64]


def least_bytes(
    trace: Sequence[Demand], nbytes: Mapping[ExpertKey, int], capacity_bytes: int, held: Collection[ExpertKey] = ()
) -> int:
    """Returns the bytes that any policy reads, whatever it keeps and however early it reads, if it holds `held` at
    first and runs experts in the order of the trace. Raises ValueError if a demanded expert alone is larger than the
    capacity."""
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
    """Returns how many other demands came [demands] since the same expert's last one, or since the start for one that
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
    """Returns the most bytes that hits can save. A hit saves its size and takes up size × wait of the room: hits with
    the shortest waits come first, the last one in part."""
    order = waits.argsort(kind="stable")
    sizes, waits = sizes[order], waits[order]
    taken = np.cumsum(sizes * waits)
    whole = int(np.searchsorted(taken, room, side="right"))
    saved = int(sizes[:whole].sum())
    if whole < len(sizes):
        saved += (room - (int(taken[whole - 1]) if whole else 0)) // int(waits[whole])
    return saved


# The run of a pack on some prompts, with every figure that `moert bench` prints.

TEXTS = (
    "The river rises in the hills north of the town and runs south for about thirty miles until it meets the sea.",
    "In the first years after the war the company built small cars, then lorries, and at last engines for aircraft.",
    "She studied music in Vienna, wrote two operas before she was twenty, and taught singing for the rest of her life.",
    "The oldest part of the church is its tower, which was begun in the twelfth century and never quite finished.",
)
"""Texts that are read where no prompt is given."""
WARM_TEXT = "Copper was mined on the island for two centuries, and the old shafts are still open to anyone with a lamp."
"""The text that is read before any measurement, and never measured itself."""
_TEXT_TOKENS = 24  # of each, and of made-up ones where the pack has no tokenizer
_DISK_S = 1.0
_ROOM = 1.5  # free memory, as a multiple of the experts, in which everything else finds room too


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a measurement. Each prompt gets exactly `new_tokens`: no token ends a text."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    new_tokens: int = 32


@dataclass(frozen=True)
class Sample:
    """The run of one prompt: `first_s` to the first token, `later_s` for each one after it. `room_bytes`: the most room
    that experts had meanwhile."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    first_s: float
    later_s: tuple[float, ...]
    room_bytes: int = 0

    @property
    def total_s(self) -> float:
        return self.first_s + sum(self.later_s)


@dataclass(frozen=True)
class BenchRun:
    """The counts and times of the samples' run. `hits_in_flight` of the `hits` were still being read when they were
    demanded. `least_bytes` are the bytes that no policy could have avoided reading, `furthest_first` the reads of
    Belady's rule, `disk_bytes_per_s` the speed at which this drive is read without the engine, `resident_s` the time of
    the same samples with all experts in memory, None if that was not tried.

    `open_s` is the time to open the pack, and `first_request_s` the time to the first token of the first request of
    all: with the look at the drive and the choice of an eviction policy, and nothing in memory. `memory_bytes`,
    `eviction`, `io`, `threads` and `kernels` are the values that the settings came to; `eviction` is None where all
    experts fit. `trace` and `nbytes` are for replays. `device`: its work since the engine was opened; where it is
    simulated, all times but `open_s` and `stall_s` are its own.
    """

    pack: Pack
    settings: BenchSettings
    samples: tuple[Sample, ...]
    bytes_read: int
    ahead_bytes: int
    ahead_used_bytes: int
    demands: int
    hits: int
    hits_in_flight: int
    stall_s: float
    memory_bytes: int | None
    cache_bytes: int
    expert_bytes: int
    backbone_bytes: int
    peak_bytes: int
    least_bytes: int
    furthest_first: FurthestFirst
    disk_bytes_per_s: float
    resident_s: float | None
    open_s: float
    first_request_s: float
    eviction: str | None
    io: str
    threads: int
    kernels: str
    trace: tuple[Demand, ...]
    nbytes: dict[ExpertKey, int]
    device: DeviceUse | None = None

    @property
    def total_s(self) -> float:
        return sum(sample.total_s for sample in self.samples)


def silent(note: str) -> None:
    """A Notify that drops notes, for runs that the user has not asked for in this form."""


def measure(
    path: Path,
    settings: BenchSettings,
    texts: Sequence[str] | None = None,
    disk_bytes_per_s: float | None = None,
    notify: Notify | None = None,
) -> BenchRun:
    """Measures a run of `texts`, or the built-in ones, once the engine is warm (see `_warm`). No expert is in the page
    cache at the start.

    Where `disk_bytes_per_s` is not given, the speed of the drive is measured at the end, and so is the same run with
    all experts in memory, where they fit there whatever the settings say; a simulated device has the speed of its own
    drive instead. `notify`: see Engine.open. Raises PackError, RunError.
    """

    pack = Pack.open(path)
    files = [pack.file(entry.path) for entry in pack.manifest.experts]
    for file in files:
        drop_page_cache(file)
    trace: list[Demand] = []
    started = time.perf_counter()
    with Engine.open(path, settings.engine, trace=trace, notify=notify) as engine:
        open_s = time.perf_counter() - started
        prompts = prompts_of(engine, texts, settings.new_tokens)
        first_request_s = _warm(engine, settings.new_tokens).first_s
        before, held = engine.stats(), engine.cache.resident()
        trace.clear()
        samples = tuple(_sample(engine, ids, settings.new_tokens) for ids in prompts)
        after, threads, kernels = engine.stats(), engine.backend.threads, engine.backend.name
        nbytes = dict(engine.cached_bytes)
    resident_s = None
    device = settings.engine.device
    if disk_bytes_per_s is None and device.startswith("sim:"):
        disk_bytes_per_s = PROFILES[device.removeprefix("sim:")].drive_bytes_per_s
    if disk_bytes_per_s is None:
        reading = settings.engine.reading or drive_of(files).settings
        disk_bytes_per_s = read_for(itertools.cycle(files), reading, _DISK_S)
        resident_s = _resident_s(path, settings, prompts)
    room_bytes = max(sample.room_bytes for sample in samples)
    return BenchRun(
        pack=pack,
        settings=settings,
        samples=samples,
        **_counted(before, after),
        memory_bytes=after.memory_bytes,
        cache_bytes=after.cache_bytes,
        expert_bytes=after.expert_bytes,
        backbone_bytes=pack.manifest.files[BACKBONE].nbytes,
        peak_bytes=after.peak_rss_bytes,
        least_bytes=least_bytes(trace, nbytes, room_bytes, held),
        furthest_first=furthest_first(trace, nbytes, room_bytes, held),
        disk_bytes_per_s=disk_bytes_per_s,
        resident_s=resident_s,
        open_s=open_s,
        first_request_s=first_request_s,
        eviction=after.eviction if after.cache_bytes < after.expert_bytes else None,
        io=after.io,
        threads=threads,
        kernels=kernels,
        trace=tuple(trace),
        nbytes=nbytes,
        device=after.device if isinstance(after.device, DeviceUse) else None,
    )


def _warm(engine: Engine, new_tokens: int) -> Sample:
    """Runs a text that is not measured itself, and returns its sample: a text that has just run would find more in
    memory than a new one. Where all experts fit, the missing ones are read then, so that nothing is left to read."""
    first = _sample(engine, _tokens(engine, [WARM_TEXT], new_tokens)[0], new_tokens)
    if engine.cache.capacity_bytes >= engine.budget.expert_bytes:
        read_all(engine)
    return first


def read_all(engine: Engine) -> None:
    """Reads every expert that is not in memory yet, where all have room: later runs then read nothing."""
    for entry in engine.pack.manifest.experts:
        with engine.cache.lease([entry.key]) as lease:
            lease.all()


def _resident_s(path: Path, settings: BenchSettings, prompts: Sequence[list[int]]) -> float | None:
    """Returns the seconds for all prompts, measured alike, with all experts in memory; None if they don't fit."""
    free, experts = machine_memory().free_bytes, Pack.open(path).manifest.experts
    if free is None or free < _ROOM * sum(entry.file_bytes for entry in experts):
        return None
    with Engine.open(path, settings.engine, memory=None, cache=None, predict="none", notify=silent) as engine:
        _warm(engine, settings.new_tokens)
        return sum(_sample(engine, ids, settings.new_tokens).total_s for ids in prompts)


def _counted(before: RunStats, after: RunStats) -> dict[str, Any]:
    return {
        "bytes_read": after.bytes_read - before.bytes_read,
        "ahead_bytes": after.prefetch_issued_bytes - before.prefetch_issued_bytes,
        "ahead_used_bytes": after.prefetch_used_bytes - before.prefetch_used_bytes,
        "demands": after.expert_requests - before.expert_requests,
        "hits": after.expert_hits - before.expert_hits,
        "hits_in_flight": after.expert_hits_in_flight - before.expert_hits_in_flight,
        "stall_s": after.stall_s - before.stall_s,
    }


def _sample(engine: Engine, ids: list[int], new_tokens: int) -> Sample:
    times: list[float] = []
    room_bytes = 0  # the most that experts had
    started = engine.now()
    with engine.session() as session:
        request = session.add(ids, GenerationSettings(max_new_tokens=new_tokens, ignore_eos=True))
        for _ in session:
            times.append(engine.now())
            room_bytes = max(room_bytes, engine.cache.capacity_bytes)
    later = tuple(late - early for early, late in itertools.pairwise(times))
    return Sample(len(ids), tuple(request.answer.result.tokens), times[0] - started, later, room_bytes)


def prompts_of(engine: Engine, texts: Sequence[str] | None, new_tokens: int) -> list[list[int]]:
    """Returns the token ids of a run's prompts: `texts`, or the built-in ones."""
    return [engine.encode(text) for text in texts] if texts else _tokens(engine, TEXTS, new_tokens)


def _tokens(engine: Engine, texts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Returns the token ids of texts, shortened to the length that the model can take; where the pack has no tokenizer,
    made-up ones that differ from text to text."""
    from moert.errors import TokenizerMissing

    most = _TEXT_TOKENS
    if engine.spec.max_positions is not None:
        others = new_tokens if engine.spec.encoder is None else 0
        most = max(1, min(most, engine.spec.max_positions - others))
    try:
        return [engine.encode(text)[:most] for text in texts]
    except TokenizerMissing:
        return [[(7919 * at + sum(text.encode())) % engine.spec.vocab_size for at in range(most)] for text in texts]
