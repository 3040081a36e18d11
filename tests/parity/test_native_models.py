"""Tiny random models on the native kernels beside the reference: what rounding activations to 8 bits changes, no more.

A weight of few bits meets activations that were rounded to 127 steps of the largest of their 32, so each product is off
by about 0.5% of its size. Attention and layers carry that on: over all these models the logits were off by 0.3 to 1.5%
(median of a model's rows) and 17% at most, in proportion to the largest of the row. Routers decide as they do on the
reference, since between two experts that are as likely any change decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import greedy, open_model, pack_of
from tiny import OLMOE_VARIANTS, SWITCH_VARIANTS, VOCAB, tiny_olmoe, tiny_switch

from moert.kernels import library, open_backend
from moert.models.model import Model

if library.load() is None:
    pytest.skip(f"no native kernels: {library.missing()}", allow_module_level=True)

WORST, MEDIAN = 0.2, 0.02
CASES = [("switch", name) for name in SWITCH_VARIANTS] + [("olmoe", name) for name in OLMOE_VARIANTS]
IDS = [f"{family}: {name}" for family, name in CASES]


def checkpoint(family: str, name: str, path: Path) -> Path:
    make, variants = (tiny_switch, SWITCH_VARIANTS) if family == "switch" else (tiny_olmoe, OLMOE_VARIANTS)
    return make(path, **variants[name])


def sequences(name: str, n: int) -> list[tuple[list[int], list[int]]]:
    """What is read and, by encoder–decoder models, written after it."""
    chance = random.Random(name)
    return [
        ([chance.randrange(2, VOCAB) for _ in range(2 + 5 * at)], [0, *(chance.randrange(2, VOCAB) for _ in range(9))])
        for at in range(n)
    ]


def forward(model: Model, ids: list[int], target: list[int]) -> torch.Tensor:
    return model.forward_all(ids) if model.spec.encoder is None else model.forward_all(ids, target)


def stepped(model: Model, ids: list[int], target: list[int]) -> torch.Tensor:
    """The logits after each of the target's tokens, one step at a time."""
    state, logits = model.prefill(ids)
    return torch.stack([logits] + [model.step(state, token) for token in target[1:]])


@pytest.mark.parametrize(("family", "name"), CASES, ids=IDS)
def test_few_bits_are_off_by_the_rounding_of_activations(family: str, name: str, tmp_path: Path) -> None:
    source, shares = checkpoint(family, name, tmp_path / "hf"), []
    for bits in (2, 3, 4, 8):
        pack = pack_of(source, tmp_path / f"{bits}.pack", bits)
        (reference, leader), (native, follower) = open_model(pack), open_model(pack, open_backend())
        for ids, target in sequences(name, 5):
            expected = forward(reference, ids, target)
            follower.given, leader.decided = leader.decided, []
            found = forward(native, ids, target)
            assert follower.given == []
            largest = expected.abs().amax(-1)
            share = (found - expected).abs().amax(-1) / largest
            assert float(share.max()) < WORST
            first, second = expected.topk(2).values.unbind(-1)
            clear = first - second > 2 * WORST * largest
            assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
            shares.append(share)
    assert 1e-4 < float(torch.cat(shares).median()) < MEDIAN  # not nothing: then nothing was rounded


@pytest.mark.parametrize("run", [forward, stepped])
@pytest.mark.parametrize(("family", "name"), CASES, ids=IDS)
def test_16_bits_are_the_reference(family: str, name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    """Experts and dense matrices of floats meet activations as they are."""
    pack = pack_of(checkpoint(family, name, tmp_path / "hf"), tmp_path / "model.pack")
    (reference, _), (native, _) = open_model(pack), open_model(pack, open_backend())
    for ids, target in sequences(name, 6):
        expected, found = run(reference, ids, target), run(native, ids, target)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert greedy(native, ids, 8) == greedy(reference, ids, 8)
