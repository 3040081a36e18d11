"""Routing that prefers what a sequence has used lately: decided by the tokens alone, and undone where it is to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_packs import PROMPTS, SPECS, VOCAB, write_pack

from moert.engine.budget import preference_for
from moert.engine.engine import Engine
from moert.engine.registry import ROUTINGS
from moert.engine.session import Continued, Prefix
from moert.errors import SettingInvalid
from moert.kernels import library
from moert.models.kv import Recent, recent_bytes
from moert.pack.manifest import Preference
from moert.pack.model_spec import ModelSpec

NATIVE = library.load() is not None
needs_native = pytest.mark.skipif(not NATIVE, reason=f"the same bit for bit on the native kernels: {library.missing()}")
ASKED: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}


class Letters:
    """Text of token ids, one letter each."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def flush(self) -> str:
        return ""


def preferences(spec: ModelSpec) -> tuple[Preference, ...]:
    layers = sum(at.stack == "decoder" for at in spec.moe_layers())
    k = spec.moe.router.top_k
    return tuple(
        Preference(share, k + more, 0, (bonus,) * layers) for share, more, bonus in ((0.3, 1, 0.2), (0.6, 2, 1))
    )


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("preference")
    return {
        name: write_pack(root / f"{name}.pack", spec, preferences=preferences(spec)) for name, spec in SPECS.items()
    }


def tokens(path: Path, batch: bool = False, **changes: Any) -> list[list[int]]:
    with Engine.open(path, **changes) as engine:
        if batch:
            return [answer.result.tokens for answer in engine.generate_many(PROMPTS, **ASKED)]
        return [engine.generate(prompt, **ASKED).result.tokens for prompt in PROMPTS]


# What a sequence has used lately --------------------------------------------------------------------------------------


def plainly(k: int, chosen: Sequence[Sequence[int]]) -> list[int]:
    latest: list[int] = []
    for token in chosen:
        latest = [*sorted(token), *(expert for expert in latest if expert not in token)][:k]
    return latest


choices = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True), max_size=300)


@given(chosen=choices, k=st.integers(2, 10), cuts=st.lists(st.integers(0, 300), max_size=4), back=st.integers(0, 300))
def test_the_latest_are_those_of_each_token_in_turn_however_many_come_at_once(
    chosen: list[list[int]], k: int, cuts: list[int], back: int
) -> None:
    recent, rows = Recent(k, 2), np.sort(np.array(chosen, np.int64).reshape(-1, 2), axis=1)
    recent.exact = len(rows)
    for part in np.split(rows, sorted(min(cut, len(rows)) for cut in cuts)):
        recent.add(part)
    assert [expert for expert in recent.experts.tolist() if expert >= 0] == plainly(k, chosen)
    twin, back = recent.copy(), min(back, len(rows))
    assert recent.reach(back) == back
    recent.cut(back)
    assert [expert for expert in recent.experts.tolist() if expert >= 0] == plainly(k, chosen[:back])
    recent.add(rows[back:])
    assert recent.experts.tolist() == twin.experts.tolist()


def test_what_was_written_can_not_be_gone_back_to() -> None:
    recent = Recent(3, 2)
    recent.exact = 2
    recent.add(np.array([[0, 1], [1, 2]]))
    recent.experts[:] = [4, 5, 1]
    recent.went()
    assert [recent.reach(length) for length in (1, 2, 3, 9)] == [1, 2, 2, 2]
    recent.cut(2)
    assert (recent.length, recent.experts.tolist()) == (2, [1, 2, 0])


@pytest.mark.parametrize("name", ["decoder", "switch"])
@pytest.mark.parametrize("prompt_tokens", [1, 127, 128, 129, 390])
def test_what_it_takes_is_counted(packs: dict[str, Path], name: str, prompt_tokens: int) -> None:
    with Engine.open(packs[name], cache="50%", predict="none") as engine:
        engine.reserve(prompt_tokens, 1)
        (state, read), *_ = engine.model.begin([[9] * prompt_tokens])
        engine.model.read([state], [read])
        assert 0 < sum(kept.nbytes for kept in state.recent) <= recent_bytes(engine.spec, prompt_tokens)


# Answers --------------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("name", SPECS)
def test_the_same_tokens_on_any_machine(packs: dict[str, Path], name: str) -> None:
    path = packs[name]
    expected = tokens(path, routing="30%", cache="100%", predict="none", threads=1)
    assert expected != tokens(path, routing="exact", threads=1)
    assert expected != tokens(path, routing="60%", threads=1)
    for cache in ("60%", "100%"):
        for eviction, predictor in (("auto", "gate"), ("lru", "none"), ("expected", "transitions")):
            assert tokens(path, routing="30%", cache=cache, eviction=eviction, predict=predictor) == expected
    assert tokens(path, batch=True, routing="30%", cache="60%") == expected


