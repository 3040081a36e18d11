"""`make bench-peers`: the runtime beside llama.cpp on one model of OLMoE's shape, and beside transformers on our own.

The programs are loaded at once, each in a process of its own, and work in turns on the same token ids. llama.cpp runs
as pip compiles it, with its weights laid out anew when they are loaded (its default) and as they lie in the file, and
as its released wheels are compiled; what is quoted is the median of our ratios to the best, round by round. Experts
have the same effective bits on both sides, and all weights are in memory before anything is timed. A program that ends
loses its own rows; they are named at the end, and the exit status is then 1. Takes about ten minutes, and five more
when the model's files are made first.

Writes build/bench/peers.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from recipes.bench.bandwidth import read_bandwidth
from recipes.bench.llama import file_of
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.runner import Runner, ending
from recipes.bench.shaped import FOLDER, OLMOE, SEED, THREADS, write_pack
from recipes.bench.sides import OURS, Measure, Sides, alternate, compared
from recipes.bench.sized import sized
from recipes.bench.whole import process_rows

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
    if not LLAMA.exists() or not (DEMO / "summary.json").exists():
        raise SystemExit("llama.cpp or the demo's packs are missing: run `make bench-peers`")
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
    main()
