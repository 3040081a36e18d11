"""What the system reads beyond what a page fault asks for: as much as Linux does by default, on every machine.

A program that maps its weights, as llama.cpp does, reads this much around each page that it touches. Some virtual
machines set megabytes, which fill its memory with what it did not ask for."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from moert.experts.names import DEFAULT_PREDICTOR
from moert.machine import drop_page_cache
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack
from recipes.bench.program import need
from recipes.bench.result import Row, context, table, write
from recipes.bench.runner import Runner
from recipes.bench.stream_packs import DEMO, PIECE, Packs, expert_bytes, layer_bytes
from recipes.bench.streamed import THREADS, Segment, Setting, Spent, lines_of
from tests.cgroups import Group, disk_of, missing

# Who runs in `make bench-stream`: this engine, and the paper's baselines as settings of it. Pure.

Room = Literal["budget", "layer", "two layers", "all"]


@dataclass(frozen=True)
class Contender:
    """`pack`: which widths. `room` for experts: the budget's, of one token's demand of a layer or two, or for all.
    `warm_tokens` are written before anything counts."""

    name: str
    pack: Literal["mixed", "int4", "half"]
    room: Room
    eviction: str
    predictor: str
    warm_tokens: int

    def setting(self, packs: Packs, share: float | None) -> Setting:
        """`share`: the budget as a share of the bytes of the mixed widths' experts."""
        pack = {"mixed": packs.mixed, "int4": packs.int4, "half": packs.half}[self.pack]
        return Setting(
            pack=str(pack),
            cache_bytes=self._cache_bytes(packs, pack, share),
            eviction=self.eviction,
            predict=self.predictor,
            routing=None if packs.routing is None else str(packs.routing),
            prompts=None if packs.prompts is None else str(packs.prompts),
            new_tokens=packs.new_tokens or PIECE,
        )

    def _cache_bytes(self, packs: Packs, pack: Path, share: float | None) -> int | None:
        if self.room == "all":
            return None
        least = layer_bytes(pack)
        if self.room != "budget":
            return least if self.room == "layer" else 2 * least
        if share is None:
            raise ValueError(f"{self.name} needs a budget")
        return max(least, int(share * expert_bytes(packs.mixed)))


MOERT = Contender("moert", "mixed", "budget", "auto", DEFAULT_PREDICTOR, warm_tokens=48)
IO_EXP = Contender("IO-EXP", "half", "layer", "lru", "none", warm_tokens=1)
IO_QEXP = Contender("IO-QEXP", "int4", "layer", "lru", "none", warm_tokens=1)
ON_DEMAND = Contender("mixed bits, on demand", "mixed", "layer", "lru", "none", warm_tokens=1)
PRELOAD = Contender("mixed bits, + preload", "mixed", "two layers", "lru", DEFAULT_PREDICTOR, warm_tokens=16)
CACHE = Contender("mixed bits, + cache", "mixed", "budget", "auto", "none", warm_tokens=48)
STI = Contender("STI-like", "int4", "budget", "lifo", "none", warm_tokens=16)
INT4_LRU = Contender("INT4, LRU", "int4", "budget", "lru", "none", warm_tokens=32)
INT4_LFU = Contender("INT4, LFU", "int4", "budget", "lfu", "none", warm_tokens=32)
IO_FREE = Contender("IO-FREE", "half", "all", "lru", "none", warm_tokens=128)
RESIDENT = Contender("moert, all in memory", "mixed", "all", "lru", "none", warm_tokens=128)

BUDGETED = (MOERT, CACHE, STI, INT4_LRU, INT4_LFU)
UNBUDGETED, IN_MEMORY = (IO_EXP, IO_QEXP, ON_DEMAND, PRELOAD), (IO_FREE, RESIDENT)
"""From IO-EXP over ON_DEMAND and PRELOAD to CACHE and MOERT each part of the engine comes in turn (EdgeMoE Fig. 16); in
equal room CACHE reads nothing ahead, and MOERT does what it does by default."""


# Programs in turns on an imitated device, each in a process and a control group of its own.

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


# The small devices that benches imitate, and what is said of programs that end early there.

DEVICES = {
    "board": Device("board", 100_000_000),
    "ssd": Device("ssd", 500_000_000),
    "nvme": Device("nvme", None),
}
PROCESS_BYTES = 300_000_000
"""Python, its libraries, keys, values, activations: what a budget gets beside the weights."""


def memory_bytes(packs: Packs, share: float) -> int:
    """Returns the bytes that a process may hold at this budget."""
    backbone = Pack.open(packs.mixed).manifest.files[BACKBONE].nbytes
    return int(share * expert_bytes(packs.mixed)) + backbone + PROCESS_BYTES


def alive(where: str, outcomes: dict[str, Outcome], failed: list[str]) -> dict[str, Outcome]:
    """Without those whose programs ended: `failed` gets their names, and they cost their own rows only."""
    for name, outcome in outcomes.items():
        if outcome.ended is not None:
            tell(f"{where}: {name}", outcome.ended, failed)
    return {name: outcome for name, outcome in outcomes.items() if outcome.ended is None}


def tell(what: str, why: object, failed: list[str]) -> None:
    print(f"{what} failed: {why}", file=sys.stderr, flush=True)
    failed.append(what)


USUAL_KB = 128
ROOT = Path("/sys/dev/block")


@contextmanager
def read_ahead(path: Path, kb: int = USUAL_KB, root: Path = ROOT) -> Iterator[int | None]:
    """Inside the block files that are opened on the disk under `path` are read ahead by so much; afterwards as before.
    Gives what holds, as a result is to say it: `kb`; what was set, where it can't be changed, which is said; None for
    what lies on no disk of this machine."""
    setting = root / disk_of(path) / "queue/read_ahead_kb"
    if not setting.exists():
        yield None
        return
    before = setting.read_text()
    try:
        setting.write_text(f"{kb}\n")
        holds = kb
    except OSError as error:
        holds = int(before)
        print(f"{setting} stays at {before.strip()} ({error.strerror})", file=sys.stderr, flush=True)
    try:
        yield holds
    finally:
        with suppress(OSError):
            setting.write_text(before)


def bench(
    name: str, needed: Sequence[Path], rows_of: Callable[[list[str]], Iterable[Row]], settings: Mapping[str, object]
) -> int:
    """Runs `make bench-NAME`, which races on imitated drives the packs of `make demo`: `rows_of` returns the rows, and
    adds to its argument what failed. Writes build/bench/NAME.json with the settings; returns the exit status. Raises
    Missing."""
    if lacking := missing(reads=Path(__file__)):
        raise SystemExit(f"bench-{name} imitates drives with control groups, but {lacking}")
    need(needed, "demo")
    failed = list[str]()
    with read_ahead(DEMO) as ahead_kb:
        rows = [*rows_of(failed)]
    path = write(name, context({**settings, "threads": THREADS, "read_ahead_kb": ahead_kb, "failed": failed}), rows)
    print(table(rows))
    print(f"written to {path}")
    return 1 if failed else 0
