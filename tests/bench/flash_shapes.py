"""Models of published shapes, whose weights are made up, with the firings of trained ones replayed: neurons beside
whole parts on an imitated drive, in control groups of exactly `--memory`. The packs are removed behind it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeconv.conversion.layouts import neurons_of
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack
from tests.bench.devices import DEVICES, alive
from tests.bench.flash_bytes import opened, write
from tests.bench.flash_firings import Firings, Recorder
from tests.bench.flash_packs import BITS, COLUMNS, FOLDER, SUBJECTS, WHOLE, Subject, inputs, pack_of, say
from tests.bench.flash_rows import HALF, NAIVE, NEURONS, TODAY, TODAY_AIM, raced_rows, steps_rows, today_rows
from tests.bench.race import Entry, of_setting, race
from tests.bench.result import Row
from tests.bench.shape_list import described
from tests.bench.shaped import DENSE, write_pack
from tests.bench.stream_packs import expert_bytes, layer_bytes
from tests.bench.streamed import Setting
from tests.published import PUBLISHED

BESIDE_BYTES = 120_000_000
"""Python, its libraries, keys, values and what the engine leaves free."""
LEAST_SECONDS, TIMED_TOKENS = 4.0, 4
"""Of a turn, in which whole parts write a few tokens; and tokens whose time is taken apart."""
WARM_TOKENS = {NAIVE: 1, TODAY: 4, NEURONS: 32}


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
        return out


SHAPES = {
    "opt-1.3b": Shape("OPT-1.3B", ("opt",)),
    "switch-base-8": Shape("switch-base-8", ("marks_sparse", "g2p"), (0.25, HALF)),
}


def recorded(subject: Subject) -> tuple[Firings, Path]:
    """What fires while the model writes behind held-out inputs, and the file that has it."""
    pack = pack_of(subject, COLUMNS)
    out = FOLDER / f"{subject.name}-firings.npz"
    if not out.exists() or out.stat().st_mtime < (pack / "manifest.json").stat().st_mtime:
        say(f"{subject.name}: what fires is recorded")
        with opened(pack) as engine:
            recorder = Recorder(engine)
            recorder.on = True
            write(engine, inputs(subject, subject.recorded), subject.new_tokens)
            recorder.firings().save(out)
    return Firings.load(out), out


def shape_rows(shape: Shape, device: str, seconds: float, rounds: int, failed: list[str]) -> Iterator[Row]:
    """All that a token needs loaded, today's engine, and neurons, in the same room."""
    subject = shape.subject
    firings, file = recorded(subject)
    where = f"{shape.model} like {subject.name}"
    say(f"{shape.model} is written, with the firings of {subject.name}")
    try:
        whole, columns = shape.pack(WHOLE), shape.pack(COLUMNS)
        yield Row(f"{where}: experts", expert_bytes(whole) / 1e6, "MB")
        yield Row(f"{where}: neurons that fire", 100 * firings.share, "%")
        for share in shape.shares:
            here, limit = f"{where}, {device}, {share:.0%}", _limit(whole, share)
            entries = _entries(whole, columns, file, limit)
            outcomes = alive(here, race(DEVICES[device], entries, max(seconds, LEAST_SECONDS), rounds), failed)
            yield from raced_rows(here, outcomes, limit)
            dense = shape.spec.moe.n == 1
            yield from steps_rows(here, device, outcomes, NEURONS if dense else None)
            yield from today_rows(here, outcomes, [""], None if dense else TODAY_AIM)
    finally:
        shutil.rmtree(shape.folder, ignore_errors=True)


def _limit(whole: Path, share: float) -> int:
    backbone = Pack.open(whole).manifest.files[BACKBONE].nbytes
    return int(share * expert_bytes(whole)) + backbone + BESIDE_BYTES


def _entries(whole: Path, columns: Path, firings: Path, limit: int) -> list[Entry]:
    """In processes of at most `limit` bytes, of which experts have what `--memory` leaves; none stays for NAIVE."""

    def entry(name: str, pack: Path, room: int | None) -> Entry:
        setting = Setting(
            str(pack), room, "auto" if room is None else "lru", "none", firings=str(firings),
            memory_bytes=limit if room is None else None,
        )  # fmt: skip
        return of_setting(name, setting, WARM_TOKENS[name], limit, timed_tokens=TIMED_TOKENS)

    return [entry(NAIVE, whole, layer_bytes(whole)), entry(TODAY, whole, None), entry(NEURONS, columns, None)]
