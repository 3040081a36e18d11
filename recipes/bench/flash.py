"""`make bench-flash`: single neurons in place of whole experts, by the tables and curves of "LLM in a flash" (Alizadeh
et al., arXiv 2312.11514), on the reference models with ReLU.

Parts: `bytes` that are read for a token beside whole experts in the same room; `steps` from loading all that a token
needs to what is here, on imitated drives; `today`, the speed beside whole experts; `curves` of what a window leaves to
be loaded, and of hits; `memory`, slots beside copies; `order`, in which order neurons lie best; `drafts` by n-grams;
`reads`, the speed of the drive by the size of a read; `shapes` of published models with recorded firings. Races also
say where a token's time goes, and what the process held. All text is held out.

Writes build/bench/flash.json."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from moeconv.conversion.settings import neurons_of
from moeconv.conversion.taught import usual_rank
from moeconv.order import NeuronOrder, by_frequency, load_order
from moeconv.writer import add_to_pack
from moert.bench.curve import CELL_S, IN_FLIGHT, curve_of
from moert.beside.flash.runner import EXACT, PREDICTED
from moert.pack.errors import Error
from moert.pack.learnt import PREDICTOR, NeuronPredictor
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import MANIFEST, Pack
from recipes.bench import drafts
from recipes.bench.flash_firings import (
    COUNTED,
    IN_THE_PACK,
    Firings,
    Recorder,
    hit_rows,
    managed_rows,
    order_rows,
    window_rows,
)
from recipes.bench.flash_measures import (
    BITS,
    BUNDLED,
    COLUMNS,
    FOLDER,
    HALF,
    NAIVE,
    NAMED,
    NEURONS,
    SUBJECTS,
    TODAY,
    TODAY_AIM,
    WHOLE,
    Subject,
    bytes_rows,
    counted_of,
    inputs,
    memory_bytes,
    of_naive_rows,
    opened,
    pack_of,
    predicting,
    prompts_file,
    raced_rows,
    room_of,
    say,
    steps_rows,
    today_rows,
    write_texts,
)
from recipes.bench.program import as_program
from recipes.bench.race import DEVICES, Entry, alive, of_setting, race, read_ahead, tell
from recipes.bench.result import Row, context, table, write
from recipes.bench.runner import Runner
from recipes.bench.shape_numbers import described
from recipes.bench.shaped import DENSE, write_pack
from recipes.bench.sized import sized
from recipes.bench.stream_packs import expert_bytes, layer_bytes
from recipes.bench.streamed import THREADS, Setting
from tests.cgroups import missing
from tests.published import PUBLISHED
from tests.random_predictor import random_layer

# Speeds on imitated drives: the steps of "LLM in a flash" (Table 2) from loading all that a token needs to what is
# here, and neurons beside whole experts in the same room. Where the time of a token goes is seen behind each race.

SHARES = (0.25, 0.5, 0.75)
RACE_WARM_TOKENS, RACED_TOKENS = sized((48, 64), (4, 4))


@dataclass(frozen=True)
class Step:
    """`half`: room for half of the weights, else for what a layer needs; `neurons`, `keeping`: as --tune neurons and
    --tune keep-neurons."""

    name: str
    layout: str
    half: bool
    neurons: str = EXACT
    keeping: str = "recent"


KEPT = f"{TODAY}, half kept"
STEPS = (
    Step(NAIVE, WHOLE, half=False), Step(KEPT, WHOLE, half=True), Step("what fires", COLUMNS, half=False),
    Step("what fires, + window", COLUMNS, half=True, keeping="window"),
    Step("what fires, kept by use", COLUMNS, half=True),
    Step("+ predictor", COLUMNS, half=False, neurons=PREDICTED),
    Step("+ window", COLUMNS, half=True, neurons=PREDICTED, keeping="window"),
    Step("+ bundles", BUNDLED, half=True, neurons=PREDICTED, keeping="window"),
    Step("kept by use", BUNDLED, half=True, neurons=PREDICTED),
)  # fmt: skip


def entry_of(subject: Subject, step: Step) -> Entry:
    pack = predicting(subject, step.layout) if step.neurons == PREDICTED else pack_of(subject, step.layout)
    room = room_of(subject, HALF) if step.half else layer_bytes(pack)
    setting = Setting(
        str(pack), room, "lru" if step.name == NAIVE else "auto", "none", prompts=str(prompts_file(subject)),
        new_tokens=subject.new_tokens, keep_neurons=step.keeping, neurons=step.neurons,
    )  # fmt: skip
    warm = RACE_WARM_TOKENS if step.half else 2
    return of_setting(step.name, setting, warm, memory_bytes(subject, HALF), timed_tokens=RACED_TOKENS)


def step_race(subject: Subject, device: str, seconds: float, rounds: int, failed: list[str]) -> Iterator[Row]:
    """The same room for the process in all steps."""
    where = f"{subject.name}, {device}, steps"
    entries = [entry_of(subject, step) for step in STEPS]
    outcomes = alive(where, race(DEVICES[device], entries, seconds, rounds), failed)
    yield from raced_rows(where, outcomes, memory_bytes(subject, HALF))
    yield from steps_rows(where, device, outcomes, STEPS[-1].name)


def today_race(subject: Subject, device: str, seconds: float, rounds: int, failed: list[str]) -> Iterator[Row]:
    """The packs of today's layout and those by neurons, in the same room."""
    prompts, where = prompts_file(subject), f"{subject.name}, {device}"

    def entry(name: str, pack: Path, share: float, neurons: str = EXACT) -> Entry:
        setting = Setting(
            str(pack), room_of(subject, share), predict="none", prompts=str(prompts), new_tokens=subject.new_tokens,
            neurons=neurons,
        )  # fmt: skip
        memory = memory_bytes(subject, share)
        return of_setting(f"{name} {share:.0%}", setting, RACE_WARM_TOKENS, memory, timed_tokens=RACED_TOKENS)

    entries = []
    for share in SHARES:
        entries += [entry(TODAY, pack_of(subject, WHOLE), share), entry(NEURONS, pack_of(subject, COLUMNS), share)]
        if subject.predicted:
            entries.append(entry(NAMED, predicting(subject, BUNDLED), share, PREDICTED))
    outcomes = alive(where, race(DEVICES[device], entries, seconds, rounds), failed)
    yield from raced_rows(where, outcomes, memory_bytes(subject, max(SHARES)))
    names = [f" {share:.0%}" for share in SHARES]
    yield from today_rows(where, outcomes, names, TODAY_AIM if device == "ssd" and not subject.dense else None)


