"""Whole programs: how long `moert run` takes to its first token, and what its process holds beside the model."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from moert.engine.budget import Budget
from moert.machine import thread_bytes
from moert.models.kv import state_bytes
from moert.pack.reader import Pack
from recipes.bench.result import Row, row_of_runs
from recipes.bench.shaped import THREADS

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
    options = ["--max-new-tokens", str(new_tokens), "--threads", str(THREADS), "--json"]
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
