"""Requests that come, go and part while others run: each writes what it writes alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_packs import SPECS, VOCAB, with_ends, write_pack

from moert.engine.engine import Engine
from moert.engine.session import Request
from moert.errors import BudgetTooSmall, Busy, Closed, InputInvalid, OutOfMemory, SettingInvalid
from moert.kernels import reference
from moert.kernels.pages import PageLayout
from moert.models.footprint import Loads
from moert.models.kv import BLOCK_TOKENS, Kept
from moert.pack.parts import Attention

PROMPTS = ("one small step", "zigzag", "a", "hello world", "jumps over the lazy dog")
NEW = 10


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, ends = tmp_path_factory.mktemp("sessions"), tuple(range(1, VOCAB, 11))
    return {name: write_pack(root / f"{name}.pack", with_ends(spec, ends), paths=False) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def engines(packs: dict[str, Path]) -> dict[str, Engine]:
    """With room for the experts of two tokens."""
    return {name: Engine.open(path, predict="none", cache="40%", threads=1) for name, path in packs.items()}


@pytest.fixture(scope="module")
def alone(engines: dict[str, Engine]) -> dict[tuple[str, str, int], Any]:
    return {
        (name, prompt, seed): engine.generate(prompt, max_new_tokens=NEW, temperature=0.9, seed=seed).result
        for name, engine in engines.items()
        for prompt in PROMPTS
        for seed in (0, 1)
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(SPECS)),
    script=st.lists(st.tuples(st.sampled_from("aaatttfc"), st.integers(0, 100)), max_size=25),
)
def test_whatever_comes_and_goes_each_writes_what_it_writes_alone(
    name: str, script: list[tuple[str, int]], engines: dict[str, Engine], alone: dict[tuple[str, str, int], Any]
) -> None:
    asked: list[tuple[Request, str, int]] = []
    cancelled: set[int] = set()
    with engines[name].session() as session:
        for what, number in script:
            if what == "a":
                prompt, seed = PROMPTS[number % len(PROMPTS)], number % 2
                request = session.add(prompt, max_new_tokens=NEW, temperature=0.9, seed=seed)
                asked.append((request, prompt, seed))
            elif what == "t":
                session.turn()
            elif asked:
                request, prompt, seed = asked[number % len(asked)]
                if what == "c":
                    session.cancel(request)
                    cancelled |= {id(request)} if request.answer.result.stop_reason == "cancelled" else set()
                elif not request.ended:
                    asked.append((session.fork(request), prompt, seed))
        for _ in session:
            pass
        assert session.unfinished == 0
    for request, prompt, seed in asked:
        found, expected = request.answer.result, alone[name, prompt, seed]
        if id(request) in cancelled:
            assert found.tokens == expected.tokens[: len(found.tokens)]
            assert expected.text.startswith(found.text)
        else:
            assert found == expected


@pytest.mark.parametrize("name", SPECS)
def test_a_fork_with_another_seed_parts(name: str, engines: dict[str, Engine]) -> None:
    with engines[name].session() as session:
        first = session.add([5, 6, 7], max_new_tokens=60, temperature=9.0, ignore_eos=True)
        for _ in range(5):
            session.turn()
        second = session.fork(first, seed=7, max_new_tokens=40)
        for _ in session:
            pass
    one, other = first.answer.result.tokens, second.answer.result.tokens
    assert (len(one), len(other)) == (60, 40)
    assert one[:5] == other[:5]
    assert one[5:40] != other[5:]
    assert first.answer.text == "", "token ids are answered in token ids"


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("length", [0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 5])
def test_copied_keys_go_on_by_themselves(length: int, bits: Any) -> None:
    part = Attention(2, 2, 4, 1.0, None, None, None, None)
    kept, layout, rng = Kept(part, 0, bits), PageLayout.of(part, bits), np.random.default_rng(length)

    def write(to: Kept, tokens: int) -> Any:
        rows = rng.normal(size=(2, tokens, 2, 4)).astype(np.float32)
        reference.write(to, to.extend(tokens), *rows)
        return reference.read(to)

    write(kept, 1)
    before = write(kept, length)
    twin = kept.copy()
    assert twin.pages == kept.pages
    assert write(twin, 3 * BLOCK_TOKENS)[0].shape == (2, twin.length, 4)
    assert write(kept, 5)[0].shape == (2, kept.length, 4)
    assert (kept.length, twin.length) == (6 + length, 1 + length + 3 * BLOCK_TOKENS)
    for each in (kept, twin):
        for found, expected in zip(reference.read(each), before, strict=True):
            assert np.array_equal(found[:, : 1 + length], expected)
    assert kept.nbytes == layout.nbytes * len(kept.pages)


def test_figures_count_each_request_once(packs: dict[str, Path]) -> None:
    with Engine.open(packs["decoder"], predict="none", threads=1) as engine:
        with engine.session() as session:
            first = session.add("hello", max_new_tokens=4, ignore_eos=True)
            session.turn()
            second = session.add("zigzag", max_new_tokens=4, ignore_eos=True)
            waits = session.add("never", max_new_tokens=4)
            session.cancel(waits)
            session.turn()
            session.cancel(second)
        assert [request.answer.result.stop_reason for request in (first, second, waits)] == ["cancelled"] * 3
        figures = engine.stats()
        assert (figures.requests, figures.new_tokens, figures.prompt_tokens) == (2, 3, 5 + 6)
        assert figures.tokens_per_s > 0
        assert 0 < second.answer.time_to_first_token_s <= second.answer.total_s


def test_what_can_not_run_is_refused_when_it_is_added(engines: dict[str, Engine]) -> None:
    with engines["decoder"].session() as session:
        for prompt, wrong in (([], "no tokens"), ([VOCAB], "vocabulary"), ("\ud800", "Unicode")):
            with pytest.raises(InputInvalid, match=wrong):
                session.add(prompt)
        with pytest.raises(
            SettingInvalid, match=r"temprature is no setting: did you mean temperature\? There are max_new_tokens, temp"
        ):
            session.add("a", temprature=1.0)
        with pytest.raises(SettingInvalid, match="top_p is 2"):
            session.add("a", top_p=2.0)
        with pytest.raises(SettingInvalid, match="stop are found in text"):
            session.add([1], stop=("a",))
        request = session.add("a", max_new_tokens=1)
        session.turn()
        with pytest.raises(SettingInvalid, match="request has ended"):
            session.fork(request)
        assert session.turn() == []
    with pytest.raises(Closed, match="closed"):
        session.add("a")


def test_one_that_lacks_room_waits_and_a_fork_is_refused(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["decoder"]
    expected = [engine.generate(prompt, max_new_tokens=NEW).result for prompt in PROMPTS[:2]]

    def together(running: Loads, waiting: Loads) -> int:
        return 0 if running else 1

    def before(loads: Loads) -> None:
        if len(loads) > 1:
            raise BudgetTooSmall("no room", 1)

    monkeypatch.setattr(engine._admission, "together", together)
    monkeypatch.setattr(engine._admission, "before", before)
    with engine.session() as session:
        first, second = (session.add(prompt, max_new_tokens=NEW) for prompt in PROMPTS[:2])
        session.turn()
        assert (first.begun, second.begun) == (True, False)
        with pytest.raises(BudgetTooSmall):
            session.fork(first)
        for _ in session:
            assert not second.begun or first.ended
    assert [first.answer.result, second.answer.result] == expected


def test_after_an_error_nothing_goes_on_and_the_next_session_is_as_new(
    engines: dict[str, Engine], alone: dict[tuple[str, str, int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["decoder"]

    def fails(states: Sequence[object], sequences: Sequence[object]) -> np.ndarray[Any, Any]:
        raise MemoryError

    with engine.session() as session:
        request, waits = session.add(PROMPTS[0], max_new_tokens=NEW), session.add("b")
        session.turn()
        with monkeypatch.context() as broken:
            broken.setattr(engine.model, "read", fails)
            with pytest.raises(OutOfMemory):
                session.turn()
        assert (request.answer.result.stop_reason, len(request.answer.result.tokens)) == ("interrupted", 1)
        assert waits.ended
        assert session.turn() == []
        again = session.add(PROMPTS[0], max_new_tokens=NEW, temperature=0.9)
        for _ in session:
            pass
    assert again.answer.result == alone["decoder", PROMPTS[0], 0]


def test_threads_add_while_another_takes_turns(
    engines: dict[str, Engine], alone: dict[tuple[str, str, int], Any]
) -> None:
    found: list[tuple[str, Request]] = []
    with engines["switch"].session() as session:

        def adds(at: int) -> None:
            for step in range(4):
                prompt = PROMPTS[(at + step) % len(PROMPTS)]
                found.append((prompt, session.add(prompt, max_new_tokens=NEW, temperature=0.9)))

        threads = [threading.Thread(target=adds, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or session.unfinished:
            session.turn()
    assert len(found) == 12
    for prompt, request in found:
        assert request.answer.result == alone["switch", prompt, 0]


def test_a_stream_that_is_thrown_away_frees_the_engine(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"]
    whole = engine.generate("hello", max_new_tokens=NEW).text
    assert "".join(engine.stream("hello", max_new_tokens=NEW)) == whole
    pieces = engine.stream("hello", max_new_tokens=NEW)
    first = next(pieces)
    assert whole.startswith(first)
    with pytest.raises(Busy, match="this thread"):
        engine.generate("hello")
    pieces.close()  # type: ignore[attr-defined]
    assert engine.generate("hello", max_new_tokens=NEW).text == whole
