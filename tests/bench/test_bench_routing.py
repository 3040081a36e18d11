"""Routing recorded from one model and replayed in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moert.engine import Engine
from moert.experts.demand import Demand
from moert.pack.codec import F32
from recipes.bench import routing as recorded
from recipes.bench.routing import WINDOW, Replaced, ReplayedRouting, join, like, record, windows_of
from tests import tiny_packs

NO_GUESSES = np.zeros((3, 3, 8), np.float16)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("packs") / "tiny.pack", tiny_packs.DECODER)


def test_two_streams_become_one_of_twice_as_many_experts() -> None:
    first, second = np.array([[[3, 1]], [[0, 2]]], np.uint8), np.array([[[2, 0]], [[1, 3]]], np.uint8)
    assert join(first, second, 4).tolist() == [[[1, 3, 4, 6]], [[0, 2, 5, 7]]]
    with pytest.raises(ValueError, match="can't be joined"):
        join(first, second[:1], 4)


def test_windows_follow_each_other() -> None:
    class Words:
        def encode(self, text: str) -> Any:
            return type("Encoded", (), {"ids": [int(word) for word in text.split()]})

    text = " ".join(map(str, range(2 * WINDOW + 5)))
    assert windows_of(text, Words(), 2) == [list(range(WINDOW)), list(range(WINDOW, 2 * WINDOW))]
    with pytest.raises(ValueError, match="tokens of text"):
        windows_of(text, Words(), 3)


def test_replayed_routing_decides_prompts_and_tokens_and_goes_round(pack: Path) -> None:
    trace: list[Demand] = []
    routing = np.array([[[0, 1]] * 3, [[2, 3]] * 3, [[4, 5]] * 3], np.uint8)  # three tokens, three layers
    with Engine.open(pack, predict="none", threads=1, trace=trace) as engine:
        ReplayedRouting(routing, NO_GUESSES).replace(engine.model.routers, engine.spec.moe_layers())
        tiny_packs.run_greedy(engine, [5, 6], 4)
    passes = [[step.experts for step in trace[at : at + 3]] for at in range(0, len(trace), 3)]
    assert passes == [[(0, 1, 2, 3)] * 3, [(4, 5)] * 3, [(0, 1)] * 3, [(2, 3)] * 3]


def test_replayed_guesses_are_those_of_the_tokens_on_their_way(pack: Path) -> None:
    routing = np.array([[[0, 1]] * 3, [[2, 3]] * 3], np.uint8)
    guesses = np.zeros((2, 3, 8), np.float16)
    guesses[0, :, 6], guesses[1, :, 7] = 1, 1
    with Engine.open(pack, predict="gate", threads=1) as engine:
        routers = engine.model.routers
        ReplayedRouting(routing, guesses).replace(routers, engine.spec.moe_layers())
        seen: list[list[float]] = []

        class Spied(Replaced):
            def guess(self, x: F32) -> F32:
                found = self.router.guess(x)
                seen.append(found[6:].tolist())
                return found

        for at, router in list(routers.items()):
            routers[at] = Spied(at, router)
        engine.cache.resize(0)
        tiny_packs.run_greedy(engine, [5, 6], 2)
    assert seen[0] == [0.5, 0.5]  # the prompt has both tokens
    assert seen[-1] == [1.0, 0.0]  # and the recording has begun anew


def test_recorded_routing_is_what_the_engine_demands(pack: Path) -> None:
    trace: list[Demand] = []
    with Engine.open(pack, predict="none", threads=1, trace=trace) as engine:
        engine.reserve(3, 1)
        engine.model.prefill([5, 6, 7])
    routing, guesses = record(pack, [[5, 6, 7]])
    assert [set(routing[:, place].ravel().tolist()) for place in range(3)] == [set(step.experts) for step in trace]
    assert guesses.shape == (3, 3, 8)
    assert not guesses[:, 0].any()
    assert np.allclose(guesses[:, 1:].sum(2), 1, atol=0.01)


def test_routing_for_more_layers_experts_and_choices(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained model has 3 layers of 8 experts; streams differ, and each has half of the experts."""
    monkeypatch.setattr(recorded, "text_of", lambda split: "")
    windows = [[number + 1] * WINDOW for number in range(4)]
    monkeypatch.setattr(recorded, "windows_of", lambda text, tokenizer, count: windows[:count])
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", lambda path: None)
    spec = tiny_packs.DECODER_SHAPE.but(decoder=(True,) * 5, num_experts=16, top_k=6).spec
    routing, guesses = like(pack, "heldout", 1, spec)
    assert routing.shape == (WINDOW, 5, 6)
    assert guesses.shape == (WINDOW, 5, 16)
    first, second = (record(pack, [windows[at]], top_k=3)[0] for at in (0, 1))  # the lower half of the experts
    assert (routing[:, :3, :3] == np.sort(first, -1)).all()
    assert (routing[:, 3:, :3] == np.sort(second, -1)[:, :2]).all()
    upper = np.sort(record(pack, [windows[2]], top_k=3)[0], -1) + 8
    assert (routing[:, :3, 3:] == upper).all()
    with pytest.raises(ValueError, match="no multiple"):
        like(pack, "heldout", 1, spec=tiny_packs.DECODER_SHAPE.but(num_experts=12).spec)
