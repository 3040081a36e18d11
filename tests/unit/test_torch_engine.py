"""Whole engines with a device of torch: on the processor here, and on a GPU where there is one (pytest -m cuda)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_hash import add_hash
from tiny_packs import PROMPTS, SPECS, run_greedy, write_pack

from moert.beside.gpu.tiers import DeviceTier
from moert.beside.gpu.torch_device import TorchDevice
from moert.engine.engine import Engine
from moert.pack.reader import Pack
from tests.pairs import thinned

N_TOKENS = 12
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA, or a torch without it")
DEVICES = ["torch:cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engines")
    return {name: add_hash(write_pack(root / f"{name}.pack", spec)) for name, spec in SPECS.items()}


def opened(path: Path, device: str, **settings: Any) -> Engine:
    return Engine.open(path, **{"kernels": "reference", "device": device, **settings})


def bytes_of(path: Path) -> tuple[int, int]:
    """Of the largest expert, and of all."""
    sizes = [entry.file_bytes for entry in Pack.open(path).manifest.experts]
    return max(sizes), sum(sizes)


@thinned("device, rule, name", DEVICES, ["cheapest", "copied", "resident"], SPECS)
def test_tokens_are_the_same_and_logits_nearly(packs: dict[str, Path], name: str, rule: str, device: str) -> None:
    with opened(packs[name], "none") as engine:
        expected = [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in PROMPTS]
    with opened(packs[name], device, device_experts=rule) as engine:
        assert isinstance(engine.holding, DeviceTier)
        assert isinstance(engine.holding.device, TorchDevice)
        found = [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in PROMPTS]
        assert engine.holding.device.used_bytes > 0
    for (tokens, logits), (others, exact) in zip(found, expected, strict=True):
        assert np.abs(logits - exact).max() < 2e-3 * np.abs(exact).max()
        assert tokens == others


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_a_small_device_is_never_filled_beyond_what_it_may_have(packs: dict[str, Path], name: str, device: str) -> None:
    """Matrices, keys, values and experts have to share it; what finds no room is in memory."""
    with opened(packs[name], "none") as engine:
        expected = [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in PROMPTS]
    largest, everything = bytes_of(packs[name])
    for capacity in (largest + 60_000, everything // 2 + 60_000):
        with opened(packs[name], device, gpu_memory=capacity) as engine:
            assert isinstance(engine.holding, DeviceTier)
            seen = []
            for prompt, (tokens, exact) in zip(PROMPTS, expected, strict=True):
                found, logits = run_greedy(engine, engine.encode(prompt), N_TOKENS)
                seen.append(engine.holding.device.used_bytes)
                assert np.abs(logits - exact).max() < 2e-3 * np.abs(exact).max()
                assert found == tokens
            assert max(seen) <= engine.holding.device.capacity_bytes == capacity


@pytest.mark.parametrize("runs", [3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_a_device_is_the_same_after_any_number_of_tokens(
    packs: dict[str, Path], device: str, runs: int
) -> None:
    """A thousand or two; each prompt's keys and values are given back with it."""
    with opened(packs["decoder"], device) as engine:
        assert isinstance(engine.holding, DeviceTier)
        used = []
        for _ in range(runs):
            run_greedy(engine, engine.encode(PROMPTS[0]), 334)
            gc.collect()
            used.append(engine.holding.device.used_bytes)
    assert used[0] > 0
    assert set(used[1:]) == {used[1]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [{"predict": "hash"}, {"routing": "hash"}, {"predict": "gate"}], ids=str)
def test_what_foresees_experts_reads_the_models_embedding(
    packs: dict[str, Path], settings: dict[str, str], device: str
) -> None:
    """Which is on the device."""
    answers = []
    for where in ("none", device):
        with opened(packs["decoder"], where, **settings) as engine:
            answers.append([engine.generate(prompt, max_new_tokens=N_TOKENS).result.tokens for prompt in PROMPTS])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_together_are_answered_as_alone(packs: dict[str, Path], device: str) -> None:
    with opened(packs["decoder"], device) as engine:
        alone = [engine.generate(prompt, max_new_tokens=N_TOKENS).result.tokens for prompt in PROMPTS]
        together = [answer.result.tokens for answer in engine.generate_many(PROMPTS, max_new_tokens=N_TOKENS)]
    assert together == alone


def test_the_device_is_given_back_with_the_engine(packs: dict[str, Path]) -> None:
    with opened(packs["decoder"], "torch:cpu") as engine:
        run_greedy(engine, engine.encode(PROMPTS[0]), 3)
        assert isinstance(engine.holding, DeviceTier)
        assert isinstance(engine.holding.device, TorchDevice)
        memory = engine.holding.device._memory
        assert memory.used_bytes > 0
    del engine
    gc.collect()
    assert memory.used_bytes == 0
