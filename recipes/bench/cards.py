"""`make bench-devices`: experts on a card, in memory and on a drive, beside experts in one of these places alone.

No card is needed: all of it runs on simulated cards (moert/beside/gpu/simulated.py), with the engine's own tiers and
experts of Mixtral-8x7B's sizes; their routing is the wiki model's, made as wide and as deep. Three other methods run
with the same kernels, machine and bits: everything on the processor; Mixtral-offloading's method (the latest experts of
each layer stay on the card, the others are copied, guessed ones ahead); and whole layers on the card, as llama.cpp
splits a model. The wiki pack itself runs in the engine as well. The time to decide is processor time of this machine;
all other times are a simulated card's.

Writes build/bench/devices.json.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from moert.beside.fill import Popularity, by_popularity
from moert.beside.gpu.device import DeviceCounters
from moert.beside.gpu.placement import IN_MEMORY, ON_DEVICE, ONLY_HELD, RULES, Kind, Placement
from moert.beside.gpu.residents import KEEPS, Keeping, Ranked, Residents
from moert.beside.gpu.simulated import PROFILES, SimulatedDevice
from moert.beside.gpu.tiers import CopyAhead, Lent, Others, Telling, TieredExperts, Tiers
from moert.experts.ahead import Further, Lookahead
from moert.experts.cache import ExpertCache
from moert.experts.policy import EVICTION, Demand, LayerOrder
from moert.experts.predictors import GateAhead
from moert.kernels.backend import ExpertView, ProjectionView
from moert.pack.files import atomic_write
from moert.pack.model_spec import LayerKey
from moert.stats import ExpertCounters
from recipes.bench import routing
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO
from tests.shapes import Shape, every

# Routing for a model of Mixtral's shape, recorded from the wiki model: no trace of Mixtral itself is published.
# The wiki model's 32 experts are taken four at a time: a token goes to the two such groups that hold the experts
# which its router ranks highest, and a group is guessed with the probability of its four. Its eight layers come
# four times over, each time with other text. So popularity, repetition from token to token and guesses are those of
# a trained model, of a smaller one than Mixtral. They came out like what is known of Mixtral: an expert of the
# token before comes again for 50 to 67% of tokens (46 to 67% there, Jiang et al. 2024), and of two guesses 80% are
# right.

LAYERS, EXPERTS, TOP_K = 32, 8, 2
_ROUNDS, _RANKED = 4, 8
FOLDER = Path("build/bench/cards")

Chosen = npt.NDArray[np.uint8]
Guesses = npt.NDArray[np.float16]


class Routes(NamedTuple):
    """`chosen` [tokens, LAYERS, TOP_K] ascending; `guesses` [tokens, LAYERS, EXPERTS]: probabilities by the router of
    the layer, asked a layer too early."""

    chosen: Chosen
    guesses: Guesses


def recorded(pack: Path, split: str, windows: int) -> Routes:
    """`windows` windows of text of each round, recorded once and kept."""
    kept = FOLDER / f"{split}-{windows}.npz"
    if not kept.exists():
        found = _record(pack, split, windows)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with atomic_write(kept) as fresh, fresh.open("wb") as stream:
            np.savez(stream, chosen=found.chosen, guesses=found.guesses)
    with np.load(kept) as read:
        return Routes(read["chosen"], read["guesses"])


def _record(pack: Path, split: str, windows: int) -> Routes:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pack / "tokenizer.json"))
    texts = routing.windows_of(routing.text_of(split), tokenizer, _ROUNDS * windows)
    ranked, guesses = routing.record(pack, texts, top_k=_RANKED)
    chosen = grouped(ranked)
    sums = guesses.astype(np.float32).reshape(*guesses.shape[:2], EXPERTS, -1).sum(-1).astype(np.float16)
    return Routes(*(_rounds(part, windows) for part in (chosen, sums)))


def grouped(ranked: npt.NDArray[np.uint8], size: int = 4) -> Chosen:
    """[tokens, layers, ranked], the best first → the two groups of `size` experts that come first in it, ascending."""
    groups = ranked // size
    first = groups[..., 0]
    other = groups != first[..., None]
    at = np.where(other.any(-1), other.argmax(-1), 0)
    second = np.take_along_axis(groups, at[..., None], -1)[..., 0]
    second = np.where(other.any(-1), second, (first + 1) % EXPERTS)
    return np.sort(np.stack([first, second], -1), -1).astype(np.uint8)


def _rounds(part: npt.NDArray[np.generic], windows: int) -> npt.NDArray[np.generic]:
    """[rounds × tokens, layers, n] → [tokens, rounds × layers, n]"""
    tokens = windows * routing.WINDOW
    parts = part.reshape(_ROUNDS, tokens, *part.shape[1:])
    return np.concatenate(list(parts), 1)[:, :LAYERS]


# The engine's two tiers with experts that have sizes and no numbers: what a card would do with a model of any size.
# Everything that decides is the engine's own (moert.beside.gpu.tiers, moert.beside.gpu.placement, the cache,
# reading ahead); what would compute or read does nothing, and the simulated card's clock tells what it takes.

MIXTRAL_SHAPE = Shape(
    32000, d_model=4096, n_heads=32, n_kv_heads=8, head_dim=128, decoder=every(32), num_experts=8, top_k=2, d_ff=14336,
    scale=128**-0.5, family="mixtral",
)  # fmt: skip
MIXTRAL = MIXTRAL_SHAPE.spec
WIDTH, D_FF = 4096, 14336
ORDER = MIXTRAL.moe_layers()
_ATTENTION = 2 * WIDTH * WIDTH + 2 * WIDTH * 1024
_HEAD = 32000 * WIDTH
_SCALES = 0.5
PAST = 125
"""Tokens of the calibration that the worth of experts is learned from."""
_STEPS_S = 50e-6  # of a layer on a card: some ten small kernels


def _least_popular(shares: Popularity, order: LayerOrder, succession: object) -> Keeping:
    ranked = by_popularity(shares, order)[::-1]
    return Keeping(Ranked(ranked), ranked)


def _at_random(shares: Popularity, order: LayerOrder, succession: object) -> Keeping:
    ranked = random.Random(0).sample(by_popularity(shares, order), k=len(order) * EXPERTS)
    return Keeping(Ranked(ranked), ranked)


PLACEMENTS = {"least popular": _least_popular, "at random": _at_random}
"""Controls beside KEEPS: experts that stay for good, as Fiddler's popular ones do."""


