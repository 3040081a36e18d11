"""`make bench-serve`: the server beside the engine itself. Writes build/bench/serve.json.

A model of OLMoE's shape with random weights in 2.5 bits a weight, whose tokens are words of a made-up tokenizer, and
the demo's wiki pack: tokens/s of a client of `moert serve` and of the engine without it, in turns; many clients at once
beside one after another, with half of the experts in memory on a drive of 500 MB/s; the second turn of a long
conversation; memory beside the engine's; the time until the server answers.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeconv.writer import add_files
from moert.engine.engine import Engine
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.shaped import DENSE, FOLDER, OLMOE, write_pack
from recipes.bench.sized import sized
from tests.cgroups import Group, missing

WIKI = Path("build/demo/wiki.pack")
ROUNDS, STARTS = sized((5, 5), (1, 1))
NEW, CLIENTS, EACH = sized((96, 8, 48), (4, 2, 2))
LONG, ANSWER, MORE = sized((8000, 16, 24), (200, 4, 4))
READ_BPS = 500_000_000
BITS = 2


@dataclass(frozen=True)
class Running:
    """A server in a process of its own. `ready_s`: seconds from its start until it answers."""

    process: subprocess.Popen[str]
    port: int
    ready_s: float

    @property
    def peak_mb(self) -> float:
        """The most memory that the process has held."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) * 1024 / 1e6


@dataclass(frozen=True)
class Timed:
    """One streamed answer: its text, the number of its tokens, seconds until the first and from there to the last."""

    text: str
    tokens: int
    first_s: float
    rest_s: float

    @property
    def speed(self) -> float:
        return (self.tokens - 1) / self.rest_s


@contextmanager
def served(pack: Path, *options: str, group: Group | None = None) -> Iterator[Running]:
    """Runs `moert serve` while the with block does."""
    command = [sys.executable, "-m", "moert", "serve", str(pack), "--port", "0", *options]
    began = time.perf_counter()
    enter = None if group is None else lambda: group.add(0)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready_s = time.perf_counter() - began
        found = re.match(r"http://127\.0\.0\.1:(\d+) ", line)
        if found is None:
            raise RuntimeError(f"moert serve did not start: {line}")
        yield Running(process, int(found[1]), ready_s)
    finally:
        process.terminate()
        process.wait()


def asked(port: int, prompt: Any, tokens: int) -> Timed:
    """Returns the answer of the server to a prompt, as it came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    first = last = 0.0
    texts, written = list[str](), 0
    for line in answer:
        if line.startswith(b"data: {"):
            found = json.loads(line[6:])
            if "error" in found:
                raise RuntimeError(found["error"]["message"])
            if found["choices"]:
                last = time.perf_counter()
                first = first or last
                texts.append(found["choices"][0]["text"])
            else:
                written = found["usage"]["completion_tokens"]
    connection.close()
    return Timed("".join(texts), written, first - began, max(last - first, 1e-9))


def words(seed: int, count: int) -> str:
    """Returns text of this many tokens of the made-up tokenizer."""
    return " ".join(f"w{(seed * 7919 + at * 104729) % (OLMOE.vocab_size - 2) + 2}" for at in range(count))


def shaped() -> Path:
    """Returns the pack of OLMoE's shape with a tokenizer whose tokens are words; makes it where it is not there."""
    out = FOLDER / f"served-{BITS}bits.pack"
    write_pack(out, BITS, DENSE, alike=True)
    manifest = Pack.open(out).manifest
    if TOKENIZER not in manifest.files:
        vocabulary = {"[UNK]": 0, "</s>": 1} | {f"w{number}": number for number in range(2, OLMOE.vocab_size)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
        tokenizer = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model,
        }  # fmt: skip
        add_files(out, manifest, {TOKENIZER: json.dumps(tokenizer).encode()})
    return out


def speed_rows(name: str, pack: Path, prompts: Sequence[str]) -> list[Row]:
    """The speed of one client through the server, beside the engine in this process, in turns."""
    ratios, through, alone = list[float](), list[float](), list[float]()
    with served(pack, "--memory", "4GB") as running, Engine.open(pack, memory="4GB") as engine:
        for at in range(ROUNDS + 1):
            prompt = prompts[at % len(prompts)]
            client = asked(running.port, prompt, NEW)
            answer = engine.generate(prompt, max_new_tokens=NEW)
            if client.text != answer.text:
                raise RuntimeError(f"{name}: the server writes other text than the engine")
            own = (len(answer.tokens) - 1) / (answer.total_s - answer.time_to_first_token_s)
            if at:  # the first one warms both
                through.append(client.speed)
                alone.append(own)
                ratios.append(client.speed / own)
    return [
        row_of_runs(f"{name}: tokens/s through the server", through, "tokens/s"),
        row_of_runs(f"{name}: tokens/s of the engine", alone, "tokens/s"),
        row_of_runs(f"{name}: through the server, of the engine's", ratios, "×").at_least(0.97),
    ]


