"""A long run in little memory: what is held must not grow, and what is written must not change."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import BudgetTooSmall
from moert.machine import held_bytes, return_freed
from moert.stats import RunStats
from recipes.bench.shaped import OLMOE_SHAPE, write_pack
from tests.alone import alone
from tests.shapes import every

REQUESTS = [(1, 300), (7, 150), (40, 40), (120, 20), (130, 260), (64, 1), (100, 200), (3, 29)]
"""Tokens of a prompt, and new ones: 1000 of them in all."""
ROUNDS = 10
WIDTHS = (2, 4, 8, 3, 16)
LOADERS = 3
MOST_GROWTH_BYTES = 2_500_000


@dataclass(frozen=True)
class Held:
    """By the process, after a round of all requests; the expert cache, which would make up for a leak by becoming
    smaller, is left out."""

    others_bytes: int
    threads: int
    files: int


@dataclass(frozen=True)
class Soak:
    rounds: list[Held]
    wrong: list[tuple[int, int]]  # (round, request) that wrote something else than with all experts in memory
    stats: RunStats


def write(engine: Engine, number: int) -> list[int]:
    """The new tokens of a request, which are drawn: a greedy run would soon repeat itself, and its experts."""
    prompt_tokens, new_tokens = REQUESTS[number]
    prompt = [(7 * number + 5 * at + at * at) % engine.spec.vocab_size for at in range(prompt_tokens)]
    settings = GenerationSettings(max_new_tokens=new_tokens, temperature=1.0, seed=number)
    return engine.generate(prompt, settings).result.tokens


def write_all(pack: Path) -> list[list[int]]:
    """With all experts in memory."""
    with Engine.open(pack, eviction="lru", predict="none", threads=1) as engine:
        return [write(engine, number) for number in range(len(REQUESTS))]


def open_tight(pack: Path) -> Engine:
    """In the memory that refusals lead to: one for the weights, others for the longest requests."""
    limit = 1
    while True:
        with ExitStack() as opened:
            try:
                engine = Engine.open(
                    pack,
                    memory=limit,
                    eviction="paper",
                    predict="gate",
                    threads=1,
                    io=f"direct,{LOADERS}",
                    notify=str,
                )
                opened.enter_context(engine)
                for request in REQUESTS:
                    engine.reserve(*request)
            except BudgetTooSmall as error:
                limit = max(limit + 1, error.smallest_bytes)
            else:
                opened.pop_all()
                return engine


def held(engine: Engine) -> Held:
    return_freed()
    threads, files = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    return Held(held_bytes() - engine.cache.held_bytes, len(threads), len(files))


def soak(pack: Path, expected: list[list[int]]) -> Soak:
    rounds, wrong = [], []
    with open_tight(pack) as engine:
        for at in range(ROUNDS):
            wrong += [(at, number) for number, tokens in enumerate(expected) if write(engine, number) != tokens]
            rounds.append(held(engine))
        return Soak(rounds, wrong, engine.stats())


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts from 100 kB to 3 MB, 90 MB in all: some are read by the thread that computes, others by loaders."""
    spec = OLMOE_SHAPE.but(
        vocab_size=64, d_model=256, n_heads=4, n_kv_heads=4, head_dim=64, decoder=every(2), num_experts=32, top_k=2,
        d_ff=2048, scale=64**-0.5,
    ).spec  # fmt: skip
    out = tmp_path_factory.mktemp("soak") / "soak.pack"
    write_pack(
        out, {key: WIDTHS[at % len(WIDTHS)] for at, key in enumerate(spec.expert_keys())}, {"attention": 8}, spec
    )
    return out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc tells")
def test_thousands_of_tokens_in_little_memory(pack: Path) -> None:
    done = alone(soak, pack, alone(write_all, pack))  # so that the peak is its own
    stats, first, last = done.stats, done.rounds[0], done.rounds[-1]
    print(*done.rounds, *stats.lines(), sep="\n")
    assert stats.new_tokens == 1000 * ROUNDS
    assert done.wrong == []
    assert last.others_bytes - first.others_bytes < MOST_GROWTH_BYTES
    assert (last.threads, last.files) == (first.threads, first.files)
    assert stats.memory_bytes is not None
    assert stats.peak_rss_bytes <= stats.memory_bytes
    assert stats.cache_bytes < stats.expert_bytes / 2
    assert stats.evictions > stats.new_tokens / 10
    assert stats.prefetch_issued_bytes > 0