@dataclass(frozen=True)
class Setup:
    """`gpu_bytes`: of the card's memory; `bits`: of experts, `others_bits` of all else. `others`: what computes that,
    "device", "host", or "split": of a layer whoever has its experts. `memory_bytes`: for experts on the host; None:
    all of them."""

    card: str
    gpu_bytes: int
    keep: str = "expected"
    rule: str = "cheapest"
    others: str = "device"
    bits: int = 4
    others_bits: int = 16
    guesses: bool = True
    memory_bytes: int | None = None


@dataclass
class Ran:
    """Seconds of each pass, what the layers of all were predicted to take and took, and what was done."""

    passes: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    counters: DeviceCounters = field(default_factory=DeviceCounters)

    @property
    def mean_s(self) -> float:
        return sum(self.passes) / len(self.passes)

    @property
    def hit_rate(self) -> float:
        return self.counters.held / self.counters.asked

    @property
    def error(self) -> float:
        """Of the prediction of a pass, the mean over all."""
        pairs = zip(self.predicted, self.taken, self.passes, strict=True)
        return float(np.mean([abs(predicted - taken) / whole for predicted, taken, whole in pairs]))


class _Card(SimulatedDevice):
    """Holds sizes, and computes nothing."""

    def _made(self, view: ExpertView) -> None:
        return None

    def _parts(self, *_: Any) -> Any:
        return 0.0

    def _row_bytes(self, x: Any) -> int:
        return 4 * WIDTH


class _Nothing:
    """A Backend, as far as experts are concerned."""

    threads = 1
    widens = False

    def parts(self, *_: Any) -> None: ...

    def mixture(self, *_: Any) -> None: ...

    def add_parts(self, *_: Any) -> None: ...


class _Nobody:
    """An ExpertRunner that is never called: no layer of a simulated device is the processor's alone."""

    listeners: list[Any] = []  # noqa: RUF012

    def run(self, *_: Any) -> None: ...


