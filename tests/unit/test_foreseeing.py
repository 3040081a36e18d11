"""The hash function at work: what it foresees, whoever is beside it, and what becomes of answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import PATIENCE_S, wait_until
from random_hash import add_hash, random_hash
from tiny_packs import PROMPTS, SPECS, SWITCH, VOCAB, write_pack

from moert.beside.sida.foresight import Beforehand, BeforePasses, Foresight, Ready, any_demands, of_each_token
from moert.beside.sida.network import Heard, Reader, readers, recalled_bytes
from moert.engine.engine import Engine
from moert.engine.session import Continued, Prefix
from moert.errors import HashMissing, NotFinite, SettingInvalid
from moert.experts import names as names_module
from moert.experts.policy import Demand, Residency
from moert.experts.predictors import of_one_token
from moert.kernels import open_backend
from moert.kernels.backend import Floats, opaque
from moert.kernels.reference import ReferenceBackend
from moert.pack.errors import HashMismatch, HeaderInvalid
from moert.pack.learnt import HASH, RoutedLoss
from moert.pack.model_spec import LayerKey
from recipes.bench.controls import Foreseen, Foretold, opened
from tests.kernels import KERNELS, NATIVE, needs_native
from tests.plain_hash import plain

ASKED: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}

# The network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_network_is_that_of_the_specification(kernels: str) -> None:
    function, rng = random_hash(SWITCH), np.random.default_rng(1)
    backend = open_backend(kernels, 1)
    there = readers(function, backend)
    text = rng.standard_normal((7, SWITCH.d_model)).astype(np.float32)
    other = rng.standard_normal((3, SWITCH.d_model)).astype(np.float32)
    y = there["encoder"].encode(np.concatenate([other, text]), [3, 7])
    numbers, expected = plain(function.stacks["encoder"], text)
    np.testing.assert_allclose(y[3:], expected, atol=2e-4)
    np.testing.assert_allclose(there["encoder"].numbers(y[3:].copy()), numbers, atol=2e-3)
    recalled = there["decoder"].begin()
    recalled.encoded = there["decoder"].shown(y[3:].copy())
    written = rng.standard_normal((5, SWITCH.d_model)).astype(np.float32)
    made = there["decoder"].read(written, [5], [recalled])
    numbers, expected = plain(function.stacks["decoder"], written, expected)
    np.testing.assert_allclose(made, expected, atol=2e-4)
    for layer in range(numbers.shape[1]):
        np.testing.assert_allclose(there["decoder"].of_layer(made, layer), numbers[:, layer], atol=2e-3)
    backend.close()


@needs_native
@given(cuts=st.lists(st.integers(1, 39), max_size=4, unique=True), seed=st.integers(0, 9))
@settings(max_examples=25)
def test_in_pieces_and_beside_others_each_token_gets_the_same_bits(cuts: list[int], seed: int) -> None:
    spec = SPECS["decoder"]
    backend, rng = open_backend("auto", 2), np.random.default_rng(seed)
    reader = Reader(random_hash(spec).stacks["decoder"], backend)
    rows = rng.standard_normal((40, spec.d_model)).astype(np.float32)
    whole = reader.read(rows, [40], [reader.begin()])
    mine, others, found = reader.begin(), reader.begin(), []
    for piece in np.split(rows, sorted(cuts)):
        beside = rng.standard_normal((3, spec.d_model)).astype(np.float32)
        made = reader.read(np.concatenate([beside, piece]), [3, len(piece)], [others, mine])
        found.append(made[3:])
    assert np.array_equal(np.concatenate(found), whole)
    backend.close()


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_many_tokens_are_made_probabilities_as_one_is(top_k: int) -> None:
    weights = np.random.default_rng(3).random((20, 7)) ** 6 + 1e-6
    expected = [of_one_token(row, top_k) for row in weights]
    if top_k > 1:
        np.testing.assert_allclose(of_each_token(weights, top_k), expected, atol=1e-12)
    shares = weights / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(of_each_token(shares, top_k), expected, atol=1e-12)


# What is foreseen -----------------------------------------------------------------------------------------------------


class Watched:
    """A Foresight with embeddings of its own, and what it was asked to read."""

    def __init__(self, name: str, routes: bool = False) -> None:
        self.spec = SPECS[name]
        self.backend = open_backend("auto" if NATIVE else "reference", 1)
        self.foresight = Foresight(random_hash(self.spec), self.spec, self.backend, self.spec.moe.router.top_k, routes)
        table = np.random.default_rng(5).standard_normal((VOCAB, self.spec.d_model)).astype(np.float32)
        self.foresight.embed = self.backend.matrix(Floats("F32", table))
        self.read: list[int] = []
        embedded = self.foresight._embedded
        self.foresight._embedded = lambda ids: (self.read.append(len(ids)), embedded(ids))[1]  # type: ignore[method-assign]

    def likely(self, place: int = 0) -> np.ndarray | None:
        return self.foresight.likely(self.spec.moe_layers("decoder")[place])


def test_what_was_not_asked_about_is_read_when_something_is() -> None:
    one, other = Watched("decoder"), Watched("decoder")
    heard, twin = one.foresight.begin(), other.foresight.begin()
    for token in (5, 6, 7):
        one.foresight.decodes([[token]], [heard], needed=False)
        other.foresight.decodes([[token]], [twin])
    assert one.likely() is None
    assert one.read == []
    one.foresight.decodes([[8]], [heard])
    other.foresight.decodes([[8]], [twin])
    assert one.read == [4]
    np.testing.assert_allclose(one.likely(), other.likely(), atol=1e-5)


@pytest.mark.parametrize("routes", [False, True])
def test_what_was_left_for_long_begins_anew_unless_answers_depend_on_it(routes: bool) -> None:
    watched = Watched("decoder", routes)
    heard = watched.foresight.begin()
    watched.foresight.decodes([[3] * 300], [heard], needed=False)
    watched.foresight.decodes([[4]], [heard])
    assert sum(watched.read) == (301 if routes else 256)


def test_what_was_cut_off_leaves_no_trace() -> None:
    watched = Watched("decoder")
    heard, other = watched.foresight.begin(), watched.foresight.begin()
    watched.foresight.decodes([[5, 6, 7, 8]], [heard])
    heard.cut(2)
    watched.foresight.decodes([[9]], [heard])
    found = watched.likely(1)
    watched.foresight.decodes([[5, 6, 9]], [other])
    alone = other.copy()
    watched.foresight.decodes([[1]], [other])
    watched.foresight.decodes([[1]], [alone])
    again = watched.likely(1)
    watched.foresight.decodes([[1]], [heard])
    assert np.array_equal(watched.likely(1), again)
    assert found is not None


def test_layers_that_have_run_are_not_foreseen() -> None:
    watched = Watched("decoder")
    layers = watched.spec.moe_layers("decoder")
    watched.foresight.decodes([[5, 6]], [watched.foresight.begin()])
    assert [watched.foresight.likely(at) is not None for at in layers] == [True] * len(layers)
    watched.foresight.passed(layers[0])
    assert [watched.foresight.likely(at) is not None for at in layers] == [False] + [True] * (len(layers) - 1)
    coming, likely = Foretold(watched.foresight, layers).coming()
    assert list(coming) == layers[1:]
    assert likely.shape == (len(layers) - 1, watched.spec.moe.n)
    watched.foresight.passed(layers[-1])
    assert list(Foretold(watched.foresight, layers).coming()[0]) == []
    assert watched.foresight.ranked(layers[-1]) == []


def test_questions_of_other_threads_compute_nothing() -> None:
    """A policy is asked by threads that read, while the backend is the model's."""
    watched = Watched("decoder")
    layers, heard = watched.spec.moe_layers("decoder"), watched.foresight.begin()
    for ids in ([5], [6, 7]):
        watched.foresight.decodes([ids], [heard])
        backend: Any = watched.foresight._backend
        watched.foresight._readers["decoder"]._backend = None  # type: ignore[assignment]
        assert len(Foretold(watched.foresight, layers).coming()[1]) == len(layers)
        for at in layers:
            assert watched.foresight.likely(at) is not None
            assert watched.foresight.ranked(at)
            assert (watched.foresight.shares(at) is None) == (len(ids) > 1)
        watched.foresight._readers["decoder"]._backend = backend


