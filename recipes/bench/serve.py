"""`make bench-serve`: the server beside the engine itself. Writes build/bench/serve.json.

A model of OLMoE's shape with random weights in 2.5 bits a weight, whose tokens are words of a made-up tokenizer, and
the demo's wiki pack: tokens/s of a client of `moert serve` and of the engine without it, in turns; many clients at once
beside one after another, with half of the experts in memory on a drive of 500 MB/s, where random routers say, where a
trained model's do, and where routing is as persistent as that of a published model; the second turn of a long
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

import numpy as np

from moeconv.writer import add_files
from moert.engine.engine import Engine
from moert.pack.files import atomic_write
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER
from recipes.bench import routing
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.shaped import DENSE, FOLDER, OLMOE, write_pack
from recipes.bench.sized import sized
from recipes.bench.stream_packs import add_paths
from tests.cgroups import Group, missing

WIKI = Path("build/demo/wiki.pack")
ROUNDS, STARTS = sized((5, 5), (1, 1))
NEW, CLIENTS, EACH = sized((96, 8, 48), (4, 2, 2))
LONG, ANSWER, MORE = sized((8000, 16, 24), (200, 4, 4))
READ_BPS = 500_000_000
BITS = 2
LENGTH = 16 + EACH
WINDOWS, CALIBRATION_WINDOWS, STREAMS = sized((16, 16, 64), (1, 1, 4))
AnyArray = np.ndarray[Any, Any]


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
def served(pack: Path, *options: str, group: Group | None = None, program: str = "moert") -> Iterator[Running]:
    """Runs `moert serve`, or another program with servers, while the with block does."""
    own = ("serve", str(pack), "--port", "0") if program == "moert" else (str(pack),)
    command = [sys.executable, "-m", program, *own, *options]
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


def shaped(name: str = f"served-{BITS}bits") -> Path:
    """Returns a pack of OLMoE's shape with a tokenizer whose tokens are words; makes it where it is not there."""
    out = FOLDER / f"{name}.pack"
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
    """Many clients at once beside the same one after another, where the routers of random weights say."""
    cache = f"cache={_expert_bytes(pack) // 2}"
    with Group(read_bps=READ_BPS, path=pack) as group, served(
        pack, "--tune", cache, "--tune", "io=direct", group=group
    ) as running:  # fmt: skip
        return _crowd(running, f"{CLIENTS} clients at once")


def routed_rows() -> list[Row]:
    """The same with a text of its own for each client, where the routers of the wiki model say; and with routing that
    is as persistent as that of Qwen3-30B-A3B, of texts that have nothing in common."""
    pack, rows = shaped("served-routed"), list[Row]()
    trained, persistent = FOLDER / "served-wiki.npz", FOLDER / "served-persistent.npz"
    if not trained.exists():
        streams, guesses = map(_streams, routing.joined(WIKI, "heldout", WINDOWS))
        calibration, _ = routing.joined(WIKI, "calibration", CALIBRATION_WINDOWS)
        _save(trained, streams=streams, guesses=guesses, calibration=calibration)
    if not persistent.exists():
        streams = np.stack([routing.persistent(OLMOE, LENGTH, seed=seed) for seed in range(STREAMS)])
        _save(persistent, streams=streams, guesses=np.zeros((*streams.shape[:3], OLMOE.moe.n), np.float16))
    with np.load(trained) as recorded:
        add_paths(pack, recorded["calibration"])
    for name, routes, policies in (
        ("like wiki", trained, {}), ("as persistent as Qwen3", persistent, {"eviction": "layer-lru", "predict": "none"})
    ):  # fmt: skip
        settings = json.dumps({"cache": _expert_bytes(pack) // 2, "io": "direct", **policies})
        with Group(read_bps=READ_BPS, path=pack) as group, served(
            pack, str(routes), settings, group=group, program="recipes.bench.served"
        ) as running:  # fmt: skip
            rows += _crowd(running, f"{CLIENTS} clients at once, routed {name}")
    return [row.at_least(2) if row.name.endswith("like wiki, of one after another") else row for row in rows]


def _save(path: Path, **arrays: AnyArray) -> None:
    with atomic_write(path) as fresh, fresh.open("wb") as stream:
        np.savez(stream, **arrays)


def _streams(windows: AnyArray) -> AnyArray:
    """Returns windows [windows x WINDOW, ...] as streams [streams, LENGTH, ...]: neighbours are of different
    windows."""
    rest = windows.shape[1:]
    parts = windows.reshape(-1, routing.WINDOW, *rest)[:, : routing.WINDOW // LENGTH * LENGTH]
    return parts.reshape(len(parts), -1, LENGTH, *rest).swapaxes(0, 1).reshape(-1, LENGTH, *rest)


def _expert_bytes(pack: Path) -> int:
    return sum(entry.file_bytes for entry in Pack.open(pack).manifest.experts)


def _crowd(running: Running, name: str) -> list[Row]:
    ratios, at_once, bounds = list[float](), list[float](), list[float]()
    asked(running.port, words(0, 16), EACH)  # the experts that are used first
    for turn in range(max(1, ROUNDS - 2)):
        prompts = [words(1 + 100 * turn + at, 16) for at in range(2 * CLIENTS)]
        before, began = _read_bytes(running.port), time.perf_counter()
        one = [asked(running.port, prompt, EACH) for prompt in prompts[:CLIENTS]]
        alone_s, began = time.perf_counter() - began, time.perf_counter()
        between = _read_bytes(running.port)
        with ThreadPoolExecutor(CLIENTS) as pool:
            many = [*pool.map(lambda prompt: asked(running.port, prompt, EACH), prompts[CLIENTS:])]
        crowd_s = time.perf_counter() - began
        tokens, single = sum(each.tokens for each in many), sum(each.tokens for each in one)
        at_once.append(tokens / crowd_s)
        ratios.append((tokens / crowd_s) / (single / alone_s))
        bounds.append((between - before) / single / ((_read_bytes(running.port) - between) / tokens))
    return [
        row_of_runs(f"{name}, half of the experts in memory, 500 MB/s", at_once, "tokens/s"),
        row_of_runs(f"{name}, of one after another", ratios, "×"),
        row_of_runs(f"{name}: bytes a token of one after another, of theirs", bounds, "×"),
    ]


def _read_bytes(port: int) -> int:
    """Returns the bytes of experts that the server has read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/props")
    found: int = json.loads(connection.getresponse().read())["stats"]["bytes_read"]
    connection.close()
    return found


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
        rows += [*crowd_rows(pack), *routed_rows()]
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
