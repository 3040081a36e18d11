"""`make bench-edgemoe`: figures of EdgeMoE (Yi et al., arXiv 2308.14352) on trained models, beside its baselines.

For g2p and wiki: the experts' bytes and the held-out loss of our default, of the paper's own algorithm, and of all
experts at four bits, at two, and with widths as STI ranks them (Tab. 2); all of them run on an imitated drive of 500
MB/s, each in as many bytes as half of our experts take. For wiki also: times of samples beside the paper's baselines
(Fig. 12), sizes of the cache beside two bits under LRU (Fig. 14), and packs of several targets (Fig. 15). On experts of
OLMoE's size, with the recorded routing of wiki: reading ahead by path tables and by the next layer's router, beside
nothing read ahead (Fig. 16). Contenders of one model take turns. Writes build/bench/edgemoe.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeconv.artifacts import Assignment, Target, uniform
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.measuring import References
from moeconv.conversion.settings import Settings
from moeconv.dense import SOURCE
from moeconv.packing.emit import Label, emit
from moeconv.plan.problem import Plan
from moeconv.plan.search import assigned_bytes
from moeconv.progress import unseen
from moert.bench.command import percentile
from moert.pack.reader import Pack
from recipes.bench import race as races
from recipes.bench.conversions import Signals, Subject, opened
from recipes.bench.plans import measured, say
from recipes.bench.program import as_program, own_recipe
from recipes.bench.race import (
    CACHE,
    DEVICES,
    INT4_LRU,
    IO_EXP,
    IO_QEXP,
    MOERT,
    STI,
    Contender,
    Entry,
    alive,
    memory_bytes,
    race,
)
from recipes.bench.result import Row, row_of_runs, table
from recipes.bench.runner import Runner
from recipes.bench.sized import sized
from recipes.bench.stream_packs import DEMO, Packs, reference, shaped, texts, uniform_pack
from recipes.bench.stream_rows import raced_rows
from recipes.bench.streamed import Segment

FOLDER = Path("build/bench/edgemoe")
MODELS = ("g2p", "wiki")
TRAINED = "wiki"
"""The model of Fig. 12, 14 and 15."""
PAPER: Mapping[str, Any] = {
    "quantizer": "channel", "signal": "metric", "allocation": "greedy", "bits": (2, 4, 8, 16), "dense_bits": SOURCE,
    "confidence": None, "scales": "fitted",
}  # fmt: skip
"""Settings of a conversion as in the paper (docs/method.md)."""
TARGETS = (0.10, 0.15, 0.20)
"""Beside the target of the demo's pack."""
UNSURE: Mapping[str, Any] = sized({}, {"confidence": None})  # a few samples promise nothing
SHARES, HALF = (0.25, 0.5, 0.75), 0.5
SECONDS, SHAPED_SECONDS, ROUNDS, SAMPLES = sized((1.2, 2.0, 5, 40), (0.1, 0.1, 1, 2))
SSD, NVME = DEVICES["ssd"], DEVICES["nvme"]
TARGET, OURS, PAPERS, LOW = "target of {:.0%}", "ours", "paper's", "INT2, LRU"
NONE, GATE, PATHS = (replace(CACHE, name=name, predictor=name) for name in ("none", "gate", "transitions"))


# Sizes and losses: conversions by our default and by the paper's algorithm, and plans that need none.


@dataclass(frozen=True)
class Rivals:
    """The packs of one model: `packs` has ours, all experts at 4 and at 16 bits; `others` by name."""

    packs: Packs
    others: Mapping[str, Path]


def recipe(name: str, out: str, **changes: Any) -> Settings:
    """Returns the settings of a model's recipe with changes, for the pack FOLDER/OUT.pack."""
    settings = own_recipe(name, FOLDER).settings
    return replace(settings, out=FOLDER / f"{out}.pack", **changes)


def pack_rows(where: str, pack: Path) -> list[Row]:
    """Returns the bytes of a pack's experts, and the held-out loss that its conversion measured."""
    manifest = Pack.open(pack).manifest
    assert manifest.quality is not None
    assert manifest.quality.heldout is not None
    loss, nbytes = manifest.quality.heldout, sum(entry.tensor_bytes for entry in manifest.experts)
    return [
        Row(f"{where}: loss", 100 * loss.loss, "%").within(100 * loss.low, 100 * loss.high, loss.samples),
        Row(f"{where}: experts", nbytes / 1e6, "MB"),
    ]


