"""Speeds on imitated drives: the steps of "LLM in a flash" (Table 2) from loading all that a token needs to what is
here, and neurons beside whole experts in the same room. Where the time of a token goes is seen behind each race."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moert.beside.flash.runner import EXACT, PREDICTED
from recipes.bench.devices import DEVICES, alive
from recipes.bench.flash_packs import (
    BUNDLED,
    COLUMNS,
    WHOLE,
    Subject,
    memory_bytes,
    pack_of,
    predicting,
    prompts_file,
    room_of,
)
from recipes.bench.flash_rows import HALF, NAIVE, NAMED, NEURONS, TODAY, TODAY_AIM, raced_rows, steps_rows, today_rows
from recipes.bench.race import Entry, of_setting, race
from recipes.bench.result import Row
from recipes.bench.sized import sized
from recipes.bench.stream_packs import layer_bytes
from recipes.bench.streamed import Setting

SHARES = (0.25, 0.5, 0.75)
WARM_TOKENS, TIMED_TOKENS = sized((48, 64), (4, 4))


@dataclass(frozen=True)
class Step:
    """`half`: room for half of the weights, else for what a layer needs; `neurons`, `keeping`: as --neurons and
    --keep-neurons."""

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
    warm = WARM_TOKENS if step.half else 2
    return of_setting(step.name, setting, warm, memory_bytes(subject, HALF), timed_tokens=TIMED_TOKENS)


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
        return of_setting(f"{name} {share:.0%}", setting, WARM_TOKENS, memory, timed_tokens=TIMED_TOKENS)

    entries = []
    for share in SHARES:
        entries += [entry(TODAY, pack_of(subject, WHOLE), share), entry(NEURONS, pack_of(subject, COLUMNS), share)]
        if subject.predicted:
            entries.append(entry(NAMED, predicting(subject, BUNDLED), share, PREDICTED))
    outcomes = alive(where, race(DEVICES[device], entries, seconds, rounds), failed)
    yield from raced_rows(where, outcomes, memory_bytes(subject, max(SHARES)))
    names = [f" {share:.0%}" for share in SHARES]
    yield from today_rows(where, outcomes, names, TODAY_AIM if device == "ssd" and not subject.dense else None)
