"""Whole engines with a device of torch: on the processor here, and on a GPU where there is one (pytest -m cuda)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_hash import add_hash
from tiny_packs import PROMPTS, SHAPES, SPECS, run_greedy, write_pack

from moert.beside.gpu import tiers
from moert.beside.gpu.device import DeviceCosts
from moert.beside.gpu.tiers import DeviceTier
from moert.beside.gpu.torch_device import TorchDevice
from moert.engine.engine import Engine
from moert.experts.streaming import CachedExperts
from moert.pack.reader import Pack
from tests.fast_card import FAST
from tests.pairs import thinned

N_TOKENS = 12
WIDE = {"d_model": 512, "head_dim": 128, "d_ff": 4096}
"""Experts of a size that a GPU's allocator can tell apart."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA, or a torch without it")
DEVICES = ["torch:cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, needs_cuda])]


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed where depends on no clock."""
    monkeypatch.setattr(TorchDevice, "costs", lambda device: FAST)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("engines")
    return {name: add_hash(write_pack(root / f"{name}.pack", spec)) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def without(packs: dict[str, Path]) -> Callable[[str], list[Any]]:
    """What the engine of a pack writes after each prompt without a device, and its logits."""

    @cache
    def answers(name: str) -> list[Any]:
        with opened(packs[name], "none") as engine:
            return [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in PROMPTS]

    return answers


def opened(path: Path, device: str, **settings: Any) -> Engine:
    return Engine.open(path, **{"kernels": "reference", "device": device, **settings})


def bytes_of(path: Path) -> tuple[int, int]:
    """Of the largest expert, and of all."""
    sizes = [entry.file_bytes for entry in Pack.open(path).manifest.experts]
    return max(sizes), sum(sizes)


@thinned("device, rule, name", DEVICES, ["cheapest", "copied", "resident"], SPECS)
def test_tokens_are_the_same_and_logits_nearly(
    packs: dict[str, Path], without: Callable[[str], list[Any]], name: str, rule: str, device: str
) -> None:
    expected = without(name)
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
def test_a_small_device_is_never_filled_beyond_what_it_may_have(
    packs: dict[str, Path], tmp_path: Path, name: str, device: str
) -> None:
    """Matrices, keys, values and experts have to share it; what finds no room is in memory."""
    pack, beside, prompts = packs[name], 60_000, PROMPTS
    if device.startswith("cuda"):  # its allocator takes 20 MiB at a time, and its products a workspace
        prompts = PROMPTS[:2]
        pack = write_pack(tmp_path / "wide.pack", SHAPES[name].but(**WIDE).spec, paths=False)
        torch.zeros((2, 2), device=device) @ torch.zeros((2, 2), device=device)
        beside = torch.cuda.memory_reserved(device) + (96 << 20)
    with opened(pack, "none") as engine:
        expected = [run_greedy(engine, engine.encode(prompt), N_TOKENS) for prompt in prompts]
    largest, everything = bytes_of(pack)
    for capacity in (largest + beside, everything // 2 + beside):
        with opened(pack, device, gpu_memory=capacity) as engine:
            assert isinstance(engine.holding, DeviceTier)
            seen = []
            for prompt, (tokens, exact) in zip(prompts, expected, strict=True):
                found, logits = run_greedy(engine, engine.encode(prompt), N_TOKENS)
                seen.append(engine.holding.device.used_bytes)
                assert np.abs(logits - exact).max() < 2e-3 * np.abs(exact).max()
                assert found == tokens
            assert max(seen) <= engine.holding.device.capacity_bytes == capacity


@pytest.mark.parametrize(("runs", "new"), [(3, 100), pytest.param(6, 334, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
def test_memory_of_a_device_is_the_same_after_any_number_of_tokens(
    packs: dict[str, Path], device: str, runs: int, new: int
) -> None:
    """Hundreds, in the slow suite two thousand; each prompt's keys and values are given back with it."""
    with opened(packs["decoder"], device) as engine:
        assert isinstance(engine.holding, DeviceTier)
        used = []
        for _ in range(runs):
            run_greedy(engine, engine.encode(PROMPTS[0]), new)
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


SLOW_STEPS = replace(FAST, step_s=1.0)
SLOW = replace(SLOW_STEPS, launch_s=1.0)


@pytest.mark.parametrize(
    ("each", "experts", "others"), [(FAST, True, True), (SLOW_STEPS, True, False), (SLOW, False, False)]
)
def test_a_device_computes_what_it_computes_sooner(
    packs: dict[str, Path], each: DeviceCosts, experts: bool, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And auto takes a device of no use for none."""
    monkeypatch.setattr(TorchDevice, "costs", lambda device: each)
    with Engine.open(packs["decoder"], device="torch:cpu", kernels="reference") as engine:
        run_greedy(engine, engine.encode(PROMPTS[0]), 3)
        assert isinstance(engine.holding, DeviceTier)
        assert (engine.holding.others is not None, engine.holding.counters.held > 0) == (others, experts)
    monkeypatch.setattr(tiers, "open_device", lambda name, *given: TorchDevice("torch:cpu", None))
    notes = list[str]()
    with Engine.open(packs["decoder"], device="auto", notify=notes.append) as engine:
        assert isinstance(engine.holding, DeviceTier) is experts
    assert [note for note in notes if "would take longer" in note] == notes[: 0 if experts else 1]


def test_layers_of_the_processor_alone_run_as_without_a_device(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that run together there are not computed one by one for a device that gets none of them."""
    monkeypatch.setattr(TorchDevice, "costs", lambda device: SLOW)
    run, calls, found = CachedExperts.run, list[int](), list[list[int]]()

    def counted(*given: Any) -> None:
        calls[-1] += 1
        run(*given)

    monkeypatch.setattr(CachedExperts, "run", counted)
    for device in ("none", "torch:cpu"):
        calls.append(0)
        with opened(packs["decoder"], device) as engine:
            found.append(run_greedy(engine, engine.encode(PROMPTS[0]), N_TOKENS)[0])
            holding = engine.holding
    assert isinstance(holding, DeviceTier)
    assert (holding.counters.held, holding.counters.copied, holding.counters.on_host) == (0, 0, holding.counters.asked)
    assert holding.counters.asked > 0
    assert calls[0] == calls[1] > 0
    assert found[0] == found[1]


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