class _Sizes:
    """A Store whose experts take room that nobody writes to, which takes no memory."""

    def __init__(self, nbytes: int, projections: Mapping[str, ProjectionView]) -> None:
        self._nbytes, self._projections = nbytes, projections

    def nbytes(self, key: object) -> int:
        return self._nbytes

    def read_all(self, wanted: Sequence[Any]) -> list[Any]:
        return [into for _, into in wanted]

    def expert(self, key: object, buffer: Any) -> Any:
        return Lent(ExpertView(buffer, self._projections), cast("Any", None))

    def close(self) -> None: ...


class _Split(Telling):
    """A layer's other weights are where most of its experts are."""

    def __init__(self, *given: Any, residents: Residents, host: Others, device: Others) -> None:
        super().__init__(*given)
        self._residents, self._by = residents, (host, device)

    def layer(self, at: LayerKey, tokens: int) -> None:
        there = sum(at.expert(number) in self._residents for number in range(MIXTRAL.moe.n))
        self._others = self._by[2 * there > MIXTRAL.moe.n]
        super().layer(at, tokens)


class _Asked:
    """A router that says what was recorded."""

    def __init__(self, rig: Rig, place: int) -> None:
        self._rig, self._place = rig, place

    def guess(self, x: Any) -> Any:
        return self._rig.guesses[:, self._place].astype(np.float32).mean(0)


