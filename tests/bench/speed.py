"""`make bench-peers`: the runtime beside llama.cpp on one model of OLMoE's shape, and beside transformers on our own.

Both programs are loaded at once, each in a process of its own, and work in turns; what is quoted is the median of the
ratios of neighbouring runs. Writes build/bench/peers.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from tests.bench.bandwidth import read_bandwidth
from tests.bench.result import Row, context, row_of_runs, table, write
from tests.bench.runner import Runner
from tests.bench.shaped import FOLDER, OLMOE, SEED, THREADS, write_pack

LLAMA = Path("build/peers/llama/bin/python")
DEMO = Path("build/demo")

T = TypeVar("T")
Measure = Callable[[Runner], float]
Pairs = Sequence[tuple[float, float]]
"""Ours and the peer's, one pair a round."""


@dataclass(frozen=True)
class Sizes:
    """How much is run: rounds that count, tokens of the short and the long prompt, tokens written."""

    rounds: int = 9
    prompt: int = 16
    new_tokens: int = 96
    prefill: int = 512
    busy_rounds: int = 5
    busy_tokens: int = 24  # beside a busy process llama.cpp can fall to a token a second


@dataclass(frozen=True)
class Level:
    """The same model at about the same size on both sides, and what our speed should be of the peer's.

    By default llama.cpp lays weights out anew when it loads them; without, it starts and reads prompts faster and
    decodes slower.
    """

    name: str
    bits: int
    model: str
    decode: float | None = None
    prefill: float | None = None
    repack: bool = True

    @property
    def peer(self) -> str:
        return self.model if self.repack else f"{self.model}, not repacked"

    def ours(self) -> list[str]:
        """The command that runs our side; makes the pack where it is missing."""
        pack = FOLDER / f"{self.bits}bits.pack"
        write_pack(pack, self.bits, {"attention": 4, "router": 16, "head": 4, "embed": 4})
        return [sys.executable, "-m", "tests.bench.ours", str(pack)]

    def theirs(self) -> list[str]:
        options = [] if self.repack else ["--no-repack"]
        return [str(LLAMA), "-m", "tests.bench.llama", str(FOLDER / f"{self.model}-{SEED}.gguf"), *options]


LEVELS = {
    "4bits": Level("4.5 bits", 4, "Q4_K_M", decode=1.15, prefill=1.0),
    "2bits": Level("2.6 bits", 2, "Q2_K", decode=1.5),
    "plain": Level("4.5 bits", 4, "Q4_K_M", repack=False),
}
BUSY_SHARE = 0.45
REFERENCES = {"g2p": 24, "wiki": 32}  # tokens written
REFERENCE_RATIO = 5


def decode_speed(ids: Sequence[int], new_tokens: int) -> Measure:
    """Tokens per second after the first."""

    def measure(runner: Runner) -> float:
        tokens, first_s, total_s = runner.ask("generate", list(ids), new_tokens)
        return (len(tokens) - 1) / float(total_s - first_s)

    return measure


def prefill_speed(ids: Sequence[int]) -> Measure:
    """Tokens of the prompt per second, to the first new one."""
    return lambda runner: len(ids) / float(runner.ask("generate", list(ids), 1)[1])


def whole_speed(prompts: Sequence[Sequence[int]], new_tokens: int) -> Measure:
    """New tokens per second over some requests, their prompts included."""

    def measure(runner: Runner) -> float:
        seconds = [runner.ask("generate", list(ids), new_tokens)[2] for ids in prompts]
        return len(prompts) * new_tokens / float(sum(seconds))

    return measure


def beside_busy_process(measure: Measure, runner: Runner) -> tuple[float, float]:
    """The speed when all is quiet, and right after it beside another process of the same priority that never sleeps."""
    quiet = measure(runner)
    with busy_process():
        return quiet, measure(runner)


def alternate(rounds: int, ours: Callable[[], T], theirs: Callable[[], T]) -> list[tuple[T, T]]:
    """Both in turns, now one first, now the other; a first round warms up and does not count."""
    ours(), theirs()
    pairs = []
    for count in range(rounds):
        if count % 2:
            peer, mine = theirs(), ours()
        else:
            mine, peer = ours(), theirs()
        pairs.append((mine, peer))
    return pairs


def compared(what: str, peer: str, pairs: Pairs, unit: str = "tokens/s") -> list[Row]:
    """Both sides' rows, and last the ratio, ours to the peer's."""
    return [
        row_of_runs(f"{what}: moert", [mine for mine, _ in pairs], unit),
        row_of_runs(f"{what}: {peer}", [other for _, other in pairs], unit),
        row_of_runs(f"{what}: ratio", [mine / other for mine, other in pairs], "× the peer's"),
    ]


