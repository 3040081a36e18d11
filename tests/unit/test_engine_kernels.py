"""The engine on each of its kernels: chosen by name, missing, with more than one thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from native_problems import running
from random_packs import RICH
from tiny_packs import PROMPTS, SPECS, run_greedy, write_pack

from moert.engine.budget import CacheLimit
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.kernels import library
from moert.kernels.library import InstructionSetInvalid
from moert.pack.codec import F32
from tests.kernels import needs_native
from tests.refusing import one_line

NEW = 6


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kernels")
    return {name: write_pack(root / f"{name}.pack", spec) for name, spec in SPECS.items()}


def answer(path: Path, prompt: str = PROMPTS[3], **chosen: object) -> tuple[list[int], F32]:
    with Engine.open(path, predict="none", **chosen) as engine:  # type: ignore[arg-type]
        return run_greedy(engine, engine.encode(prompt), NEW)


@needs_native
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_answers_by_its_name(packs: dict[str, Path], name: str) -> None:
    best, *_ = running()
    assert np.array_equal(answer(packs[name])[1], answer(packs[name], kernels=best)[1])
    reference = answer(packs[name], kernels="reference")[1][0]
    for kernels in running():
        with Engine.open(packs[name], predict="none", kernels=kernels) as engine:
            assert engine.backend.name == kernels
            logits = engine.generate(engine.encode("abc"), GenerationSettings(max_new_tokens=NEW)).result.tokens
            assert len(logits) == NEW
        # not equal: then nothing was rounded; not far: 8 bits keep most of a row (1/254 of its largest is lost)
        first = answer(packs[name], kernels=kernels)[1][0]
        distance = float(np.linalg.norm(first - reference) / np.linalg.norm(reference))
        assert 1e-6 < distance < 0.1


@needs_native
@pytest.mark.parametrize("ids", [[3], list(range(2, 11)) * 9])
def test_a_model_of_every_part_is_the_same_on_all_kernels(tmp_path: Path, ids: list[int]) -> None:
    """At 16 bits but for the order of sums; read at once or step by step in the same bits."""
    path = write_pack(tmp_path / "rich.pack", RICH, paths=False, tokenizer=False, bits=[16])
    found = {}
    for kernels in (*running(), "reference"):
        with Engine.open(path, predict="none", kernels=kernels) as engine:
            engine.reserve(len(ids), 1)
            found[kernels] = engine.model.forward_all(ids)
            state, first = engine.model.prefill(ids[:1])
            steps = np.stack([first, *(engine.model.step(state, token) for token in ids[1:])])
            if kernels != "reference":
                assert np.array_equal(steps, found[kernels])
    size = np.abs(found["reference"]).max()
    assert all(np.abs(logits - found["reference"]).max() < 1e-4 * size for logits in found.values())


@pytest.mark.parametrize("name", SPECS)
def test_without_the_library_there_is_one_note_and_the_answer_of_the_reference(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = answer(packs[name], kernels="reference")
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    notes: list[str] = []
    with Engine.open(packs[name], notify=notes.append) as engine:
        for _ in range(2):
            found = run_greedy(engine, engine.encode(PROMPTS[3]), NEW)
            assert found[0] == expected[0]
            assert np.array_equal(found[1], expected[1])
    assert len(notes) == 1
    assert notes[0].startswith("no native kernels: _native.so was not built; computing with numpy, slowly")
    notes.clear()
    with Engine.open(packs[name], notify=notes.append, kernels="reference") as engine:
        run_greedy(engine, engine.encode("abc"), NEW)
    assert notes == []  # as asked
    with one_line(InstructionSetInvalid, "kernels='avx2' does not run here: there are no native kernels"):
        Engine.open(packs[name], kernels="avx2")


def test_each_thing_to_say_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pack(tmp_path / "bare.pack", SPECS["decoder"], paths=False)
    monkeypatch.setattr(library, "PATH", tmp_path / "_native.so")
    notes: list[str] = []
    with Engine.open(path, cache=CacheLimit(share=0.1), notify=notes.append) as engine:
        for _ in range(2):
            engine.generate("abc", GenerationSettings(max_new_tokens=2))
    assert len(notes) == 2
    assert "no native kernels" in notes[0]
    assert "holds less than one token demands" in notes[1]


@needs_native
@pytest.mark.parametrize("name", SPECS)
def test_threads_change_no_bit(packs: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moert.engine.engine.usable_cores", lambda: 2)  # they may share one
    (one, first), (two, second) = (answer(packs[name], threads=threads) for threads in (1, 2))
    assert one == two
    assert np.array_equal(first, second)
