"""The bench of two devices: what its routing, its rig and its tables make of small examples. Nothing here is timed."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.bench.cards import offloading, ours, processor, split
from recipes.bench.cards_rig import Setup, replay
from recipes.bench.cards_routing import EXPERTS, LAYERS, TOP_K, Routes, grouped
from recipes.bench.result import Result, Row
from recipes.bench.tables import devices

TOKENS = 12


@pytest.fixture(scope="module")
def routes() -> Routes:
    """Of experts of which some are popular, and of guesses that are always right."""
    rng = np.random.default_rng(0)
    scores = rng.random((TOKENS, LAYERS, EXPERTS)) + np.linspace(0, 0.7, EXPERTS)
    chosen = np.sort(np.argsort(-scores, -1)[..., :TOP_K], -1).astype(np.uint8)
    guesses = np.zeros(scores.shape, np.float16)
    np.put_along_axis(guesses, chosen.astype(np.int64), np.float16(0.5), -1)
    return Routes(chosen, guesses)


def test_experts_are_taken_four_at_a_time() -> None:
    ranked = np.array([[[5, 6, 31, 0]], [[9, 8, 11, 10]], [[0, 28, 4, 1]]], np.uint8)
    assert grouped(ranked).tolist() == [[[1, 7]], [[2, 3]], [[0, 7]]]


@pytest.mark.parametrize("setup", [ours("t4"), processor("t4"), offloading("t4"), split("t4")])
def test_the_same_run_gives_the_same_figures(routes: Routes, setup: Setup) -> None:
    first, second = (replay(setup, routes.chosen, routes, 1, 4, 2) for _ in range(2))
    assert first == second
    counters = first.counters
    assert counters.asked == 4 * LAYERS * TOP_K == counters.held + counters.copied + counters.on_host
    assert len(first.passes) == 4
    assert first.error < 0.1


def test_where_experts_are_computed(routes: Routes) -> None:
    counters = {
        name: replay(setup("t4"), routes.chosen, routes, 1, 3, 1).counters
        for name, setup in {"processor": processor, "offloading": offloading, "split": split}.items()
    }
    assert counters["processor"].on_host == counters["processor"].asked
    assert counters["offloading"].on_host == 0
    assert counters["split"].copied == 0


def test_memory_for_half_of_the_experts_takes_longer(routes: Routes) -> None:
    whole = replay(processor("t4"), routes.chosen, routes, 1, 3, 3)
    half = replay(Setup("t4", 1, "layers", "resident", "host", guesses=False, memory_bytes=100 * 10**8), routes.chosen,
                  routes, 1, 3, 3)  # fmt: skip
    assert half.mean_s > 1.2 * whole.mean_s


def test_tables() -> None:
    names = ["two devices", "all on the processor", "LRU offloading", "layers split"]
    rows = [Row(f"t4, one request: {name}", 1.0, "tokens/s") for name in names]
    rows.append(Row(f"t4, one request: {devices.OTHERS[-1]}", 1.2, "tokens/s"))
    rows.append(Row("t4, one request: by the best of the others", 1.5, "×").at_least(1.3))
    rows.append(Row("deciding a layer, 2 of 8 experts", 1.0, "µs").at_most(20))
    rows.append(Row("hits on the card with room for 10%: lru", 19.0, "%"))
    rows += [Row(f"t4, experts at 2 bits: {name}", 1.0, "tokens/s") for name in ("their method", "two devices")]
    raced, aimed, hits, published = devices.parts(Result({}, rows))
    assert raced[1][0] == "t4, one request"
    assert raced[1][-1] == "0.83 ×", "a best of the others that was measured once is among them"
    assert [line[0] for line in aimed[1:]] == ["deciding a layer, 2 of 8 experts"]
    assert hits[1] == ("10%", "{hits on the card with room for 10%: lru}%")
    assert published[1][0] == "t4, experts at 2 bits"
