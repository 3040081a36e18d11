"""What a conversation has read is kept, and changes nothing but what is read: each answer is that of a fresh run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_packs import DECODER_SHAPE, LATE, MIXERS_SHAPE, SWITCH_SHAPE, VOCAB, write_pack

from moert.engine.engine import Engine
from moert.engine.session import Answer, Continued, Prefix
from moert.errors import BudgetTooSmall
from moert.kernels import library
from moert.models.footprint import Footprint, Load
from moert.models.kv import BLOCK_TOKENS, Kept, State, fixed_bytes
from moert.pack.parts import Attention

NATIVE = library.load() is not None
PART = Attention(2, 2, 4, 1.0, None, None, None, None)


class Letters:
    """Text of token ids, one letter each."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = DECODER_SHAPE.but(max_positions=600, eos=(3, 7)).spec
    return write_pack(tmp_path_factory.mktemp("prefix") / "decoder.pack", spec, paths=False)


@pytest.fixture(scope="module", params=[8, 16])
def engine(request: pytest.FixtureRequest, pack: Path) -> Engine:
    return Engine.open(pack, predict="none", cache="40%", threads=1, kv=request.param)


@pytest.fixture(scope="module")
def mixing(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Of a model with states of fixed size, which can be cut where a prompt ended, and nowhere else."""
    spec = MIXERS_SHAPE.but(max_positions=600, eos=(3, 7)).spec
    path = write_pack(tmp_path_factory.mktemp("prefix") / "mixers.pack", spec, paths=False)
    return Engine.open(path, predict="none", cache="40%", threads=1)


@pytest.fixture(scope="module", params=["attention", "states"])
def either(request: pytest.FixtureRequest, engine: Engine, mixing: Engine) -> Engine:
    return engine if request.param == "attention" else mixing


def answered(engine: Engine, ids: Sequence[int], prefix: Prefix, **changes: Any) -> Answer:
    with engine.session() as session:
        request = session.add(Continued(ids, Letters(), prefix), **changes)
        for _ in session:
            pass
    return request.answer


def fresh(engine: Engine, ids: Sequence[int], **changes: Any) -> list[int]:
    return engine.generate(list(ids), **changes).result.tokens


def test_the_second_turn_reads_only_what_is_new(pack: Path) -> None:
    with Engine.open(pack, predict="none", threads=1) as engine:
        prefix = Prefix()
        first = answered(engine, [5, 6, 8, 9], prefix, max_new_tokens=6)
        assert first.kept_tokens == 0
        assert prefix.ids == [5, 6, 8, 9, *first.result.tokens[:-1]]
        longer = [5, 6, 8, 9, *first.result.tokens, 11, 12]
        second = answered(engine, longer, prefix, max_new_tokens=6)
        assert (second.prompt_tokens, second.kept_tokens) == (len(longer), len(longer) - 3)
        assert engine.stats().prompt_tokens == 4 + 3
        assert second.result.text == "".join(map(Letters().push, second.result.tokens))


@pytest.mark.skipif(not NATIVE, reason=f"the same bit for bit on the native kernels: {library.missing()}")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.integers(0, 160), st.integers(1, 150), st.integers(1, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_every_turn_writes_what_a_fresh_run_writes(
    either: Engine, turns: list[tuple[int, int, int]], seed: int
) -> None:
    """Conversations that go on, are changed somewhere in what was read, or are begun anew."""
    rng, prefix, ids = np.random.default_rng(seed), Prefix(), list[int]()
    for forgotten, new, most in turns:
        ids = [*ids[: max(0, len(ids) - forgotten)], *rng.integers(8, VOCAB, new).tolist()][-500:]
        asked = {"max_new_tokens": most, "temperature": 0.9, "seed": seed}
        found = answered(either, ids, prefix, **asked).result.tokens
        assert found == fresh(either, ids, **asked)
        ids += found


@pytest.mark.skipif(not NATIVE, reason=f"the same bit for bit on the native kernels: {library.missing()}")
@pytest.mark.parametrize("length", [1, 63, 64, 65, BLOCK_TOKENS, 200])
def test_logits_after_a_cut_are_those_of_a_fresh_run(engine: Engine, length: int) -> None:
    ids = np.random.default_rng(length).integers(8, VOCAB, 260).tolist()
    engine.reserve(len(ids), 1)
    state, _ = engine.model.prefill([*ids[:length], *reversed(ids)])
    assert state.cut(length, len(ids))
    assert state.length == length
    found = engine.model.read([state], [ids[length:]])[0]
    assert found.tobytes() == engine.model.prefill(ids)[1].tobytes()


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 7])
def test_ctrl_c_in_the_middle_of_a_layer_leaves_what_was_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    prefix, ids = Prefix(), [5, 6, 8, 9, 10]
    first = answered(engine, ids, prefix, max_new_tokens=5, ignore_eos=True)
    kept = list(prefix.ids)
    longer, left = [*ids, *first.result.tokens, 12, 13], [None] * at
    real = engine.runner.run

    def run(*arguments: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "run", run)
        with pytest.raises(KeyboardInterrupt):
            answered(engine, longer, prefix, max_new_tokens=5, ignore_eos=True)
    assert prefix.ids[: len(kept)] == kept
    assert prefix.ids == longer[: len(prefix.ids)] or prefix.ids[: len(longer)] == longer
    second = answered(engine, longer, prefix, max_new_tokens=5, ignore_eos=True)
    assert second.kept_tokens >= len(kept)
    if NATIVE:
        assert second.result.tokens == fresh(engine, longer, max_new_tokens=5, ignore_eos=True)


def test_states_go_on_from_where_a_text_or_its_prompt_ended(mixing: Engine) -> None:
    asked, prefix, ids = {"max_new_tokens": 6, "ignore_eos": True}, Prefix(), [5, 6, 8, 9]
    first = answered(mixing, ids, prefix, **asked).result.tokens
    whole = [*ids, *first, 11, 12]
    other = [*ids, *first[:3], 13, 14, 15]
    second = answered(mixing, whole, prefix, **asked)
    assert second.kept_tokens == len(ids) + len(first) - 1
    assert answered(mixing, other, prefix, **asked).kept_tokens == 0  # the mark is behind another prompt now
    third = answered(mixing, [*other, 20], prefix, **asked)
    assert third.kept_tokens == len(other)
    assert answered(mixing, [*other, 20], prefix, **asked).kept_tokens == 0  # nothing would be left to read
    if NATIVE:
        assert third.result.tokens == fresh(mixing, [*other, 20], **asked)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_ctrl_c_while_states_change_leaves_at_most_the_prompt(
    mixing: Engine, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    prefix, ids = Prefix(), [5, 6, 8, 9, 10]
    real, left = mixing.runner.run, [None] * (4 + at)  # a prompt runs four layers of experts

    def run(*arguments: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(mixing.runner, "run", run)
        with pytest.raises(KeyboardInterrupt):
            answered(mixing, ids, prefix, max_new_tokens=5, ignore_eos=True)
    assert prefix.ids == ids
    again = answered(mixing, [*ids, 12], prefix, max_new_tokens=5, ignore_eos=True)
    assert again.kept_tokens == len(ids)
    if NATIVE:
        assert again.result.tokens == fresh(mixing, [*ids, 12], max_new_tokens=5, ignore_eos=True)


def test_what_a_mark_takes_is_set_aside(mixing: Engine) -> None:
    spec, held = mixing.spec, list[int]()
    with mixing.session() as session:
        for prompt in (Continued([5, 6, 8], Letters(), Prefix()), [5, 6, 8]):
            request = session.add(prompt, max_new_tokens=3, ignore_eos=True)
            session.turn()
            held.append(request._states[0].nbytes)
            assert request._states[0].nbytes <= Footprint(spec, False)._state(request._load(), 3)
            session.cancel(request)
    assert held[0] - held[1] == fixed_bytes(spec) > 0


def test_a_state_that_was_growing_is_thrown_away() -> None:
    for bits in (8, 16):
        kept = Kept(PART, 0, bits)  # type: ignore[arg-type]
        kept.extend(100)
        kept.place = object()
        assert kept.cut(60, 70)
        assert (kept.length, kept.place) == (60, None)
        assert not kept.cut(61, 0)
        kept.length += 100  # as Ctrl-C leaves it before there is room
        assert kept.cut(50, 0)
        kept.extend(100)
        del kept.pages[0:]
        assert not kept.cut(50, 0)
        prefix = Prefix()
        prefix.give(State([kept]), [1, 2, 3])
        assert (prefix.ids, prefix.held_bytes) == ([], 0)


def test_room_for_what_is_expected_comes_at_once() -> None:
    kept = Kept(PART)
    kept.extend(5)
    assert kept.cut(5, 1000)
    kept.extend(BLOCK_TOKENS)
    assert kept.nbytes == 16 * kept.layout.nbytes


def test_what_does_not_fit_gives_the_prefix_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = Prefix()
    answered(engine, [5, 6, 8], prefix, max_new_tokens=3, ignore_eos=True)
    kept, held = list(prefix.ids), prefix.held_bytes
    assert held > 0

    def check(loads: Sequence[Load], beside: Sequence[Load] = ()) -> None:
        assert [(load.kept_tokens, load.held_bytes) for load in loads] == [(3, held)]
        raise BudgetTooSmall("no room", 1)

    with monkeypatch.context() as full:
        full.setattr(engine._admission, "check", check)
        with pytest.raises(BudgetTooSmall):
            answered(engine, [5, 6, 8, 20], prefix)
    assert prefix.ids == kept[:3]
    prefix.clear()
    assert (prefix.ids, prefix.held_bytes) == ([], 0)


def test_one_that_is_cancelled_or_left_gives_back_what_it_read(engine: Engine) -> None:
    prefix = Prefix()
    with engine.session() as session:
        request = session.add(Continued([5, 6, 8], Letters(), prefix), max_new_tokens=9, ignore_eos=True)
        assert prefix.held_bytes == 0
        for _ in range(3):
            session.turn()
        session.cancel(request)
    assert prefix.ids == [5, 6, 8, *request.answer.result.tokens[:2]]
    with engine.session() as session:
        session.add(Continued([5, 6, 8, 9], Letters(), prefix))
    assert prefix.ids == [5, 6, 8]


def test_a_fork_goes_on_by_itself(engine: Engine) -> None:
    prefix = Prefix()
    with engine.session() as session:
        asked = {"max_new_tokens": 9, "ignore_eos": True}
        request = session.add(Continued([5, 6, 8], Letters(), prefix), **asked)
        session.turn()
        twin = session.fork(request)
        for _ in session:
            pass
    assert twin.answer.result == request.answer.result
    assert prefix.ids == [5, 6, 8, *request.answer.result.tokens[:-1]]


def test_behind_an_encoder_nothing_is_kept(tmp_path: Path) -> None:
    spec = SWITCH_SHAPE.but(eos=()).spec
    with Engine.open(write_pack(tmp_path / "p", spec, paths=False), predict="none", threads=1) as engine:
        prefix = Prefix()
        found = [answered(engine, [5, 6, 7], prefix, max_new_tokens=4).result.tokens for _ in range(2)]
        assert found == [fresh(engine, [5, 6, 7], max_new_tokens=4)] * 2
        assert prefix.ids == []


def test_only_what_is_read_takes_activations() -> None:
    footprint = Footprint(DECODER_SHAPE.spec, False)
    whole, rest, new = Load(300, 10), Load(300, 10, kept_tokens=290), Load(10, 10)
    assert footprint.written([whole]) == footprint.written([rest])
    assert footprint.prompt([rest]) - footprint._state(rest, 1) == footprint.prompt([new]) - footprint._state(new, 1)
    assert footprint.prompt([rest]) < footprint.prompt([whole])


def test_a_prompt_whose_beginning_sees_itself_whole_is_read_anew(tmp_path: Path) -> None:
    """What it is to those tokens changes with those behind them, up to the separator."""
    path, end = write_pack(tmp_path / "late.pack", LATE, paths=False), LATE.tokens.prefix_end
    assert end is not None
    first, prefix = [5, 9, 31, end], Prefix()
    with Engine.open(path, predict="none", threads=1) as engine:
        one = answered(engine, first, prefix, max_new_tokens=4, ignore_eos=True)
        more = [*first[:-1], 12, 44, 6, end]
        other = answered(engine, more, prefix, max_new_tokens=4, ignore_eos=True)
        assert (one.kept_tokens, other.kept_tokens) == (0, 0)
        assert other.result.tokens == fresh(engine, more, max_new_tokens=4, ignore_eos=True)


def test_tokens_of_a_prefix_see_each_other_and_no_others_do(tmp_path: Path) -> None:
    path, end = write_pack(tmp_path / "late.pack", LATE, paths=False), LATE.tokens.prefix_end
    assert end is not None

    def rows(ids: list[int]) -> Any:
        with Engine.open(path, predict="none", threads=1) as engine:
            engine.reserve(len(ids), 1)
            return engine.model.forward_all(ids)

    prompt = [5, 9, 31, end, 20, end, 8]
    base, inside, behind = rows(prompt), rows([5, 9, 32, *prompt[3:]]), rows([*prompt[:6], 10])
    assert (base[:3] != inside[:3]).any(axis=1).all(), "those before see the changed one"
    assert np.array_equal(base[:6], behind[:6])
    without = rows([5, 9, 31, 20])
    assert np.array_equal(without[:2], rows([5, 9, 30, 20])[:2]), "without a separator nothing sees what comes"
