"""`make bench-devices`: experts on a card, in memory and on a drive, beside running them on one of these alone.

No card is needed: all of it runs on simulated ones (moert/beside/gpu/simulated.py), with the engine's own tiers and
experts of Mixtral-8x7B's sizes (recipes/bench/cards_rig.py), routed as recipes/bench/cards_routing.py says. Three
others are compared, each with the same kernels, the same machine and the same bits: everything on the processor;
Mixtral-offloading's method (the latest experts of each layer stay on the card, the others are copied, guessed ones
ahead); whole layers on the card, as llama.cpp splits a model. The wiki pack itself runs in the engine as well. What
deciding takes is processor time of this machine; all other times are a simulated card's.

Writes build/bench/devices.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from moert.beside.gpu.placement import IN_MEMORY, ON_DEVICE, RULES, Kind, Placement
from moert.beside.gpu.residents import KEEPS
from moert.beside.gpu.simulated import PROFILES
from recipes.bench.cards_rig import Ran, Setup, expert_of, replay
from recipes.bench.cards_routing import Chosen, Routes, recorded
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO

GB = 10**9
HELDOUT_WINDOWS, CALIBRATION_WINDOWS = sized((16, 4), (2, 2))
CARDS = {"rtx3060": 12 * GB, "t4": 15 * GB, "rtx3080-mobile": 16 * GB, "a100": 12 * GB}
"""Memory of each; of the A100, which could hold all, as much as the smallest has."""
MAIN = ("rtx3060", "t4")
PASSES, WARM = sized((100, 60), (8, 4))
PROMPTS, BEAMS, BATCHES = sized(((512, 1024, 2048, 4096), (4, 8, 16), (1, 2, 4, 8, 16, 32, 64)), ((64,), (4,), (1, 8)))
SHARES = sized((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75), (0.5,))
LAYERS = {"2 of 8": (2, 1), "8 of 8": (8, 4), "8 of 128": (8, 1), "64 of 64": (64, 4), "128 of 128": (128, 16)}
"""Experts that a layer asks for, and tokens of each on the mean."""
DECIDED, ROUNDS = sized((300, 5), (4, 1))
TEXT, NEW_TOKENS = "The river rises in the hills north of the town", 24
EXPERT_BYTES = expert_of(4)[1].nbytes


class Bench:
    """What all comparisons run on."""

    def __init__(self, pack: Path) -> None:
        self.pack = pack
        self.heldout: Routes = recorded(pack, "heldout", HELDOUT_WINDOWS)
        self.calibration: Chosen = recorded(pack, "calibration", CALIBRATION_WINDOWS).chosen

    def run(self, setup: Setup, size: int = 1, passes: int = PASSES, warm: int = WARM) -> Ran:
        return replay(setup, self.calibration, self.heldout, size, passes, warm)


def ours(card: str, gpu_bytes: int | None = None) -> Setup:
    return Setup(card, gpu_bytes or CARDS[card])


def processor(card: str) -> Setup:
    return Setup(card, 1, "layers", "resident", "host", guesses=False)


def offloading(card: str) -> Setup:
    return replace(ours(card), keep="lru", rule="copied")


def split(card: str) -> Setup:
    return replace(ours(card), keep="layers", rule="resident", others="split", guesses=False)


def experts_split(card: str) -> Setup:
    return replace(split(card), others="device")


OTHERS = {
    "all on the processor": processor, "LRU offloading": offloading, "layers split": split,
    "experts of layers split, all else on the card": experts_split,
}  # fmt: skip


def compared(bench: Bench, card: str, what: str, size: int, passes: int, warm: int) -> Iterator[Row]:
    """Tokens a second of each, and of ours by the best of the others."""
    speeds = {}
    for name, setup in {"two devices": ours, **OTHERS}.items():
        speeds[name] = size / bench.run(setup(card), size, passes, warm).mean_s
        yield Row(f"{card}, {what}: {name}", speeds[name], "tokens/s")
    yield Row(f"{card}, {what}: by the best of the others", speeds["two devices"] / _best(speeds), "×")


def _best(speeds: dict[str, float]) -> float:
    return max(speed for name, speed in speeds.items() if name in OTHERS)


def request_rows(bench: Bench) -> Iterator[Row]:
    for card in MAIN:
        *rows, ratio = compared(bench, card, "one request", 1, PASSES, WARM)
        yield from [*rows, ratio.at_least(1.3)]
        alone = bench.run(replace(ours(card), guesses=False))
        yield Row(f"{card}, one request: two devices, nothing copied ahead", 1 / alone.mean_s, "tokens/s")


def prompt_rows(bench: Bench) -> Iterator[Row]:
    for card, size in product(MAIN, PROMPTS):
        *rows, ratio = compared(bench, card, f"prompt of {size}", size, 1, WARM)
        yield from [*rows, ratio.at_least(1.5)]
        cold = {name: bench.run(setup(card), size, 1, 0).mean_s for name, setup in {"two": ours, **OTHERS}.items()}
        best = min(seconds for name, seconds in cold.items() if name != "two") / cold["two"]
        yield Row(f"{card}, prompt of {size}, the first after a start: by the best of the others", best, "×")


def beam_rows(bench: Bench) -> Iterator[Row]:
    """Beams are sequences that are read together."""
    for card, size in product(MAIN, BEAMS):
        *_, ratio = compared(bench, card, f"{size} beams", size, PASSES // 4, WARM // 3)
        yield ratio.at_least(8)


def batch_rows(bench: Bench) -> Iterator[Row]:
    """Beside the better of all on the processor and all on the card, with copies."""
    for card in MAIN:
        least = float("inf")
        for size in BATCHES:
            setups = ours(card), processor(card), offloading(card)
            mine, *others = (bench.run(setup, size, PASSES // 4, WARM // 3).mean_s for setup in setups)
            least = min(least, min(others) / mine)
            yield Row(f"{card}, batch of {size}: by the better of processor and card", min(others) / mine, "×")
        yield Row(f"{card}, batches of 1 to 64: the least of these", least, "×").at_least(0.98)


def prediction_rows(bench: Bench) -> Iterator[Row]:
    for card in MAIN:
        for what, size, passes in (("token", 1, PASSES), ("pass of 8", 8, PASSES // 4), ("prompt of 1024", 1024, 1)):
            error = 100 * bench.run(ours(card), size, passes).error
            yield Row(f"{card}: prediction of a {what}'s time by the clock that times it, mean error", error, "%")


def hit_rows(bench: Bench) -> Iterator[Row]:
    """By the share of experts that the card has room for."""
    card = "rtx3060"
    whole = 256 * EXPERT_BYTES
    ways = {
        "popular": Setup(card, 0, "popular", "resident", guesses=False),
        "lru": Setup(card, 0, "lru", "copied", guesses=False),
        "expected": Setup(card, 0, "expected", "cheapest", guesses=False),
        "expected, copied ahead": Setup(card, 0, "expected", "cheapest"),
    }
    for share, (name, setup) in product(SHARES, ways.items()):
        gpu = int(share * whole) + 5 * GB
        large = replace(setup, card="a100", gpu_bytes=gpu)
        hits = 100 * bench.run(large).hit_rate
        yield Row(f"hits on the card with room for {100 * share:g}%: {name}", hits, "%")


def memory_rows(bench: Bench) -> Iterator[Row]:
    """Room for half of the experts in memory; the drive has the rest."""
    for card in MAIN:
        for name, setup in (("two devices", ours), ("all on the processor", processor)):
            ran = bench.run(replace(setup(card), memory_bytes=128 * EXPERT_BYTES))
            yield Row(f"{card}, memory for half of the experts: {name}", 1 / ran.mean_s, "tokens/s")


def pack_rows(bench: Bench) -> Iterator[Row]:
    """The wiki pack in the engine, with room on the card for half of its experts and in memory for a third."""
    from moert.engine.engine import Engine

    with Engine.open(bench.pack, threads=1) as engine:
        expected = engine.generate(TEXT, max_new_tokens=NEW_TOKENS).result.tokens
        experts, others = engine.budget.expert_bytes, engine.budget.backbone_bytes
    same, speeds = 0, {}
    for keep, rule, cache in product(KEEPS, RULES, (None, "33%")):
        with Engine.open(
            bench.pack, threads=1, cache=cache, device="sim:t4", gpu_memory=experts // 2 + 3 * others, device_keep=keep,
            device_experts=rule, notify=lambda note: None,
        ) as engine:  # fmt: skip
            same += engine.generate(TEXT, max_new_tokens=NEW_TOKENS).result.tokens == expected
            if cache is None:
                speeds[keep, rule] = engine.stats().tokens_per_s
    for keep, rule in (("expected", "cheapest"), ("lru", "copied"), ("layers", "resident")):
        yield Row(f"t4, the wiki pack: {keep}, {rule}", speeds[keep, rule], "tokens/s")
    yield replace(
        Row("t4, the wiki pack: settings with the processor's tokens", same, "of 24"), aim="24", met=same == 24
    )


def published_rows(bench: Bench) -> Iterator[Row]:
    """Mixtral-offloading's second table: experts at 2 and 3 bits, all else at 4."""
    for card, bits in product(CARDS, (3, 2)):
        for name, setup in (("their method", offloading), ("two devices", ours)):
            speed = 1 / bench.run(replace(setup(card), bits=bits, others_bits=4)).mean_s
            yield Row(f"{card}, experts at {bits} bits: {name}", speed, "tokens/s")


