"""Prompts that run together: the answers of each alone, with fewer reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_packs import SHAPES, SPECS, VOCAB, with_capacity, with_ends, write_pack

from moert.command.prompts import PromptRecord, followed, grouped
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.regulator import Bounds, Regulator
from moert.engine.session import Answer, Interrupted
from moert.errors import InputInvalid
from moert.kernels.backend import Floats, NormWeights, RouterWeights, opaque
from moert.kernels.reference import ReferenceBackend
from moert.models.ffn import LearnedRouter, Routed
from moert.models.footprint import Footprint, Load
from moert.models.kv import rounded
from moert.pack.codec import F32
from moert.pack.parts import Router
from tests.pairs import thinned

PROMPTS = ("one small step", "zigzag", "a", "hello world", "jumps over the lazy dog", "x y z")
IDS = [[5, 9, 12], [7], list(range(3, 40)), [4, 4, 8, 30, 22, 11], [20] * 11]
SETTINGS = {
    "greedy": GenerationSettings(max_new_tokens=12),
    "drawn": GenerationSettings(max_new_tokens=12, temperature=0.8, seed=3),
    "stop strings": GenerationSettings(max_new_tokens=12, temperature=0.8, stop=("o", "ab", "e", "j", "z")),
}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Answers end at different places."""
    root = tmp_path_factory.mktemp("batch")
    ends = tuple(range(1, VOCAB, 11))
    return {name: write_pack(root / f"{name}.pack", with_ends(spec, ends), paths=False) for name, spec in SPECS.items()}


