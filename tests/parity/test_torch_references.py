"""The reference models with a device of torch: the same tokens as on the processor alone, of each shape of model."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from packs import Tiny
from tiny_packs import run_greedy

from moert.beside.gpu.tiers import DeviceTier
from moert.beside.gpu.torch_device import TorchDevice
from moert.engine.engine import Engine
from moert.pack.reader import Pack
from tests.fast_card import FAST

PROMPTS = {"wiki": ["The city of", "In the year 1900 the"], "g2p": ["station", "knowledgeable"]}
NEW = 24
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA, or a torch without it")
DEVICES = ["torch:cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.fixture(scope="module", params=PROMPTS)
def pack(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[str, Pack]:
    """With experts of 4 bits."""
    return request.param, tiny.reference(request.param, 4)


def opened(pack: Pack, **settings: Any) -> Engine:
    return Engine.open(pack.root, **{"kernels": "reference", "predict": "none", **settings})


def answers(engine: Engine, name: str) -> list[Any]:
    return [run_greedy(engine, engine.encode(prompt), NEW) for prompt in PROMPTS[name]]


def same(found: list[Any], expected: list[Any]) -> None:
    for (tokens, logits), (others, exact) in zip(found, expected, strict=True):
        assert np.abs(logits - exact).max() < 2e-3 * np.abs(exact).max()
        assert tokens == others


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed where depends on no clock."""
    monkeypatch.setattr(TorchDevice, "costs", lambda device: FAST)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_the_same(pack: tuple[str, Pack], device: str) -> None:
    """With all of it on the device, and with little of it there."""
    name, where = pack
    with opened(where) as engine:
        expected = answers(engine, name)
    little = sum(entry.file_bytes for entry in where.manifest.experts) // 2
    if device.startswith("cuda"):  # its allocator takes 20 MiB at a time, and its products a workspace
        little = torch.cuda.memory_reserved(device) + (96 << 20)
    for settings in ({}, {"gpu_memory": little, "device_experts": "copied"}):
        with opened(where, device=device, **settings) as engine:
            assert isinstance(engine.holding, DeviceTier)
            same(answers(engine, name), expected)
            assert engine.holding.device.used_bytes <= engine.holding.device.capacity_bytes


# What only a GPU can show


@pytest.mark.cuda
@needs_cuda
def test_the_allocator_never_has_more_than_it_may(pack: tuple[str, Pack]) -> None:
    name, where = pack
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    capacity = 256 << 20
    with opened(where, device="cuda:0", gpu_memory=capacity) as engine:
        answers(engine, name)
    assert torch.cuda.max_memory_reserved() <= capacity


@pytest.mark.cuda
@needs_cuda
def test_where_others_take_the_memory_experts_leave_and_tokens_stay(pack: tuple[str, Pack]) -> None:
    name, where = pack
    with opened(where) as engine:
        expected = answers(engine, name)
    with opened(where, device="cuda:0", gpu_memory=256 << 20) as engine:
        answers(engine, name)
        assert isinstance(engine.holding, DeviceTier)
        left = engine.holding.device.capacity_bytes - torch.cuda.memory_reserved()
        hog = torch.empty(max(1, left), dtype=torch.uint8, device="cuda:0")
        same(answers(engine, name), expected)
        del hog


@pytest.mark.cuda
@needs_cuda
def test_nothing_of_an_engine_stays_on_the_card(pack: tuple[str, Pack]) -> None:
    name, where = pack
    gc.collect()
    before = torch.cuda.memory_allocated()
    with opened(where, device="cuda:0") as engine:
        answers(engine, name)
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
