"""Costs that were measured: of devices, remembered in the user's cache folder beside drives; of the processor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from moert.devices.costs import DeviceCosts, HostCosts, Roofline
from moert.kernels import library
from moert.kernels.backend import Backend
from moert.kernels.speed import WIDTHS, kernel_speeds
from moert.machine.remembered import DAMAGED, cache_file, entries, remember
from moert.pack.codec import QuantizedMatrix, n_groups, row_bytes

_SECTION = "devices"
_MEASURED_BYTES = 48 << 20  # of weights, for what they take where no cache holds them
_SIDE, _GROUP, _ROWS, _TURNS = 512, 64, 64, 3
_SCALES = 0.5  # bits of a weight for its scale and minimum


def remembered_costs(key: str, measure: Callable[[], DeviceCosts], cache: Path | None = None) -> DeviceCosts:
    """Those of the device that `key` names: remembered, or measured now and remembered."""
    cache = cache or cache_file()
    known = entries(cache, _SECTION)
    with suppress(KeyError, *DAMAGED):
        return _parsed(known[key])
    found = measure()
    remember(cache, _SECTION, {**known, key: _body(found)})
    return found


def known_costs(cache: Path | None = None) -> dict[str, DeviceCosts]:
    """Of all devices that were measured here; without damaged entries."""
    found: dict[str, DeviceCosts] = {}
    for key, body in entries(cache or cache_file(), _SECTION).items():
        with suppress(*DAMAGED):
            found[key] = _parsed(body)
    return found


def host_costs(backend: Backend, drive_bytes_per_s: float) -> HostCosts:
    """Of this processor, measured in half a second: what weights take that no cache holds, and what each of many rows
    takes."""
    loaded = library.load()
    speeds = None if loaded is None or backend.widens else kernel_speeds(loaded, backend.threads, _MEASURED_BYTES)
    widths = {bits: _roofline(backend, bits, None if speeds is None else speeds[bits]) for bits in WIDTHS}
    return HostCosts(widths, 5e-6, 100e-6, drive_bytes_per_s)


def _roofline(backend: Backend, bits: int, bytes_per_s: float | None) -> Roofline:
    stored = _matrix(bits)
    matrix = backend.matrix(stored)
    many = _least_s(lambda: backend.linear(np.ones((_ROWS, _SIDE), np.float32), matrix)) / (_ROWS * _SIDE**2)
    if bytes_per_s is not None:
        return Roofline((bits + (_SCALES if bits < 16 else 0)) / 8 / bytes_per_s, many)
    return Roofline(_least_s(lambda: backend.linear(np.ones((1, _SIDE), np.float32), matrix)) / _SIDE**2, many)


def _matrix(bits: int) -> Any:
    """Of so many bits a weight."""
    from moert.kernels.backend import Floats

    if bits == 16:
        return Floats("BF16", np.full((_SIDE, _SIDE), 0x3C00, np.uint16))
    codes = np.full((_SIDE, row_bytes(_SIDE, bits)), 0x55, np.uint8)
    groups = n_groups(_SIDE, _GROUP)
    scale, minimum = (np.full((_SIDE, groups), value, np.float16) for value in (0.01, -0.01))
    return QuantizedMatrix(bits, _SIDE, _GROUP, codes, scale, minimum)


def _least_s(call: Callable[[], object]) -> float:
    """Of a few turns, after one that is not counted."""
    call()
    times = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _body(costs: DeviceCosts) -> dict[str, Any]:
    return {
        "widths": {str(bits): [each.weight_s, each.row_s] for bits, each in costs.widths.items()},
        "launch_s": costs.launch_s,
        "pass_s": costs.pass_s,
        "copy_s": costs.copy_s,
        "copy_bytes_per_s": costs.copy_bytes_per_s,
    }


def _parsed(body: Mapping[str, Any]) -> DeviceCosts:
    widths = {int(bits): Roofline(float(each[0]), float(each[1])) for bits, each in body["widths"].items()}
    numbers = [float(body[name]) for name in ("launch_s", "pass_s", "copy_s", "copy_bytes_per_s")]
    slopes = [each for width in widths.values() for each in (width.weight_s, width.row_s)]
    sound = all(0 <= each < math.inf for each in (*numbers, *slopes)) and min(numbers[-1], *slopes) > 0
    if set(widths) != set(WIDTHS) or not sound:
        raise ValueError
    return DeviceCosts(widths, *numbers)