# Models of published shapes, whose weights are made up, with the firings of trained ones replayed: neurons beside
# whole parts on an imitated drive, in control groups of exactly `--memory`. The packs are removed behind it.

BESIDE_BYTES = 120_000_000
"""About what Python, its libraries, keys, values and what the engine leaves free take."""
LEAST_SECONDS, TIMED_TOKENS = sized(4.0, 0.1), 4
"""Of a turn, in which whole parts write a few tokens; and tokens whose time is taken apart."""
WARM_TOKENS = {NAIVE: 1, TODAY: 4, NEURONS: 32, NAMED: 32}


@dataclass(frozen=True)
class Shape:
    """A model of tests/published.py, whose firings it has (the first of these that is there), and the shares of its
    experts that there is room for: half, and where a decoder alone has no more, less."""

    model: str
    like: tuple[str, ...]
    shares: tuple[float, ...] = (HALF,)

    @property
    def spec(self) -> ModelSpec:
        return described(PUBLISHED[self.model]).spec

    @property
    def subject(self) -> Subject:
        return next(SUBJECTS[name] for name in self.like if SUBJECTS[name].is_there)

    @property
    def folder(self) -> Path:
        return FOLDER / self.model

    def pack(self, layout: str) -> Path:
        """Made where it is not there. Raises OSError."""
        spec, out = self.spec, self.folder / f"{layout}.pack"
        dense = {role: DENSE.get(role, BITS) for role in spec.roles()}
        write_pack(out, BITS, dense, spec, alike=True, neurons=neurons_of(layout, spec, mxfp4=False))
        if layout == BUNDLED and PREDICTOR not in Pack.open(out).manifest.files:
            add_to_pack(out, Pack.open(out).manifest, PREDICTOR, made_up(spec).to_bytes())
        return out


def made_up(spec: ModelSpec) -> NeuronPredictor:
    """A predictor of the size that one has by default: how long it takes does not depend on what it says."""
    layer = random_layer(spec.expert_width, spec.moe.n, spec.moe.ffn.d_ff, usual_rank(spec))
    return NeuronPredictor(dict.fromkeys(spec.moe_layers(), layer), 0.05, 1)


SHAPES = {
    "opt-1.3b": Shape("OPT-1.3B", ("opt",)),
    "switch-base-8": Shape("switch-base-8", ("marks_sparse", "g2p"), (0.25, HALF)),
}