@needs_native
@pytest.mark.parametrize("name", ["decoder", "mixers"])
def test_a_prompt_in_pieces_leaves_what_it_leaves_at_once(packs: dict[str, Path], name: str) -> None:
    ids = np.random.default_rng(0).integers(8, VOCAB, 50).tolist()
    with Engine.open(packs[name], routing="30%", predict="none") as engine:
        engine.reserve(60, 10)
        model = engine.model
        whole, pieces = (model.begin([ids])[0][0] for _ in range(2))
        first = model.read([whole], [ids])
        for start, stop in ((0, 1), (1, 30), (30, 49), (49, 50)):
            second = model.read([pieces], [ids[start:stop]])
        assert np.array_equal(first, second)
        steps = [np.stack([model.step(state, token) for token in (9, 10, 11)]) for state in (whole, pieces)]
        assert np.array_equal(*steps)
        for one, other in zip(whole.recent, pieces.recent, strict=True):
            assert one.experts.tolist() == other.experts.tolist()


def answered(engine: Engine, ids: Sequence[int], prefix: Prefix, **changes: Any) -> Any:
    with engine.session() as session:
        request = session.add(Continued(ids, Letters(), prefix), **changes)
        for _ in session:
            pass
    return request.answer


@needs_native
@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=4),
    name=st.sampled_from(["decoder", "mixers"]), seed=st.integers(0, 100),
)  # fmt: skip
def test_every_turn_of_a_conversation_writes_what_a_fresh_run_writes(
    packs: dict[str, Path], turns: list[tuple[int, int, int]], name: str, seed: int
) -> None:
    with Engine.open(packs[name], routing="30%", predict="none", threads=1) as engine:
        rng, prefix, ids = np.random.default_rng(seed), Prefix(), list[int]()
        for forgotten, new, most in turns:
            ids = [*ids[: max(0, len(ids) - forgotten)], *rng.integers(8, VOCAB, new).tolist()][-350:]
            found = answered(engine, ids, prefix, max_new_tokens=most, ignore_eos=True).result.tokens
            assert found == engine.generate(list(ids), max_new_tokens=most, ignore_eos=True).result.tokens
            assert len(prefix.ids) <= len(ids)  # answers are read again, exactly
            ids += found


@needs_native
def test_ctrl_c_leaves_what_a_prompt_has_read(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [5, 6, 8, 9, 10, 11]
    with Engine.open(packs["decoder"], routing="30%", predict="none", threads=1) as engine:
        expected = engine.generate([*ids, 12], **ASKED).result.tokens
        real = engine.runner.run
        for at in (1, 4, 6, 20):
            prefix, left = Prefix(), [None] * at

            def run(*arguments: Any, left: list[None] = left) -> None:
                if not left:
                    raise KeyboardInterrupt
                left.pop()
                real(*arguments)

            with monkeypatch.context() as broken:
                broken.setattr(engine.runner, "run", run)
                with pytest.raises(KeyboardInterrupt):
                    answered(engine, ids, prefix, **ASKED)
            assert answered(engine, [*ids, 12], prefix, **ASKED).result.tokens == expected


@needs_native
def test_a_fork_goes_on_by_itself(packs: dict[str, Path]) -> None:
    with Engine.open(packs["decoder"], routing="30%", predict="none", threads=1) as engine:
        expected = engine.generate("hello world", **ASKED).result.tokens
        with engine.session() as session:
            request = session.add("hello world", **ASKED)
            for _ in range(7):
                session.turn()
            twin = session.fork(request)
            for _ in session:
                pass
        assert request.answer.result.tokens == twin.answer.result.tokens == expected


# Which of them --------------------------------------------------------------------------------------------------------


def test_the_room_decides_where_nobody_does() -> None:
    known = preferences(SPECS["decoder"])
    first, second = known
    for share, expected in ((0.1, first), (0.3, first), (0.59, first), (0.6, second), (0.99, second), (1.0, None)):
        assert preference_for("auto", known, share) == expected
    assert preference_for("auto", (), 0.1) is None
    assert preference_for("exact", known, 0.1) is None
    assert preference_for("60%", known, 0.1) == second
    with pytest.raises(SettingInvalid, match=r"'25%' is not in this pack: it has exact, and for shares 30%, 60%"):
        preference_for("25%", known, 0.1)
    for wanted in ("half", "25", "0%", "100%", "-5%", "nan%", ""):
        with pytest.raises(SettingInvalid, match="should be auto, exact, hash, or a share"):
            preference_for(wanted, known, 0.1, ROUTINGS)


def test_it_is_said_and_counted(packs: dict[str, Path]) -> None:
    notes: list[str] = []
    with Engine.open(packs["decoder"], cache="40%", notify=notes.append) as engine:
        engine.generate("hello", max_new_tokens=4)
        assert engine.stats().routing == "30%"
        assert engine.stats().eviction == "layer-lru"
    assert [note for note in notes if "prefers" in note] == [
        "routing prefers experts that were used lately, for room for 30% of them: routing='exact' turns that off"
    ]
    with Engine.open(packs["decoder"], cache="100%", notify=notes.append) as engine:
        assert (engine.preference, engine.stats().routing) == (None, "exact")
