"""What can be said of the engine to every command that runs a pack: one list of options for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING

from moert.command.options import (
    CacheOption,
    DeviceExpertsOption,
    DeviceKeepOption,
    DeviceOption,
    Eviction,
    EvictionOption,
    GpuMemoryOption,
    IoOption,
    KeepNeurons,
    KeepNeuronsOption,
    KernelsOption,
    KvOption,
    MemoryOption,
    Neurons,
    NeuronsOption,
    Predict,
    PredictOption,
    RoutingOption,
    ThreadsOption,
)

if TYPE_CHECKING:
    from moert.settings import EngineSettings


@dataclass(frozen=True)
class SaidOptions:
    """The options, as they were said."""

    memory: MemoryOption = None
    cache: CacheOption = None
    eviction: EvictionOption = Eviction.auto
    keep_neurons: KeepNeuronsOption = KeepNeurons.recent
    neurons: NeuronsOption = Neurons.exact
    predict: PredictOption = Predict.auto
    io: IoOption = "auto"
    threads: ThreadsOption = None
    kernels: KernelsOption = "auto"
    kv: KvOption = "16"
    routing: RoutingOption = "auto"
    device: DeviceOption = "none"
    gpu_memory: GpuMemoryOption = None
    device_keep: DeviceKeepOption = None
    device_experts: DeviceExpertsOption = None

    def settings(self) -> EngineSettings:
        """Returns the engine's settings. Raises SettingInvalid, InvalidMemory or IoInvalid."""
        from moert.settings import EngineSettings

        bits = int(self.kv) if self.kv.strip() in ("8", "16") else self.kv
        limit = "auto" if self.memory is None and self.cache is None else self.memory
        return EngineSettings(
            limit, self.cache, self.eviction.value, self.predict.value, self.io, self.threads, self.kernels,
            bits, self.routing.strip(), self.keep_neurons.value, self.neurons.value,  # type: ignore[arg-type]
            self.device, self.gpu_memory,
            *(None if each is None else each.value for each in (self.device_keep, self.device_experts)),
        )  # fmt: skip


UNSAID = SaidOptions()


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the fields of SaidOptions as options of its own, in the place of its parameter
    `engine_options`."""
    options = signature(SaidOptions, eval_str=True).parameters
    listed = list[Parameter]()
    own = signature(command, eval_str=True)
    for parameter in own.parameters.values():
        listed += options.values() if parameter.name == "engine_options" else [parameter]

    @wraps(command)
    def taking(**given: object) -> None:
        said = {name: given.pop(name) for name in options}
        command(**given, engine_options=SaidOptions(**said))  # type: ignore[arg-type]

    taking.__signature__ = own.replace(parameters=listed)  # type: ignore[attr-defined]
    return taking
