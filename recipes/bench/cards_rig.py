"""The engine's two tiers with experts that have sizes and no numbers: what a card would do with a model of any size.

Everything that decides is the engine's own (moert.beside.gpu.tiers, moert.beside.gpu.placement, the cache, reading
ahead); what would compute or read does nothing, and the simulated card's clock tells what it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from moert.beside.gpu.placement import ONLY_HELD, Kind, Placement
from moert.beside.gpu.residents import KEEPS, Residents
from moert.beside.gpu.simulated import PROFILES, SimulatedDevice
from moert.beside.gpu.tiers import CopyAhead, Lent, Others, Telling, TieredExperts, Tiers
from moert.experts.ahead import Lookahead
from moert.experts.cache import ExpertCache
from moert.experts.policy import EVICTION, Demand
from moert.experts.predictors import GateAhead
from moert.kernels.backend import ExpertView, ProjectionView
from moert.pack.model_spec import LayerKey
from moert.stats import DeviceCounters, ExpertCounters
from recipes.bench.cards_routing import Chosen, Guesses, Routes
from tests.shapes import Shape, every

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
        keeping = KEEPS[setup.keep](shares, ORDER, None)
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
        ahead = Lookahead(MIXTRAL, nbytes, self.cache, ExpertCounters(), GateAhead(), None) if setup.guesses else None
        if ahead is not None:
            ahead.reads = False
            ahead.routers = {at: cast("Any", _Asked(self, place)) for place, at in enumerate(ORDER)}
        self.runner = TieredExperts(tiers, self.cache, cast("Any", _Nothing()), MIXTRAL.moe.ffn, ahead)
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
