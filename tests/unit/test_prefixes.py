"""The prefix cache of many conversations: finding, sharing, leaving."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_packs import SPECS, write_pack

from moert.engine.engine import Engine
from moert.engine.prefixes import Prefixes
from moert.engine.session import Answer, Continued

KINDS = [name for name, spec in sorted(SPECS.items()) if spec.continues]
NEW = 6


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    root = tmp_path_factory.mktemp("prefixes")
    packs = {name: write_pack(root / f"{name}.pack", SPECS[name], paths=False) for name in KINDS}
    return {name: Engine.open(pack, predict="none", threads=1) for name, pack in packs.items()}


def ask(engine: Engine, ids: list[int], kept: Prefixes, at_once: int | None = None) -> Answer:
    with engine.session(at_once) as session:
        request = session.add(Continued(ids, engine.text.detokenizer(), kept), max_new_tokens=NEW, ignore_eos=True)
        for _ in session:
            pass
    return request.answer


@pytest.mark.parametrize("name", KINDS)
def test_branches_of_a_conversation_go_on_from_where_they_part(name: str, engines: dict[str, Engine]) -> None:
    engine, kept = engines[name], Prefixes()
    begin = [3 + at % 11 for at in range(20)]
    first = ask(engine, begin, kept)
    turns = [[*begin, *first.tokens, 5, 6, 7], [*begin, *first.tokens, 9, 4], [*begin, 8, 8, 8, 3], begin[:9]]
    for ids in turns:
        found = ask(engine, ids, kept)
        assert found.tokens == engine.generate(ids, max_new_tokens=NEW, ignore_eos=True).tokens
    again = ask(engine, turns[0], kept)
    assert again.kept_tokens >= len(begin) + NEW - 1, "all that the first turn has read is still there"
    assert ask(engine, turns[1], kept).kept_tokens >= len(begin) + NEW - 1


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_prompts_in_parts_are_answered_as_whole_ones(name: str, at_once: int, engines: dict[str, Engine]) -> None:
    engine = engines[name]
    ids = [3 + at % 13 for at in range(23)]
    whole = engine.generate(ids, max_new_tokens=NEW, ignore_eos=True)
    assert ask(engine, ids, Prefixes(), at_once).tokens == whole.tokens


def test_others_write_while_a_long_prompt_is_read(engines: dict[str, Engine]) -> None:
    engine = engines[KINDS[0]]
    with engine.session(2) as session:
        short = session.add([3, 4], max_new_tokens=20, ignore_eos=True)
        session.turn()
        long = session.add([3 + at % 13 for at in range(20)], max_new_tokens=2, ignore_eos=True)
        wrote = [{request for request, _ in session.turn()} for _ in range(9)]
    assert all(found == {short} for found in wrote)
    assert not long.begun


def test_shared_beginnings_are_in_memory_once(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"] if "decoder" in engines else engines[KINDS[0]]
    kept = Prefixes()
    begin = [3 + at % 11 for at in range(200)]
    first = ask(engine, begin, kept)
    alone = kept.held_bytes
    for at in range(4):
        ask(engine, [*begin, *first.tokens, 5 + at, 6, 7], kept)
    assert len(kept) == 4, "the first state is covered by those that went on from it"
    assert kept.held_bytes < 3 * alone


def test_a_state_that_another_covers_is_not_kept(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"] if "decoder" in engines else engines[KINDS[0]]
    kept, begin = Prefixes(), [3 + at % 11 for at in range(70)]
    whole = ask(engine, begin, kept)
    alone = kept.held_bytes
    for length in (50, 60, 70):  # their answers are left behind the first token
        ids = Continued([*begin, *whole.tokens][:length], engine.text.detokenizer(), kept)
        with engine.session() as session:
            session.add(ids, max_new_tokens=NEW, ignore_eos=True)
            session.turn()
    assert (len(kept), kept.held_bytes) == (1, alone)
    assert ask(engine, [*begin, *whole.tokens], kept).kept_tokens == len(begin) + NEW - 1


def test_the_one_used_longest_ago_leaves(engines: dict[str, Engine]) -> None:
    engine = engines["decoder"] if "decoder" in engines else engines[KINDS[0]]
    kept = Prefixes()
    prompts = [[at, *range(3, 40)] for at in (3, 4, 5)]
    for ids in prompts[:2]:
        ask(engine, ids, kept)
    kept.most_bytes = kept.held_bytes
    ask(engine, prompts[0], kept)
    ask(engine, prompts[2], kept)
    assert ask(engine, prompts[0], kept).kept_tokens > 0
    assert ask(engine, prompts[1], kept).kept_tokens == 0


def test_states_leave_where_a_request_needs_their_room(tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "a.pack", SPECS[KINDS[0]], paths=False)
    with Engine.open(pack, predict="none", threads=1) as engine:
        kept = engine.prefixes()
        ask(engine, [3 + at % 11 for at in range(60)], kept)
        assert engine._regulator._forget(), "there was one"
        assert not engine._regulator._forget()
        assert len(kept) == 0
