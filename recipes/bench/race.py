"""Programs in turns on an imitated device, each in a process and a control group of its own."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from moert.machine import drop_page_cache
from recipes.bench.contenders import Contender
from recipes.bench.runner import Runner
from recipes.bench.stream_packs import Packs
from recipes.bench.streamed import Segment, Setting, lines_of
from recipes.bench.timed import Spent
from tests.cgroups import Group

LLAMA_WARM_TOKENS = 8  # read more than twice what its group may hold
LEAST_TOKENS = 2


@dataclass(frozen=True)
class Device:
    """A drive that is read at no more than `read_bps` bytes per second; None: as fast as this machine's."""

    name: str
    read_bps: int | None


@dataclass
class Outcome:
    """What an entry did in its turns, and with the prompt that it read at the end. Of our engine's sessions alone: what
    no policy could have avoided reading in each turn, bytes that the session tells, and where its time went. `ended`:
    why it has no figures, where its program ended early."""

    segments: list[Segment] = field(default_factory=list)
    unavoidable: list[int] = field(default_factory=list)
    prompt: Segment | None = None
    facts: Mapping[str, int] = field(default_factory=dict)
    spent: Spent | None = None
    group_bytes: int = 0
    ended: str | None = None

    @property
    def speeds(self) -> list[float]:
        return [segment.speed for segment in self.segments]


@dataclass(frozen=True)
class Entry:
    """A program in a race. `warm` lets it work before anything counts, `turn` for some seconds, `end` asks for the rest
    of its outcome. `reads`: a pack or a file, of which nothing is in the page cache at the start. `memory_bytes`: None
    for what holds everything in memory; neither that nor how it is loaded is limited."""

    name: str
    command: Sequence[str]
    reads: Path
    memory_bytes: int | None
    warm: Callable[[Runner], object]
    turn: Callable[[Runner, float], Segment]
    end: Callable[[Runner, Outcome], None]


def race(device: Device, entries: Sequence[Entry], seconds: float, rounds: int) -> dict[str, Outcome]:
    """All load and warm up at once; then they take turns, every other round in reverse order. One that ends early, as
    where its memory is too small, costs its own outcome only."""
    outcomes = {entry.name: Outcome() for entry in entries}
    with ExitStack() as stack:
        for path in {entry.reads for entry in entries}:
            forget(path)
        groups = [
            stack.enter_context(Group(entry.memory_bytes, device.read_bps if entry.memory_bytes else None, entry.reads))
            for entry in entries
        ]
        seats = [
            (entry, stack.enter_context(Runner(entry.command, enter=partial(group.add, 0))))
            for entry, group in zip(entries, groups, strict=True)
        ]

        def ask(entry: Entry, what: Callable[[Outcome], object]) -> None:
            outcome = outcomes[entry.name]
            if outcome.ended is None:
                try:
                    what(outcome)
                except (RuntimeError, OSError) as error:
                    outcome.ended = str(error)

        with ThreadPoolExecutor(len(seats)) as pool:
            for seat in seats:
                pool.submit(ask, seat[0], partial(_warm, *seat))
        for number in range(rounds):
            for entry, runner in seats if number % 2 == 0 else reversed(seats):
                ask(entry, partial(_turn, entry, runner, seconds))
        for (entry, runner), group in zip(seats, groups, strict=True):
            ask(entry, partial(entry.end, runner))
            outcomes[entry.name].group_bytes = group.peak_bytes if entry.memory_bytes else 0
    return outcomes


def _warm(entry: Entry, runner: Runner, outcome: Outcome) -> None:
    entry.warm(runner)


def _turn(entry: Entry, runner: Runner, seconds: float, outcome: Outcome) -> None:
    outcome.segments.append(entry.turn(runner, seconds))


