"""`make bench-sida`: SiDA's set-up as a whole beside others, and the observations that it is built on (Du et al. 2023);
Mixtral-offloading's ablation on experts of real size (Eliseev & Mazur 2023).

Parts, each for g2p and marks: `sizes` of experts; `used` expert memory by length; `idle` experts, and choices that stay
where further tokens change; `critical` tokens (Eq. 2); `kept` performance with one and three experts of the hash
function; `whole`, the race of the set-up on a drive of 500 MB/s. Then `ablation`. All text is held out.

Writes build/bench/sida.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from moert.bench.measure import BenchSettings, measure, silent
from moert.beside.sida.foresight import ForeseeingRouter
from moert.beside.sida.network import network_bytes
from moert.engine.engine import Engine
from moert.engine.settings import EngineSettings
from moert.pack.files import write_atomically
from moert.pack.learnt import HASH
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack
from recipes.bench.choices import Input, Reader, choices, special
from recipes.bench.hash_measures import (
    FOLDER,
    LENGTHS,
    SUBJECTS,
    Subject,
    heldout,
    inputs,
    judged_by,
    say,
    source,
    with_function,
)
from recipes.bench.hashed import HALF, demanded, with_function_bytes
from recipes.bench.program import as_program
from recipes.bench.race import (
    DEVICES,
    MOERT,
    ON_DEMAND,
    PRELOAD,
    Entry,
    alive,
    bench,
    memory_bytes,
    of_setting,
    race,
)
from recipes.bench.result import Row, row_of_runs, table
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO, expert_bytes, shaped
from recipes.bench.stream_rows import raced_rows
from recipes.bench.streamed import THREADS, Segment, Setting

MODELS = sized(("g2p", "marks"), ("g2p",))
DRIVE = DEVICES["ssd"]
DISK_BYTES_PER_S = 500e6
"""Given to runs that are not timed, so that no drive is measured."""
ROUNDS, SECONDS = sized((5, 1.5), (1, 0.1))

# The observations that SiDA is built on: the size of experts, how few of them an input needs, and by how few of its
# tokens each choice is decided.


def size_rows(subject: Subject) -> Iterator[Row]:
    """Yields the experts' share of the weights (SiDA, Table 2): of their number, and of the bytes of the pack."""
    manifest = Pack.open(source(subject)).manifest
    spec = manifest.model
    one = sum(prod(spec.projection_shape(name)) for name in spec.moe.ffn.projections)
    experts, others = one * len(manifest.experts), sum(prod(tensor.shape) for tensor in spec.tensors.values())
    held = sum(entry.file_bytes for entry in manifest.experts)
    yield Row(f"{subject.name}: weights", (experts + others) / 1e6, "M")
    yield Row(f"{subject.name}: experts, of all weights", 100 * experts / (experts + others), "%")
    yield Row(f"{subject.name}: experts, of the pack", 100 * held / manifest.nbytes(), "%")


def used_rows(subject: Subject) -> Iterator[Row]:
    """Yields the expert memory that inputs and their answers use (SiDA, Figure 2)."""
    for length in LENGTHS:
        shares = demanded(subject, length)
        tokens = sum(map(len, inputs(subject, length))) / len(shares)
        yield Row(f"{subject.name}, {length}: tokens", tokens, "an input", n=len(shares))
        used = 100 * sum(shares) / len(shares)
        yield Row(f"{subject.name}, {length}: expert memory that an input uses", used, "%", n=len(shares))


TEXTS = sized(60, 6)


def choice_rows(subject: Subject) -> Iterator[Row]:
    """Yields idle experts by the tokens that are read (SiDA, Figure 4), and the choices that stay where all tokens from
    a distance on change, as `recipes.bench.sweeps` draws both."""
    texts = [row["input"] for row in heldout(subject)[:TEXTS]]
    settings = BenchSettings(EngineSettings(predict="none", routing="exact", threads=THREADS), subject.new_tokens)
    found = choices(measure(subject.pack, settings, texts, DISK_BYTES_PER_S, silent), texts)
    for stack, shares in found.idle.items():
        for tokens, share in shares.items():
            yield Row(f"{subject.name}, {stack}, {tokens} tokens: idle experts", share, "%")
    for stack, shares in found.same.items():
        for distance, share in shares.items():
            yield Row(f"{subject.name}, {stack}, changed from {distance} on: choices that stay", share, "%")


CORRUPTED = (0.1, 0.3, 0.5, 0.7)
"""Shares of an input's tokens."""
DRAWS = sized(100, 8)
LEAST = {"tokens": 1, "positions": 2}
"""Tokens that must be changed: one alone changes no place."""


