"""The experts that tokens go to, as `moert bench --plot` counts them: which stay idle, and which depend on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moert.bench import choices, figures, sweeps
from moert.bench.choices import Change, Input, Reader, changes, shares_idle, shares_kept
from moert.bench.measure import BenchRun, measure
from moert.engine.engine import Engine
from moert.errors import BudgetTooSmall
from moert.experts.policy import Demand
from moert.kernels.backend import I64
from tests import tiny_packs
from tests.tiny_bench import SETTINGS, but


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("packs") / "switch.pack", tiny_packs.SWITCH)


def inputs(*all_ids: Sequence[int]) -> list[Input]:
    return [Input(ids, ids) for ids in all_ids]


def by_token(asked: Sequence[Input]) -> list[I64]:
    """Two layers with top-2 of 8 experts: the first layer goes by the token alone, the second by the token before."""
    found = []
    for each in asked:
        ids = np.array(each.ids)
        before = np.concatenate([[0], ids[:-1]])
        found.append(np.stack([np.stack([ids % 4, ids % 4 + 4], 1), np.stack([before % 4, before % 4 + 4], 1)], 1))
    return found


def test_what_no_token_goes_to_is_idle() -> None:
    shares = shares_idle(by_token, inputs([1, 1, 2, 1], [1, 2]), 8)
    assert shares == {1: 75, 2: pytest.approx(100 * (1 - (2 + 4 + 4 + 4) / 4 / 8)), 3: 50, 4: 37.5}

    def full(asked: Sequence[Input]) -> list[I64]:
        return [np.where(experts < 4, -1, experts) for experts in by_token(asked)]

    assert shares_idle(full, inputs([1]), 8) == {1: 87.5}  # what was dropped went nowhere


def test_a_length_that_hardly_an_input_has_is_left_out() -> None:
    assert list(shares_idle(by_token, inputs(*[[1, 2]] * 20, [1, 2, 3]), 8)) == [1, 2]


def test_experts_that_stay_are_counted_by_distance() -> None:
    asked, changed = inputs([1, 2, 3]), inputs([3, 2, 3], [2, 1, 3])
    tried = [(0, changed[0], Change([0], [(1, 1), (2, 2)])), (0, changed[1], Change([0, 1], [(2, 1)]))]
    assert shares_kept(by_token, asked, tried) == {1: 50, 2: 100}


def test_of_an_encoder_both_sides_change_and_of_a_decoder_what_came_before() -> None:
    ids = [9, 5, 6, 7, 1]  # 1 and 9 are special: they stay, and nobody looks at them
    assert list(changes(ids, {1, 9}, causal=False)) == [
        Change([2, 3], [(1, 1)]), Change([3], [(1, 2)]), Change([1, 3], [(2, 1)]), Change([1, 2], [(3, 1)]),
        Change([1], [(3, 2)]),
    ]  # fmt: skip
    assert list(changes(ids, {1, 9}, causal=True)) == [Change([1], [(2, 1), (3, 2)]), Change([1, 2], [(3, 1)])]
    assert not list(changes([9, 5, 1], {1, 9}, causal=False))
    for change in changes(list(range(20)), (), causal=False):
        ((token, distance),) = change.seen
        assert min(abs(token - gone) for gone in change.gone) >= distance


def test_random_tokens_differ_from_those_they_replace_and_come_from_the_inputs() -> None:
    spec = tiny_packs.DECODER
    asked = inputs([5, 6, 7, 8, spec.tokens.eos[0]], [10, 11])
    changed = choices._changed(spec, asked, causal=True)
    assert {number for number, _, _ in changed} == {0, 1}
    assert changed == choices._changed(spec, asked, causal=True)
    for number, each, change in changed:
        for place, (old, new) in enumerate(zip(asked[number].ids, each.ids, strict=True)):
            assert (old != new) == (place in change.gone)
            assert new in {5, 6, 7, 8, 10, 11} or old == new
    (_, each, _), *_ = choices._changed(spec, inputs([5, 5]), causal=True)
    assert each.ids[0] != 5


@pytest.mark.parametrize("limit", [100, 10_000_000])
def test_changes_and_inputs_are_no_more_than_asked_for(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(choices, "_CHANGED_TOKENS", limit)
    changed = choices._changed(tiny_packs.DECODER, inputs(list(range(5, 35))), causal=False)
    assert len(changed) == 3 if limit == 100 else len(changed) > 100
    monkeypatch.setattr(choices, "_INPUT_TOKENS", 300)
    found = choices._inputs(tiny_packs.DECODER, "decoder", [[5] * 400, [5] * 40, [5] * 5], [[]] * 3)
    assert [len(each.ids) for each in found] == [256, 40]


def test_behind_an_encoder_the_decoder_reads_what_it_wrote_before_the_end() -> None:
    spec = tiny_packs.SWITCH
    start, end = spec.tokens.start, spec.tokens.eos[0]
    found = choices._inputs(spec, "decoder", [[5, 6], [7]], [[8, 9, end, 9], [10, 11]])
    assert found == [Input([5, 6], [start, 8, 9]), Input([7], [start, 10])]
    assert found[0].having([start, 3]) == Input([5, 6], [start, 3])


def test_each_input_is_read_as_if_alone_and_as_the_engine_demands_it(switch: Path) -> None:
    trace: list[Demand] = []
    asked = [Input([5, 6, 7, 8], [0, 9, 10]), Input([11, 12], [0, 13])]
    with Engine.open(switch, SETTINGS.engine, trace=trace) as engine:
        own = dict(engine.model.routers)
        for name in ("encoder", "decoder"):
            reader = Reader(engine, name)
            together = reader.read([each if name == "decoder" else Input(each.given, each.given) for each in asked])
            for each, experts in zip(asked, together, strict=True):
                given = each if name == "decoder" else Input(each.given, each.given)
                trace.clear()
                assert np.array_equal(reader.read([given])[0], experts)
                used = [set(layer[layer >= 0].tolist()) for layer in experts.swapaxes(0, 1)]
                assert used == [set(demand.experts) for demand in trace if demand.at.stack == name]
        assert engine.model.routers == own


def test_as_many_are_read_at_once_as_fit(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = inputs(*([5 + n, 6, 7] for n in range(5)))
    with Engine.open(pack, SETTINGS.engine) as engine:
        reader, begun = Reader(engine, "decoder"), list[int]()
        whole = reader.read(asked)

        def reserve(prompt_tokens: int, new_tokens: int) -> None:
            if prompt_tokens > 6:
                raise BudgetTooSmall("too small", 0)
            begun.append(prompt_tokens)

        monkeypatch.setattr(engine, "reserve", reserve)
        assert all(map(np.array_equal, reader.read(asked), whole))
        assert begun == [6, 3, 6]
        with pytest.raises(BudgetTooSmall):
            reader.read(inputs([5] * 7))


@pytest.mark.parametrize("changed", [{}, {"predict": "gate"}, {"cache": None}])
def test_of_one_token_all_but_top_k_are_idle_and_of_more_fewer(pack: Path, changed: dict[str, object]) -> None:
    found = choices.choices(
        measure(pack, but(**changed), ["one small step", "hello"], 1e9), ["one small step", "hello"]
    )
    assert list(found.idle) == list(found.same) == ["decoder"]
    idle = list(found.idle["decoder"].values())
    assert idle[0] == 75
    assert idle[-1] < idle[1] < idle[0]
    assert next(iter(found.same["decoder"])) == 1
    assert all(0 <= share <= 100 for share in found.same["decoder"].values())


def test_both_stacks_of_an_encoder_decoder_are_seen(switch: Path) -> None:
    measured = measure(switch, replace(SETTINGS, new_tokens=6), ["one small step"], 1e9)
    found = choices.choices(measured, ["one small step"])
    assert list(found.idle) == ["encoder", "decoder"]
    assert max(found.idle["encoder"]) == 12
    figure = figures.idle_experts([measured], [found])
    assert list(figure.series) == ["switch.pack, encoder", "switch.pack, decoder"]
    assert figure.series["switch.pack, encoder"][0] == ("1", pytest.approx(100 * 5 / 6))


def test_a_pack_without_a_tokenizer_reads_made_up_tokens(tmp_path: Path) -> None:
    root = tiny_packs.write_pack(tmp_path / "bare.pack", tiny_packs.DECODER, paths=False, tokenizer=False)
    found = choices.choices(measure(root, SETTINGS, None, 1e9))
    assert max(found.idle["decoder"]) == 24
    assert max(found.same["decoder"]) == 16


def test_inputs_of_one_token_depend_on_nothing_and_that_is_said(
    measured: BenchRun, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweeps._of_choices([replace(measured, samples=measured.samples[:1])], ["a"])
    assert [figure.name for figure in found] == ["idle-experts"]
    assert capsys.readouterr().err.count("no picture") == 1