def level_rows(level: Level, sizes: Sizes, bandwidth: float) -> list[Row]:
    """Everything that is asked of two loaded models."""
    random = np.random.default_rng(SEED)
    short, long = (random.integers(0, OLMOE.vocab_size, n).tolist() for n in (sizes.prompt, sizes.prefill))
    decode, prefill = decode_speed(short, sizes.new_tokens), prefill_speed(long)
    with Runner(level.ours()) as ours, Runner(level.theirs()) as theirs:

        def turns(measure: Measure) -> Pairs:
            return alternate(sizes.rounds, lambda: measure(ours), lambda: measure(theirs))

        same = np.corrcoef(ours.ask("logits", short), theirs.ask("logits", short))[0, 1]
        rows = [Row(f"{level.name}: correlation of the logits", float(same), "with the peer's").at_least(0.8)]
        prefills = turns(prefill)  # first: it brings nearly all experts into memory
        *both, ratio = compared(f"{level.name}: prefill of {sizes.prefill}", level.peer, prefills)
        rows += [*both, ratio if level.prefill is None else ratio.at_least(level.prefill)]
        quiet = turns(decode)
        *both, ratio = compared(f"{level.name}: decode", level.peer, quiet)
        rows += [*both, ratio if level.decode is None else ratio.at_least(level.decode)]
        rows += traffic_rows(level, ours, theirs, quiet, bandwidth)
        if level.prefill is not None:
            shorter = decode_speed(short, sizes.busy_tokens)
            both_sides = [partial(beside_busy_process, shorter, runner) for runner in (ours, theirs)]
            rows += busy_rows(level, alternate(sizes.busy_rounds, *both_sides))
    return rows


def traffic_rows(level: Level, ours: Runner, theirs: Runner, decode: Pairs, bandwidth: float) -> list[Row]:
    """Bytes of weights that a token reads, and at what share of the bandwidth they came."""
    rows = []
    for side, runner, name in ((0, ours, "moert"), (1, theirs, level.peer)):
        nbytes = float(runner.ask("bytes_per_token"))
        shares = [100 * pair[side] * nbytes / bandwidth for pair in decode]
        rows.append(Row(f"{level.name}: read for each token: {name}", nbytes / 1e6, "MB"))
        rows.append(row_of_runs(f"{level.name}: decode: bandwidth: {name}", shares, "% of what can be read"))
    return rows


def busy_rows(level: Level, runs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> list[Row]:
    """`runs`: ours and the peer's, each its quiet speed and the one beside another process."""
    what = f"{level.name}: decode with one busy process"
    rows = compared(what, level.peer, [(ours[1], theirs[1]) for ours, theirs in runs])
    shares = [[busy / quiet for quiet, busy in side] for side in zip(*runs, strict=True)]
    rows.append(row_of_runs(f"{what}: moert, of its quiet speed", shares[0], "").at_least(BUSY_SHARE))
    rows.append(row_of_runs(f"{what}: {level.peer}, of its quiet speed", shares[1], ""))
    return rows


def start_rows(level: Level, sizes: Sizes) -> list[Row]:
    """From the start of the process to its first token, files in the page cache."""
    ids = np.random.default_rng(SEED).integers(0, OLMOE.vocab_size, sizes.prompt).tolist()

    def start(command: Sequence[str]) -> float:
        started = time.perf_counter()
        with Runner(command) as runner:
            runner.ask("generate", ids, 1)
            return time.perf_counter() - started

    ours, theirs = level.ours(), level.theirs()
    pairs = alternate(sizes.rounds, lambda: start(ours), lambda: start(theirs))
    *both, ratio = compared(f"{level.name}: start to first token", level.peer, pairs, "s")
    return [*both, ratio.at_most(1) if level.repack else ratio]


def reference_rows(name: str, new_tokens: int, sizes: Sizes) -> list[Row]:
    """A converted model beside its source in transformers, one stream, greedy, the same prompts."""
    from tokenizers import Tokenizer

    checkpoint, pack = f"recipes/models/{name}", DEMO / f"{name}.pack"
    tokenizer = Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
    lines = (DEMO / f"{name}-prompts.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    measure = whole_speed(prompts, new_tokens)
    with (
        Runner([sys.executable, "-m", "tests.bench.ours", str(pack)]) as ours,
        Runner([sys.executable, "-m", "tests.bench.source", checkpoint]) as theirs,
    ):
        pairs = alternate(sizes.rounds, lambda: measure(ours), lambda: measure(theirs))
    *both, ratio = compared(f"{name}: {new_tokens} tokens after a prompt", "transformers", pairs)
    return [*both, ratio.at_least(REFERENCE_RATIO)]


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of the same priority that computes without end."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.2)  # until it runs
        try:
            yield process
        finally:
            process.kill()


def main() -> None:
    if not LLAMA.exists() or not (DEMO / "summary.json").exists():
        raise SystemExit("llama.cpp or the demo's packs are missing: run `make bench-peers`")
    subprocess.run([str(LLAMA), "-m", "tests.bench.llama", "make"], check=True, capture_output=True)
    started, sizes, bandwidth = time.perf_counter(), Sizes(), read_bandwidth(THREADS)
    rows = [Row("read bandwidth", bandwidth / 1e9, "GB/s")]
    parts: dict[str, Callable[[], list[Row]]] = {
        **{name: partial(level_rows, level, sizes, bandwidth) for name, level in LEVELS.items()},
        "start": partial(start_rows, LEVELS["4bits"], sizes),
        "plain-start": partial(start_rows, LEVELS["plain"], sizes),
        **{name: partial(reference_rows, name, new_tokens, sizes) for name, new_tokens in REFERENCES.items()},
    }
    chosen = sys.argv[1:] or list(parts)
    for name in chosen:
        rows += parts[name]()
        print(table(rows), end="\n\n", file=sys.stderr, flush=True)
    print(table(rows))
    if chosen == list(parts):
        settings = {"threads": THREADS, "seconds": round(time.perf_counter() - started), "llama_cpp_python": "0.3.36"}
        print(f"written to {write('peers', context(settings), rows)}")


if __name__ == "__main__":
    main()
