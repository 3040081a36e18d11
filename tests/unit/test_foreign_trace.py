"""A sealed trace of another model or of a later version is left aside with a note: no answer changes, no run ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_packs import DECODER, PROMPTS, write_pack

from moeconv.routes import record
from moeconv.writer import add_to_pack
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.pack.errors import HashMismatch
from moert.pack.paths import TRACE
from moert.pack.reader import Pack

OTHER = record(3, [{"decoder": np.zeros((4, 1, 1), dtype=np.int64)}]).to_bytes()
LATER = OTHER.replace(b'"version":"1"', b'"version":"2"')
SETTINGS = GenerationSettings(max_new_tokens=5)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(tmp_path / "decoder.pack", DECODER, paths=False)


@pytest.mark.parametrize("eviction", ["auto", "expected"])
@pytest.mark.parametrize("body", [OTHER, LATER, b"{}"], ids=["another model's", "a later version", "no trace at all"])
def test_a_run_that_streams_goes_on_without_it(pack: Path, body: bytes, eviction: str) -> None:
    with Engine.open(pack, predict="none") as engine:
        expected = engine.generate(PROMPTS[0], SETTINGS).text
        least = engine.budget.token_bytes

    add_to_pack(pack, Pack.open(pack).manifest, TRACE, body)
    notes: list[str] = []
    with Engine.open(pack, predict="none", cache=least, eviction=eviction, notify=notes.append) as engine:
        assert engine.generate(PROMPTS[0], SETTINGS).text == expected
        engine.generate(PROMPTS[1], SETTINGS)
    assert len(notes) == 1
    assert TRACE in notes[0]
    assert notes[0].endswith("the run goes on without it")


@pytest.mark.parametrize(("recorded", "taken"), [({50: "lfu"}, "lfu"), ({25: "lru", 90: "of-tomorrow"}, "expected")])
def test_auto_takes_the_policy_that_the_pack_records(pack: Path, recorded: dict[int, str], taken: str) -> None:
    moe, layers = DECODER.moe, len(DECODER.moe_layers())
    sample = {"decoder": np.tile(np.arange(moe.router.top_k), (4, layers, 1))}
    body = replace(record(moe.n, [sample]), eviction=recorded).to_bytes()
    add_to_pack(pack, Pack.open(pack).manifest, TRACE, body)
    with Engine.open(pack, predict="none", cache="70%") as engine:
        engine.generate(PROMPTS[0], SETTINGS)
        assert engine.eviction == taken


def test_one_that_is_damaged_still_ends_it(pack: Path) -> None:
    add_to_pack(pack, Pack.open(pack).manifest, TRACE, OTHER)
    (pack / TRACE).write_bytes(b"x" * len(OTHER))
    with Engine.open(pack, predict="none") as engine:
        least = engine.budget.token_bytes
    with Engine.open(pack, predict="none", cache=least) as engine, pytest.raises(HashMismatch):
        engine.generate(PROMPTS[0], SETTINGS)