def test_where_nobody_asks_only_routers_are_answered() -> None:
    watched = Watched("decoder", routes=True)
    watched.foresight.decodes([[5, 6]], [watched.foresight.begin()], needed=False)
    assert list(Foretold(watched.foresight, watched.spec.moe_layers()).coming()[0]) == []
    assert watched.foresight.numbers(watched.spec.moe_layers("decoder")[1]).shape == (2, watched.spec.moe.n)


class Told:
    """Foresees that the second layer asks for expert 3."""

    def __init__(self, sure: float) -> None:
        self.sure = sure

    def coming(self) -> tuple[Sequence[LayerKey], np.ndarray]:
        likely = np.zeros((1, 4))
        likely[0, 3] = self.sure
        return [LayerKey("decoder", 1)], likely


@pytest.mark.parametrize(("sure", "leaves"), [(1.0, 2), (0.0, 3)])
def test_what_the_pass_will_ask_for_stays(sure: float, leaves: int) -> None:
    order = [LayerKey("decoder", 0), LayerKey("decoder", 1)]
    residency = Residency(30, Foreseen(order, Told(sure)))
    for _ in range(3):  # experts 2 and 3 are as frequent, 3 was used longer ago
        for at, experts in ((order[1], (3,)), (order[1], (2,)), (order[0], (0,))):
            residency.begin(Demand(at, experts))
            for expert in experts:
                key = at.expert(expert)
                if key not in residency:
                    residency.add(key, 10)
                residency.used([key])
    residency.begin(Demand(order[0], (1,)))
    first = residency.victims(10)
    assert [key.expert for key in first if key.at == order[1]] in ([leaves], [])
    worths = [key for key in (residency.victims(20) or []) if key.at == order[1]]
    assert worths[0].expert == leaves