def recorded(subject: Subject, neurons: str = EXACT) -> tuple[Firings, Path]:
    """What fires while the model writes behind held-out inputs, or is named then, and the file that has it."""
    pack = pack_of(subject, COLUMNS) if neurons == EXACT else predicting(subject, BUNDLED)
    out = FOLDER / f"{subject.name}-{neurons}.npz"
    if not out.exists() or out.stat().st_mtime < (pack / MANIFEST).stat().st_mtime:
        say(f"{subject.name}, {neurons}: neurons are recorded")
        with opened(pack, neurons=neurons) as engine:
            recorder = Recorder(engine)
            recorder.on = True
            write_texts(engine, inputs(subject, subject.recorded), subject.new_tokens)
            recorder.firings().save(out)
    return Firings.load(out), out


def shape_rows(shape: Shape, device: str, seconds: float, rounds: int, failed: list[str]) -> Iterator[Row]:
    """All that a token needs loaded, today's engine, what fires, and what is predicted, in the same room."""
    subject = shape.subject
    (fired, fires), (named, names) = recorded(subject), recorded(subject, PREDICTED)
    where = f"{shape.model} like {subject.name}"
    say(f"{shape.model} is written, with the neurons of {subject.name}")
    try:
        whole, columns, bundled = (shape.pack(layout) for layout in (WHOLE, COLUMNS, BUNDLED))
        yield Row(f"{where}: experts", expert_bytes(whole) / 1e6, "MB")
        yield Row(f"{where}: neurons that fire", 100 * fired.share, "%")
        yield Row(f"{where}: neurons that are named", 100 * named.share, "%")
        for share in shape.shares:
            here, limit = f"{where}, {device}, {share:.0%}", _limit(whole, share)
            entries = [
                _entry(NAIVE, whole, fires, limit, room=layer_bytes(whole)), _entry(TODAY, whole, fires, limit),
                _entry(NEURONS, columns, fires, limit), _entry(NAMED, bundled, names, limit, PREDICTED),
            ]  # fmt: skip
            outcomes = alive(here, race(DEVICES[device], entries, max(seconds, LEAST_SECONDS), rounds), failed)
            yield from raced_rows(here, outcomes, limit)
            dense = shape.spec.moe.n == 1
            yield from of_naive_rows(here, outcomes, subject.sparse)
            yield from steps_rows(here, device, outcomes, NAMED if dense else None)
            yield from today_rows(here, outcomes, [""], None if dense else TODAY_AIM)
    finally:
        shutil.rmtree(shape.folder, ignore_errors=True)


def _limit(whole: Path, share: float) -> int:
    """Bytes of each process: so many that `--memory` leaves that share of whole experts room, where these are run."""
    room = int(share * expert_bytes(whole))
    guess = room + Pack.open(whole).manifest.files[BACKBONE].nbytes + BESIDE_BYTES
    with Runner(Setting(str(whole), None, predict="none", memory_bytes=guess).command()) as runner:
        runner.ask("run", 0.0, 1)
        found: int = runner.ask("facts")["cache_bytes"]
    return guess + room - found


def _entry(
    name: str, pack: Path, firings: Path, limit: int, neurons: str = EXACT, room: int | None = None
) -> Entry:  # fmt: skip
    """In a process of at most `limit` bytes. `room` for experts; None: what `--memory` leaves."""
    setting = Setting(
        str(pack), room, "auto" if room is None else "lru", "none", firings=str(firings), neurons=neurons,
        memory_bytes=limit if room is None else None,
    )  # fmt: skip
    return of_setting(name, setting, WARM_TOKENS[name], limit, timed_tokens=TIMED_TOKENS)


SECONDS, ROUNDS = sized((0.5, 3), (0.05, 1))
STEPPED, STEP_DEVICES = ("opt",), ("ssd", "board")
"""Where everything is asked for at each token."""
SSD = "ssd"
READ_SECONDS = sized(CELL_S, 0.01)
"""Of reads of one size."""


def curves(subject: Subject) -> Iterator[Row]:
    firings, _ = recorded(subject)
    opened = Pack.open(pack_of(subject, COLUMNS))
    yield from window_rows(subject.name, firings)
    yield from hit_rows(subject.name, firings, opened.neurons(opened.manifest.experts[0].key).per_block)


def memory(subject: Subject) -> Iterator[Row]:
    """Slots beside copies, also in the shapes that have these firings."""
    firings, _ = recorded(subject)
    yield from managed_rows(subject.name, firings, Pack.open(pack_of(subject, COLUMNS)).manifest.model)
    for shape in SHAPES.values():
        if shape.subject == subject:
            yield from managed_rows(f"{shape.model} like {subject.name}", firings, shape.spec)