def deciding_rows(bench: Bench) -> Iterator[Row]:
    """New patterns, none of which is remembered; on this machine."""
    profile, weights = PROFILES["rtx3060"], 4096 * 14336
    kinds = [Kind(((bits, weights),) * 3, 3 * weights * bits // 8) for bits in (2, 4, 8)]
    for name, (experts, tokens) in LAYERS.items():
        placement = Placement(kinds, 4096, profile.device(), profile.host())
        rng = np.random.default_rng(0)
        runs = []
        for _ in range(ROUNDS):
            layers = [
                (
                    rng.integers(1, 2 * tokens + 1, experts).tolist(), rng.integers(0, 3, experts).tolist(),
                    rng.choice([IN_MEMORY, IN_MEMORY | ON_DEVICE], experts).tolist(),
                )
                for _ in range(DECIDED)
            ]  # fmt: skip
            placement._known.clear()
            started = time.process_time()
            for layer in layers:
                placement.decide(*layer)
            runs.append(1e6 * (time.process_time() - started) / DECIDED)
        yield row_of_runs(f"deciding a layer, {name} experts", runs, "µs").at_most(20)


PARTS = {
    "request": request_rows, "prompts": prompt_rows, "beams": beam_rows, "batches": batch_rows,
    "prediction": prediction_rows, "hits": hit_rows, "memory": memory_rows, "published": published_rows,
    "pack": pack_rows, "deciding": deciding_rows,
}  # fmt: skip


def main() -> int:
    pack = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO / "wiki.pack"
    bench = Bench(pack)
    rows: list[Row] = []
    for part in PARTS.values():
        rows += part(bench)
    settings = {
        "cards": {card: {"memory": nbytes, "simulated": True} for card, nbytes in CARDS.items()},
        "experts": "Mixtral-8x7B",
        "bits": 4, "other_bits": 16, "tokens": PASSES, "warm": WARM, "real card": "none was there",
    }  # fmt: skip
    write("devices", context(settings), rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