# Whole packs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("foresight")
    return {name: add_hash(write_pack(root / f"{name}.pack", SPECS[name])) for name in ("decoder", "switch", "mixers")}


def tokens(path: Path, batch: bool = False, **changes: Any) -> list[list[int]]:
    with Engine.open(path, notify=lambda note: None, **changes) as engine:
        if batch:
            return [answer.result.tokens for answer in engine.generate_many(PROMPTS, **ASKED)]
        return [engine.generate(prompt, **ASKED).result.tokens for prompt in PROMPTS]


def test_by_default_it_is_asked_where_experts_are_large(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(packs["decoder"]) as engine:
        assert (engine.ahead, engine.model.foresight) == (None, None)
    monkeypatch.setattr(names_module, "HANDED_OVER_BYTES", 1)
    with Engine.open(packs["decoder"]) as engine:
        assert engine.ahead is not None
        assert engine.model.foresight is not None


@pytest.mark.parametrize("name", ["decoder", "switch", "mixers"])
def test_reading_ahead_and_eviction_by_it_change_no_answer(
    packs: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "HANDED_OVER_BYTES", 1)
    expected = tokens(packs[name], predict="none")
    assert tokens(packs[name], predict="hash", eviction="lru", cache="30%") == expected
    for predictor in ("hash", "auto", "none"):
        with opened(str(packs[name]), "foreseen", predictor, cache="30%", notify=lambda note: None) as engine:
            assert [engine.generate(prompt, **ASKED).result.tokens for prompt in PROMPTS] == expected


@needs_native
@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_routed_by_it_answers_depend_on_the_request_alone(packs: dict[str, Path], name: str) -> None:
    expected = tokens(packs[name], routing="hash", predict="none")
    assert expected != tokens(packs[name], routing="exact")
    assert tokens(packs[name], routing="hash", predict="hash", cache="30%") == expected
    assert tokens(packs[name], routing="hash", predict="gate", cache="30%") == expected
    assert tokens(packs[name], routing="hash", batch=True, cache="50%") == expected
    assert tokens(packs[name], routing="hash", batch=True, threads=1) == expected


@needs_native
def test_a_conversation_goes_on_as_if_it_were_read_at_once(packs: dict[str, Path]) -> None:
    prefix, ids = Prefix(), [9, 8, 7, 6, 5, 4, 3]
    with Engine.open(packs["decoder"], routing="hash", notify=lambda note: None) as engine, engine.session() as session:
        for _ in range(2):
            for length in (7, 4):
                request = session.add(
                    Continued(ids[:length], engine.text.detokenizer(), prefix), max_new_tokens=3, ignore_eos=True
                )
                list(session)
                alone = session.add(ids[:length], max_new_tokens=3, ignore_eos=True)
                list(session)
                assert request.answer.result.tokens == alone.answer.result.tokens


def test_the_router_is_left_out_and_the_function_decides(packs: dict[str, Path]) -> None:
    with Engine.open(packs["decoder"], routing="hash", notify=lambda note: None) as engine:
        at = engine.spec.moe_layers()[0]
        numbers = np.random.default_rng(2).standard_normal((4, engine.spec.moe.n)).astype(np.float32)
        router: Any = engine.model.routers[at]
        router._numbers = lambda: numbers
        x = np.random.default_rng(4).standard_normal((4, engine.spec.d_model)).astype(np.float32)
        routed = router.route(x, [4])
        top_k = engine.spec.moe.router.top_k
        assert np.array_equal(routed.experts, np.sort(np.argsort(-numbers, axis=1)[:, :top_k], axis=1))
        shares = np.exp(numbers) / np.exp(numbers).sum(axis=1, keepdims=True)
        expected = np.take_along_axis(shares, routed.experts, axis=1)
        if engine.spec.moe.router.renormalise:
            expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(routed.weights, expected, rtol=1e-4)
        assert np.array_equal(routed.hidden, router._exact._backend.scores(x, router._exact.weights)[0])


@needs_native
@pytest.mark.parametrize("routing", ["hash", "exact"])
@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_prompts_that_wait_are_worked_out_beforehand(packs: dict[str, Path], name: str, routing: str) -> None:
    expected = tokens(packs[name], routing=routing, predict="hash", cache="50%")
    with (
        Engine.open(packs[name], routing=routing, predict="hash", cache="50%", notify=lambda note: None) as engine,
        engine.session() as session,
    ):
        listener: Any = engine.model.foresight
        listener.needed, foresight = lambda: True, listener.foresight
        if foresight.before is None:  # on one core
            foresight.before = foresight.beforehand(open_backend("auto", 1))
        engine._admission.together = lambda running, waiting: 0 if running else 1  # type: ignore[method-assign]
        asked = [session.add(prompt, **ASKED) for prompt in PROMPTS]
        session.turn()
        wait_until(lambda: len(foresight.before._ready) == len(PROMPTS) - 1)
        list(session)
        assert [request.answer.result.tokens for request in asked] == expected
        assert foresight.before.used == len(PROMPTS) - 1


@needs_native
def test_prompts_of_the_next_call_are_worked_out_during_this_one(packs: dict[str, Path]) -> None:
    path, asked = packs["switch"], {"routing": "hash", "predict": "hash", "cache": "50%"}
    expected = tokens(path, **asked)
    with Engine.open(path, **asked, notify=lambda note: None) as engine:
        listener: Any = engine.model.foresight
        foresight = listener.foresight
        if foresight.before is None:  # on one core
            foresight.before = foresight.beforehand(open_backend("auto", 1))
        found = [answer.result.tokens for answer in engine.generate_many(PROMPTS[:1], coming=PROMPTS[1:], **ASKED)]
        wait_until(lambda: len(foresight.before._ready) == len(PROMPTS) - 1)
        found += [answer.result.tokens for answer in engine.generate_many(PROMPTS[1:], **ASKED)]
        assert found == expected
        assert foresight.before.used == len(PROMPTS) - 1


def test_what_is_not_expected_any_more_is_forgotten() -> None:
    working, go = threading.Event(), threading.Event()

    def work(prompts: Sequence[tuple[int, ...]]) -> list[Ready]:
        working.set()
        assert go.wait(PATIENCE_S)
        return [Ready(np.zeros((len(prompt), 2), np.float32), None) for prompt in prompts]

    before = Beforehand(work)
    before.expect([(1,), (2, 3)])
    assert working.wait(PATIENCE_S)
    assert before.take((1,)) is None  # it has begun without
    before.expect([(2, 3)])
    go.set()
    wait_until(lambda: (2, 3) in before._ready)
    assert (1,) not in before._ready
    before.expect([])
    assert before.take((2, 3)) is None
    before.close()
    before.expect([(4,)])
    assert before.take((4,)) is None


def test_what_has_begun_can_be_expected_once_more() -> None:
    asked, worked = [[1], [2, 3]], list[tuple[int, ...]]()

    def work(prompts: Sequence[tuple[int, ...]]) -> list[Ready]:
        worked.extend(prompts)
        return [Ready(np.zeros((len(prompt), 2), np.float32), None) for prompt in prompts]

    before = Beforehand(work)
    for _ in range(2):
        before.expect(asked)
        wait_until(lambda: len(before._ready) == len(asked))
        before.expect(asked)
        assert all(before.take(tuple(prompt)) is not None for prompt in asked)
    before.close()
    assert worked == 2 * [(1,), (2, 3)]


def test_what_finds_no_memory_is_left_to_its_run() -> None:
    """And long prompts do not go together with others."""
    tried: list[list[tuple[int, ...]]] = []
    long = (7,) * 300

    def work(prompts: Sequence[tuple[int, ...]]) -> list[Ready]:
        tried.append(list(prompts))
        if (1,) in prompts:
            raise MemoryError
        return [Ready(np.zeros((len(prompt), 2), np.float32), None) for prompt in prompts]

    before = Beforehand(work)
    before.expect([(1,), (4, 5), long, (2, 3)])
    wait_until(lambda: (2, 3) in before._ready)
    assert tried == [[(1,), (4, 5)], [long], [(2, 3)]]
    assert before.take((1,)) is None
    assert before.take((4, 5)) is None
    assert before.take(long) is not None
    before.close()


def test_by_default_nothing_is_foreseen_for_nobody(packs: dict[str, Path]) -> None:
    """Routed by the function, while nothing reads ahead or keeps experts by it."""
    with Engine.open(packs["decoder"], routing="hash", notify=lambda note: None) as engine:
        engine.generate(PROMPTS[0], **ASKED)
        assert engine.ahead is None
        assert isinstance(engine.model.foresight, BeforePasses)
        assert not any(engine.model.foresight.foresight.ranked(at) for at in engine.spec.moe_layers())
        assert not engine.model.foresight.needed()


def test_it_is_said_what_routing_by_it_loses(packs: dict[str, Path], tmp_path: Path) -> None:
    notes: list[str] = []
    with Engine.open(packs["decoder"], routing="hash", notify=notes.append) as engine:
        engine.generate("hello", max_new_tokens=1)
    assert any("takes the place of the routers: what that loses was not measured" in note for note in notes)
    path = write_pack(tmp_path / "measured.pack", SPECS["decoder"], paths=False)
    add_hash(path, random_hash(SPECS["decoder"], routed=RoutedLoss(2, 0.034, 0.03, 0.04)))
    with Engine.open(path, routing="hash", notify=notes.append) as engine:
        engine.generate("hello", max_new_tokens=1)
        assert engine.stats().routing == "hash"
    assert "held-out loss 3.4%" in notes[-1]


@pytest.mark.parametrize("asked", [{"predict": "hash"}, {"routing": "hash"}], ids=lambda asked: next(iter(asked)))
def test_without_a_function_one_line_says_what_adds_it(tmp_path: Path, asked: dict[str, str]) -> None:
    path = write_pack(tmp_path / "bare.pack", SPECS["decoder"], paths=False)
    with pytest.raises(HashMissing, match=f"has no {HASH} .moeconv train-hash adds it"):
        Engine.open(path, **asked)
    Engine.open(path).close()


@pytest.mark.parametrize("name", ["switch", "mixers"])
def test_one_of_another_model_is_left_aside_unless_it_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "HANDED_OVER_BYTES", 1)
    path = write_pack(tmp_path / "decoder.pack", SPECS["decoder"], paths=False)
    add_hash(path, random_hash(SPECS[name]))
    notes: list[str] = []
    with Engine.open(path, notify=notes.append) as engine:
        engine.generate("hello", max_new_tokens=1)
    assert [note for note in notes if HASH in note and note.endswith("the run goes on without it")]
    with pytest.raises(HeaderInvalid, match="train the hash function of this pack again"):
        Engine.open(path, predict="hash")
    (path / HASH).write_bytes(b"x" * (path / HASH).stat().st_size)
    with pytest.raises(HashMismatch):
        Engine.open(path)


