"""Positions that embeddings get added, in models with an encoder and without, and first tokens that are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_packs import DECODER, EOS, PAD, PROMPTS, SWITCH, VOCAB, write_pack

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import PromptTooLong, SettingInvalid
from moert.kernels.backend import Floats
from moert.models.kv import state_bytes
from moert.models.mixers import AddedPositions
from moert.pack.model_spec import ModelSpec
from moert.pack.parts import PositionTable

MOST, FIRST, NEW = 48, 9, 12
TABLE = PositionTable(MOST, skips_pad=True)
TRANSLATOR = replace(
    SWITCH, encoder=replace(SWITCH.stacks["encoder"], positions=TABLE),
    decoder=replace(SWITCH.decoder, positions=PositionTable(MOST + 3, skips_pad=True)), max_positions=MOST,
    tokens=replace(SWITCH.tokens, first=FIRST, start=EOS),
)  # fmt: skip
LEARNT = replace(DECODER, decoder=replace(DECODER.decoder, positions=PositionTable(60)), max_positions=50)
SPECS = {"translator": TRANSLATOR, "learnt": LEARNT}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("positions")
    return {name: write_pack(root / f"{name}.pack", spec, paths=False) for name, spec in SPECS.items()}


def by_hand(spec: ModelSpec, stack: str, table: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """What the text of SPEC.md says, token by token."""
    found, counted = np.zeros((len(ids), table.shape[1]), np.float32), 0
    part = spec.encoder.positions if stack == "encoder" and spec.encoder else spec.decoder.positions
    assert part is not None
    for place, token in enumerate(ids):
        if part.skips_pad and token == spec.tokens.pad:
            continue
        found[place] = table[counted if part.skips_pad and stack == "encoder" else place]
        counted += 1
    return found


class Replaced:
    """In the place of AddedPositions."""

    def __init__(self, vectors: Callable[[Sequence[int]], Any]) -> None:
        self.vectors = vectors

    def add(self, x: np.ndarray, ids: Sequence[int], start: int) -> None:
        x += self.vectors(ids)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("ids", [[5, 6, 7], [5, PAD, PAD, 6, 7], [PAD, 5, 6, PAD], [PAD]])
def test_a_token_gets_the_vector_of_its_position(stack: str, ids: list[int]) -> None:
    table = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    added = AddedPositions(Floats("F32", table), PAD, counts_pad=stack == "decoder")
    x = np.zeros((len(ids), 4), np.float32)
    added.add(x, ids, 0)
    np.testing.assert_array_equal(x, by_hand(TRANSLATOR, stack, table, ids))
    for start in range(1, len(ids)) if stack == "decoder" else ():
        rest = np.zeros((len(ids) - start, 4), np.float32)
        added.add(rest, ids[start:], start)
        np.testing.assert_array_equal(rest, x[start:])
    with pytest.raises(ValueError, match="positions for 6 tokens, 7 are read"):
        added.add(np.zeros((3, 4), np.float32), [5, 6, 7], 4)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_a_table_stays_as_it_is_stored(dtype: Any) -> None:
    numbers = np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
    kept = {
        "F16": numbers.astype(np.float16),
        "BF16": (numbers.view(np.uint32) >> 16).astype(np.uint16),
        "F32": numbers,
    }
    table = Floats(dtype, kept[dtype])
    added, x = AddedPositions(table, None, counts_pad=True), np.ones((200, 4), np.float32)
    added.add(x, [5] * 200, 90)
    assert added._table.data is kept[dtype]
    np.testing.assert_array_equal(x, 1 + table.widened()[90:290])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_positions_are_all_that_is_added(packs: dict[str, Path], kernels: str) -> None:
    ids, fed, rows = [7, PAD, 3, 9, 30, 3], [EOS, 5, PAD, 21, 5], {}
    with Engine.open(packs["translator"], kernels=kernels) as engine:
        engine.reserve(len(ids), len(fed))
        rows["as it is"] = engine.model.forward_all(ids, fed)
        for stack, tower in (("encoder", engine.model._encoder), ("decoder", engine.model._decoder)):
            assert tower is not None
            assert tower.positions is not None
            table = tower.positions._table.widened()
            tower.positions = Replaced(lambda ids, stack=stack, table=table: by_hand(TRANSLATOR, stack, table, ids))
        rows["by hand"] = engine.model.forward_all(ids, fed)
        for tower in (engine.model._encoder, engine.model._decoder):
            tower.positions = Replaced(lambda ids: np.float32(0))
        rows["without"] = engine.model.forward_all(ids, fed)
    np.testing.assert_array_equal(rows["by hand"], rows["as it is"])
    assert np.abs(rows["without"] - rows["as it is"]).max() > 0.05 * np.abs(rows["as it is"]).max()


@pytest.mark.parametrize("name", SPECS)
def test_requests_together_write_what_each_writes_alone(packs: dict[str, Path], name: str) -> None:
    prompts = [[7, 3, 9], [30, 4, 5, 6, 8, 20, 21], [11], list(range(10, 40))]
    settings = GenerationSettings(max_new_tokens=NEW, ignore_eos=True)
    with Engine.open(packs[name]) as engine:
        alone = [engine.generate(ids, settings).result.tokens for ids in prompts]
        assert [answer.result.tokens for answer in engine.generate_many(prompts, settings)] == alone
        with engine.session() as session:
            first = session.add(prompts[1], settings)
            for _ in range(4):
                session.turn()
            late, twin = session.add(prompts[0], settings), session.fork(first)
            for _ in session:
                pass
        assert [late.answer.result.tokens, twin.answer.result.tokens] == alone[:2]
        assert first.answer.result.tokens == alone[1]
    assert len({tuple(tokens[1:]) for tokens in alone}) > 2
    assert {tokens[0] for tokens in alone} == {FIRST} if name == "translator" else len({*map(tuple, alone)}) > 2


def test_there_is_room_for_as_many_tokens_as_there_are_positions(packs: dict[str, Path]) -> None:
    settings = GenerationSettings(max_new_tokens=500, ignore_eos=True)
    with Engine.open(packs["translator"]) as engine:
        answer = engine.generate([5] * MOST, settings)
        assert (len(answer.result.tokens), answer.result.stop_reason) == (MOST, "context_full")
        with pytest.raises(PromptTooLong, match=f"the model can take {MOST}: shorten"):
            engine.generate([5] * (MOST + 1), settings)
        state, _ = engine.model.prefill([5] * MOST)
        for token in answer.result.tokens[:-1]:
            engine.model.step(state, token)
        assert state.nbytes <= state_bytes(TRANSLATOR, MOST, 500) == state_bytes(TRANSLATOR, MOST, MOST)
    with Engine.open(packs["learnt"]) as engine:
        answer = engine.generate([5] * 20, settings)
        assert (len(answer.result.tokens), answer.result.stop_reason) == (30, "context_full")
        with pytest.raises(PromptTooLong, match="the model can take 49: shorten"):
            engine.generate([5] * 50, settings)


def test_the_first_token_is_what_was_asked_for(packs: dict[str, Path]) -> None:
    settings = GenerationSettings(max_new_tokens=NEW, ignore_eos=True)
    with Engine.open(packs["translator"]) as engine:
        tokens = [engine.generate([7, 3], settings, first_token=first).result.tokens for first in (None, 13, "▁", 13)]
        assert [each[0] for each in tokens] == [FIRST, 13, engine.text.tokenizer.token_to_id("▁"), 13]
        assert tokens[1] == tokens[3] != tokens[0]
        drawn = engine.generate([7, 3], settings, first_token=13, temperature=5.0).result.tokens
        assert drawn[0] == 13
        assert drawn[1:] != tokens[1][1:]
        assert engine.generate(PROMPTS[0], max_new_tokens=1, first_token="b").text == "b"
        for wrong, why in (("nothing", "'nothing' is no token"), (VOCAB, f"an id below {VOCAB}"), (-1, "an id below")):
            with pytest.raises(SettingInvalid, match=f"first_token .*{why}"):
                engine.generate([7, 3], first_token=wrong)
        with engine.session() as session:
            request = session.add([7, 3], settings)
            twin = session.fork(request, first_token="▁")
            session.turn()
            with pytest.raises(SettingInvalid, match="can't change"):
                session.fork(request, first_token=14)
            for _ in session:
                pass
        assert [request.answer.result.tokens, twin.answer.result.tokens] == [tokens[0], tokens[2]]
    with Engine.open(packs["learnt"]) as engine:
        assert engine.generate([7, 3], settings, first_token=13).result.tokens[0] == 13
