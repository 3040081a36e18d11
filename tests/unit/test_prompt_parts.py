"""Parts of prompts by deadline: short prompts pass long ones, but not for ever; answers stay the same."""

from __future__ import annotations

import pytest
from tiny_packs import DECODER_SHAPE, write_pack

from moert.engine.engine import Engine
from moert.engine.session import Request, Session, parts
from moert.models.footprint import WHOLE

PART, NEW = 8, 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    spec = DECODER_SHAPE.but(eos=(), max_positions=None).spec
    return Engine.open(write_pack(tmp_path_factory.mktemp("parts") / "tiny.pack", spec, paths=False))


def ids(seed: int, count: int) -> list[int]:
    return [3 + (seed * 7 + at * 5) % 50 for at in range(count)]


def test_the_earliest_deadline_is_read_first() -> None:
    assert parts([(100, 90), (20, 12), (50, 40)], 16, 32) == [4, 12, 16]
    assert parts([(100, 90), (20, 12), (50, 40)], 16, 16) == [0, 12, 4]
    assert parts([(7, 5), (7, 5)], 16, 6) == [5, 1], "of two the one that came first"
    assert parts([(9, 90), (1, 12)]) == [90, 12]
    assert parts([], 1, 1) == []


def turns_until_first(session: Session, request: Request, most: int = 1000) -> int:
    """Returns how many turns it takes until a request has its first token."""
    for turn in range(1, most):
        session.turn()
        if request.begun:
            return turn
    raise AssertionError("it did not begin")


def test_a_short_prompt_passes_long_ones(engine: Engine) -> None:
    with engine.session(PART) as session:
        long = [session.add(ids(seed, 40 * PART), max_new_tokens=NEW) for seed in range(6)]
        session.turn()
        short = session.add(ids(9, 2 * PART), max_new_tokens=NEW)
        assert turns_until_first(session, short) == 2, "though there is no room in a turn for a part of each"
        assert not any(each.begun for each in long)


def test_a_long_prompt_is_passed_for_its_own_length_at_most(engine: Engine) -> None:
    length = 20 * PART
    with engine.session(PART) as session:
        long = session.add(ids(0, length), max_new_tokens=NEW)
        others = [session.add(ids(seed, 2 * PART), max_new_tokens=1) for seed in range(1, 5)]
        turns = 0
        while not long.begun:  # a stream of short ones that takes each turn whole
            session.turn()
            turns += 1
            others = [each for each in others if not each.ended]
            while len(others) < 5:
                others.append(session.add(ids(turns % 40, 2 * PART), max_new_tokens=1))
        assert length // PART < turns <= length // PART + length // (4 * PART) + 2


def test_without_parts_who_came_first_is_read_first(engine: Engine) -> None:
    with engine.session() as session:
        asked = [session.add(ids(seed, 60 - 10 * seed), max_new_tokens=1) for seed in range(4)]
        assert {each._deadline for each in asked} == {0}
        assert session._part == WHOLE
        assert [request for request, _ in session.turn()] == asked


def test_answers_are_those_of_each_alone(engine: Engine) -> None:
    lengths = (3, 50, 9, 120, 17, 64, 33, 90)
    wanted = [engine.generate(ids(seed, length), max_new_tokens=12).tokens for seed, length in enumerate(lengths)]
    with engine.session(PART) as session:
        asked = []
        for seed, length in enumerate(lengths):
            asked.append(session.add(ids(seed, length), max_new_tokens=12))
            session.turn()
        for _ in session:
            pass
    assert [each.answer.tokens for each in asked] == wanted
