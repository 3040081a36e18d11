"""What things take on a device of torch, measured in well under a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from moert.devices.costs import DeviceCosts, Roofline
from moert.devices.device import Device
from moert.devices.torch_matrices import Kind, TorchMatrix
from moert.devices.torch_ops import product
from moert.kernels.backend import ExpertView, ProjectionView
from moert.pack.codec import INT_WIDTHS, n_groups, row_bytes
from moert.pack.parts import Act, Ffn

_ROWS, _COLS, _GROUP, _TOKENS = 1024, 1024, 64, 64
_COPIED = 8 << 20
_TRIES = 3


def measured(device: Device, place: torch.device) -> DeviceCosts:
    """Of a device, which is torch's `place`. Each figure is the least of a few tries, after one that does not count."""
    widths = {}
    for bits in (*INT_WIDTHS, 16):
        matrix = _matrix(bits, place)
        one, many = (_product_s(matrix, tokens) for tokens in (1, _TOKENS))
        widths[bits] = Roofline(one / (_ROWS * _COLS), many / (_ROWS * _COLS * _TOKENS))
    most = min(_COPIED, device.capacity_bytes // 2)
    small, large = (_copy_s(device, nbytes) for nbytes in (1, most))
    one, two = (_mixture_s(device, experts) for experts in (1, 2))
    launch = max(0.0, two - one)
    return DeviceCosts(widths, launch, max(0.0, one - launch), small, most / max(1e-9, large - small))


def _matrix(bits: int, device: torch.device) -> TorchMatrix:
    """Of zeros."""
    if bits == 16:
        return TorchMatrix("BF16", _COLS, _COLS, torch.zeros((_ROWS, _COLS), dtype=torch.bfloat16, device=device))
    kind: Kind = bits  # type: ignore[assignment]
    codes = torch.zeros((_ROWS, row_bytes(_COLS, bits)), dtype=torch.uint8, device=device)
    scale = torch.zeros((_ROWS, n_groups(_COLS, _GROUP)), dtype=torch.float16, device=device)
    return TorchMatrix(kind, _COLS, _GROUP, codes, scale, scale)


def _product_s(matrix: TorchMatrix, tokens: int) -> float:
    x = torch.zeros((tokens, _COLS), dtype=torch.float32, device=matrix.data.device)

    def run() -> None:
        product(x, matrix)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    return _least(run)


def _copy_s(device: Device, nbytes: int) -> float:
    view = ExpertView(np.zeros(nbytes, np.uint8), {})

    def run() -> None:
        held = device.copy(view)
        device.wait(held)
        device.free(held)

    return _least(run)


def _mixture_s(device: Device, experts: int) -> float:
    """Of experts of one neuron, so that it is what goes with any."""
    part = ProjectionView((1, 1), 16, 0, "BF16", (0,))
    held = device.copy(ExpertView(np.zeros(64, np.uint8), {"up": part, "down": part}))
    x, parts, spec = np.zeros((1, 1), np.float32), np.zeros((experts, 1), np.float32), Ffn(1, Act("relu"), gated=False)

    def run() -> None:
        device.finish(device.begin([held] * experts, [1] * experts, np.zeros(experts, np.int32), x, spec), parts)

    return _least(run)


def _least(run: Callable[[], None]) -> float:
    found = []
    for _ in range(1 + _TRIES):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return min(found[1:])
