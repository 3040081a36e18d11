"""A device of torch, where the processor stands for a GPU: experts of a pack copied, computed with, given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from native_problems import normal
from random_packs import QUANTIZATION, RICH, SPECS, write_pack

from moert.beside.gpu import torch_device
from moert.beside.gpu.device import COSTED, DeviceFull, DeviceMissing, Held
from moert.beside.gpu.torch_device import TorchDevice
from moert.experts.store import ExpertStore, IoSettings
from moert.kernels.backend import Backend, ExpertView
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.reader import Pack
from moert.stats import ExpertCounters


class Views(ReferenceBackend):
    """Whose experts are what they are made of."""

    def expert(self, view: ExpertView) -> Any:
        return view


@pytest.fixture
def device() -> Iterator[TorchDevice]:
    opened = TorchDevice("torch:cpu", 1 << 24)
    yield opened
    opened.close()


def views(pack: Pack) -> dict[ExpertKey, ExpertView]:
    store, found = ExpertStore(pack, cast("Backend", Views()), ExpertCounters(), IoSettings(False, 1)), {}
    for entry in pack.manifest.experts:
        buffer = np.empty(entry.file_bytes, np.uint8)
        store.read(entry.key, buffer)
        found[entry.key] = cast("ExpertView", store.expert(entry.key, buffer))
    return found


@pytest.fixture(params=[*SPECS, "mxfp4", "trellis"])
def pack(request: pytest.FixtureRequest, tmp_path: Path) -> Pack:
    """Of all widths, floats and activations with all that they may have."""
    spec = SPECS.get(request.param, RICH)
    mxfp4, dtype16 = request.param == "mxfp4", "BF16" if request.param in ("mxfp4", "mixers") else "F16"
    codes = "trellis" if request.param == "trellis" else "plain"
    quantization = replace(QUANTIZATION, mxfp4=mxfp4, dtype16=dtype16, codes=codes)
    write_pack(tmp_path / "model.pack", spec, quantization)
    return Pack.open(tmp_path / "model.pack")


def plain(view: ExpertView, x: F32, spec: ModelSpec) -> F32:
    reference, out = ReferenceBackend(), np.empty_like(x)
    for row in range(len(x)):
        reference.parts([reference.expert(view)], x[row : row + 1], out[row : row + 1], spec.moe.ffn)
    return out


def test_experts_of_a_pack_give_what_they_give_in_memory(pack: Pack, device: TorchDevice) -> None:
    """Several in one mixture, some with no rows; in the order given. Neither x nor the buffer is needed afterwards."""
    spec, rng = pack.manifest.model, np.random.default_rng(0)
    found = list(views(pack).values())
    x = normal(rng, 5, spec.expert_width)
    counts = [int(rng.integers(0, 6)) for _ in found]
    tokens = np.concatenate([rng.permutation(5)[:count] for count in counts]).astype(np.int32)
    expected, first = np.empty((len(tokens), x.shape[1]), np.float32), 0
    for view, count in zip(found, counts, strict=True):
        expected[first : first + count] = plain(view, x[tokens[first : first + count]], spec)
        first += count
    held = []
    for view in found:
        own = ExpertView(view.buffer.copy(), view.projections)
        held.append(device.copy(own))
        device.wait_left(held[-1])
        own.buffer[:] = 0xFF
        device.wait(held[-1])
        assert device.has(held[-1])
    given, parts = x.copy(), np.empty_like(expected)
    running = device.begin(held, counts, tokens, given, spec.moe.ffn)
    given[:] = np.nan
    device.finish(running, parts)
    np.testing.assert_allclose(parts, expected, rtol=0, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


def test_memory_is_what_was_weighed_and_comes_back(tmp_path: Path, device: TorchDevice) -> None:
    write_pack(tmp_path / "model.pack")
    held, weighed = [], 0
    for view in views(Pack.open(tmp_path / "model.pack")).values():
        held.append(device.copy(view))
        weighed += device.weigh(view.buffer.nbytes, view.projections)
        assert device.used_bytes == weighed
    for each in held:
        device.free(each)
    assert device.used_bytes == 0


def test_a_full_device_says_so_and_takes_more_once_something_is_given_back(tmp_path: Path) -> None:
    write_pack(tmp_path / "model.pack")
    found = list(views(Pack.open(tmp_path / "model.pack")).values())
    nbytes = found[0].buffer.nbytes
    device, held = TorchDevice("torch:cpu", 2 * nbytes + nbytes // 2), list[Held]()
    with pytest.raises(DeviceFull, match="are asked for"):
        held += [device.copy(view) for view in found]
    held = [device.copy(view) for view in found[:2]]
    device.free(held.pop())
    held.append(device.copy(found[2]))
    assert device.used_bytes <= device.capacity_bytes
    device.close()


def test_what_is_computed_needs_room_too(tmp_path: Path, device: TorchDevice) -> None:
    """And where there is none, nothing has begun."""
    write_pack(tmp_path / "model.pack", RICH)
    spec, x = RICH.moe.ffn, np.zeros((1, RICH.expert_width), np.float32)
    held = device.copy(next(iter(views(Pack.open(tmp_path / "model.pack")).values())))
    device._memory.capacity_bytes = device.used_bytes + device.scratch_bytes(1, *x.shape[1:], spec.d_ff) - 1
    with pytest.raises(DeviceFull):
        device.begin([held], [1], np.zeros(1, np.int32), x, spec)
    device._memory.capacity_bytes += 1
    device.finish(device.begin([held], [1], np.zeros(1, np.int32), x, spec), np.empty_like(x))


@pytest.mark.parametrize("capacity", [10_000, 1 << 24])
def test_costs_are_those_of_every_width(capacity: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured, as nothing is remembered; on a small device too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = TorchDevice("torch:cpu", capacity)
    costs = device.costs()
    assert device.costs() == costs
    assert sorted(costs.widths) == sorted(COSTED)
    numbers = [costs.launch_s, costs.pass_s, costs.copy_s]
    assert all(0 <= each < 10 for each in numbers)
    assert costs.copy_bytes_per_s > 0
    assert all(each.weight_s > 0 < each.row_s for each in costs.widths.values())
    assert device.used_bytes == 0


def test_a_device_says_what_it_is(device: TorchDevice) -> None:
    assert (device.name, device.simulated, device.capacity_bytes) == ("torch:cpu", False, 1 << 24)
    assert device.clock.now() <= device.clock.now()
    assert TorchDevice("torch:cpu", None).capacity_bytes == 1 << 30


@pytest.mark.parametrize("name", ["torch:gpu", "cuda:x", "mps", ""])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DeviceMissing, match=f"device='{name}' is no device of torch: use cuda:0 or torch:cpu"):
        TorchDevice(name, None)


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceMissing, match="device='cuda:0' is not there: this torch is built without CUDA"):
        TorchDevice("cuda:0", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceMissing, match="torch finds no GPU"):
        TorchDevice("cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceMissing, match="there are 1"):
        torch_device.TorchDevice("cuda:1", None)
