"""Drafts: answers are those without, in fewer passes; the price ends drafts that cost more than they save."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_hash import add_hash
from tiny_packs import DECODER, DECODER_SHAPE, SPECS, VOCAB, write_pack

from moert.beside.drafts import ALIKE, PASSES, Draft, Drafted, Drafts, Price
from moert.engine.engine import Engine
from moert.engine.generation import Generation
from moert.engine.session import Continued, Prefix, Request
from moert.errors import SettingInvalid
from moert.kernels import library
from moert.models.kv import BLOCK_TOKENS
from moert.models.model import Model
from moert.pack.model_spec import ModelSpec, stack_of
from moert.pack.parts import Attention

NATIVE = pytest.mark.skipif(library.load() is None, reason=f"the same bits on the native kernels: {library.missing()}")
REPEATS = [5, 9, 12, 30, 22, 11, 7, 40] * 5
NEW = 40


def windowed() -> ModelSpec:
    """A decoder whose first layers see a window of few tokens."""
    layers = []
    for at in range(len(DECODER.decoder)):
        layer = DECODER.decoder[at]
        if at % 2 == 0 and isinstance(layer.mixer, Attention):
            layer = replace(layer, mixer=replace(layer.mixer, window=6))
        layers.append(layer)
    return replace(DECODER, decoder=stack_of(layers, DECODER.decoder.norm))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    specs = {"decoder": DECODER_SHAPE.but(max_positions=600).spec, "window": windowed(), "mixers": SPECS["mixers"]}
    made = {name: write_pack(root / f"{name}.pack", spec, paths=False) for name, spec in specs.items()}
    return made | {"hash": add_hash(write_pack(root / "hash.pack", DECODER, paths=False))}


def opened(pack: Path, draft: str | int, **changes: Any) -> Engine:
    return Engine.open(pack, predict="none", threads=1, draft=draft, **changes)


class Passes:
    """Counts the tokens of each pass of a model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        decode = Model._decode

        def counted(model: Model, sequences: Sequence[Sequence[int]], states: Any) -> Any:
            self.tokens.append(sum(map(len, sequences)))
            return decode(model, sequences, states)

        monkeypatch.setattr(Model, "_decode", counted)


def quoting(monkeypatch: pytest.MonkeyPatch, script: Sequence[int]) -> None:
    """Every answer is this one."""
    monkeypatch.setattr(Generation, "_choose", lambda self, logits: script[self.written])


# Answers --------------------------------------------------------------------------------------------------------------

FEW = {5: 100.0, 9: 100.0, 12: 99.0}
"""Biases that leave three tokens, so that texts repeat."""
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 3},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4},
    "logprobs": {"logprobs": 2, "temperature": 0.4},
}


@NATIVE
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("kv", [16, 8])
@pytest.mark.parametrize("name", ["decoder", "window"])
def test_answers_are_those_without_drafts(packs, name, kv, asked) -> None:
    with opened(packs[name], "none", kv=kv) as plain, opened(packs[name], 7, kv=kv, cache="40%") as drafting:
        for prompt in (REPEATS, REPEATS[:3], list(range(3, 60))):
            one, other = (e.generate(prompt, max_new_tokens=NEW, logit_bias=FEW, **asked) for e in (plain, drafting))
            assert other.result == one.result
        assert drafting._drafts.figures.drafted >= drafting._drafts.figures.accepted > 0
        assert drafting.times.new_tokens == plain.times.new_tokens


@NATIVE
@pytest.mark.parametrize("draft", [1, 15])
def test_states_behind_drafts_are_those_without(packs, draft, monkeypatch) -> None:
    """Wrong and right ones, over the ends of blocks; a conversation goes on from there."""
    drawn = random.Random(draft)
    script = [drawn.choice(REPEATS) if drawn.random() < 0.1 else token for token in REPEATS * 5][: BLOCK_TOKENS + 30]
    found = []
    for wish in ("none", draft):
        with opened(packs["decoder"], wish) as engine, engine.session() as session:
            prefix = Prefix()
            with monkeypatch.context() as patch:
                quoting(patch, script)
                request = session.add(
                    Continued(REPEATS, Letters(), prefix), max_new_tokens=len(script), ignore_eos=True
                )
                for _ in session:
                    pass
            ids = [*REPEATS, *request.answer.tokens]
            assert prefix.ids == ids[:-1]
            later = session.add(Continued([*ids, 5, 9], Letters(), prefix), max_new_tokens=9, logprobs=1)
            for _ in session:
                pass
            found.append((later.answer.result, later.answer.kept_tokens))
    assert found[0] == found[1]


