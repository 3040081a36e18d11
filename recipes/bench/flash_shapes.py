"""Models of published shapes, whose weights are made up, with the firings of trained ones replayed: neurons beside
whole parts on an imitated drive, in control groups of exactly `--memory`. The packs are removed behind it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeconv.conversion.settings import neurons_of
from moeconv.conversion.taught import usual_rank
from moert.beside.flash.runner import EXACT, PREDICTED
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ModelSpec
from moert.pack.neurons import PREDICTOR, NeuronPredictor
from moert.pack.reader import MANIFEST, Pack
from moert.pack.writer import add_to_pack
from recipes.bench.devices import DEVICES, alive
from recipes.bench.flash_bytes import opened, write
from recipes.bench.flash_firings import Firings, Recorder
from recipes.bench.flash_packs import (
    BITS,
    BUNDLED,
    COLUMNS,
    FOLDER,
    SUBJECTS,
    WHOLE,
    Subject,
    inputs,
    pack_of,
    predicting,
    say,
)
from recipes.bench.flash_rows import (
    HALF,
    NAIVE,
    NAMED,
    NEURONS,
    TODAY,
    TODAY_AIM,
    of_naive_rows,
    raced_rows,
    steps_rows,
    today_rows,
)
from recipes.bench.race import Entry, of_setting, race
from recipes.bench.result import Row
from recipes.bench.runner import Runner
from recipes.bench.shape_list import described
from recipes.bench.shaped import DENSE, write_pack
from recipes.bench.sized import sized
from recipes.bench.stream_packs import expert_bytes, layer_bytes
from recipes.bench.streamed import Setting
from tests.published import PUBLISHED
from tests.random_predictor import random_layer

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
            write(engine, inputs(subject, subject.recorded), subject.new_tokens)
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