def test_numbers_of_a_softmax_take_no_other_routers_place(tmp_path: Path) -> None:
    spec = SPECS["decoder"]
    kinds = tuple(
        replace(kind, ffn=replace(kind.ffn, router=replace(kind.ffn.router, score="sigmoid")))
        if kind.ffn == spec.moe
        else kind
        for kind in spec.decoder.kinds
    )
    other = replace(spec, decoder=replace(spec.decoder, kinds=kinds))
    path = add_hash(write_pack(tmp_path / "sigmoid.pack", other, paths=False))
    with pytest.raises(SettingInvalid, match="routers that weigh by a softmax, not by sigmoid"):
        Engine.open(path, routing="hash")
    Engine.open(path, predict="hash").close()


@pytest.mark.parametrize("name", ["decoder", "switch"])
@pytest.mark.parametrize("prompt_tokens", [1, 64, 65, 300])
def test_what_it_takes_is_counted(packs: dict[str, Path], name: str, prompt_tokens: int) -> None:
    with Engine.open(packs[name], cache="50%", predict="hash") as engine:
        assert isinstance(engine.model.foresight, BeforePasses)
        engine.model.foresight.needed = lambda: True  # type: ignore[method-assign]
        engine.reserve(prompt_tokens, 10)
        (state, read), *_ = engine.model.begin([[9] * prompt_tokens])
        engine.model.read([state], [read])
        assert isinstance(state.heard, Heard)
        assert 0 < state.heard.nbytes <= recalled_bytes(random_hash(SPECS[name]), prompt_tokens, 10)


def test_numbers_far_apart_name_experts_all_the_same() -> None:
    """One of them is so large that the shares of all others vanish, and a token goes to two."""
    numbers = np.array([[[4e9, 0, 1, -4e9]]], np.float32)
    for n_tokens in (1, 5):
        found = any_demands(numbers, 2, n_tokens)
        assert np.isfinite(found).all()
        assert found[0, 0] == 1
        assert ((found >= 0) & (found <= 1)).all()


def test_a_function_that_gives_no_numbers_ends_in_one_line() -> None:
    reader = next(iter(readers(random_hash(SWITCH), opaque(ReferenceBackend())).values()))
    made = np.full((2, reader.width), np.inf, np.float32)
    for read in (reader.numbers, lambda y: reader.of_layer(y, 0)):
        with (
            np.errstate(all="ignore"),
            pytest.raises(NotFinite, match=r"hash.safetensors gives numbers that are not finite"),
        ):
            read(made)
