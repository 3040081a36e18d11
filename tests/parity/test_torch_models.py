"""Tiny random models with everything but the experts on a device of torch, beside the reference; torch's CPU stands
for the device. Logits are within 2e-3 of the largest: float32 sums in another order, and keys and values that are
rounded the other way for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from packs import Tiny, open_model
from test_native_models import forward, sequences, stepped
from tiny import TINY, kin_of

from moert.beside.gpu.torch_device import TorchDevice
from moert.kernels import AUTO_KERNELS, REFERENCE, open_backend
from moert.kernels.backend import Backend
from moert.pack.reader import Pack
from tests.pairs import thinned

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA, or a torch without it")
DEVICES = ["torch:cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.fixture(scope="module")
def pack(request: pytest.FixtureRequest, tiny: Tiny) -> Pack:
    """A family's pack, its experts of 16 bits, which the native kernels compute with as they are."""
    return tiny.pack(request.param, next(iter(TINY[request.param][1])))


def kinds_and_pairs(case: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the kin of a case's family, and every pair of its other values, on each device; on a GPU every family."""
    family, *others, device = case
    yield from ((device, kin_of(family) if device == DEVICES[0] else family), (device, *others))


Place = Callable[[str, Backend, "int | None"], Backend]


@pytest.fixture
def on_device() -> Iterator[Place]:
    """Opens devices, which are closed after the test: on a GPU, the limit of one holds for all work of the process."""
    with ExitStack() as closing:

        def place(name: str, host: Backend, capacity_bytes: int | None) -> Backend:
            device = TorchDevice(name, capacity_bytes)
            closing.callback(device.close)
            backend = device.backend(host)
            assert backend is not None
            return backend

        yield place


@thinned(
    "pack, kernels, capacity_bytes, device",
    TINY, [REFERENCE, AUTO_KERNELS], [None, 60_000], DEVICES, facts=kinds_and_pairs, indirect=["pack"],
)  # fmt: skip
def test_logits_are_those_of_the_cpu(
    pack: Pack, kernels: str, capacity_bytes: int | None, device: str, on_device: Place
) -> None:
    """17 tokens read at once; and one by one, behind 2, which is less than states hold. Some: what the device has no
    room for is in memory."""
    backend = on_device(device, open_backend(kernels), capacity_bytes)
    (reference, leader), (model, follower) = open_model(pack), open_model(pack, backend)
    jumps = pack.manifest.model.moe.router.score == "sparsemixer"
    runs: list[Callable[..., Any]] = [stepped, forward]
    for run, (ids, target) in zip(runs, sequences("torch", 4)[::3], strict=True):
        leader.decided = []
        expected = run(reference, ids, target)
        follower.given = leader.decided if jumps else []
        off = np.abs(run(model, ids, target) - expected) / np.abs(expected).max()
        assert off.max() < 2e-3
        assert np.median(off) < 2e-4


@thinned("pack, device", TINY, DEVICES, facts=kinds_and_pairs, indirect=["pack"])
def test_a_forked_sequence_goes_on_by_itself(pack: Pack, device: str, on_device: Place) -> None:
    """What is on the device of it too."""
    model, twin = (open_model(pack, on_device(device, open_backend(REFERENCE), None))[0] for _ in range(2))
    ids, _ = sequences("fork", 3)[2]
    state, _ = model.prefill(ids)
    fork = state.copy()
    model.step(state, 5)
    found = model.step(fork, 7)
    found = np.stack((found, model.step(fork, 9)))
    straight, _ = twin.prefill(ids)
    expected = np.stack([twin.step(straight, token) for token in (7, 9)])
    assert np.array_equal(found, expected)
