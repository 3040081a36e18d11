"""Preferring routers with experts of OLMoE's size: wiki's routing replayed, and random routers beside llama.cpp."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moert.pack.files import atomic_write
from moert.pack.manifest import Preference
from moert.pack.reader import Pack
from recipes.bench import routing
from recipes.bench.contenders import MOERT, RESIDENT
from recipes.bench.less_packs import FOLDER, SHARES, Level, say, with_preferences
from recipes.bench.less_rows import speed_rows
from recipes.bench.llama import file_of
from recipes.bench.race import Entry, of_llama, of_setting, race
from recipes.bench.result import Row, row_of_runs
from recipes.bench.shaped import OLMOE
from recipes.bench.sized import sized
from recipes.bench.stream import DEVICES, LLAMA, SAME_AS_Q2_K, alive, disk_bytes_per_s, memory_bytes, tell
from recipes.bench.stream_packs import HELDOUT_WINDOWS, Packs, expert_bytes, shaped, texts
from recipes.bench.stream_rows import ratios
from recipes.bench.streamed import Setting, beginnings

if TYPE_CHECKING:
    from moert.models.router import PreferringRouter

NAME = "olmoe-shaped"
SECONDS, ROUNDS = sized((2.0, 3), (0.05, 1))
BESIDE_LLAMA, LLAMA_AIM = 0.5, 15.0
TOKENS, HALVINGS = sized((64, 10), (4, 2))  # that a bonus is tried on, and how often


def rows(
    packs: Mapping[float, Path], levels: Sequence[Level], devices: Sequence[str], failed: list[str]
) -> list[Row]:  # fmt: skip
    """`packs` and `levels` are wiki's, of what routing may lose beyond the widths."""
    found, like_olmoe = list[Row](), shaped()
    for each in devices:
        device, where = DEVICES[each], f"{NAME}, {each}"
        disk = disk_bytes_per_s(like_olmoe.mixed)
        outcomes = alive(where, race(device, _entries(like_olmoe, packs), SECONDS, ROUNDS), failed)
        found += speed_rows(where, outcomes, min(disk, device.read_bps or disk), device.read_bps is not None)
    try:
        subprocess.run([str(LLAMA), "-m", "recipes.bench.llama", "make"], check=True, capture_output=True)
        found += _beside_llama(like_olmoe, levels, failed)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        tell("llama.cpp", error, failed)
    return found


def _entries(packs: Packs, preferring: Mapping[float, Path]) -> list[Entry]:
    """Routed as wiki is: exactly, and with each level; no router is asked for what it prefers, so eviction is named."""

    def entry(what: str, share: float, routed: Path, eviction: str) -> Entry:
        setting = Setting(
            str(packs.mixed), int(share * expert_bytes(packs.mixed)), eviction=eviction, routing=str(routed)
        )
        return of_setting(f"{what} {share:.0%}", setting, MOERT.warm_tokens, memory_bytes(packs, share))

    assert packs.routing is not None
    entries = [
        of_setting(
            RESIDENT.name, Setting(str(packs.mixed), None, predict="none", routing=str(packs.routing)),
            RESIDENT.warm_tokens, None,
        )
    ]  # fmt: skip
    for share in SHARES:
        entries.append(entry("exact", share, packs.routing, "auto"))
        for beyond, pack in preferring.items():
            entries.append(entry(f"{100 * beyond:g}%", share, _recorded(pack, share), "layer-lru"))
    return entries


def _recorded(pack: Path, share: float) -> Path:
    """How a pack of wiki routes held-out text with its preference for a share."""
    out = FOLDER / f"{pack.stem}-{share:.0%}.npz"
    if not out.exists():
        heldout, guesses = routing.joined(pack, "heldout", HELDOUT_WINDOWS, f"{share:.0%}")
        with atomic_write(out) as fresh, fresh.open("wb") as stream:
            np.savez(stream, heldout=heldout, guesses=guesses)
    return out


