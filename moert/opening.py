"""What an engine is opened with, from settings to parts: threads, the memory's regulator, a second device, and room
beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE

from moert.budget.admission import Admission
from moert.budget.budget import Budget, CacheLimit
from moert.budget.regulator import Cache, Regulator
from moert.devices.device import Device
from moert.devices.opening import AUTO_DEVICE, open_device
from moert.errors import SettingInvalid
from moert.generation.turns import Turns
from moert.kernels.backend import Backend
from moert.machine.cores import usable_cores
from moert.machine.memory import held_bytes, most_bytes
from moert.models.footprint import Footprint
from moert.pack.reader import Pack
from moert.settings import EngineSettings
from moert.stats import size
from moert.wording import said


def regulator_for(
    footprint: Footprint, budget: Budget, cache: Cache, settings: EngineSettings, device: Device | None
) -> tuple[Regulator, list[str]]:
    """And a note if the limit is less than what was asked for. What a simulated device holds is not this process's."""

    def held() -> int:
        return held_bytes() - (device.used_bytes if device is not None and device.simulated else 0)

    asked, notes = settings.limit, list[str]()
    limit = room_bytes = None
    name = ""
    if isinstance(asked, CacheLimit):
        room_bytes = asked.resolve(budget.expert_bytes)
    elif asked is not None and (limit := asked.resolve(held_bytes(), most_bytes())) is not None:
        name = asked.named(limit)
        if asked.nbytes is not None and limit // PAGESIZE < asked.nbytes // PAGESIZE:  # groups count in pages
            notes.append(f"{said('memory', size(asked.nbytes))} is more than {name}: that is used")
    return Regulator(footprint, budget, cache, limit, room_bytes, held, name), notes


def device_for(pack: Pack, settings: EngineSettings, backend: Backend) -> tuple[Device | None, list[str]]:
    """The second device, open, if the settings name one; and a note if `auto` is none. Raises DeviceMissing, or
    SettingInvalid where it is of no use for this pack."""
    device = open_device(settings.device, settings.gpu_bytes, backend)
    if device is not None and pack.has_neurons:
        device.close()
        if settings.device == AUTO_DEVICE:
            asked = said("device", AUTO_DEVICE)
            return None, [
                f"{asked} runs whole experts, and this pack's lie in blocks of neurons: the processor runs all"
            ]
        problem = "runs whole experts, and this pack's lie in blocks of neurons: leave it out"
        raise SettingInvalid("device", f"{settings.device!r} {problem}")
    if device is None:
        note = f"{said('device', AUTO_DEVICE)} found no GPU that torch can use: the processor runs all"
        return None, [note] if settings.device == AUTO_DEVICE else []
    return device, []


def threads_of(threads: int | None) -> tuple[int, str | None]:
    """The number of threads, by default and at most one for each usable core; a note if that is fewer than
    was asked for."""
    cores = usable_cores()
    asked = cores if threads is None else threads
    count = min(asked, cores)
    note = f"{said('threads', asked)} is more than the {cores} core(s) that this process may use: {count} are used"
    return count, note if count < asked else None


@contextmanager
def aside(turns: Turns, admission: Admission, purpose: str, nbytes: int) -> Iterator[None]:
    """Room for what is done beside the model, which does nothing else meanwhile."""
    with turns.own():
        admission.aside(nbytes, purpose)
        yield
