"""`make check-gpu`: what can only be seen on a GPU, in at most eight minutes: the tests that need one, a pack there
beside the processor, and the speeds that `make bench-devices` simulates, measured. Writes build/bench/card.json.

Without a GPU it says so and ends well; `--device torch:cpu` takes torch on the processor in its place, to try this.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from moert.beside.gpu.torch_device import TorchDevice
from moert.engine.engine import Engine
from moert.machine import usable_cores
from moert.pack.reader import is_pack
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.shaped import DENSE, OLMOE_SHAPE, write_pack
from recipes.bench.shaped import NARROW_SHAPE as NARROW
from recipes.bench.sized import sized
from tests.fast_card import FAST
from tests.shapes import every

FOLDER = Path("build/bench/card")
TEXT, SAME_TOKENS = "The river rises in the hills north of the town", sized(128, 16)
SHAPE = sized(OLMOE_SHAPE, NARROW).but(decoder=every(sized(4, 2))).spec
PROMPT, NEW_TOKENS, BATCH, ROUNDS = sized((512, 64, 8, 3), (32, 4, 2, 1))
TESTS_S, RACE_S = 270, 120
SAME_AIM, LOGITS_AIM = 0.98, 0.2
"""The processor rounds what goes into its products to 8 bits, a device does not."""
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "two devices": {},
    "layers split": {"device_keep": "layers", "device_experts": "resident"},
    "LRU offloading": {"device_keep": "lru", "device_experts": "copied"},
}


def test_rows() -> Iterator[Row]:
    """Returns how `make test-cuda` ended: 0, or 5 where pytest selected nothing."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-n", str(min(12, usable_cores())), "-q", "--no-header"]
    done = subprocess.run(command, timeout=TESTS_S, capture_output=True, text=True)
    print(done.stdout[-3000:], file=sys.stderr, flush=True)
    yield Row("make test-cuda: exit status", done.returncode, "").at_most(0)


def same_rows(device: str) -> Iterator[Row]:
    """Returns whether the wiki model at four bits says the same on the device, with all that it can compute there, as
    on the processor, within rounding."""
    pack = FOLDER / "wiki.pack"
    if not is_pack(pack):
        command = [
            sys.executable,
            "-m",
            "moeconv",
            "quantize",
            "recipes/models/wiki",
            "--bits",
            "4",
            "--out",
            str(pack),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    logits = []
    for settings in ({}, {"device": device}):
        with patch.object(TorchDevice, "costs", lambda _: FAST), Engine.open(pack, notify=say, **settings) as engine:
            if not logits:
                written = engine.generate(TEXT, max_new_tokens=SAME_TOKENS, ignore_eos=True).result.tokens
                ids = [*engine.encode(TEXT), *written]
            engine.reserve(len(ids), 1)
            logits.append(engine.model.forward_all(ids))
    mine, there = logits
    apart = float(np.abs(mine - there).max() / mine.std())
    same = float((mine.argmax(1) == there.argmax(1)).mean())
    yield Row("wiki pack: tokens that the device likes best too", same, "of them", n=len(mine)).at_least(SAME_AIM)
    yield Row("wiki pack: largest difference of logits", apart, "of their deviation", n=len(mine)).at_most(LOGITS_AIM)


def speed_rows(device: str) -> Iterator[Row]:
    """Returns tokens a second with room on the device for half of the experts, as far as the time allows."""
    pack, until = FOLDER / "shaped.pack", time.monotonic() + RACE_S
    write_pack(pack, 4, DENSE, SHAPE, alike=True)
    with Engine.open(pack, notify=say) as engine:
        room = engine.budget.expert_bytes // 2 + 3 * engine.budget.backbone_bytes
    on_card = {name: {"device": device, "gpu_memory": room, **more} for name, more in SETTINGS.items()}
    for name, settings in {"all on the processor": {}, **on_card}.items():
        if time.monotonic() > until:
            say(f"{name}: not measured, {RACE_S} s are over")
            continue
        with Engine.open(pack, notify=say, **settings) as engine:
            runs: dict[str, list[float]] = {}
            for number in range(ROUNDS + 1):
                for what, speed in speeds(engine, number).items():
                    runs.setdefault(what, []).append(speed)
        for what, found in runs.items():
            yield row_of_runs(f"{what}: {name}", found[1:], "tokens/s")


def speeds(engine: Engine, number: int) -> dict[str, float]:
    """Returns tokens a second of one request, of a prompt and of a batch; all texts are new."""
    rng = np.random.default_rng(number)
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    texts = [rng.integers(0, engine.spec.vocab_size, 8).tolist() for _ in range(BATCH)]
    one = engine.generate(texts[0], **settings)
    prompt = engine.generate(rng.integers(0, engine.spec.vocab_size, PROMPT).tolist(), max_new_tokens=1)
    started = time.perf_counter()
    written = sum(len(each.result.tokens) for each in engine.generate_many(texts, **settings))
    return {
        "one request": (NEW_TOKENS - 1) / (one.total_s - one.time_to_first_token_s),
        f"prompt of {PROMPT}": PROMPT / prompt.time_to_first_token_s,
        f"batch of {BATCH}": written / (time.perf_counter() - started),
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description="What can only be seen on a GPU.")
    parser.add_argument("--device", default="cuda:0", help="or torch:cpu, to try this without a GPU")
    device = parser.parse_args().device
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("make check-gpu: there is no GPU with CUDA here, so nothing is checked")
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    card = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    rows, failed = list[Row](), list[str]()
    for part in (lambda: same_rows(device), test_rows, lambda: speed_rows(device)):
        try:
            for row in part():
                rows.append(row)
                say(f"{row.name}: {row.value:.4g} {row.unit}")
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            failed.append(str(error))
            say(f"failed: {error}")
        path = write("card", context({"device": card, "failed": failed}), rows)  # the card may be gone any minute
    print(table(rows))
    print(f"written to {path}")
    return 1 if failed or any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    as_program(main)