def critical_rows(subject: Subject) -> Iterator[Row]:
    """Yields how often a token's choice changes if a share of the others become random, or change places (SiDA, Figure
    7), and the number of critical tokens c that follows by Eq. 2; mean over layers. Special tokens stay."""
    with Engine.open(subject.pack, predict="none", routing="exact", threads=THREADS, notify=silent) as engine:
        texts, marks, rng = inputs(subject, "long"), special(engine.spec), np.random.default_rng(0)
        places = [np.array([place for place, token in enumerate(ids) if token not in marks]) for ids in texts]
        pool = np.array(sorted({token for ids in texts for token in ids} - marks))
        read = Reader(engine, "encoder").read
        before = read([Input(ids, ids) for ids in texts])
        for kind in LEAST:
            for share in CORRUPTED:
                drawn, changed = [], []
                for _ in range(DRAWS):
                    number = int(rng.integers(len(texts)))
                    own, *others = rng.permutation(places[number]).tolist()
                    gone = others[: int(share * (1 + len(others)))]
                    if len(gone) < LEAST[kind]:
                        continue
                    ids = corrupted(texts[number], own, gone, pool if kind == "tokens" else None, rng)
                    drawn.append((number, own, len(others), len(gone)))
                    changed.append(Input(ids, ids))
                differs = []
                for (number, own, _, _), experts in zip(drawn, read(changed), strict=True):
                    old, new = before[number][own], experts[own]  # [layers, top_k]
                    differs += (old != new)[(old >= 0) & (new >= 0)].tolist()
                if not differs:
                    continue
                rate, where = float(np.mean(differs)), f"{subject.name}, {share:.0%} of the {kind} changed"
                yield Row(f"{where}: choices that change", 100 * rate, "%", n=len(differs))
                count = critical(rate, [(others, gone) for _, _, others, gone in drawn])
                yield Row(f"{where}: critical tokens", count, "c", n=len(differs))


def corrupted(
    ids: Sequence[int], own: int, gone: Sequence[int], pool: np.ndarray | None, rng: np.random.Generator
) -> list[int]:  # fmt: skip
    """Returns an input whose tokens at `gone` are others of `pool`, neither the old ones nor the token at `own`;
    without a pool, they change places."""
    found = list(ids)
    for place, after in zip(gone, [*gone[1:], *gone[:1]], strict=True):
        unlike = None if pool is None else np.setdiff1d(pool, [ids[place], ids[own]])
        found[place] = ids[after] if unlike is None else int(rng.choice(unlike))
    return found


def critical(rate: float, drawn: Sequence[tuple[int, int]]) -> float:
    """Returns the c at which Eq. 2 expects this rate of changes, on the mean of `drawn`: for each, the other tokens and
    the number of these that were changed. c need not be whole; it is at most the number of others."""
    low, high = 0.0, float(max(others for others, _ in drawn))
    for _ in range(50):
        middle = (low + high) / 2
        expected = sum(found_critical(middle, *each) for each in drawn) / len(drawn)
        low, high = (middle, high) if expected < rate else (low, middle)
    return low


def found_critical(c: float, others: int, gone: int) -> float:
    """Returns the probability that `gone` of `others` tokens have one of c critical ones among them (SiDA, Eq. 2)."""
    return 1.0 - prod(max(0.0, others - c - at) / (others - at) for at in range(gone))


# Performance with the function in the place of the routers: one expert for each token, and three, as SiDA takes for
# longer texts.

THREE = 3


def kept_rows(subject: Subject) -> Iterator[Row]:
    """Yields the performance with routers, and with the function in their place."""
    metric, exact = Path(subject.metric).stem, judged_by(subject, "exact")
    yield Row(f"{subject.name}: {metric} with routers", exact, "")
    for count, change in ((1, lambda engine: None), (THREE, routed_to_three)):
        found = judged_by(subject, "hash", change)
        yield Row(f"{subject.name}: {metric} with {count} of the function", found, "")
        yield Row(f"{subject.name}: kept with {count} of the function", found / exact, "of its performance")


def routed_to_three(engine: Engine) -> None:
    """Has each token go to the three experts that the function ranks highest, weighed by their shares."""
    for at, router in engine.model.routers.items():
        assert isinstance(router, ForeseeingRouter)
        engine.model.routers[at] = ForeseeingRouter(router._exact, router._backend, router._numbers, THREE)


# The set-up as a whole: routers left out, experts read by the function, the first that came the first to leave; beside
# our default without the function in equal room, and with the function's memory as further room.

WHOLE, OURS, EQUAL = "as a whole", "on demand", "in equal memory"
RACED = ("short", "long")


def sides(subject: Subject, prompts: Path) -> dict[str, Setting]:
    """Returns the settings of each side. Where EQUAL has room for all experts, they are all in memory at the start."""
    every, function = expert_bytes(subject.pack), function_bytes(subject)
    ours = Setting(
        str(subject.pack), int(HALF * every), predict="none", prompts=str(prompts), new_tokens=subject.new_tokens,
        prefers="exact",
    )  # fmt: skip
    room = int(HALF * every) + function
    return {
        WHOLE: replace(ours, eviction="fifo", predict="hash", prefers="hash"),
        OURS: ours,
        EQUAL: replace(ours, cache_bytes=None if room >= every else room),
    }


def function_bytes(subject: Subject) -> int:
    """Returns the memory of the hash function, as the budget counts it."""
    return network_bytes(Pack.open(subject.pack).manifest.files[HASH].nbytes)


