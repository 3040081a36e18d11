"""`make bench-peers`: the runtime beside llama.cpp on one model of OLMoE's shape, and beside transformers on our own.

The programs are loaded at once, each in a process of its own, and work in turns on the same token ids. llama.cpp runs
as pip compiles it, with its weights laid out anew when they are loaded (its default) and as they lie in the file, and
as its released wheels are compiled; what is quoted is the median of our ratios to the best, round by round. Experts
have the same effective bits on both sides, and all weights are in memory before anything is timed. A program that ends
loses its own rows; they are named at the end, and the exit status is then 1. Takes about ten minutes, and five more
when the model's files are made first.

Writes build/bench/peers.json."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from moert.engine.budget import Budget
from moert.machine import thread_bytes
from moert.models.kv import state_bytes
from moert.pack.reader import Pack
from recipes.bench.kernel_cases import read_bandwidth
from recipes.bench.llama import file_of
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.runner import ProgramEnded, Runner, ending
from recipes.bench.shaped import FOLDER, OLMOE, SEED, THREADS, write_pack
from recipes.bench.sized import sized

# Programs that are measured in turns, each in a process of its own. One that ends costs its own figures only.

OURS = "moert"

T = TypeVar("T")
Measure = Callable[[Runner, int], T]
"""Asks a program for something in the round of that number; the same number means the same prompt for all."""


def alternate(
    what: str, sides: Mapping[str, Callable[[int], T]], rounds: int, failures: list[str]
) -> dict[str, list[T]]:
    """All in turns, every other round in reverse order; round 0 warms up and does not count.

    A side whose program ends is left out of the result, and `failures` gets a line that names it.
    """
    runs: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(runs) if number < 2 or number % 2 else list(reversed(runs)):
            try:
                value = sides[name](number)
            except ProgramEnded as error:
                failures.append(f"{what}: {name}: {error}")
                del runs[name]
                continue
            if number:
                runs[name].append(value)
    return runs


class Sides:
    """Programs that are loaded at once; to be used in a with block. `where` begins the names of their rows."""

    def __init__(self, where: str, commands: Mapping[str, Sequence[str]], failures: list[str]) -> None:
        self._where, self._failures, self._stack = where, failures, ExitStack()
        self._runners = {name: self._stack.enter_context(Runner(command)) for name, command in commands.items()}

    def __enter__(self) -> Sides:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def turns(
        self, what: str, measure: Measure[T], rounds: int, names: Iterable[str] | None = None
    ) -> dict[str, list[T]]:
        """What `measure` gives for each side, or for those of `names`, in each round."""
        chosen = self._runners if names is None else {name: self._runners[name] for name in names}
        bound = {name: lambda number, runner=runner: measure(runner, number) for name, runner in chosen.items()}
        return alternate(f"{self._where}: {what}", bound, rounds, self._failures)

    def once(self, *command: Any) -> dict[str, Any]:
        """The answer of each side to one command."""
        answers = self.turns(str(command[0]), lambda runner, _: [runner.ask(*command)], 1)
        return {name: answer[0][0] for name, answer in answers.items()}


def best_peer(runs: Mapping[str, Sequence[float]], least: bool = False) -> str | None:
    """The peer, or its setting, with the greatest or least median; None where none is left."""
    others = [name for name in runs if name != OURS]
    sign = -1 if least else 1
    return max(others, key=lambda name: sign * statistics.median(runs[name]), default=None)


def compared(
    what: str, runs: Mapping[str, Sequence[float]], unit: str = "tokens/s", aim: Callable[[Row], Row] | None = None
) -> list[Row]:
    """A row for each side and last, if both are there, the ratio of ours to the best of the peer's, round by round,
    with its aim. Of seconds the best are the fewest."""
    rows = [row_of_runs(f"{what}: {name}", values, unit) for name, values in runs.items()]
    peer = best_peer(runs, least=unit == "s")
    if OURS in runs and peer is not None:
        ratios = [mine / other for mine, other in zip(runs[OURS], runs[peer], strict=True)]
        ratio = row_of_runs(f"{what}: ratio", ratios, "× the peer's" if len(runs) == 2 else "× the peer's best")
        rows.append(ratio if aim is None else aim(ratio))
    return rows


# Whole programs: how long `moert run` takes to its first token, and what its process holds beside the model.

TO_FIRST_S = {"wiki": 0.4}
BESIDE_MB = 50.0
NEW_TOKENS = 16


def process_rows(folder: Path, names: Iterable[str], rounds: int) -> list[Row]:
    """Of the packs of these names, in the page cache, all experts in memory, on the first of the demo's prompts."""
    rows: list[Row] = []
    for name in names:
        pack = folder / f"{name}.pack"
        asked = (folder / f"{name}-prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
        prompt = json.loads(asked)["prompt"]
        seconds = [_first_token_s(pack, prompt) for _ in range(1 + rounds)][1:]
        row = row_of_runs(f"{name}: start of the program to first token", seconds, "s")
        rows.append(row.at_most(TO_FIRST_S[name]) if name in TO_FIRST_S else row)
        rows += _memory_rows(name, pack, prompt, rounds)
    return rows


def _command(pack: Path, prompt: str, new_tokens: int) -> list[str]:
    options = ["--max-new-tokens", str(new_tokens), "--tune", f"threads={THREADS}", "--json"]
    return [sys.executable, "-m", "moert", "run", str(pack), prompt, *options]


def _first_token_s(pack: Path, prompt: str) -> float:
    """To the end of a program that writes one token."""
    started = time.perf_counter()
    subprocess.run(_command(pack, prompt, 1), check=True, capture_output=True)
    return time.perf_counter() - started


def _memory_rows(name: str, path: Path, prompt: str, rounds: int) -> list[Row]:
    """The most that a process has held; and beside weights, experts, keys and values, which are bounded from above."""
    peaks, tokens = [], 0
    for _ in range(rounds):
        done = subprocess.run(_command(path, prompt, NEW_TOKENS), check=True, capture_output=True)
        stats = json.loads(done.stdout)["stats"]
        peaks.append(stats["peak_rss_bytes"])
        tokens = stats["prompt_tokens"]
    pack = Pack.open(path)
    budget = Budget.of(pack.manifest, False, thread_bytes(THREADS))
    model = budget.backbone_bytes + budget.expert_bytes + state_bytes(pack.manifest.model, tokens, NEW_TOKENS)
    whole = row_of_runs(f"{name}: most that the process holds", [peak / 1e6 for peak in peaks], "MB")
    beside = f"{name}: beside weights, experts, keys and values"
    return [whole, Row(beside, statistics.median(peaks) / 1e6 - model / 1e6, "MB").at_most(BESIDE_MB)]


LLAMA_FOLDER = Path("build/peers/llama")
LLAMA = LLAMA_FOLDER / "bin/python"
RELEASED = f"LLAMA_CPP_LIB_PATH={LLAMA_FOLDER}/released/bin"
DEMO = Path("build/demo")
DENSE = {"attention": 4, "router": 16, "head": 4, "embed": 4}
CORRELATION = 0.8  # of logits of the same weights, rounded in two ways
BUSY_SHARE = 0.45
REFERENCES = {"g2p": 24, "wiki": 32}  # tokens written
REFERENCE_RATIO = 5
START_S = 0.6
PREFILL = 1.5


@dataclass(frozen=True)
class Sizes:
    """How much is run: rounds that count, tokens of the prompts, tokens written."""

    rounds: int = 9
    prompt: int = 16
    new_tokens: int = 96
    first: int = 128
    prefill: int = 512
    long_rounds: int = 3
    long_prefill: int = 4096
    long_context: int = 8000
    long_tokens: int = 32
    busy_rounds: int = 5
    busy_tokens: int = 24  # beside a busy process llama.cpp can fall to a token a second


QUICK = Sizes(rounds=1, new_tokens=8, long_rounds=1, long_prefill=600, long_context=700, busy_rounds=1, busy_tokens=4)


@dataclass(frozen=True)
class Level:
    """The same model at the same bits on both sides, and what our speed should be of the peer's best, `context` that
    with many tokens before.

    Every `every`-th expert of ours has `more` bits, so that the mean is the peer's.
    """

    name: str
    bits: int
    peer: str
    decode: float
    prefill: float | None = None
    context: float | None = None
    more: int = 0
    every: int = 0
    busy: bool = False

    @property
    def pack(self) -> Path:
        return FOLDER / f"{self.peer}-equal.pack"

    def make(self) -> None:
        """Writes our pack where it is not there."""
        widths = dict.fromkeys(OLMOE.expert_keys(), self.bits)
        if self.every:
            widths |= {key: self.more for key in widths if key.expert % self.every == 0}
        write_pack(self.pack, widths, DENSE)

    def commands(self, *options: str) -> dict[str, list[str]]:
        """By the names of their rows: ours, and the peer's settings with the options of recipes/bench/llama.py."""
        theirs = [str(LLAMA), "-m", "recipes.bench.llama", str(file_of(self.peer)), *options]
        return {
            OURS: [sys.executable, "-m", "recipes.bench.ours", str(self.pack)],
            self.peer: theirs,
            f"{self.peer}, not repacked": [*theirs, "--no-repack"],
            f"{self.peer}, as released": ["env", RELEASED, *theirs],
        }


LEVELS = {
    "4bits": Level("4.5 bits", 4, "Q4_K", decode=1.17, prefill=PREFILL, context=1.2, busy=True),
    "2bits": Level("2.6 bits", 2, "Q2_K", decode=1.78, more=3, every=8),  # 2.625 on both sides
}


def prompt(number: int, tokens: int) -> list[int]:
    """The token ids of a round: the same for everyone, others in each round."""
    ids: list[int] = np.random.default_rng([SEED, number, tokens]).integers(0, OLMOE.vocab_size, tokens).tolist()
    return ids


def decode_speed(tokens: int, new_tokens: int) -> Measure[float]:
    """Tokens per second after the first."""

    def measure(runner: Runner, number: int) -> float:
        written, first_s, total_s = runner.ask("generate", prompt(number, tokens), new_tokens)
        return (len(written) - 1) / float(total_s - first_s)

    return measure


def first_token_s(tokens: int) -> Measure[float]:
    """Seconds to the first token after a prompt."""
    return lambda runner, number: float(runner.ask("generate", prompt(number, tokens), 1)[1])


def prefill_speed(tokens: int) -> Measure[float]:
    """Tokens of the prompt per second, to the first new one."""
    seconds = first_token_s(tokens)
    return lambda runner, number: tokens / seconds(runner, number)


def going_on_speed(new_tokens: int) -> Measure[float]:
    """Tokens per second behind what was read."""
    return lambda runner, _: new_tokens / float(runner.ask("go_on", new_tokens))


def whole_speed(prompts: Sequence[Sequence[int]], new_tokens: int) -> Measure[float]:
    """New tokens per second over some requests, their prompts included."""

    def measure(runner: Runner, number: int) -> float:
        seconds = [runner.ask("generate", list(ids), new_tokens)[2] for ids in prompts]
        return len(prompts) * new_tokens / float(sum(seconds))

    return measure


def beside_busy_process(measure: Measure[float]) -> Measure[tuple[float, float]]:
    """The speed when all is quiet, and right after it beside another process of the same priority that never sleeps."""

    def both(runner: Runner, number: int) -> tuple[float, float]:
        quiet = measure(runner, number)
        with busy_process():
            return quiet, measure(runner, number)

    return both


def level_rows(level: Level, sizes: Sizes, bandwidth: float, failures: list[str]) -> list[Row]:
    """Everything that is asked of loaded models."""
    level.make()
    long = () if level.context is None else ("--long",)
    with Sides(level.name, level.commands("--no-mmap", *long), failures) as sides:
        sides.once("fill")
        rows = same_rows(level, sides, sizes)
        whole = sides.turns("prefill", prefill_speed(sizes.prefill), sizes.rounds)
        rows += compared(f"{level.name}: prefill of {sizes.prefill}", whole, aim=at_least(level.prefill))
        first = sides.turns("first token", first_token_s(sizes.first), sizes.rounds)
        rows += compared(f"{level.name}: first token after {sizes.first}", first, "s")
        decode = sides.turns("decode", decode_speed(sizes.prompt, sizes.new_tokens), sizes.rounds)
        rows += compared(f"{level.name}: decode", decode, aim=at_least(level.decode))
        rows += traffic_rows(level, sides, decode, bandwidth)
        if level.context is not None:
            rows += long_rows(level, sides, sizes)
        if level.busy:
            shorter = beside_busy_process(decode_speed(sizes.prompt, sizes.busy_tokens))
            rows += busy_rows(level, sides.turns("busy", shorter, sizes.busy_rounds, (OURS, level.peer)))
    return rows


def long_rows(level: Level, sides: Sides, sizes: Sizes) -> list[Row]:
    """Of long prompts, and of a token that has one before it, which each program reads once."""
    whole = sides.turns("long prefill", prefill_speed(sizes.long_prefill), sizes.long_rounds)
    rows = compared(f"{level.name}: prefill of {sizes.long_prefill}", whole, aim=at_least(level.prefill))
    ids, room = prompt(0, sizes.long_context), (sizes.rounds + 2) * sizes.long_tokens
    sides.turns("reading", lambda runner, _: runner.ask("read", ids, room), 0)
    behind = sides.turns("long context", going_on_speed(sizes.long_tokens), sizes.rounds)
    rows += compared(f"{level.name}: decode behind {sizes.long_context}", behind, aim=at_least(level.context))
    sides.turns("forgetting", lambda runner, _: runner.ask("forget"), 0)
    return rows


def at_least(limit: float | None) -> Callable[[Row], Row] | None:
    """The aim of a ratio, if it has one."""
    return None if limit is None else partial(Row.at_least, limit=limit)


def same_rows(level: Level, sides: Sides, sizes: Sizes) -> list[Row]:
    """That the programs run the same weights, in as many bits."""
    bits, logits = sides.once("expert_bits"), sides.once("logits", prompt(0, sizes.prompt))
    rows = [Row(f"{level.name}: effective bits of an expert's weight: {name}", bits[name], "bits") for name in bits]
    if OURS in bits and len(bits) > 1:
        rows[0] = rows[0].at_most(min(bits[name] for name in bits if name != OURS))
    for name in logits:
        if name != OURS and OURS in logits:
            same = float(np.corrcoef(logits[OURS], logits[name])[0, 1])
            rows.append(Row(f"{level.name}: correlation of the logits: {name}", same, "").at_least(CORRELATION))
    return rows


def traffic_rows(level: Level, sides: Sides, decode: Mapping[str, Sequence[float]], bandwidth: float) -> list[Row]:
    """Bytes of weights that a token reads, and at what share of the bandwidth they came."""
    rows, read = [], sides.once("bytes_per_token")
    for name in (name for name in decode if name in read):
        shares = [100 * speed * read[name] / bandwidth for speed in decode[name]]
        rows.append(Row(f"{level.name}: read for each token: {name}", read[name] / 1e6, "MB"))
        rows.append(row_of_runs(f"{level.name}: decode: bandwidth: {name}", shares, "% of what can be read"))
    return rows


def busy_rows(level: Level, runs: Mapping[str, Sequence[tuple[float, float]]]) -> list[Row]:
    """`runs`: of each side its quiet speed and the one beside another process, in each round."""
    what = f"{level.name}: decode with one busy process"
    rows = compared(what, {name: [busy for _, busy in speeds] for name, speeds in runs.items()})
    for name, speeds in runs.items():
        share = row_of_runs(f"{what}: {name}, of its quiet speed", [busy / quiet for quiet, busy in speeds], "")
        rows.append(share.at_least(BUSY_SHARE) if name == OURS else share)
    return rows


def start_rows(level: Level, sizes: Sizes, failures: list[str]) -> list[Row]:
    """From the start of the process to its first token, files in the page cache; llama.cpp maps its file."""
    level.make()

    def start(command: Sequence[str], number: int) -> float:
        started = time.perf_counter()
        with Runner(command) as runner:
            runner.ask("generate", prompt(number, sizes.prompt), 1)
            return time.perf_counter() - started

    what = f"{level.name}: start to first token"
    starts = {name: partial(start, command) for name, command in level.commands().items()}
    rows = compared(what, alternate(what, starts, sizes.rounds, failures), "s", partial(Row.at_most, limit=1))
    return [row.at_most(START_S) if row.name == f"{what}: {OURS}" else row for row in rows]


def reference_rows(name: str, new_tokens: int, sizes: Sizes, failures: list[str]) -> list[Row]:
    """A converted model beside its source in transformers, one stream, greedy, the same prompts."""
    from tokenizers import Tokenizer

    checkpoint, pack = f"recipes/models/{name}", DEMO / f"{name}.pack"
    tokenizer = Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
    lines = (DEMO / f"{name}-prompts.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    commands = {
        OURS: [sys.executable, "-m", "recipes.bench.ours", str(pack)],
        "transformers": [sys.executable, "-m", "recipes.bench.source", checkpoint],
    }
    what = f"{new_tokens} tokens after a prompt"
    with Sides(name, commands, failures) as sides:
        runs = sides.turns(what, whole_speed(prompts, new_tokens), sizes.rounds)
    return compared(f"{name}: {what}", runs, aim=partial(Row.at_least, limit=REFERENCE_RATIO))


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of the same priority that computes without end."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.2)  # until it runs
        try:
            yield process
        finally:
            process.kill()


def make_peers_files(failures: list[str]) -> None:
    """The GGUF files; without them llama.cpp's rows fail, and the others' do not."""
    made = subprocess.run([str(LLAMA), "-m", "recipes.bench.llama", "make"], capture_output=True, text=True)
    if made.returncode:
        failures.append(f"making llama.cpp's files {ending(made.returncode)}: {made.stderr.strip()[-500:]}")


def built(*before: str) -> str:
    """Returns the extensions that llama.cpp was compiled with; a command may stand before it."""
    return subprocess.run(
        [*before, str(LLAMA), "-m", "recipes.bench.llama", "built"], capture_output=True, text=True
    ).stdout.strip()


def settings(sizes: Sizes, failures: Sequence[str], seconds: float) -> dict[str, object]:
    """What the figures depend on."""
    return {
        **asdict(sizes),
        "threads": THREADS,
        "seconds": round(seconds),
        "llama_cpp_python": "0.3.36",
        "llama_cpp_built": {"as pip compiles it": built(), "as released": built("env", RELEASED)},
        "failed": list(failures),
    }


def main() -> None:
    failures: list[str] = []
    parts: dict[str, Callable[[Sizes, float], list[Row]]] = {
        name: lambda sizes, bandwidth, level=level: level_rows(level, sizes, bandwidth, failures)
        for name, level in LEVELS.items()
    }
    parts["start"] = lambda sizes, _: start_rows(LEVELS["4bits"], sizes, failures)
    parts["process"] = lambda sizes, _: process_rows(DEMO, REFERENCES, sizes.rounds)
    for name, new in REFERENCES.items():
        parts[name] = lambda sizes, _, name=name, new=new: reference_rows(name, new, sizes, failures)
    parser = argparse.ArgumentParser(description="The runtime beside llama.cpp and transformers.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}; by default all")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}")
    need([LLAMA, DEMO / "summary.json"], "bench-peers")
    started, sizes = time.perf_counter(), sized(Sizes(), QUICK)
    make_peers_files(failures)
    bandwidth = read_bandwidth(THREADS)
    rows = [Row("read bandwidth", bandwidth / 1e9, "GB/s")]
    for name in arguments.parts or parts:
        rows += parts[name](sizes, bandwidth)
        print(table(rows), end="\n\n", file=sys.stderr, flush=True)
    print(table(rows))
    if not arguments.parts:
        where = context(settings(sizes, failures, time.perf_counter() - started))
        print(f"written to {write('peers', where, rows)}")
    if failures:
        raise SystemExit("\n".join(["these rows are missing, because a program ended:", *failures]))


if __name__ == "__main__":
    as_program(main)