# Beside llama.cpp -----------------------------------------------------------------------------------------------------


def _beside_llama(packs: Packs, levels: Sequence[Level], failed: list[str]) -> list[Row]:
    """Both go where random routers say, which llama.cpp can't be kept from. No loss can be measured of random weights:
    their bonus is such that as large a part of what exact routing asks for is asked for as on wiki."""
    level = max((each for each in levels if each.share == BESIDE_LLAMA), key=lambda each: each.beyond)
    preference = _as_little(packs.mixed, BESIDE_LLAMA, level.read / level.exact_read)
    preferring = with_preferences(packs.mixed, [preference], FOLDER / "olmoe-shaped.pack")
    limit, share = memory_bytes(packs, BESIDE_LLAMA), f"{BESIDE_LLAMA:.0%}"
    written = str(texts(OLMOE))
    settings = {
        f"exact {share}": Setting(str(packs.mixed), None, memory_bytes=limit, texts=written),
        f"preferring {share}": Setting(str(preferring), None, prefers=share, memory_bytes=limit, texts=written),
    }
    llama = f"llama.cpp {SAME_AS_Q2_K}"
    entries = [of_setting(name, setting, MOERT.warm_tokens, limit) for name, setting in settings.items()]
    entries.append(of_llama(llama, LLAMA, file_of(SAME_AS_Q2_K), limit, Path(written)))
    where = f"{NAME} (own routers), ssd, {limit / 1e6:.0f} MB"
    outcomes = alive(where, race(DEVICES["ssd"], entries, SECONDS, ROUNDS), failed)
    found = [row_of_runs(f"{where}: {name}: decode", each.speeds, "tokens/s") for name, each in outcomes.items()]
    preferred = outcomes.get(f"preferring {share}")
    if llama in outcomes and preferred is not None:  # exact routing beside llama.cpp is what bench-stream measures
        ratio = row_of_runs(
            f"{where}: preferring {share} to llama.cpp", ratios(preferred, outcomes[llama]), "× its speed"
        )
        found.append(ratio.at_least(LLAMA_AIM))
    return found


def _as_little(pack: Path, share: float, part: float) -> Preference:
    """The bonus, the same in all layers, with which `part` of what exact routing asks for is asked for."""
    moe = Pack.open(pack).manifest.model.moe
    count = int(share * moe.n)
    layers = len(Pack.open(pack).manifest.model.moe_layers())
    low, high = 0.0, 1.0

    def preference(bonus: float) -> Preference:
        return Preference(share, count, 1, (float(np.float32(bonus)),) * layers)

    exact = _asked(pack, preference(0.0))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        asked = _asked(pack, preference(middle))
        say(f"random routers, bonus {middle:.4f}: {asked / exact:.2f} of what exact routing asks for")
        low, high = (low, middle) if asked < part * exact else (middle, high)
    return preference(high)


def _asked(pack: Path, preference: Preference) -> int:
    """How often an expert was asked for that was not among those used last, in TOKENS tokens."""
    from moert.engine.engine import Engine
    from moert.models.router import PreferringRouter

    counts: list[int] = []

    def counted(router: PreferringRouter, x: object, lengths: object, recent: object = ()) -> object:
        before = [kept.experts.copy() for kept in recent]
        routed = PreferringRouter.route(router, x, lengths, recent)
        counts.extend(int((~np.isin(routed.experts[at], each)).sum()) for at, each in enumerate(before))
        return routed

    with Engine.open(pack, routing="exact", predict="none") as engine:
        engine.reserve(1, TOKENS)
        engine.model.prefer(preference)
        for at, router in engine.model.routers.items():
            if isinstance(router, PreferringRouter):
                engine.model.routers[at].route = partial(counted, router)
        first, *others = islice(beginnings(engine.spec.vocab_size), TOKENS)
        (state, unread), *_ = engine.model.begin([[first]])
        engine.model.read([state], [unread])
        for token in others:
            engine.model.step(state, token)
    return sum(counts)