def whole_rows(subject: Subject, failed: list[str]) -> Iterator[Row]:
    """Yields the memory of weights, and of each length the time of an input and throughputs beside others."""
    every, backbone = expert_bytes(subject.pack), Pack.open(subject.pack).manifest.files[BACKBONE].nbytes
    for name, function in ((WHOLE, function_bytes(subject)), (OURS, 0)):
        yield Row(f"{subject.name}: weights in memory, {name}", (HALF * every + backbone + function) / 1e6, "MB")
    yield Row(f"{subject.name}: weights in memory, all resident", (every + backbone) / 1e6, "MB")
    equal = min(1.0, HALF + function_bytes(subject) / every)
    yield Row(f"{subject.name}: room for experts {EQUAL}", 100 * equal, "%")
    for length in RACED:
        texts = inputs(subject, length)
        prompts = FOLDER / f"{subject.name}-{length}.jsonl"
        write_atomically(prompts, "".join(f"{json.dumps(ids)}\n" for ids in texts).encode())
        entries = [
            answering(
                of_setting(name, setting, 0, setting.cache_bytes and with_function_bytes(subject.pack, 1.0)), len(texts)
            )
            for name, setting in sides(subject, prompts).items()
        ]
        where = f"{subject.name}, {length}"
        found = alive(where, race(DRIVE, entries, 0.0, ROUNDS), failed)
        for name, outcome in found.items():
            times = [1000 * segment.seconds / len(texts) for segment in outcome.segments]
            yield row_of_runs(f"{where}: {name}: latency", times, "ms")
            yield Row(f"{where}: {name}: tokens", outcome.segments[0].tokens / len(texts), "an answer")
        for name in (OURS, EQUAL):
            if WHOLE in found and name in found:
                pairs = zip(found[WHOLE].segments, found[name].segments, strict=True)
                gains = [theirs.seconds / mine.seconds for mine, theirs in pairs]
                yield row_of_runs(f"{where}: {WHOLE} to {name}", gains, "× its throughput")


def answering(entry: Entry, prompts: int) -> Entry:
    """Returns an entry whose turns, the one to warm up among them, answer so many prompts."""
    return replace(
        entry,
        warm=lambda runner: runner.ask("answer", prompts),
        turn=lambda runner, seconds: Segment(**runner.ask("answer", prompts)),
    )


# Mixtral-offloading's ablation: the latest experts of each layer are kept, the next layer's router names those to read
# ahead, and a token's experts that are in memory run while others are read.

EVERYTHING = replace(MOERT, name="everything", eviction="layer-lru", predictor="gate")
WITHOUT_AHEAD = replace(EVERYTHING, name="without reading ahead", predictor="none")
WITHOUT_CACHE = replace(PRELOAD, name="without the cache", predictor="gate")
NAIVE = replace(ON_DEMAND, name="naive")
NOT_FIRST = "without present experts first"


def ablation_rows(failed: list[str]) -> list[Row]:
    """Returns speeds and hits with half of the experts' room, where a cache is, and how much faster everything is."""
    model = shaped(baselines=False)
    limit = memory_bytes(model, HALF)
    entries = [
        of_setting(each.name, each.setting(model, HALF), each.warm_tokens, limit)
        for each in (EVERYTHING, WITHOUT_AHEAD, WITHOUT_CACHE, NAIVE)
    ]
    waits = replace(EVERYTHING.setting(model, HALF), present_first=False)
    entries.append(of_setting(NOT_FIRST, waits, EVERYTHING.warm_tokens, limit))
    found = alive(model.name, race(DRIVE, entries, SECONDS, ROUNDS), failed)
    mine, *others = (each.name for each in entries)
    return raced_rows(model.name, found, [(mine, other) for other in others])


PARTS: Mapping[str, Callable[[Subject], Iterable[Row]]] = {
    "sizes": size_rows, "used": used_rows, "idle": choice_rows, "critical": critical_rows, "kept": kept_rows,
}  # fmt: skip


def all_rows(failed: list[str]) -> Iterator[Row]:
    """Yields the rows of each part when it is done; says on stderr how long it took."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    subjects = [SUBJECTS[name] for name in MODELS]
    for subject in subjects:
        with_function(subject)
    yield from size_rows(SUBJECTS["wiki"])
    steps = [(f"{each.name}, {part}", partial(rows, each)) for part, rows in PARTS.items() for each in subjects]
    steps += [(f"{each.name}, whole", partial(whole_rows, each, failed)) for each in subjects]
    for name, rows in [*steps, ("ablation", partial(ablation_rows, failed))]:
        started = time.perf_counter()
        found = list(rows())
        say(f"{table(found)}\n{name}: {time.perf_counter() - started:.0f} s\n")
        yield from found


def main() -> int:
    return bench("sida", [DEMO / "wiki.pack"], all_rows, {"rounds": ROUNDS, "seconds": SECONDS})


if __name__ == "__main__":
    as_program(main, __doc__)
