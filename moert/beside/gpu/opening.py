"""Devices by the names that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moert.beside.gpu.device import Device, DeviceMissing
from moert.beside.gpu.simulated import PROFILES
from moert.beside.wishes import Wishes
from moert.errors import SettingInvalid, said
from moert.machine import has_nvidia_driver

if TYPE_CHECKING:
    from moert.kernels.backend import Backend


AUTO_DEVICE, NO_DEVICE, PROCESSOR = "auto", "none", "cpu"
Open = Callable[[str, "int | None", "Backend"], Device]


def _simulated(name: str, capacity_bytes: int | None, host: Backend) -> Device:
    from moert.beside.gpu.simulated import SimulatedDevice

    return SimulatedDevice(name, PROFILES[name.removeprefix("sim:")], capacity_bytes, host)


def _torch(name: str, capacity_bytes: int | None, host: Backend) -> Device:
    if find_spec("torch") is None:
        raise DeviceMissing(f"{said('device', name)} needs torch: pip install 'moert[gpu]', or leave it out")
    try:
        from moert.beside.gpu.torch_device import TorchDevice
    except (ImportError, OSError) as error:  # a library that it links to is missing
        raise DeviceMissing(f"{said('device', name)} needs torch, which can't be loaded here: {error}") from None

    device: Device = TorchDevice(name, capacity_bytes)
    return device


DEVICES: Mapping[str, Open] = {**{f"sim:{name}": _simulated for name in PROFILES}, "torch:cpu": _torch}
"""Name → function that opens the device; cuda:0, cuda:1 … are known beside these."""


def device_named(name: str) -> bool:
    """Returns whether a device can have this name, here or elsewhere."""
    return name in (AUTO_DEVICE, NO_DEVICE, PROCESSOR, *DEVICES) or _is_cuda(name)


def check_settings(wishes: Wishes) -> None:
    """Raises SettingInvalid for names that there are not, and settings that have no effect beside others."""
    from moert.beside.gpu.placement import RULES
    from moert.beside.gpu.residents import KEEPS

    named = wishes.device
    if not isinstance(named, str) or not device_named(named):
        raise SettingInvalid("device", f"{named!r} is none of {known_devices()}")
    alone = named in (NO_DEVICE, PROCESSOR)
    for name, known in (("gpu_memory", None), ("device_keep", tuple(KEEPS)), ("device_experts", RULES)):
        value = getattr(wishes, name)
        if value is not None and alone:
            raise SettingInvalid(name, f"has no effect without a {said('device')}: leave it out, or give one")
        if value is not None and known is not None and value not in known:
            raise SettingInvalid(name, f"{value!r} is none of {', '.join(known)}")
    if not alone and named != AUTO_DEVICE and wishes.neurons == "predicted":
        asked = said("neurons", "predicted")
        raise SettingInvalid("device", f"runs whole experts, and {asked} reads none: leave it out")
    nbytes = wishes.gpu_bytes
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1):
        raise SettingInvalid("gpu_memory", f"is {nbytes!r}: it should be a size, as 6GB")


def known_devices() -> str:
    """Returns all names, for messages."""
    return ", ".join((AUTO_DEVICE, NO_DEVICE, PROCESSOR, "cuda", "cuda:0", *DEVICES))


def open_device(name: str, capacity_bytes: int | None, host: Backend) -> Device | None:
    """Returns the device of that name, of whose memory no more than `capacity_bytes` are used; None where the processor
    is alone. `auto` is the first GPU where there is one with torch; without any sign of a GPU torch is not imported.

    Raises DeviceMissing for a device that is not here, and KeyError for an unknown name.
    """
    if name in (NO_DEVICE, PROCESSOR):
        return None
    if name == AUTO_DEVICE:
        if not has_nvidia_driver() or find_spec("torch") is None:
            return None
        try:
            return _torch("cuda:0", capacity_bytes, host)
        except DeviceMissing:
            return None
    return (_torch if _is_cuda(name) else DEVICES[name])(name, capacity_bytes, host)


def _is_cuda(name: str) -> bool:
    kind, colon, number = name.partition(":")
    return kind == "cuda" and (not colon or number.isdecimal())