def start(device: Device, setting: Setting, memory_bytes: int) -> float:
    """Seconds from the start of a process to its first token, with nothing in the page cache: Python, numpy, opening
    the pack, a look at the drive, of which nothing is remembered, the choice of an eviction policy, the token.

    Raises RuntimeError if the process ends.
    """
    forget(Path(setting.pack))
    with (
        Group(memory_bytes, device.read_bps, Path(setting.pack)) as group,
        tempfile.TemporaryDirectory() as nothing_remembered,
    ):
        started = time.perf_counter()
        environment = {"XDG_CACHE_HOME": nothing_remembered}
        with Runner(setting.command(), environment, enter=partial(group.add, 0)) as runner:
            runner.ask("run", 0.0, 1)
            return time.perf_counter() - started


def ours(
    contender: Contender, packs: Packs, share: float | None, memory_bytes: int | None, prompt_tokens: int = 0
) -> Entry:
    """A setting of our engine, called by its name and its budget."""
    setting = contender.setting(packs, share)
    name = contender.name if share is None else f"{contender.name} {share:.0%}"
    return of_setting(name, setting, contender.warm_tokens, memory_bytes, prompt_tokens)


def of_setting(
    name: str, setting: Setting, warm_tokens: int, memory_bytes: int | None, prompt_tokens: int = 0,
    timed_tokens: int = 0,
) -> Entry:  # fmt: skip
    """`timed_tokens`: how many are written behind everything else to see where their time goes."""

    def end(runner: Runner, outcome: Outcome) -> None:
        if prompt_tokens:
            outcome.prompt = Segment(**runner.ask("read", prompt_tokens))
        outcome.facts = runner.ask("facts")
        outcome.unavoidable = runner.ask("unavoidable")[: len(outcome.segments)]
        if timed_tokens:
            outcome.spent = Spent(**runner.ask("spent", timed_tokens))

    return Entry(
        name, setting.command(), Path(setting.pack), memory_bytes,
        warm=lambda runner: runner.ask("run", 0.0, warm_tokens),
        turn=lambda runner, seconds: Segment(**runner.ask("run", seconds, LEAST_TOKENS)),
        end=end,
    )  # fmt: skip


def of_llama(
    name: str, python: Path, model: Path, memory_bytes: int | None, texts: Path, prompt_tokens: int = 0
) -> Entry:
    """llama.cpp (recipes/bench/llama.py), its weights mapped into memory as they lie in the file; writes `texts`."""
    lines, pace = lines_of(texts), [0.0]  # seconds that a token took
    ahead = itertools.cycle(lines)

    def turn(runner: Runner, seconds: float) -> Segment:
        first, *written = next(ahead)
        count = max(LEAST_TOKENS, min(len(written), int(seconds / pace[0]))) if pace[0] else LEAST_TOKENS
        before = read_bytes(runner.pid)
        tokens, _, total_s = runner.ask("generate", [first], count, written)
        pace[0] = total_s / len(tokens)
        return Segment(len(tokens), total_s, read_bytes(runner.pid) - before, 0, 0)

    def end(runner: Runner, outcome: Outcome) -> None:
        if prompt_tokens:
            ids = list(islice(itertools.chain(*lines), prompt_tokens))
            _, first_s, _ = runner.ask("generate", ids, 1)
            outcome.prompt = Segment(prompt_tokens, first_s, 0, 0, 0)

    def warm(runner: Runner) -> Segment:
        first, *written = next(ahead)
        runner.ask("generate", [first], LLAMA_WARM_TOKENS, written)
        return turn(runner, 0.0)

    command = [str(python), "-m", "recipes.bench.llama", str(model), "--no-repack"]
    return Entry(name, command, model, memory_bytes, warm=warm, turn=turn, end=end)


def read_bytes(pid: int) -> int:
    """Returns how much a process has read from drives, pages of mapped files among it."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"])


def forget(path: Path) -> None:
    """Takes a file, or all files of a folder, out of the page cache."""
    for file in _files(path):
        drop_page_cache(file)


def _files(path: Path) -> Iterator[Path]:
    return (each for each in path.rglob("*") if each.is_file()) if path.is_dir() else iter([path])