def drafted(subject: Subject) -> Iterator[Row]:
    """Neurons with drafts by n-grams beside without, as in `make bench-drafts`."""
    for room, kind in product(drafts.ROOMS, (drafts.QUOTED, drafts.LIKELIEST)) if subject.name in STEPPED else ():
        for row in drafts.rows_of(pack_of(subject, COLUMNS), room, kind):
            yield replace(row, name=f"{subject.name}, {row.name}")


def reads(subject: Subject) -> Iterator[Row]:
    """The speed of the drive under a pack, by the size of a read."""
    pack = Pack.open(pack_of(subject, COLUMNS))
    files = dict.fromkeys(pack.file(entry.path) for entry in pack.manifest.experts)
    curve = curve_of([*files], READ_SECONDS)
    for chunk, count in product(curve.chunks, (IN_FLIGHT[0], IN_FLIGHT[-1])):
        speed = curve.speeds[chunk, count] / 1e6
        yield Row(f"reads of {chunk} bytes, {count} at once", speed, "MB/s")


def order(subject: Subject) -> Iterator[Row]:
    from moeconv.measure.firing import ordered

    firings, _ = recorded(subject)
    layers = counted_of(subject)
    frequent = NeuronOrder({at: by_frequency(each.counts).astype(np.uint32) for at, each in layers.items()})
    others = {IN_THE_PACK: lambda size: ordered(layers.items(), size).order, COUNTED: lambda size: frequent}
    yield from order_rows(subject.name, firings, load_order(Pack.open(pack_of(subject, COLUMNS))), others)


PARTS: Mapping[str, Callable[[Subject], Iterable[Row]]] = {
    "bytes": bytes_rows, "curves": curves, "memory": memory, "order": order, "drafts": drafted, "reads": reads,
}  # fmt: skip
RACES = ("steps", "today", "shapes")


def pieces(asked: argparse.Namespace, failed: list[str]) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """What is to be done, by name."""
    subjects = [SUBJECTS[name] for name in asked.models]
    turn = (asked.seconds, asked.rounds, failed)
    for part, rows_of in PARTS.items():
        for subject in subjects[: 1 if part == "reads" else None] if part in asked.parts else ():
            yield f"{subject.name}, {part}", lambda rows_of=rows_of, subject=subject: rows_of(subject)
    for subject in subjects:
        for device in STEP_DEVICES if "steps" in asked.parts and subject.name in STEPPED else ():
            yield f"{subject.name}, {device}, steps", lambda s=subject, d=device: step_race(s, d, *turn)
        if "today" in asked.parts:
            yield f"{subject.name}, {SSD}, today", lambda s=subject: today_race(s, SSD, *turn)
    for name, shape in SHAPES.items() if "shapes" in asked.parts else ():
        if shape.subject.name in asked.models:
            yield name, lambda shape=shape: shape_rows(shape, SSD, *turn)


def all_rows(asked: argparse.Namespace, failed: list[str]) -> list[Row]:
    """What fails costs its own rows."""
    rows = list[Row]()
    for name, piece in pieces(asked, failed):
        started, found = time.perf_counter(), list[Row]()
        try:
            found += piece()
        except (RuntimeError, OSError, ValueError, Error, subprocess.CalledProcessError) as error:
            tell(name, error, failed)
        print(table(found), end="\n\n", file=sys.stderr, flush=True)
        say(f"{name}: {time.perf_counter() - started:.0f} s")
        rows += found
    return rows


def main() -> None:
    there = [name for name, subject in SUBJECTS.items() if subject.is_there]
    parser = argparse.ArgumentParser(description="Single neurons in place of whole experts.")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *RACES], default=[*PARTS, *RACES])
    parser.add_argument("--models", nargs="+", choices=there, default=sized(there, ["g2p"]))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a turn")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if set(RACES) & set(asked.parts) and (lacking := missing(reads=FOLDER)):
        raise SystemExit(f"bench-flash imitates drives with control groups, but {lacking}")
    started, failed = time.perf_counter(), list[str]()
    with read_ahead(FOLDER) as ahead_kb:
        rows = all_rows(asked, failed)
    print(table(rows))
    settings = {
        "parts": asked.parts, "models": asked.models, "seconds": asked.seconds, "rounds": asked.rounds,
        "threads": THREADS, "read_ahead_kb": ahead_kb, "failed": failed,
        "took_s": round(time.perf_counter() - started),
    }  # fmt: skip
    whole = vars(asked) == vars(parser.parse_args([]))
    print(f"written to {write('flash' if whole else 'flash-part', context(settings), rows)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    as_program(main)