@pytest.fixture(scope="module")
def smallest(packs: dict[str, Path]) -> dict[str, int]:
    engines = {name: Engine.open(path, predict="none") for name, path in packs.items()}
    sizes = {name: engine.budget.layer_bytes for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return sizes


@thinned("kernels, capacity, name", ["auto", "scalar", "reference"], [None, 0, 1, 4], SPECS)
def test_logits_are_those_of_each_prompt_alone(tmp_path, name, capacity, kernels) -> None:
    spec = with_capacity(name, capacity)
    path = write_pack(tmp_path / "some.pack", spec, paths=False, tokenizer=False)
    with Engine.open(path, predict="none", kernels=kernels, threads=1) as engine:
        engine.reserve(40, 12)
        together, alone = engine.model.prefill_many(IDS), [engine.model.prefill(ids) for ids in IDS]
        many, one = np.stack([logits for _, logits in together]), np.stack([logits for _, logits in alone])
        for _ in range(6):
            if kernels == "reference":
                np.testing.assert_allclose(many, one, rtol=1e-3, atol=1e-3)
            else:
                assert np.array_equal(many, one)
            tokens = one.argmax(-1).tolist()
            many = engine.model.read([state for state, _ in together], [[token] for token in tokens])
            steps = zip([state for state, _ in alone], tokens, strict=True)
            one = np.stack([engine.model.step(state, token) for state, token in steps])
        assert [state.length for state, _ in together] == [state.length for state, _ in alone]


class Scored(ReferenceBackend):
    """Takes a layer's input for the router's scores."""

    def scores(self, x: F32, weights: RouterWeights[Floats]) -> tuple[F32, F32]:
        return x, np.exp(x)


def test_capacity_counts_in_each_sequence() -> None:
    ones = np.ones(6, np.float32)
    weights = RouterWeights(
        Router(1, renormalise=False, capacity=2), 1.0, NormWeights(ones, None, 1e-5), None,
        opaque(Scored()).matrix(Floats("F32", ones)), None, None,
    )  # fmt: skip
    router = LearnedRouter(weights, opaque(Scored()))
    scores = np.random.default_rng(0).standard_normal((12, 6), np.float32)
    parts = [router.route(part, [len(part)]) for part in np.split(scores, [7, 8])]
    found = router.route(scores, [7, 1, 4])
    for name in Routed._fields:
        assert np.array_equal(getattr(found, name), np.concatenate([getattr(part, name) for part in parts]))
    assert not np.array_equal(found.experts, router.route(scores, [12]).experts)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", SPECS)
def test_answers_are_those_of_each_prompt_alone_and_take_fewer_reads(packs, smallest, name, settings) -> None:
    with Engine.open(packs[name], predict="none", cache=smallest[name]) as engine:
        alone = [engine.generate(prompt, SETTINGS[settings]).result for prompt in PROMPTS]
        assert len({len(result.tokens) for result in alone}) > 1
        assert settings != "stop strings" or "stop_string" in {result.stop_reason for result in alone}
    with Engine.open(packs[name], predict="none", cache=smallest[name]) as batched:
        answers = list(batched.generate_many(PROMPTS, SETTINGS[settings]))
        assert [answer.result for answer in answers] == alone
        assert batched.counters.bytes_read < 0.8 * engine.counters.bytes_read
        figures, before = batched.stats(), engine.stats()
        assert (figures.requests, figures.prompt_tokens, figures.new_tokens) == (
            before.requests, before.prompt_tokens, before.new_tokens,
        )  # fmt: skip
        for answer in answers:
            assert 0 < answer.time_to_first_token_s <= answer.total_s
        assert len({answer.total_s for answer in answers}) > 1


def test_the_reference_writes_the_same_tokens(packs) -> None:
    """Not the same bits, but these logits are far enough apart."""
    for path in packs.values():
        with Engine.open(path, predict="none", kernels="reference", threads=1) as engine:
            alone = [engine.generate(prompt, SETTINGS["greedy"]).result for prompt in PROMPTS]
            assert [answer.result for answer in engine.generate_many(PROMPTS, SETTINGS["greedy"])] == alone


def test_what_does_not_fit_together_runs_in_smaller_batches(packs, monkeypatch) -> None:
    notes: list[str] = []
    with Engine.open(packs["decoder"], predict="none", notify=notes.append) as engine:
        alone = [engine.generate(prompt, SETTINGS["greedy"]).result for prompt in PROMPTS]
        notes.clear()
        sizes: list[int] = []

        real = engine.model.read
        monkeypatch.setattr(engine._regulator, "together", lambda running, waiting: min(2 - len(running), len(waiting)))
        monkeypatch.setattr(engine.model, "read", lambda states, ids: (sizes.append(len(ids)), real(states, ids))[1])
        answers = list(engine.generate_many(PROMPTS[:5], SETTINGS["greedy"]))
    assert [answer.result for answer in answers] == alone[:5]
    assert set(sizes) <= {1, 2}, "two at a time, as long as there are two"
    assert sum(sizes) == sum(len(answer.result.tokens) for answer in answers)
    assert notes == ["5 prompts at once would take the experts' memory: they run 2 at a time"]


def test_as_many_as_fit_run_together_and_at_least_one(packs) -> None:
    with Engine.open(packs["decoder"], predict="none") as engine:
        budget, waiting = engine.budget, [Load(tokens, 12) for tokens in (20_000, 25_000, 30_000, 90_000)]

        def regulator(limit_bytes: int | None) -> Regulator:
            return Regulator(Footprint(engine.spec, False), budget, Nothing(), Bounds(limit_bytes), lambda: 10**8)

        assert regulator(None).together([], waiting) == 4
        for count in (1, 2, 3, 4):
            limit = regulator(10**9).smallest_memory(waiting[:count])
            assert regulator(limit).together([], waiting) == count
            assert regulator(limit).together(waiting[: count - 1], waiting[count - 1 :]) == 1
            assert regulator(limit).together(waiting[:count], waiting[count:]) == 0
        assert regulator(1).together([], waiting) == 1
        assert regulator(1).together(waiting[:1], waiting[1:]) == 0


class Nothing:
    """An expert cache without experts."""

    held_bytes = 0

    def resize(self, capacity_bytes: int) -> None:
        raise AssertionError("nobody asked for that")


@pytest.fixture
def interrupted_after_three(packs, monkeypatch):
    """An engine's model class whose fourth turn is interrupted; what each prompt wrote by then."""
    with Engine.open(packs["decoder"], predict="none") as engine:
        kind, left = type(engine.model), [None] * 4
        alone = [engine.generate(prompt, SETTINGS["greedy"]).result for prompt in PROMPTS]
    real = kind.read

    def read(self, states, sequences):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return real(self, states, sequences)

    monkeypatch.setattr(kind, "read", read)
    assert {len(result.tokens) <= 4 for result in alone} == {True, False}
    return alone


def test_ctrl_c_keeps_what_there_is(packs, interrupted_after_three) -> None:
    with (
        Engine.open(packs["decoder"], predict="none") as engine,
        pytest.raises(Interrupted) as stop,
    ):
        list(engine.generate_many(PROMPTS, SETTINGS["greedy"]))
    for answer, alone in zip(stop.value.answers, interrupted_after_three, strict=True):
        assert answer.result.tokens == alone.tokens[:4]
        assert answer.finished == (len(alone.tokens) <= 4)
    assert engine.stats().new_tokens == sum(len(answer.result.tokens) for answer in stop.value.answers)


def test_ctrl_c_before_the_last_began_keeps_the_others(packs, monkeypatch) -> None:
    with Engine.open(packs["decoder"], predict="none") as engine:

        def together(running, waiting):
            if len(waiting) == 2 and not running:
                raise KeyboardInterrupt
            return 0 if running else 2

        monkeypatch.setattr(engine._regulator, "together", together)
        answers: list[Answer] = []
        with pytest.raises(Interrupted) as stop:
            answers.extend(engine.generate_many(PROMPTS, SETTINGS["greedy"]))
    assert [answer.finished for answer in answers] == [True] * 4
    assert stop.value.answers == []


def test_biases_take_room_for_the_longest_prompt_alone(packs) -> None:
    """One table serves all prompts, layers and tokens, and grows with the length, not with its square."""
    prompts, heads = [*IDS, [9] * 200], SHAPES["switch"].n_heads
    with Engine.open(packs["switch"], predict="none") as engine:
        engine.reserve(300, 1)
        engine.model.prefill_many(prompts)
        for tower, longest in ((engine.model._encoder, 200), (engine.model._decoder, 1)):
            table, reach = tower.bias.by_distance(1)
            assert reach == rounded(longest)
            assert table.shape == (heads, 2 * reach + 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": at, "prompt": prompt}) + "\n" for at, prompt in enumerate(PROMPTS)))
    return path


def test_ctrl_c_leaves_the_finished_answers_of_a_batch(packs, source, interrupted_after_three, moert) -> None:
    options = ("--tune", "predict=none", "--max-new-tokens", 12, "--json", "--batch", 6)
    assert moert("run", packs["decoder"], "--input", source, *options) == 130
    wanted = [(at, one.tokens) for at, one in enumerate(interrupted_after_three) if len(one.tokens) <= 4]
    assert [(line["id"], line["tokens"]) for line in map(json.loads, moert.out.splitlines())] == wanted


def test_a_file_gives_the_same_lines_in_any_batch(packs, source, moert) -> None:
    options = ("--input", source, "--tune", "predict=none", "--max-new-tokens", 12, "--json", "--temperature", 1)
    assert moert("run", packs["switch"], *options) == 0
    wanted = moert.out
    assert [json.loads(line)["id"] for line in wanted.splitlines()] == list(range(len(PROMPTS)))
    for size in (3, 100):
        assert (moert("run", packs["switch"], *options, "--batch", size), moert.out, moert.err) == (0, wanted, "")


def test_a_batch_needs_a_file_and_a_size(packs, source, moert) -> None:
    said = moert.refuses("run", packs["switch"], "abc", "--batch", 2)
    assert said == "moert: --batch 2 goes with --input: there is one prompt\n"
    assert "--batch" in moert.refuses("run", packs["switch"], "--input", source, "--batch", 0)


def test_lines_before_a_bad_one_are_run() -> None:
    def records():
        yield from [PromptRecord(str(number), {}) for number in range(5)]
        raise InputInvalid("bad")

    seen: list[list[str]] = []
    groups = ([record.prompt for record in group] for group in grouped(records(), 3))
    with pytest.raises(InputInvalid, match="bad"):
        seen.extend(groups)
    assert seen == [["0", "1", "2"], ["3", "4"]]
    assert [len(group) for group in grouped(iter([PromptRecord("", {})] * 4), 2)] == [2, 2]


def test_each_group_comes_with_the_next() -> None:
    one, other = [PromptRecord("a", {})] * 2, [PromptRecord("b", {})]
    assert list(followed([one, other])) == [(one, other), (other, [])]
    assert list(followed([])) == []
