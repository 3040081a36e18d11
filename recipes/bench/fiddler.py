"""`make bench-fiddler`: figures of Fiddler's paper (Kamahori et al. 2024) that `make bench-devices` lacks.

They are those of its simulated cards, the same on every machine: popularity, the time of an expert by its tokens,
single requests by their length, widths of beams, and the share of the experts that fit. The paper's own method is a
setting: the most popular experts stay, each expert takes the cheapest way, and nothing is copied ahead.

Only the processor's time of an expert is that of this machine. A line is fitted on one half of its measurements and
judged on the other, as are the costs that the engine measures itself. On a simulated card that would say nothing: its
clock and its latency model share their figures.

Writes build/bench/fiddler.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moert.beside.gpu.device import host_costs, least_s
from moert.beside.gpu.placement import IN_MEMORY, Placement
from moert.beside.gpu.simulated import PROFILES, compute_parts
from moert.kernels import open_backend
from moert.kernels.backend import Backend, Expert, ExpertView
from moert.machine import usable_cores
from moert.pack.codec import n_groups, row_bytes
from recipes.bench.cards import (
    EXPERT_BYTES,
    EXPERTS,
    GB,
    MAIN,
    MIXTRAL,
    ORDER,
    OTHERS,
    PASSES,
    WARM,
    WIDTH,
    Bench,
    Ran,
    Rig,
    Setup,
    expert_of,
    ours,
)
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO

BITS = 4
INPUTS, OUTPUTS = sized(((32, 64, 128, 256), (64, 128, 256, 512)), ((8,), (2, 4)))
"""Tokens of single requests."""
BEAMS = sized((4, 8, 12, 16), (4,))
SHARES = sized((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0), (0.5,))
TOKENS = sized((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), (1, 2))
"""Of an expert in one layer."""
ROUNDS, COPIES = sized((16, 3), (2, 1))
"""Measurements of each of TOKENS, and experts that take turns in them: together no cache holds them."""

Seconds = npt.NDArray[np.float64]


def fiddler(card: str) -> Setup:
    return replace(ours(card), keep="popular", guesses=False)


METHODS = {"two devices": ours, "Fiddler's own": fiddler, **OTHERS}


def popularity_rows(bench: Bench) -> Iterator[Row]:
    """Tokens of each expert by those of the most popular expert of all layers."""
    layers = np.moveaxis(bench.calibration, 1, 0)
    counts = np.stack([np.bincount(layer.reshape(-1), minlength=EXPERTS) for layer in layers])
    shares = 100 * counts / counts.max()
    for what, share in (("mean", shares.mean()), ("deviation", shares.std()), ("least", shares.min())):
        yield Row(f"tokens of an expert by those of the most popular one: {what}", float(share), "%")


def expert_rows(bench: Bench) -> Iterator[Row]:
    """The time of an expert by its tokens, as the cards' profiles have it."""
    _, kind = expert_of(BITS)
    for card in MAIN:
        profile = PROFILES[card]
        placement = Placement([kind], WIDTH, profile.device(), profile.host())
        for count in TOKENS:
            costs = placement.costs(count, 0, IN_MEMORY)
            for what, seconds in (("copy", costs.copy), ("card", costs.device), ("processor", costs.host)):
                yield Row(f"{card}, tokens of an expert, {count}: {what}", 1e3 * seconds, "ms")
        costs_of = (placement.costs(count, 0, IN_MEMORY) for count in range(1, 1 << 16))
        sooner = next(count for count, each in enumerate(costs_of, 1) if each.copy + each.device < each.host)
        yield Row(f"{card}, a copy and the card are sooner: from", sooner, "tokens")


def request_seconds(bench: Bench, setup: Setup, tokens_in: int, tokens_out: int) -> Seconds:
    """Returns the time of a request until each token that is written [tokens_out]; nothing ran before it."""
    rig, ran, routes = Rig(setup, bench.calibration), Ran(), bench.heldout
    try:
        for rows in (slice(tokens_in), *(slice(at, at + 1) for at in range(tokens_in, tokens_in + tokens_out - 1))):
            rig.run(routes.chosen[rows], routes.guesses[rows], ran)
    finally:
        rig.close()
    return np.cumsum(ran.passes)


def length_rows(bench: Bench) -> Iterator[Row]:
    for card in MAIN:
        speeds = dict[str, list[float]]()
        for tokens_in in INPUTS:
            taken = {
                name: request_seconds(bench, setup(card), tokens_in, max(OUTPUTS)) for name, setup in METHODS.items()
            }
            for tokens_out, (name, seconds) in product(OUTPUTS, taken.items()):
                speeds.setdefault(name, []).append(tokens_out / seconds[tokens_out - 1])
                yield Row(f"{card}, {tokens_in} tokens in, {tokens_out} out: {name}", speeds[name][-1], "tokens/s")
        for name, found in speeds.items():
            yield Row(f"{card}, mean of these requests: {name}", float(np.mean(found)), "tokens/s")


