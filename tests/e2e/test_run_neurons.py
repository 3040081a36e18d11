"""Packs whose experts lie in blocks of neurons: only what fires is read, and no answer changes by that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Moert
from kept_keys import WideKeys
from tiny_packs import LATE, PROMPTS, SWITCH, run_greedy, write_pack

from moert.beside.flash.keeping import KEEPING
from moert.engine.engine import Engine
from moert.experts import store
from moert.kernels.backend import opaque
from moert.pack.codec import F32
from moert.pack.errors import FileTruncated, HashMismatch
from moert.pack.layout import Neurons
from moert.pack.reader import Pack
from tests.pairs import each, thinned, thinned_fixture

SPECS = {"switch": SWITCH, "late": LATE}
LAYOUTS = {"bundled": Neurons(512, True), "apart": Neurons(512, False), "together": Neurons(512, False, together=True)}
NEW = 12
FULL = "100%"


@thinned_fixture(SPECS, LAYOUTS)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec, layout = request.param
    return write_pack(tmp_path_factory.mktemp("neurons") / "m.pack", SPECS[spec], neurons=LAYOUTS[layout])


def answers(pack: Path, **settings: Any) -> list[tuple[list[int], F32]]:
    with Engine.open(pack, notify=lambda note: None, **settings) as engine:
        return [run_greedy(engine, engine.encode(prompt), NEW) for prompt in PROMPTS]


def smallest(pack: Path) -> int:
    with Engine.open(pack, notify=lambda note: None) as engine:
        return engine.budget.layer_bytes


def same(found: list[tuple[list[int], F32]], expected: list[tuple[list[int], F32]]) -> bool:
    return all(
        tokens == others and logits.tobytes() == rows.tobytes()
        for (tokens, logits), (others, rows) in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def expected(pack: Path) -> list[tuple[list[int], F32]]:
    return answers(pack, cache=FULL)


@pytest.mark.parametrize("keep", KEEPING)
def test_no_room_and_no_policy_changes_an_answer(pack: Path, expected: list[tuple[list[int], F32]], keep: str) -> None:
    for cache in (smallest(pack), "50%", "80%"):
        assert same(answers(pack, cache=cache, keep_neurons=keep), expected), cache


@pytest.mark.parametrize(
    "how", [{"threads": 1}, {"io": "direct,2"}, {"io": "buffered,1"}, {"predict": "none"}], ids=str
)
def test_no_way_of_running_changes_an_answer(
    pack: Path, expected: list[tuple[list[int], F32]], how: dict[str, Any]
) -> None:
    assert same(answers(pack, cache="60%", **how), expected)


def test_reading_without_a_ring_or_without_c_brings_the_same(
    pack: Path, expected: list[tuple[list[int], F32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = store.open_reader

    def by_threads(threads: int) -> store.Reader:
        return usual(threads, by_ring=False)

    for opened in (by_threads, lambda threads: store.PlainReader()):
        monkeypatch.setattr(store, "open_reader", opened)
        assert same(answers(pack, cache="60%"), expected)


def test_several_prompts_at_once_are_answered_as_alone(pack: Path) -> None:
    with Engine.open(pack, cache="60%", notify=lambda note: None) as engine:
        alone = [engine.generate(prompt, max_new_tokens=NEW).result.tokens for prompt in PROMPTS]
        together = [answer.result.tokens for answer in engine.generate_many(PROMPTS, max_new_tokens=NEW)]
    assert together == alone


@thinned("spec, layout", SPECS, LAYOUTS, facts=each)
def test_the_same_weights_in_either_layout_say_the_same(
    spec: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_pack(tmp_path / "whole.pack", SPECS[spec], bits=(16,))
    blocks = write_pack(tmp_path / "blocks.pack", SPECS[spec], bits=(16,), neurons=LAYOUTS[layout])
    # Rounded to 16 bits, keys might fall either way.
    monkeypatch.setattr("moert.engine.engine.open_backend", lambda name, threads: opaque(WideKeys()))
    for (_, logits), (_, others) in zip(
        answers(whole, kernels="reference"), answers(blocks, kernels="reference"), strict=True
    ):
        np.testing.assert_allclose(logits, others, rtol=2e-4, atol=2e-4)


def test_what_does_not_fire_is_not_read(pack: Path) -> None:
    with Engine.open(pack, cache="60%", notify=lambda note: None) as engine:
        for prompt in PROMPTS:
            engine.generate(prompt, max_new_tokens=NEW)
        found = engine.stats()
    assert 0 < found.neurons_fired < 0.9
    assert 0 < found.block_hits < found.block_requests


def test_room_is_kept_to(pack: Path) -> None:
    with Engine.open(pack, cache=smallest(pack), notify=lambda note: None) as engine:
        streaming = engine._streaming
        for prompt in PROMPTS:
            engine.generate(prompt, max_new_tokens=NEW)
            assert streaming.held_bytes <= streaming.capacity_bytes


@pytest.mark.parametrize("where", ["rows", "columns"])
def test_a_damaged_piece_is_named(damaged: Path, where: str) -> None:
    opened = Pack.open(damaged)
    for entry in opened.manifest.experts:
        layout, file = opened.neurons(entry.key), damaged / entry.path
        at, step, nbytes = (
            (layout.rows_at, layout.rows_step, layout.rows_bytes)
            if where == "rows"
            else (layout.columns_at, layout.columns_step, layout.columns_bytes)
        )
        body = bytearray(file.read_bytes())
        for block in range(layout.n_blocks):
            body[at + block * step + nbytes // 3] ^= 16
        file.write_bytes(body)
    with pytest.raises(HashMismatch, match=r"experts/.*: a checksum differs from neurons\.safetensors"):
        answers(damaged, cache="60%")


def test_a_file_cut_short_while_it_runs_is_named(damaged: Path) -> None:
    with Engine.open(damaged, cache="60%", notify=lambda note: None) as engine:
        for file in damaged.glob("experts/*/*"):
            file.write_bytes(file.read_bytes()[:4096])
        with pytest.raises(FileTruncated, match=r"experts/.* ends before its neurons do"):
            run_greedy(engine, engine.encode(PROMPTS[0]), NEW)


def test_the_command_says_what_fired(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moert = Moert(capsys, monkeypatch)
    flags = ["run", pack, PROMPTS[0], "--tune", "cache=60%", "--max-new-tokens", "8", "--stats"]
    assert moert(*flags, "--tune", "keep-neurons=window") == 0
    assert " fired; blocks asked for " in moert.err
    assert moert(*flags, "--json") == 0
    assert json.loads(moert.out)["stats"]["block_requests"] > 0
    assert "--tune keep-neurons=none: 'none' is not one of" in moert.refuses(*flags, "--tune", "keep-neurons=none")


def test_the_note_on_a_small_cache_speaks_of_rows(pack: Path) -> None:
    opened = Pack.open(pack)
    with Engine.open(pack, notify=lambda note: None) as engine:
        token = engine.budget.token_bytes
        assert token < sum(entry.file_bytes for entry in opened.manifest.experts if entry.key.stack == "decoder")
    for cache, said in ((max(smallest(pack), token), 0), (smallest(pack), int(smallest(pack) < token))):
        notes: list[str] = []
        with Engine.open(pack, cache=str(cache), notify=notes.append) as engine:
            engine.generate(PROMPTS[0], max_new_tokens=2)
        about = [note for note in notes if "less than one token demands" in note]
        assert len(about) == said
        assert all(
            f"({token} bytes over all decoder layers, and what fires of the columns of down)" in n for n in about
        )