def converted(where: str, settings: Settings) -> list[Row]:
    """Converts a model; returns the rows of its pack."""
    Conversion(settings, say, unseen).run()
    return pack_rows(where, settings.out)


def sti_widths(name: str, samples: int) -> Assignment:
    """Returns 4 bits for one half of the experts and 2 for the other, as STI ranks shards of a model (Guo et al. 2023):
    first those that gain most of the metric when they alone have all 16 bits, and all others 2."""
    subject = Subject(name, samples)
    spec, prober = subject.spec, subject.prober
    subject.trial.assign(uniform(spec, 2))
    base = prober.prepare()
    found = [each for at in spec.moe_layers() for each in prober.probe(subject.probes(at, 16))]
    signals = Signals(name, subject.metric, subject.reference, base, [each.scores for each in found])
    order = np.argsort(signals.rises("metric", np.arange(signals.samples)), kind="stable")
    widened = [found[at].probe.key for at in order[: len(order) // 2]]
    return uniform(spec, 2) | dict.fromkeys(widened, (4,) * len(spec.moe.ffn.projections))


def rivals(name: str) -> tuple[Rivals, list[Row]]:
    """Makes the packs of a model; returns them, with their sizes and losses. Raises ConversionError."""
    packs, settings = reference(name), recipe(name, f"{name}-paper", **PAPER)
    quality = Pack.open(packs.mixed).manifest.quality
    assert quality is not None
    assert quality.target_loss is not None
    rows = [Row(f"{name}: target", 100 * quality.target_loss, "%"), *pack_rows(f"{name}, {OURS}", packs.mixed)]
    rows += converted(f"{name}, {PAPERS}", settings)
    sti, ranked = FOLDER / f"{name}-sti.pack", sti_widths(name, settings.sweep_samples)
    with opened(settings) as bench:
        references, spec = References.of(bench), bench.spec
        for what, widths in {"INT4": uniform(spec, 4), STI.name: ranked, "INT2": uniform(spec, 2)}.items():
            plan = Plan(widths, assigned_bytes(spec, widths, bench.coding.storage), 0.0)
            rows += measured(f"{name}, {what}", bench, references, [plan])
        emit(bench.coder, ranked, sti, seed=0, label=Label("recipes.bench.edgemoe"))
    return Rivals(packs, {PAPERS: settings.out, STI.name: sti, LOW: uniform_pack(name, 2)}), rows


def targets(found: Rivals) -> tuple[Rivals, list[Row]]:
    """Converts the trained model for other targets by the demo's measurements; returns its packs with these too."""
    if (known := DEMO / f"{TRAINED}.work").exists():
        shutil.copytree(known, FOLDER / f"{TRAINED}.work", dirs_exist_ok=True)
    others, rows = dict(found.others), list[Row]()
    for loss in TARGETS:
        name = TARGET.format(loss)
        settings = recipe(TRAINED, f"{TRAINED}-{loss:.0%}", target=Target("loss", loss), **UNSURE)
        lost, nbytes = converted(f"{TRAINED}, {name}", settings)
        rows += [lost.at_most(100 * loss), nbytes]  # with a probability of 95%, which the conversion promised
        others[name] = settings.out
    return replace(found, others=others), rows


# Speeds. A share is of the bytes of our experts, for every pack.


def entry(contender: Contender, packs: Packs, share: float, pack: Path | None = None) -> Entry:
    """Returns a contender that runs in the room that our experts get, with the widths of `pack` where one is given. A
    decoder writes the same text with all widths."""
    if pack is not None:
        contender, packs = replace(contender, pack="int4"), replace(packs, int4=pack)
    setting = contender.setting(packs, share)
    if (spec := Pack.open(packs.mixed).manifest.model).encoder is None:
        setting = replace(setting, texts=str(texts(spec)))
    name = f"{contender.name} {share:.0%}"
    return races.of_setting(name, setting, contender.warm_tokens, memory_bytes(packs, share))


def width_rows(found: Rivals, failed: list[str]) -> list[Row]:
    """Returns the speeds of all packs of a model in half of our room (Tab. 2, Fig. 15)."""
    packs, where = found.packs, f"{found.packs.name}, {SSD.name}"
    rules = {PAPERS: replace(CACHE, eviction="paper"), STI.name: STI, LOW: INT4_LRU}
    entries = [entry(replace(MOERT, name=OURS), packs, HALF), entry(INT4_LRU, packs, HALF)]
    for name, pack in found.others.items():
        entries.append(entry(replace(rules.get(name, MOERT), name=name), packs, HALF, pack))
    mine, *others = (each.name for each in entries)
    outcomes = alive(where, race(SSD, entries, SECONDS, ROUNDS), failed)
    return raced_rows(where, outcomes, [(mine, other) for other in others])


def sample_rows(found: Rivals, failed: list[str]) -> list[Row]:
    """Returns times of samples (Fig. 12): a turn is a prompt and all tokens that are written after it."""
    packs, where = found.packs, f"{found.packs.name}, samples, {SSD.name}"
    room, most = memory_bytes(packs, HALF), memory_bytes(packs, max(SHARES))
    entries = [
        races.ours(replace(MOERT, name=OURS), packs, HALF, room),
        *(races.ours(each, packs, None, most) for each in (IO_EXP, IO_QEXP)),
        races.ours(STI, replace(packs, int4=found.others[STI.name]), HALF, room),
    ]

    def turn(runner: Runner, seconds: float) -> Segment:
        return Segment(**runner.ask("run", seconds, packs.new_tokens))

    outcomes = alive(where, race(SSD, [replace(each, turn=turn) for each in entries], 0.0, SAMPLES), failed)
    rows = []
    for name, outcome in outcomes.items():
        times = [1000 * segment.seconds for segment in outcome.segments]
        rows += [
            row_of_runs(f"{where}: {name}: median", times, "ms"),
            Row(f"{where}: {name}: 95th percentile", percentile(times, 95), "ms", n=len(times)),
        ]
    mine, *others = (each.name for each in entries)
    return rows + raced_rows(where, outcomes, [(mine, other) for other in others], speeds=False)


def cache_rows(found: Rivals, failed: list[str]) -> list[Row]:
    """Returns speeds over sizes of the cache, ours and two bits under LRU in turns (Fig. 14)."""
    packs, low, rows = found.packs, found.others[LOW], list[Row]()
    mine, other = replace(MOERT, name=OURS), replace(INT4_LRU, name=LOW)
    for device in (SSD, NVME):
        where = f"{packs.name}, caches, {device.name}"
        entries = [
            each for share in SHARES for each in (entry(mine, packs, share), entry(other, packs, share, low))
        ]  # fmt: skip
        outcomes = alive(where, race(device, entries, SECONDS, ROUNDS), failed)
        rows += raced_rows(where, outcomes, [(f"{OURS} {share:.0%}", f"{LOW} {share:.0%}") for share in SHARES])
    return rows


def ahead_rows(failed: list[str]) -> list[Row]:
    """Returns speeds of reading ahead in equal room, on experts of OLMoE's size (Fig. 16)."""
    packs, none = shaped(baselines=False), NONE.name
    smallest = min(each.file_bytes for each in Pack.open(packs.mixed).manifest.experts)
    rows = [Row(f"{packs.name}: smallest expert", smallest / 1e6, "MB")]
    for device in (SSD, NVME):
        where, room = f"{packs.name}, {device.name}", memory_bytes(packs, HALF)
        entries = [races.ours(each, packs, HALF, room) for each in (NONE, GATE, PATHS)]
        outcomes = alive(where, race(device, entries, SHAPED_SECONDS, ROUNDS), failed)
        pairs = [(f"{each.name} {HALF:.0%}", f"{none} {HALF:.0%}") for each in (GATE, PATHS)]
        rows += raced_rows(where, outcomes, pairs)
    return rows


def result_rows(failed: list[str]) -> Iterator[list[Row]]:
    """Yields the rows of each part. Raises ConversionError."""
    for name in MODELS:
        found, rows = rivals(name)
        yield rows
        if name == TRAINED:
            found, rows = targets(found)
            yield rows
            yield sample_rows(found, failed)
            yield cache_rows(found, failed)
        yield width_rows(found, failed)
    yield ahead_rows(failed)


def all_rows(failed: list[str]) -> Iterator[Row]:
    """Yields the rows of each part when it is done, and prints them."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for part in result_rows(failed):
        print(table(part), end="\n\n", file=sys.stderr, flush=True)
        yield from part


def main() -> int:
    settings = {"seconds": SECONDS, "shaped_seconds": SHAPED_SECONDS, "rounds": ROUNDS, "samples": SAMPLES}
    return races.bench("edgemoe", [DEMO / "summary.json"], all_rows, settings)


if __name__ == "__main__":
    as_program(main, __doc__)
