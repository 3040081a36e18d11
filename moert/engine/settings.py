"""The settings of a run: the one place for everything that commands, benches and Python can choose about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from moert.beside.flash.keeping import DEFAULT_KEEPING, KEEPING
from moert.beside.flash.runner import EXACT, NEURONS, PREDICTED
from moert.beside.gpu.opening import AUTO_DEVICE, NO_DEVICE, PROCESSOR, device_named, known_devices
from moert.beside.gpu.placement import CHEAPEST, RULES
from moert.beside.gpu.residents import DEFAULT_KEEP, KEEPS
from moert.beside.gpu.tiers import Asked
from moert.engine.budget import AUTO_ROUTING, CacheLimit, MemoryLimit, check_routing, parse_cache, parse_memory
from moert.errors import Adjustable, SettingInvalid, said
from moert.experts.io import IoSettings, parse_io
from moert.experts.names import AUTO_PREDICTOR, DEFAULT_EVICTION, DEFAULT_PREDICTOR, EVICTIONS, PREDICTORS
from moert.experts.replay import AUTO_EVICTION
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
    of moert.chat.renderer or the path of a file.

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
    keep_neurons: str = DEFAULT_KEEPING
    neurons: str = EXACT
    device: str = NO_DEVICE
    gpu_memory: int | str | None = None
    device_keep: str | None = None
    device_experts: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        self.check_types()
        _ = self.limit, self.reading
        self._check_device()
        check_routing(self.routing)
        if self.memory is not None and self.cache is not None:
            raise SettingInvalid(
                "memory", f"and {said('cache')} exclude each other: give the room of the process or that of the experts"
            )
        names = {
            "eviction": EVICTIONS,
            "predict": tuple(PREDICTORS),
            "keep_neurons": tuple(KEEPING),
            "neurons": NEURONS,
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                others = ", ".join(map(str, known))
                raise SettingInvalid(name, f"{getattr(self, name)!r} is none of {others}")
        if self.neurons == PREDICTED:
            self._check_without_experts()
        if self.threads is not None and self.threads < 1:
            raise SettingInvalid("threads", f"{self.threads} can't compute anything: give at least 1")

    def _check_device(self) -> None:
        if not isinstance(self.device, str) or not device_named(self.device):
            raise SettingInvalid("device", f"{self.device!r} is none of {known_devices()}")
        alone = self.device in (NO_DEVICE, PROCESSOR)
        for name, known in (("gpu_memory", None), ("device_keep", tuple(KEEPS)), ("device_experts", RULES)):
            value = getattr(self, name)
            if value is not None and alone:
                raise SettingInvalid(name, f"has no effect without a {said('device')}: leave it out, or give one")
            if value is not None and known is not None and value not in known:
                raise SettingInvalid(name, f"{value!r} is none of {', '.join(known)}")
        if not alone and self.device != AUTO_DEVICE and self.neurons == PREDICTED:
            asked = said("neurons", PREDICTED)
            raise SettingInvalid("device", f"runs whole experts, and {asked} reads none: leave it out")
        nbytes = self.gpu_bytes
        if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1):
            raise SettingInvalid("gpu_memory", f"is {nbytes!r}: it should be a size, as 6GB")

    @cached_property
    def gpu_bytes(self) -> int | None:
        """Bytes of the device's memory that may be used; None: most of its free memory."""
        if not isinstance(self.gpu_memory, str):
            return self.gpu_memory
        try:
            return parse_size(self.gpu_memory)
        except NotASize as error:
            raise SettingInvalid("gpu_memory", str(error)) from None

    @property
    def on_device(self) -> Asked:
        """The rules by which a device is used."""
        return Asked(self.device_keep or DEFAULT_KEEP, self.device_experts or CHEAPEST)

    def _check_without_experts(self) -> None:
        for name, harmless in (("predict", (AUTO_PREDICTOR, "none")), ("eviction", (AUTO_EVICTION,))):
            if getattr(self, name) not in harmless:
                asked, why = said("neurons", PREDICTED), "reads no whole experts, only blocks of their neurons"
                raise SettingInvalid(name, f"{getattr(self, name)!r} is about experts, and {asked} {why}: leave it out")

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