def crowd_rows(pack: Path) -> list[Row]:
    """Many clients at once beside the same one after another."""
    expert_bytes = sum(entry.file_bytes for entry in Pack.open(pack).manifest.experts)
    options = ("--tune", f"cache={expert_bytes // 2}", "--tune", "io=direct")
    ratios, at_once = list[float](), list[float]()
    with Group(read_bps=READ_BPS, path=pack) as group, served(pack, *options, group=group) as running:
        asked(running.port, words(0, 16), EACH)
        for turn in range(max(1, ROUNDS - 2)):
            prompts = [words(1 + 100 * turn + at, 16) for at in range(2 * CLIENTS)]
            began = time.perf_counter()
            one = [asked(running.port, prompt, EACH) for prompt in prompts[:CLIENTS]]
            alone_s, began = time.perf_counter() - began, time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                many = [*pool.map(lambda prompt: asked(running.port, prompt, EACH), prompts[CLIENTS:])]
            crowd_s = time.perf_counter() - began
            tokens = sum(each.tokens for each in many)
            at_once.append(tokens / crowd_s)
            ratios.append((tokens / crowd_s) / (sum(each.tokens for each in one) / alone_s))
    return [
        row_of_runs(f"{CLIENTS} clients at once, half of the experts in memory, 500 MB/s", at_once, "tokens/s"),
        row_of_runs(f"{CLIENTS} clients at once, of one after another", ratios, "×").at_least(2),
    ]


def turn_rows(pack: Path) -> list[Row]:
    """The second turn of a long conversation beside its first."""
    ratios, first_s, second_s = list[float](), list[float](), list[float]()
    with served(pack, "--memory", "6GB") as running:
        asked(running.port, words(0, 64), 4)
        for at in range(max(1, ROUNDS - 2)):
            prompt = words(900 + at, LONG)
            first = asked(running.port, prompt, ANSWER)
            second = asked(running.port, f"{prompt} {first.text} {words(77 + at, MORE)}", ANSWER)
            first_s.append(first.first_s)
            second_s.append(second.first_s)
            ratios.append(second.first_s / first.first_s)
    return [
        row_of_runs(f"first token behind {LONG} tokens, first turn", first_s, "s"),
        row_of_runs(f"first token behind {LONG} tokens, second turn", second_s, "s"),
        row_of_runs("second turn, of the first", ratios, "×").at_most(0.05),
    ]


def start_rows(name: str, pack: Path, prompt: str, most_s: float) -> list[Row]:
    """The time until the server answers, and its memory beside a run's."""
    ready, beside = list[float](), list[float]()
    for _ in range(STARTS + 1):
        command = [sys.executable, "-m", "moert", "run", str(pack), prompt, "--memory", "4GB", "--json"]
        done = subprocess.run([*command, "--max-new-tokens", str(NEW)], check=True, capture_output=True, text=True)
        run_mb = json.loads(done.stdout)["stats"]["peak_rss_bytes"] / 1e6
        with served(pack, "--memory", "4GB") as running:
            asked(running.port, prompt, NEW)
            ready.append(running.ready_s)
            beside.append(running.peak_mb - run_mb)
    return [
        row_of_runs(f"{name}: the server answers after", ready[1:], "s").at_most(most_s),
        row_of_runs(f"{name}: memory beside moert run's", beside[1:], "MB").at_most(25),
    ]


def main() -> int:
    need([WIKI], "demo")
    pack = shaped()
    texts = [f"The history of {name}" for name in ("Rome", "Japan", "the river", "music", "the city", "trade")]
    rows = speed_rows("OLMoE's shape", pack, [words(at, 16) for at in range(ROUNDS + 1)])
    rows += speed_rows("wiki", WIKI, texts)
    reason = missing(pack)
    if reason is None:
        rows += crowd_rows(pack)
    else:
        print(f"no rows with a slow drive: {reason}", file=sys.stderr)
    rows += turn_rows(pack)
    rows += start_rows("wiki", WIKI, texts[0], 0.6)
    rows += start_rows("OLMoE's shape", pack, words(3, 16), 1.5)
    write("serve", context({"new_tokens": NEW, "clients": CLIENTS, "rounds": ROUNDS, "bits": BITS}), rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    as_program(main, __doc__)
