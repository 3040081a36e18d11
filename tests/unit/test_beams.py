"""Beam search: the bookkeeping against all answers that there are, and states that fork against some that don't."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Moert
from hypothesis import given, settings
from hypothesis import strategies as st
from random_hash import add_hash
from test_preference import preferences
from tiny_packs import DECODER, SPECS, VOCAB, with_ends, write_pack

from moert.engine.engine import Engine
from moert.engine.generation import BeamRules, Beams, EarlyStopping, largest, log_softmax
from moert.engine.session import Continued, Prefix
from moert.errors import SettingInvalid
from moert.kernels import library
from moert.models.footprint import Footprint, Load
from moert.models.kv import State, state_bytes, written_bytes
from moert.pack.codec import F32
from tests.kernels import NATIVE

NEW = 10
LONG = [5 + at % 50 for at in range(130)]

# Bookkeeping


def table(seed: int, vocab: int = 4) -> Any:
    """Logits of what follows any tokens."""

    def logits(tokens: tuple[int, ...]) -> F32:
        return np.random.default_rng([seed, *tokens]).normal(size=vocab).astype(np.float32) * 2

    return logits


def searched(logits: Any, rules: BeamRules) -> Iterator[Beams]:
    beams = Beams(rules)
    while not beams.over:
        beams.step(np.stack([logits(each.tokens) for each in beams.running]))
        yield beams


def answers(logits: Any, rules: BeamRules) -> Beams:
    *_, last = searched(logits, rules)
    return last


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), penalty=st.sampled_from([0.0, 1.0, -0.5, 2.0]))
def test_with_room_for_all_beginnings_the_best_of_all_answers_are_found(seed: int, penalty: float) -> None:
    most, logits = 4, table(seed)
    every: dict[tuple[int, ...], float] = {}
    for tokens in product(range(4), repeat=most):
        end = tokens.index(0) + 1 if 0 in tokens else most
        score = sum(float(log_softmax(logits(tokens[:at]))[tokens[at]]) for at in range(end))
        every[tokens[:end]] = score / end**penalty
    expected = sorted(every.values(), reverse=True)[:64]
    found = answers(logits, BeamRules(64, most, frozenset([0]), penalty, "never")).finished
    assert [each.score for each in found] == pytest.approx(expected, abs=1e-5)
    assert [every[each.tokens] for each in found] == pytest.approx(expected, abs=1e-5)


@given(
    seed=st.integers(0, 1000), width=st.integers(2, 5), early=st.sampled_from([True, False, "never"]),
    ends=st.sets(st.integers(0, 8), max_size=2), penalty=st.sampled_from([0.0, 1.0, -1.0]),
)  # fmt: skip
def test_what_all_agree_on_is_what_every_answer_begins_with(
    seed: int, width: int, early: EarlyStopping, ends: set[int], penalty: float
) -> None:
    agreed: list[tuple[int, ...]] = []
    rules = BeamRules(width, 12, frozenset(ends), penalty, early)
    for beams in searched(table(seed, 9), rules):
        assert len(beams.running) == len(beams.parents) == (0 if beams.over and not beams.running else width)
        assert [each.score for each in beams.running] == sorted((each.score for each in beams.running), reverse=True)
        agreed.append(beams.agreed)
    assert len(beams.finished) == width
    assert len({each.tokens for each in beams.finished}) == width
    assert [each.score for each in beams.finished] == sorted((each.score for each in beams.finished), reverse=True)
    for each in beams.finished:
        assert each.tokens[-1] in ends or len(each.tokens) == 12
        assert all(each.tokens[: len(some)] == some for some in agreed)


def test_ending_early_ends_with_as_many_answers_as_beams() -> None:
    def steps(early: EarlyStopping) -> int:
        return sum(
            len(list(searched(table(seed, 6), BeamRules(3, 30, frozenset([0]), 1.0, early)))) for seed in range(40)
        )

    assert steps(True) < steps(False) < steps("never")


def test_a_forced_token_comes_first_and_costs_nothing() -> None:
    beams, logits = Beams(BeamRules(3, 5, frozenset([0]))), table(1, 9)
    beams.step(logits(())[None], forced=7)
    assert [(each.tokens, each.score) for each in beams.running] == [((7,), 0)]
    beams.step(logits((7,))[None])
    assert [each.tokens[0] for each in beams.running] == [7] * 3
    assert beams.parents == [0] * 3


@given(scores=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=40), count=st.integers(1, 50))
def test_the_largest_are_found(scores: list[float], count: int) -> None:
    array = np.array(scores, np.float32)
    assert sorted(array[list(largest(array, count))]) == sorted(scores)[-count:]


# States that fork


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """With room for the experts of two tokens; one prefers what was used lately, one goes where a hash says."""
    root, ends, made = tmp_path_factory.mktemp("beams"), tuple(range(1, VOCAB, 11)), dict[str, Engine]()
    for name, spec in SPECS.items():
        path = write_pack(root / f"{name}.pack", with_ends(spec, ends), paths=False)
        made[name] = Engine.open(path, predict="none", cache="40%", threads=1)
        made[f"{name} 8"] = Engine.open(path, predict="none", threads=1, kv=8)
    path = write_pack(root / "prefers.pack", with_ends(DECODER, ends), preferences=preferences(DECODER))
    made["prefers"] = Engine.open(path, predict="none", threads=1, routing="30%")
    path = add_hash(write_pack(root / "hash.pack", with_ends(DECODER, ends)))
    made["hash"] = Engine.open(path, predict="hash", threads=1, routing="hash")
    return made


KINDS = [*SPECS, *(f"{name} 8" for name in SPECS), "prefers", "hash"]


@pytest.mark.skipif(not NATIVE, reason=f"the same bit for bit on the native kernels: {library.missing()}")
@pytest.mark.parametrize("prompt", [[5, 6, 7], LONG], ids=["short", "pages"])
@pytest.mark.parametrize("name", KINDS)
def test_beams_are_those_of_sequences_that_share_nothing(
    name: str, prompt: list[int], engines: dict[str, Engine]
) -> None:
    engine = engines[name]
    if name.startswith("late"):
        prompt = [*prompt, 15, 9]
    engine.reserve(len(prompt), NEW)

    states = dict[tuple[int, ...], State]()  # that of each beginning goes on as one of those that follow it

    def logits(tokens: tuple[int, ...]) -> F32:
        state = states.pop(tokens[:-1], None) if tokens else None
        if state is None:
            state, found = engine.model.prefill(prompt)
            for token in tokens[:-1]:
                engine.model.step(state, token)
        if tokens:
            found = engine.model.step(state, tokens[-1])
        states[tokens] = state
        return found

    ends = frozenset(engine.spec.tokens.eos)
    expected = answers(logits, BeamRules(4, NEW, ends, 0.7)).finished
    found = engine.generate(prompt, beams=4, length_penalty=0.7, n_return=4, max_new_tokens=NEW)
    results = [found.result, *found.others]
    assert [tuple(each.tokens) for each in results] == [each.tokens for each in expected]
    assert [each.score for each in results] == [float(each.score) for each in expected]


@pytest.mark.parametrize("name", SPECS)
def test_those_that_run_beside_beams_change_nothing(name: str, engines: dict[str, Engine]) -> None:
    engine, asked = engines[name], {"beams": 3, "max_new_tokens": NEW}
    alone = [engine.generate(prompt, **asked).result for prompt in ("zigzag", "hello")]
    greedy = engine.generate("zigzag", max_new_tokens=NEW).result
    with engine.session() as session:
        first = session.add("zigzag", **asked)
        session.turn()
        other, second = session.add("zigzag", max_new_tokens=NEW), session.add("hello", **asked)
        for _ in session:
            pass
    if NATIVE:
        assert [first.answer.result, second.answer.result, other.answer.result] == [*alone, greedy]


@pytest.mark.parametrize("name", SPECS)
def test_text_streams_and_ends_as_the_best_answer(name: str, engines: dict[str, Engine]) -> None:
    for prompt in ("one small step", "a", "hello world"):
        pieces: list[str] = []
        answer = engines[name].generate(prompt, on_text=pieces.append, beams=4, n_return=3, max_new_tokens=NEW)
        assert "".join(pieces) == answer.text
        assert len(answer.others) == 2
        for result in (answer.result, *answer.others):
            assert result.text == engines[name].text.tokenizer.decode(result.tokens)
            ended = result.tokens[-1] in engines[name].spec.tokens.eos
            assert result.stop_reason == ("eos" if ended else "max_new_tokens")


@pytest.mark.parametrize("name", KINDS)
def test_beams_stay_within_what_is_set_aside_for_them(name: str, engines: dict[str, Engine]) -> None:
    engine, asked = engines[name], {"beams": 5, "max_new_tokens": 90, "ignore_eos": True}
    bits = engine.model.kv_bits
    with engine.session() as session:
        request, held = session.add(LONG, **asked), list[int]()
        for _ in session:
            if request._states:
                held.append(sum(kept.nbytes for state in request._states for kept in state.recent))
                held[-1] += sum(state.heard.nbytes for state in request._states if state.heard is not None)
                keys = written_bytes(request._states) - held[-1]
                assert keys <= state_bytes(engine.spec, len(LONG), request._load().written, bits, 5)
    assert len(held) == 89


def test_beams_share_what_they_read_of_the_prompt(engines: dict[str, Engine]) -> None:
    with engines["decoder"].session() as session:
        request = session.add(LONG, beams=4, max_new_tokens=3, ignore_eos=True)
        session.turn()
        session.turn()
        first, *others = request._states
        assert len(others) == 3
        for kept, *copies in zip(first.own, *(state.own for state in others), strict=True):
            if hasattr(kept, "pages"):
                assert len({id(page) for each in (kept, *copies) for page in each.pages[:2]}) == 2
                assert len({id(each.pages[-1]) for each in (kept, *copies)}) == 4


def test_room_is_made_for_all_beams(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    footprint, alone, searching = Footprint(DECODER, False), [Load(130, 100)], [Load(130, 100, beams=4)]
    apart = [Load(130, 100) for _ in range(4)]
    assert footprint.written(alone) < footprint.written(searching) < footprint.written(apart), "one prompt for all"
    assert footprint.prompt(alone) < footprint.prompt(searching) < footprint.prompt(apart)
    assert footprint.next_block(alone) < footprint.next_block(searching)
    checked: list[Load] = []
    monkeypatch.setattr(engines["decoder"]._regulator, "check", lambda loads, beside=(): checked.extend(loads))
    engines["decoder"].check([5] * 9, 20, beams=4)
    with engines["decoder"].session() as session:
        session.add([5] * 9, max_new_tokens=20, beams=4)
    assert checked == [Load(9, 20, beams=4)] * 2


# What does not go together


def test_beams_are_not_forked_and_hold_no_conversation(engines: dict[str, Engine]) -> None:
    with engines["decoder"].session() as session:
        request, other = session.add([5, 6], beams=2, max_new_tokens=4), session.add([5, 6], max_new_tokens=4)
        session.turn()
        with pytest.raises(SettingInvalid, match="beams can't be forked"):
            session.fork(request)
        with pytest.raises(SettingInvalid, match="beams come too late"):
            session.fork(other, beams=3)
        with pytest.raises(SettingInvalid, match="beams do not go with a conversation"):
            session.add(Continued([5], engines["decoder"].text.detokenizer(), Prefix()), beams=2)
        session.cancel(request)
    assert request.answer.result.stop_reason == "cancelled"
    assert (request.answer.result.score, request.answer.others) == (None, ())


# The command line


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("cli") / "switch.pack", SPECS["switch"], paths=False)


SAID = ("--max-new-tokens", "8", "--tune", "beams=4", "--tune", "length-penalty=0.6", "--tune", "early-stopping=true")
SAID += ("--tune", "return=3")
ASKED: dict[str, Any] = {
    "max_new_tokens": 8, "beams": 4, "length_penalty": 0.6, "early_stopping": True, "n_return": 3,
}  # fmt: skip


def test_the_command_line_gives_the_best_answers(moert: Moert, pack: Path, tmp_path: Path) -> None:
    with Engine.open(pack, predict="none") as engine:
        answer = engine.generate("hello world", **ASKED)
    texts = [answer.text, *(other.text for other in answer.others)]
    assert moert("run", pack, "hello world", *SAID) == 0
    assert moert.out == "\n\n".join(texts) + "\n"
    assert moert("run", pack, "hello world", *SAID, "--json") == 0
    found = json.loads(moert.out)
    assert [found["output"], *(each["output"] for each in found["others"])] == texts
    assert found["score"] == answer.result.score
    assert [each["score"] for each in found["others"]] == [other.score for other in answer.others]
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "hello world"}\n{"prompt": "a"}\n')
    assert moert("run", pack, "--input", lines, "--batch", 2, *SAID) == 0
    assert json.loads(moert.out.splitlines()[0]) == {"prompt": "hello world", "output": texts[0], "others": texts[1:]}
    assert moert("run", pack, "--input", lines, *SAID, "--json") == 0
    assert json.loads(moert.out.splitlines()[0])["others"] == found["others"]


def test_the_command_line_refuses_what_does_not_go_together(moert: Moert, pack: Path) -> None:
    assert "--temperature does not go with" in moert.refuses(
        "run", pack, "a", "--tune", "beams=4", "--temperature", 0.5
    )
    assert "--tune return is of beam search" in moert.refuses("run", pack, "a", "--tune", "return=2")
    assert "--chat takes the likeliest token" in moert.refuses("run", pack, "a", "--tune", "beams=4", "--chat")
    assert "--tune length-penalty is of beam search" in moert.refuses("run", pack, "a", "--tune", "length-penalty=2")
