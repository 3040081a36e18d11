"""The settings of a run: the one place for everything that commands, benches and Python can choose about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from moert.engine.budget import AUTO_ROUTING, CacheLimit, MemoryLimit, check_routing, parse_cache, parse_memory
from moert.engine.registry import ALL_NEURONS, KEPT_NEURONS, NO_DEVICE, PREDICTS, ROUTINGS, check_parts, check_place
from moert.errors import Adjustable, SettingInvalid, said
from moert.experts.names import DEFAULT_EVICTION, DEFAULT_PREDICTOR, EVICTIONS
from moert.experts.store import IoSettings, parse_io
from moert.kernels import AUTO_KERNELS
from moert.kernels.pages import KvBits
from moert.pack.messages import NotASize, parse_size


class EngineOptions(TypedDict, total=False):
    """The settings of an engine as arguments by name: the fields of EngineSettings."""

    memory: int | str | MemoryLimit | None
    cache: int | str | CacheLimit | None
    eviction: str
    predict: str
    io: str | IoSettings | None
    threads: int | None
    kernels: str
    kv: KvBits
    routing: str
    keep_neurons: str
    neurons: str
    device: str
    gpu_memory: int | str | None
    device_keep: str | None
    device_experts: str | None
    template: str | None
    profile: str | None
    draft: str | int
    fill: str


POLICIES = frozenset(
    {"memory", "cache", "eviction", "predict", "fill", "io", "threads", "template", "profile", "draft"}
)  # fmt: skip
"""Settings that never change the states of the same tokens."""


@dataclass(frozen=True)
class EngineSettings(Adjustable):
    """The settings of an engine. `memory`: the limit of the whole process, in bytes or as text for `--memory` ("1.5GB",
    "50%", "auto"); `cache`: the limit of the experts alone, in the same forms; with neither, experts stay in memory
    once they were read.

    `eviction`, `predict`: names of moert.experts.names. `io`: how experts are read, as --tune io takes it; with None or
    "auto", experts in the page cache are read from there if all fit into memory, otherwise the fastest way for the
    drive is measured, and remembered. `threads`: the number of threads that compute; by default and at most one for
    each usable core. `kernels`: see moert.kernels.open_backend. `kv`: bits of keys and values, 16 or 8. `routing`: see
    moert.engine.budget.preference_for; answers to the same tokens depend on it (with "auto" also on the room for
    experts), on `kernels`, `kv` and `neurons`, and on a GPU with its settings, but on no others. `keep_neurons`: a name
    of moert.beside.flash.keeping, for packs whose experts lie in blocks of neurons. `neurons`: all neurons of each
    expert ("exact"), or those that the pack's predictor names ("predicted"), which is another model; then no expert is
    read whole, and `eviction` and `predict` have nothing to decide. `device`: a second device that holds and computes
    experts (moert.beside.gpu.opening), of whose memory no more than `gpu_memory` is used, bytes or
    "6GB". `device_keep`: which experts stay there, a name of moert.beside.gpu.residents; `device_experts`: where
    experts are computed, a rule of moert.beside.gpu.placement. A GPU rounds in other ways than the processor; answers
    of a simulated device are the same. `template`: for conversations, in place of the pack's own chat template, a name
    of moert.chat.renderer or the path of a file. `profile`: a new file that a trace of the run is written to when the
    engine closes (moert.beside.profile). `draft`: drafts of answers, "none", "auto" where they save time, or
    the number of tokens that are always drafted. `fill`: experts that are read before the first request: "none", "used"
    (see Engine.fill), or "auto": `moert serve` asks for them, and `moert chat` at a terminal.

    Raises SettingInvalid, InvalidMemory or IoInvalid for impossible values.
    """

    memory: int | str | MemoryLimit | None = None
    cache: int | str | CacheLimit | None = None
    eviction: str = DEFAULT_EVICTION
    predict: str = DEFAULT_PREDICTOR
    io: str | IoSettings | None = None
    threads: int | None = None
    kernels: str = AUTO_KERNELS
    kv: KvBits = 16
    routing: str = AUTO_ROUTING
    keep_neurons: str = KEPT_NEURONS
    neurons: str = ALL_NEURONS
    device: str = NO_DEVICE
    gpu_memory: int | str | None = None
    device_keep: str | None = None
    device_experts: str | None = None
    template: str | None = None
    profile: str | None = None
    draft: str | int = "none"
    fill: str = "auto"

    def __post_init__(self) -> None:
        self.check_types()
        _ = self.limit, self.reading
        check_place(self)
        check_routing(self.routing, ROUTINGS)
        if self.memory is not None and self.cache is not None:
            raise SettingInvalid(
                "memory", f"and {said('cache')} exclude each other: give the room of the process or that of the experts"
            )
        for name, known in (("eviction", EVICTIONS), ("predict", PREDICTS)):
            if getattr(self, name) not in known:
                raise SettingInvalid(name, f"{getattr(self, name)!r} is none of {', '.join(known)}")
        check_parts(self)
        if self.threads is not None and self.threads < 1:
            raise SettingInvalid("threads", f"{self.threads} can't compute anything: give at least 1")

    @cached_property
    def gpu_bytes(self) -> int | None:
        """Bytes of the device's memory that may be used; None: most of its free memory."""
        if not isinstance(self.gpu_memory, str):
            return self.gpu_memory
        try:
            return parse_size(self.gpu_memory)
        except NotASize as error:
            raise SettingInvalid("gpu_memory", str(error)) from None

    @cached_property
    def limit(self) -> MemoryLimit | CacheLimit | None:
        """The limit of the process or of the experts; None without one."""
        if isinstance(self.memory, str):
            return parse_memory(self.memory)
        if isinstance(self.memory, int):
            return MemoryLimit(nbytes=self.memory)
        if isinstance(self.cache, str):
            return parse_cache(self.cache)
        return CacheLimit(nbytes=self.cache) if isinstance(self.cache, int) else self.memory or self.cache

    @cached_property
    def reading(self) -> IoSettings | None:
        """How experts are read; None: in the way that turns out to be best."""
        return parse_io(self.io) if isinstance(self.io, str) else self.io