def beam_rows(bench: Bench) -> Iterator[Row]:
    """Beams are sequences that are read together, by all methods; and beside those, one after the other."""
    for card in MAIN:
        alone = {name: 1 / bench.run(setup(card)).mean_s for name, setup in OTHERS.items()}
        for size in BEAMS:
            speeds = {
                name: size / bench.run(setup(card), size, PASSES // 4, WARM // 3).mean_s
                for name, setup in METHODS.items()
            }
            for name, speed in speeds.items():
                yield Row(f"{card}, {size} beams: {name}", speed, "tokens/s")
            for name in ("two devices", "Fiddler's own"):
                one_by_one = speeds[name] / max(alone.values())
                yield Row(f"{card}, {size} beams by the best of the others, beam after beam: {name}", one_by_one, "×")


def room_rows(bench: Bench) -> Iterator[Row]:
    """Of a card with memory for all experts, as much as some of them take."""
    whole = len(ORDER) * EXPERTS * EXPERT_BYTES
    ways = {name: setup for name, setup in METHODS.items() if name != "all on the processor"}
    for share, (name, setup) in product(SHARES, ways.items()):
        room = replace(setup("a100"), gpu_bytes=int(share * whole) + 5 * GB)
        yield Row(f"a100, room for {100 * share:g}% of the experts: {name}", 1 / bench.run(room).mean_s, "tokens/s")


def latency_rows(bench: Bench) -> Iterator[Row]:
    """The time of an expert on this machine, and how far off are models of it."""
    backend = open_backend(threads=usable_cores())
    measured = measure(backend)
    for count, seconds in zip(TOKENS, measured.T, strict=True):
        yield row_of_runs(f"this machine, tokens of an expert, {count}: processor", list(1e3 * seconds), "ms")
    fitted, judged = measured[::2], measured[1::2]
    base, slope = line(fitted)
    yield Row("this machine, the line: at no token", 1e3 * base, "ms")
    yield Row("this machine, the line: of a token", 1e3 * slope, "ms")
    placement = Placement([expert_of(BITS)[1]], WIDTH, PROFILES["t4"].device(), host_costs(backend, GB))
    models = {
        "the line": base + slope * np.array(TOKENS),
        "the engine's costs": np.array([placement.costs(count, 0, IN_MEMORY).host for count in TOKENS]),
        "the median of as many tokens": np.median(fitted, 0),
    }
    for name, expected in models.items():
        errors = 100 * np.abs(expected / judged - 1)
        for what, error in (("median", np.median(errors)), ("95th percentile", np.percentile(errors, 95))):
            yield Row(f"this machine, error of {name}: {what}", float(error), "%", n=errors.size)


def measure(backend: Backend) -> Seconds:
    """Returns times of an expert of Mixtral's [ROUNDS, len(TOKENS)], each the least of a few calls, as the engine
    measures its own; each round has the tokens in another order."""
    experts, rng = cycle([laid_out(backend) for _ in range(COPIES)]), np.random.default_rng(0)
    measured = np.empty((ROUNDS, len(TOKENS)))
    for round_s in measured:
        for place in rng.permutation(len(TOKENS)):
            round_s[place] = expert_s(backend, experts, TOKENS[place])
    return measured


def expert_s(backend: Backend, experts: Iterator[Expert], count: int) -> float:
    x, parts = np.ones((2, count, WIDTH), np.float32)
    tokens = np.arange(count, dtype=np.int32)
    return least_s(lambda: compute_parts(backend, [next(experts)], [count], x, tokens, parts, MIXTRAL.moe.ffn))


def laid_out(backend: Backend) -> Expert:
    """Returns an expert of any codes and small scales."""
    views, at = dict(expert_of(BITS)[0]), 0
    for name, view in views.items():
        out, inputs = view.shape
        codes, scales = out * row_bytes(inputs, BITS), 2 * out * n_groups(inputs, view.group_size)
        views[name] = view._replace(places=(at, at + codes, at + codes + scales))
        at += codes + 2 * scales
    return backend.expert(ExpertView(np.full(at, 0x20, np.uint8), views))


def line(seconds: Seconds) -> tuple[float, float]:
    """Returns the seconds at no token and those of each token, of the least relative errors squared."""
    tokens = np.broadcast_to(TOKENS, seconds.shape).reshape(-1)
    slope, base = np.polyfit(tokens, seconds.reshape(-1), 1, w=1 / seconds.reshape(-1))
    return float(base), float(slope)


PARTS = popularity_rows, expert_rows, length_rows, beam_rows, room_rows, latency_rows


def main() -> int:
    pack = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO / "wiki.pack"
    need([pack], "demo")
    bench = Bench(pack)
    rows = [row for part in PARTS for row in part(bench)]
    settings = {"cards": [*MAIN, "a100"], "simulated": True, "experts": "Mixtral-8x7B", "bits": BITS, "rounds": ROUNDS}
    write("fiddler", context(settings), rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    as_program(main, __doc__, "[PACK]")
