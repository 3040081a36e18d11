"""The proof that --memory bounds a conversion with text: in a control group of exactly that much, model not fitting."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_qwen3_moe

from moeconv.conversion.room import whole_bytes
from moert.pack.reader import Pack
from tests.cgroups import Group, missing
from tests.e2e.conversions import words

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

ROOT = Path(__file__).resolve().parents[2]


LIMIT = 1_380_000_000


def in_the_group(*arguments: str) -> tuple[str, int]:
    """What moeconv said, and how often the group killed something."""
    with Group(memory_bytes=LIMIT) as group:
        done = subprocess.run(
            [sys.executable, "-m", "moeconv", *arguments, "--memory", str(LIMIT)],
            capture_output=True, text=True, check=False, cwd=ROOT, preexec_fn=lambda: group.add(0),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stderr, group.oom_kills


def test_a_model_that_does_not_fit_is_converted_and_profiled_in_its_memory(on_a_drive: Path) -> None:
    """75 million weights in 96 experts, of which four see a token."""
    model = tiny_qwen3_moe(
        on_a_drive / "model", hidden_size=512, moe_intermediate_size=512, num_hidden_layers=4, num_experts=24,
        num_experts_per_tok=4,
    )  # fmt: skip
    chance, text, pack = random.Random(0), on_a_drive / "text.jsonl", on_a_drive / "m.pack"
    text.write_text("".join(json.dumps({"text": words(chance, 40)}) + "\n" for _ in range(150)))
    said, kills = in_the_group(
        "quantize", str(model), "--out", str(pack), "--calib", str(text), "--bits-per-weight", "3", "--bits", "2,4",
        "--context", "64", "--samples", "16", "--tune", "sweep-samples=8", "--tune", "heldout-samples=8",
    )  # fmt: skip
    assert kills == 0
    assert "layer by layer" in said
    assert whole_bytes(Pack.open(pack).manifest.model) > LIMIT
    _, kills = in_the_group("profile-paths", str(pack))
    assert kills == 0
    assert "paths.safetensors" in Pack.open(pack).manifest.files