class Letters:
    """Text of token ids, one letter each."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def flush(self) -> str:
        return ""

    def piece(self, token: int) -> str:
        return self.push(token)


def test_a_text_that_repeats_takes_few_passes(packs, monkeypatch) -> None:
    quoting(monkeypatch, REPEATS)
    with opened(packs["decoder"], 7) as engine:
        passes = Passes(monkeypatch)
        pieces = list(engine.stream(REPEATS, max_new_tokens=33, ignore_eos=True))
        assert passes.tokens == [40, 8, 8, 8, 8]
        assert not pieces  # ids have no text
        assert engine.stats(best=False).drafts == Drafted(4, 28, 28)
        assert "drafts           28 tokens in 4 passes, 28 accepted" in engine.stats(best=False).lines()


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 10, 17])
def test_no_draft_goes_beyond_the_end_of_an_answer(packs, most, monkeypatch) -> None:
    quoting(monkeypatch, REPEATS)
    with opened(packs["decoder"], 7) as engine:
        passes = Passes(monkeypatch)
        assert engine.generate(REPEATS, max_new_tokens=most, ignore_eos=True).tokens == REPEATS[:most]
        assert sum(passes.tokens) == len(REPEATS) + most - 1


def test_no_draft_goes_beyond_the_end_of_a_block(packs, monkeypatch) -> None:
    """There the regulator makes room for the next one."""
    quoting(monkeypatch, REPEATS * 7)
    with opened(packs["decoder"], 15) as engine:
        passes = Passes(monkeypatch)
        engine.generate(REPEATS, max_new_tokens=2 * BLOCK_TOKENS, ignore_eos=True)
        places = [sum(passes.tokens[: at + 1]) for at in range(len(passes.tokens))]
        assert {BLOCK_TOKENS, 2 * BLOCK_TOKENS} <= set(places)


def test_an_end_inside_a_draft_ends_the_answer(packs, monkeypatch) -> None:
    script = [*REPEATS[:4], 1, *REPEATS]
    quoting(monkeypatch, script)
    with opened(packs["decoder"], 7) as engine:
        found = engine.generate([*script[:8], 3, 4], max_new_tokens=30)
        assert (found.tokens, found.stop_reason) == (script[:5], "eos")


def test_text_of_a_draft_is_one_piece_and_ends_before_a_stop_string(packs) -> None:
    with opened(packs["decoder"], "none") as plain, opened(packs["decoder"], 7) as drafting:
        prompt = "hello world " * 4
        whole = plain.generate(prompt, max_new_tokens=NEW, ignore_eos=True).text
        for stop in ("q", whole[5:7], whole[11:14]):
            asked = {"max_new_tokens": NEW, "ignore_eos": True, "stop": stop}
            one, other = plain.generate(prompt, **asked), drafting.generate(prompt, **asked)
            assert (one.text, one.tokens) == (other.text, other.tokens)
            assert "".join(drafting.stream(prompt, **asked)) == one.text


def test_only_a_request_alone_is_drafted_and_forks_go_on(packs, monkeypatch) -> None:
    with opened(packs["decoder"], 7) as engine, engine.session() as session:
        quoting(monkeypatch, REPEATS * 2)
        passes = Passes(monkeypatch)
        first = session.add(REPEATS, max_new_tokens=60, ignore_eos=True)
        session.turn()
        session.turn()
        twin = session.fork(first, max_new_tokens=50)
        session.turn()
        session.cancel(first)
        session.turn()
        assert passes.tokens == [40, 8, 2, 8]
        assert twin.answer.tokens == (REPEATS * 2)[: 1 + 8 + 1 + 8]


def test_beams_are_not_drafted(packs, monkeypatch) -> None:
    with opened(packs["decoder"], 7) as engine:
        passes = Passes(monkeypatch)
        engine.generate(REPEATS, max_new_tokens=6, beams=2, ignore_eos=True)
        assert max(passes.tokens[1:]) <= 2


@NATIVE
def test_a_hash_function_that_predicts_hears_no_wrong_draft(packs, monkeypatch) -> None:
    heard = []
    for wish in ("none", 7):
        with Engine.open(packs["hash"], predict="hash", cache="40%", threads=1, draft=wish) as engine:
            with engine.session() as session:
                request = session.add(REPEATS, max_new_tokens=NEW, logit_bias=FEW)
                while not request.ended:
                    state = request._states[0] if request._states else None
                    session.turn()
            assert state is not None
            heard.append((request.answer.tokens, state.heard.ids[: state.length]))
    assert heard[0] == heard[1]


def test_models_that_cannot_forget_or_drop_tokens_say_so(packs, tmp_path) -> None:
    notes: list[str] = []
    switch = write_pack(tmp_path / "switch.pack", SPECS["switch"], paths=False)
    for pack, routing in ((packs["mixers"], "auto"), (switch, "auto"), (packs["hash"], "hash")):
        with opened(pack, 7, notify=notes.append, routing=routing) as engine:
            engine.generate(REPEATS, max_new_tokens=4, ignore_eos=True)
            assert engine.stats(best=False).drafts is None
    assert [note.partition(": ")[2] for note in notes if note.startswith("draft")] == [
        "its recurrent states cannot forget a wrong draft",
        "its experts take a limited number of tokens in each pass",
        "its routing is not exact",
    ]


def test_nothing_of_it_is_loaded_for_a_run_without(packs) -> None:
    program = "import sys, moert; moert.load(sys.argv[1]).generate([3], max_new_tokens=2); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, packs["decoder"]], capture_output=True, text=True, check=True)
    assert "moert.engine.registry" in done.stdout
    assert "moert.beside.drafts" not in done.stdout


def test_the_command_line_says_what_was_drafted(moert, packs) -> None:
    prompt = "hello world " * 4
    run = ["run", packs["decoder"], prompt, "--max-new-tokens", 8, "--stats", "--tune"]
    assert moert(*run, "draft=3") == 0
    assert "\ndrafts           " in moert.err
    assert moert(*run, "draft=none") == 0
    assert "\ndrafts " not in moert.err
    assert "--tune draft" in moert.refuses(*run, "draft=often")


@pytest.mark.parametrize("wish", ["", "often", "0", 0, "65", "-1", "1.5"])
def test_settings_that_there_are_not(packs, wish) -> None:
    with pytest.raises(SettingInvalid, match="draft"):
        opened(packs["decoder"], wish)


def test_the_memory_of_a_pass_with_a_draft_is_reckoned(packs) -> None:
    loads = []
    for wish in ("none", 15):
        with opened(packs["decoder"], wish) as engine, engine.session() as session:
            request: Request = session.add(REPEATS, max_new_tokens=4)
            loads.append(engine._regulator._footprint.written([request._load()]))
    assert loads[1] > loads[0] + 15 * 4 * VOCAB


# Proposals and their price --------------------------------------------------------------------------------------------


def drafted(text: Sequence[int], most: int = 4) -> list[int]:
    return Draft(text, most, None, Drafted()).next([], most)


def test_drafts_are_what_came_the_last_time() -> None:
    assert drafted([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]
    assert drafted([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]) == [5, 1, 2, 3]
    assert drafted([9, 9, 9, 9]) == [9, 9, 9, 9]
    assert drafted([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    for text in ([], [1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 4, 1, 2]):
        assert drafted(text) == []


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=20), answer=st.lists(st.integers(0, 3), max_size=40),
    steps=st.lists(st.integers(1, 4), min_size=40, max_size=40),
)  # fmt: skip
def test_drafts_behind_any_answer_go_on_as_an_equal_place_before(prompt, answer, steps) -> None:
    draft, end = Draft(prompt, 3, None, Drafted()), 0
    while end < len(answer):
        end += steps.pop()
        text = [*prompt, *answer[:end]]
        found = draft.next(answer[:end], 3)
        places = [at for at in range(ALIKE, len(text)) if text[at - ALIKE : at] == text[-ALIKE:]]
        goes_on = [(text[at:] * 3)[:3] for at in places]
        assert found in goes_on if goes_on else found == []


def run(cost: Callable[[int], float], right: float, tokens: int = 16_000, seed: int = 0) -> tuple[float, Drafts]:
    """Returns the time of a text in passes of one token, on a clock that no machine disturbs. `cost`: time of a pass by
    its tokens; `right`: how often the text goes on as it did."""
    drawn, drafts = random.Random(seed), Drafts("auto")
    period = [drawn.randrange(1000) for _ in range(200)]
    text = [drawn.randrange(1000) if drawn.random() > right else token for token in period * (tokens // 200 + 2)]
    draft, written, seconds = drafts.begin(period), text[:1], 0.0
    while len(written) < tokens:
        found = draft.next(written, 15)
        accepted = next((at for at, token in enumerate(found) if token != text[len(written) + at]), len(found))
        written = text[: len(written) + accepted + 1]
        seconds += cost(1 + len(found))
        draft.passed(len(found), accepted, cost(1 + len(found)))
    return seconds / (len(written) - 1), drafts


def test_text_that_repeats_is_faster_where_many_tokens_cost_less() -> None:
    assert run(lambda tokens: min(tokens, 3.7), right=1.0)[0] < 1 / 3
    assert run(lambda tokens: min(tokens, 3.7), right=0.95)[0] < 1 / 1.5
    assert run(lambda tokens: 1 + 0.1 * (tokens - 1), right=0.9)[0] < 1 / 1.5


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("cost", [lambda n: n, lambda n: 1 + 0.9 * (n - 1), lambda n: 2.0 * n - 1])
def test_drafts_that_cost_more_than_they_save_end(cost, right) -> None:
    """A pass of many tokens costs as much as they do one by one, or nearly, or more."""
    assert run(cost, right)[0] <= 1 / 0.99


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6])
def test_text_that_hardly_repeats_is_not_slower(right) -> None:
    assert run(lambda tokens: min(tokens, 3.7), right)[0] <= 1 / 0.99
    assert run(lambda tokens: min(tokens, 3.7), right=0.0)[1].figures.passes == 0


def repeated(price: Price, cost: Callable[[int], float], passes: int) -> int:
    """Returns how many tokens are drafted in the end, after passes of text that repeats."""
    for _ in range(passes):
        drafted = price.worth(8, 15)
        price.passed(1 + drafted, drafted, cost(1 + drafted))
        price.observe(8, 15, wrong=False)
    return price.worth(8, 15)


def test_a_price_that_has_fallen_is_found_and_one_that_has_risen() -> None:
    price = Price()
    assert repeated(price, lambda tokens: 1.3 * tokens - 0.3, 500) == 0
    assert repeated(price, lambda tokens: min(tokens, 3.0), 20_000) == PASSES[-1] - 1
    assert repeated(price, lambda tokens: 2.0 * tokens - 1, 500) == 0


def test_drafts_end_where_a_token_alone_has_become_cheap_or_drafts_are_wrong() -> None:
    price = Price()
    assert repeated(price, lambda tokens: min(tokens, 3.0), 100) == PASSES[-1] - 1
    for _ in range(60):
        price.observe(8, 0, wrong=True)
    assert price.worth(8, 15) == 0
    assert repeated(price, lambda tokens: min(tokens, 3.0), 200) == PASSES[-1] - 1
    assert repeated(price, lambda tokens: 0.1 if tokens == 1 else 3.0, 1500) == 0


def test_one_long_pass_decides_nothing() -> None:
    price = Price()
    assert repeated(price, lambda tokens: min(tokens, 3.0), 60) == 15
    price.passed(16, 15, 1000.0)
    assert price.worth(8, 15) == 15