class Rig:
    """An engine's experts in one setup; `calibration`: what popularity is counted in."""

    def __init__(self, setup: Setup, calibration: Chosen) -> None:
        self.setup, self.guesses = setup, np.zeros((1, len(ORDER), MIXTRAL.moe.n), np.float16)
        profile = PROFILES[setup.card]
        device = _Card(f"sim:{setup.card}", profile, setup.gpu_bytes, cast("Any", _Nothing()))
        views, kind = expert_of(setup.bits)
        keys = [at.expert(number) for at in ORDER for number in range(MIXTRAL.moe.n)]
        self.expert_bytes = kind.nbytes
        if setup.others == "device":
            device.take((len(ORDER) * _ATTENTION + 2 * _HEAD) * setup.others_bits // 8)
        placement = Placement([kind], WIDTH, device.costs(), profile.host(), setup.rule)
        counters = DeviceCounters()
        shares = {
            at: np.bincount(calibration[:, place].reshape(-1), minlength=MIXTRAL.moe.n) / len(calibration)
            for place, at in enumerate(ORDER)
        }
        keeping = {**KEEPS, **PLACEMENTS}[setup.keep](shares, ORDER, None)
        room = max(kind.nbytes, device.capacity_bytes - device.used_bytes - device.scratch_bytes(1024, WIDTH, D_FF))
        residents = Residents(device, dict.fromkeys(keys, kind.nbytes), keeping.policy, room, counters)
        residents.learn(
            Demand(at, tuple(sorted({*token[place].tolist()})))
            for token in calibration[-PAST:]
            for place, at in enumerate(ORDER)
        )
        whole = kind.nbytes * len(keys)
        store = _Sizes(kind.nbytes, views)
        memory = EVICTION["expected"](ORDER)
        self.cache = ExpertCache(cast("Any", store), memory, setup.memory_bytes or whole, ExpertCounters())
        kind_of, nbytes = dict.fromkeys(keys, 0), dict.fromkeys(keys, kind.nbytes)
        copies = None
        if setup.rule != ONLY_HELD:
            copies = CopyAhead(self.cache, residents, placement, kind_of, counters, device.clock.now)
        telling = self._telling(device, residents)
        tiers = Tiers(device, residents, placement, kind_of, nbytes, counters, copy_ahead=copies, telling=telling)
        ahead = None
        if setup.guesses:
            asked = {at: cast("Any", _Asked(self, place)) for place, at in enumerate(ORDER)}
            further = Further(asked, copies=copies, reads=False)
            ahead = Lookahead(MIXTRAL, nbytes, self.cache, ExpertCounters(), GateAhead(), further)
        self.runner = TieredExperts(tiers, self.cache, cast("Any", _Nothing()), MIXTRAL.experts, ahead, _Nobody())
        self.tiers, self._ahead = tiers, ahead
        self._fill_memory(keys)
        if setup.gpu_bytes > kind.nbytes:
            self.runner.fill(keeping.first)
        device.clock.host(1e3)  # all of that is long done

    def run(self, chosen: Chosen, guesses: Guesses, into: Ran) -> None:
        """One pass of tokens [tokens, layers, top_k] through all layers."""
        tokens, clock, counters = len(chosen), self.tiers.device.clock, self.tiers.counters
        self.guesses = guesses
        hidden = np.zeros((tokens, 1), np.float32)
        weights = np.full((tokens, chosen.shape[2]), 0.5, np.float32)
        began, before = clock.now(), (counters.predicted_s, counters.taken_s)
        for place, at in enumerate(ORDER):
            self.runner.run(at, hidden, chosen[:, place].astype(np.int64), weights, hidden, hidden)
        into.passes.append(clock.now() - began)
        into.predicted.append(counters.predicted_s - before[0])
        into.taken.append(counters.taken_s - before[1])
        into.counters = counters

    def close(self) -> None:
        self.cache.close()

    def _fill_memory(self, keys: Sequence[Any]) -> None:
        if self.setup.memory_bytes is None:
            self.cache.begin(Demand(ORDER[0], ()))
            for key in keys:
                with self.cache.lease([key]) as lease:
                    lease.all()

    def _telling(self, device: SimulatedDevice, residents: Residents) -> Telling:
        setup, host = self.setup, device.host_costs()
        bits = setup.others_bits
        there = Others(_ATTENTION, _HEAD, device.costs().widths[bits], _STEPS_S)
        here = Others(_ATTENTION, _HEAD, host.widths[bits], 0.0)
        given = device.clock, host, here if setup.others == "host" else there, ORDER[-1]
        if setup.others == "split":
            return _Split(*given, residents=residents, host=here, device=there)
        return Telling(*given)


def expert_of(bits: int) -> tuple[dict[str, ProjectionView], Kind]:
    """One of Mixtral's, at these bits in groups of 64."""
    shapes = {"gate": (D_FF, WIDTH), "up": (D_FF, WIDTH), "down": (WIDTH, D_FF)}
    views = {name: ProjectionView(shape, bits, 64, "F16", (0, 0, 0)) for name, shape in shapes.items()}
    weights = D_FF * WIDTH
    nbytes = int(3 * weights * (bits + _SCALES) / 8)
    return views, Kind(((bits, weights),) * 3, nbytes + -nbytes % 4096)


def replay(setup: Setup, calibration: Chosen, routes: Routes, size: int, passes: int, warm: int = 0) -> Ran:
    """`passes` passes of `size` tokens, of sequences that stand at different places of the text, after some that are
    not counted. A single pass is a prompt, and what comes before it are single tokens."""
    rig, ran = Rig(setup, calibration), Ran()
    try:
        for number in range(warm + passes):
            if number == warm:
                ran = Ran()
                counters = rig.tiers.counters
                for name in vars(counters):
                    setattr(counters, name, type(getattr(counters, name))(0))
            rows = _rows(len(routes.chosen), 1 if passes == 1 and number < warm else size, number, passes == 1)
            rig.run(routes.chosen[rows], routes.guesses[rows], ran)
    finally:
        rig.close()
    return ran


def _rows(tokens: int, size: int, number: int, prompt: bool) -> Any:
    if prompt and size > 1:
        return np.arange(size) % tokens
    stride = tokens // size
    return (number + stride * np.arange(size)) % tokens


GB = 10**9
HELDOUT_WINDOWS, CALIBRATION_WINDOWS = sized((16, 4), (2, 2))
CARDS = {"rtx3060": 12 * GB, "t4": 15 * GB, "rtx3080-mobile": 16 * GB, "a100": 12 * GB}
"""Memory of each; of the A100, which could hold all, as much as the smallest has."""
MAIN = ("rtx3060", "t4")
PASSES, WARM = sized((100, 60), (8, 4))
PROMPTS, BEAMS, BATCHES = sized(((512, 1024, 2048, 4096), (4, 8, 16), (1, 2, 4, 8, 16, 32, 64)), ((64,), (4,), (1, 8)))
SHARES = sized((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75), (0.5,))
LAYER_SIZES = {"2 of 8": (2, 1), "8 of 8": (8, 4), "8 of 128": (8, 1), "64 of 64": (64, 4), "128 of 128": (128, 16)}
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
        **{keep: Setup(card, 0, keep, "resident", guesses=False) for keep in (*PLACEMENTS, "popular")},
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
    for name, (experts, tokens) in LAYER_SIZES.items():
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
    need([pack], "demo")
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
    as_program(main, __doc__, "[PACK]")
