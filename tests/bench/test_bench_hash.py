"""make bench-hash: what it counts, and what its tables show of part of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from random_hash import add_hash
from tiny_packs import SPECS, write_pack

from moert.experts.demand import Demand
from moert.pack.model_spec import LayerKey
from recipes.bench.blocks import rendered
from recipes.bench.hash_evictions import BELADY, Compared, Found, Perfect, eviction_rows, hit_rates
from recipes.bench.hash_race import BEST, DEFAULT, NONE, ON_DEMAND, called, race_rows
from recipes.bench.hash_watch import READ, WHOLE, Hits, Recalls, opened, read
from recipes.bench.race import Outcome
from recipes.bench.result import Result, Row, context
from recipes.bench.streamed import Segment
from recipes.bench.tables import hashed

TEXTS = [[3, 5, 7, 9, 11], [4, 6, 8]]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hashed")
    return {name: add_hash(write_pack(root / f"{name}.pack", SPECS[name])) for name in ("decoder", "switch")}


@pytest.mark.parametrize("name", ["decoder", "switch"])
def test_every_choice_is_counted_once(packs: dict[str, Path], name: str) -> None:
    spec = SPECS[name]
    with opened(packs[name]) as engine:
        hits = Hits(engine)
        for ids in TEXTS:
            read(engine, ids, NEW_TOKENS)
    stack = "decoder" if spec.encoder is None else "encoder"
    tokens = sum(map(len, TEXTS))
    assert hits.counts[stack]["all"] == tokens * len(spec.moe_layers(stack)) * spec.moe.router.top_k
    assert 0 <= hits.share(stack, "first") <= hits.share(stack, "more") <= 1


def test_of_more_that_are_read_more_are_demanded(packs: dict[str, Path]) -> None:
    with opened(packs["decoder"]) as engine:
        recalls = Recalls(engine)
        for ids in TEXTS:
            read(engine, ids, NEW_TOKENS)
    found = [recalls.recall("decoder", WHOLE, "hash", times) for times in READ]
    assert found == sorted(found)
    layers = len(SPECS["decoder"].moe_layers())
    assert recalls.all["decoder", WHOLE, "hash"] * (layers - 1) == recalls.all["decoder", "1", "gate"] * layers
    assert recalls.recall("encoder", "1", "gate", 1) is None


def test_hits_of_both_stacks_are_all_hits(packs: dict[str, Path]) -> None:
    compared = hit_rates(packs["switch"], TEXTS, NEW_TOKENS, 0.5)
    found = compared.found
    asked = {policy: each.asked for policy, each in found.items()}
    assert asked["auto"] == asked["foreseen"] == asked[BELADY]
    assert found[BELADY].rate() >= max(found["auto"].rate(), found["foreseen"].rate(), compared.perfect)


def counted(hits: int) -> Found:
    found = Found()
    found.asked, found.hits = Counter({"decoder": 100}), Counter({"decoder": hits})
    return found


def test_what_is_won_is_a_share_of_what_is_lacking() -> None:
    compared = Compared({"auto": counted(40), "foreseen": counted(55), BELADY: counted(60)}, 0.57)
    rows = list(eviction_rows("m", 0.5, compared))
    won = next(row for row in rows if "won" in row.name)
    assert (won.value, won.met) == (pytest.approx(75), True)


def test_who_foresees_without_error_knows_the_present_pass_alone() -> None:
    layers = [LayerKey("decoder", layer) for layer in range(3)]
    trace = [Demand(at, (number,)) for number in range(2) for at in layers]
    perfect, told = Perfect(trace, 4), []
    for _ in perfect:
        coming, likely = perfect.coming()
        told.append([(at.layer, row.nonzero()[0].tolist()) for at, row in zip(coming, likely, strict=True)])
    assert told == [[(1, [0]), (2, [0])], [(2, [0])], [], [(1, [1]), (2, [1])], [(2, [1])], []]


def test_a_part_of_a_run_can_be_shown() -> None:
    outcomes = {
        called(side, 0.5): Outcome([Segment(10, seconds, 0, 0, 0)])
        for side, seconds in ((ON_DEMAND, 4.0), (BEST, 1.0), (NONE, 2.0), (DEFAULT, 2.1))
    }
    rows = [Row("m: hash function", 1.0, "MB"), *race_rows("m, ssd", outcomes, [0.5])]
    result = Result(context({}), rows)
    assert {row.name: row.met for row in rows if row.aim} == {
        "m, ssd: hash, foreseen 50% to on demand": True, "m, ssd: auto 50% to none": False,
    }  # fmt: skip
    for parts in (hashed.names, hashed.routing, hashed.hits, hashed.speeds, hashed.beforehand):
        assert rendered(parts(result), result)
    assert "0.95" in rendered(hashed.speeds(result), result)
