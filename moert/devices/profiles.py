"""Cards that can be simulated, from published figures, each in the machine that it is usually found in.

Of what a data sheet says a program gets a part: 80% of the bandwidth of memory, 76% of that of a PCI Express link (as
copies from pinned memory do), 40% of the peak of tensor cores where weights are unpacked first. These parts are
assumptions, and the same for all cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moert.devices.costs import DeviceCosts, HostCosts, Roofline

_WIDTHS = (2, 3, 4, 8, 16)
_SCALES = 0.5  # bits of a weight that scales and minima add: 32 for each group of 64
_MEMORY, _LINK, _TENSOR = 0.8, 0.76, 0.4
_LAUNCH_S = 10e-6  # a kernel for gate and up, one for down
_PASS_S = 30e-6  # two copies of a few kilobytes, and waiting for the last
_COPY_S = 15e-6


@dataclass(frozen=True)
class Profile:
    """Bytes, bytes a second, and operations a second, of which a weight takes two for each row. The processor's are
    measured figures of machines of that kind, not of data sheets."""

    title: str
    memory_bytes: int
    memory_bytes_per_s: float
    operations_per_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    host_operations_per_s: float
    drive_bytes_per_s: float

    def device(self) -> DeviceCosts:
        widths = _rooflines(_MEMORY * self.memory_bytes_per_s, _TENSOR * self.operations_per_s)
        return DeviceCosts(widths, _LAUNCH_S, _PASS_S, _COPY_S, _LINK * self.link_bytes_per_s)

    def host(self) -> HostCosts:
        widths = _rooflines(self.host_bytes_per_s, self.host_operations_per_s)
        return HostCosts(widths, 5e-6, 100e-6, self.drive_bytes_per_s)


def _rooflines(bytes_per_s: float, operations_per_s: float) -> dict[int, Roofline]:
    return {
        bits: Roofline((bits + (_SCALES if bits < 16 else 0)) / 8 / bytes_per_s, 2 / operations_per_s)
        for bits in _WIDTHS
    }


PROFILES: Mapping[str, Profile] = {
    # NVIDIA GA106: 12 GB of GDDR6 at 360 GB/s, 51 TFLOPS in FP16 on tensor cores (GA102 whitepaper, appendix C, by
    # clocks and cores), PCI Express 4.0 x16; with eight cores and two channels of DDR4-3200.
    "rtx3060": Profile("RTX 3060", 12 * 10**9, 360e9, 51e12, 31.5e9, 40e9, 0.5e12, 3e9),
    # NVIDIA T4 data sheet: 16 GB of GDDR6 at 320 GB/s, 65 TFLOPS in FP16, PCI Express 3.0 x16; with the four virtual
    # cores that clouds give to one.
    "t4": Profile("T4", 15 * 10**9, 320e9, 65e12, 15.75e9, 20e9, 0.15e12, 1e9),
    # NVIDIA GA104, laptop: 16 GB of GDDR6 at 448 GB/s, 76 TFLOPS in FP16, PCI Express 4.0 x8; eight mobile cores.
    "rtx3080-mobile": Profile("RTX 3080 Mobile", 16 * 10**9, 448e9, 76e12, 15.75e9, 35e9, 0.4e12, 3e9),
    # NVIDIA A100 data sheet, 40 GB, PCIe: 1,555 GB/s, 312 TFLOPS in FP16, PCI Express 4.0 x16; twelve virtual cores.
    "a100": Profile("A100 40GB", 40 * 10**9, 1555e9, 312e12, 31.5e9, 60e9, 0.6e12, 2e9),
}
