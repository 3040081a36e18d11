"""Tiny random models on the native kernels beside the reference: what rounding activations to 8 bits changes, no more.

A weight of few bits meets activations that were rounded to 127 steps of the largest of their 32, so each product is off
by about 0.5% of its size. Attention and layers carry that on: over all these models the logits were off by 0.3 to 1.5%
(median of a model's rows) and 17% at most, in proportion to the largest of the row. Routers decide as they do on the
reference, since between two experts that are as likely any change decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from packs import Tiny, greedy, open_model
from tiny import VARIANTS, VOCAB, features, kinds, variant_id

from moert.kernels import library, open_backend
from moert.models.model import Model
from moert.pack.codec import F32
from tests.pairs import thinned

if library.load() is None:
    pytest.skip(f"no native kernels: {library.missing()}", allow_module_level=True)

WORST, MEDIAN = 0.2, 0.02
MEDIAN_OF_DELTA = 0.025  # of some families with delta rules, each width by itself: 0.0243 was the largest
OF_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_text", "kimi_linear", "bailing_hybrid")


def sequences(name: str, n: int) -> list[tuple[list[int], list[int]]]:
    """What is read and, by encoder–decoder models, written after it."""
    chance = random.Random(name)
    return [
        ([chance.randrange(2, VOCAB) for _ in range(2 + 5 * at)], [0, *(chance.randrange(2, VOCAB) for _ in range(9))])
        for at in range(n)
    ]


def forward(model: Model, ids: list[int], target: list[int]) -> F32:
    return model.forward_all(ids) if model.spec.encoder is None else model.forward_all(ids, target)


def along(model: Model, ids: list[int], tokens: list[int]) -> F32:
    """The logits behind the prompt and behind each of the tokens, one step at a time."""
    state, logits = model.prefill(ids)
    return np.stack([logits] + [model.step(state, token) for token in tokens])


def stepped(model: Model, ids: list[int], target: list[int]) -> F32:
    return along(model, ids, target[1:])


@thinned("family, name, bits", VARIANTS, [2, 3, 4, 8], facts=kinds, ids=variant_id)
def test_few_bits_are_off_by_the_rounding_of_activations(tiny: Tiny, family: str, name: str, bits: int) -> None:
    pack, shares = tiny.pack(family, name, bits), []
    (reference, leader), (native, follower) = open_model(pack), open_model(pack, open_backend())
    for ids, target in sequences(name, 4):
        expected = forward(reference, ids, target)
        follower.given, leader.decided = leader.decided, []
        found = forward(native, ids, target)
        assert follower.given == []
        largest = np.abs(expected).max(-1)
        share = np.abs(found - expected).max(-1) / largest
        assert float(share.max()) < WORST
        second, first = np.sort(expected, -1)[:, -2:].T
        clear = first - second > 2 * WORST * largest
        assert np.array_equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
        shares.append(share)
    most = MEDIAN_OF_DELTA if family in OF_DELTA else MEDIAN
    assert 1e-4 < float(np.median(np.concatenate(shares))) < most  # not nothing: then nothing was rounded


@thinned("family, name, run", VARIANTS, [forward, stepped], facts=features, ids=variant_id)
def test_16_bits_are_the_reference(tiny: Tiny, family: str, name: str, run: Callable[..., Any]) -> None:
    """Experts and dense matrices of floats meet activations as they are. Where a key or a value lies between two of 16
    bits, the last bit of a sum decides which it becomes: logits were off by 0.01% of the largest at most in the middle,
    and 0.08% anywhere. A sparsemixer's weights jump where an expert comes within its jitter, so it follows."""
    pack = tiny.pack(family, name)
    (reference, leader), (native, follower) = open_model(pack), open_model(pack, open_backend())
    jumps = pack.manifest.model.moe.router.score == "sparsemixer"
    for ids, target in sequences(name, 4)[1::2]:
        leader.decided = []
        expected = run(reference, ids, target)
        follower.given = leader.decided if jumps else []
        found = run(native, ids, target)
        off = np.abs(found - expected) / np.abs(expected).max()
        assert off.max() < 2e-3
        assert np.median(off) < 2e-4  # a twentieth of what rounding activations to 8 bits does
    written = greedy(reference, ids, 8)
    leader.decided = []
    expected = along(reference, ids, written[:-1])
    follower.given = leader.decided if jumps else []
    found = along(native, ids, written[:-1])
    second, first = np.sort(expected, -1)[:, -2:].T
    clear = first - second > 4e-3 * np.abs(expected).max()
    assert clear.sum() >= len(written) // 2
    assert np.array_equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
