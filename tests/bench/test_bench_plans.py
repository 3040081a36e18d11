"""The bench of rankings: whose costs an expert gets, and its table."""

from __future__ import annotations

from moeconv.artifacts import Probe, SensitivityTable, Summary
from moert.pack.model_spec import ExpertKey
from recipes.bench.blocks import rendered
from recipes.bench.plans import SEEDS, SIGNAL, rankings, reordered
from recipes.bench.result import Result, Row
from recipes.bench.tables import plans as tables

KEYS = [ExpertKey("decoder", 0, expert) for expert in range(4)]
COSTS = (3.0, 1.0, 4.0, 2.0)  # of each expert at 2 bits
TOKENS = (10, 40, 20, 30)


def probe(key: ExpertKey, bits: int) -> Probe:
    return Probe(key, (bits,) * 3)


def swept() -> SensitivityTable:
    costs = {probe(key, 2): (0.0, 0.0, cost) for key, cost in zip(KEYS, COSTS, strict=True)}
    costs |= {probe(key, 3): (0.0, 0.0, cost / 10) for key, cost in zip(KEYS, COSTS, strict=True)}
    return SensitivityTable(4, Summary(1.0, 0.0, 0.0, 0.0), costs, dict(zip(KEYS, TOKENS, strict=True)))


def costs_of(table: SensitivityTable, bits: int) -> list[float]:
    return [table.cost(probe(key, bits), SIGNAL) for key in KEYS]


def test_the_first_of_an_order_gets_the_largest_costs_at_all_widths() -> None:
    found = reordered(swept(), [KEYS[3], KEYS[0], KEYS[1], KEYS[2]])
    assert costs_of(found, 2) == [3.0, 2.0, 1.0, 4.0]
    assert costs_of(found, 3) == [0.3, 0.2, 0.1, 0.4]


def test_rankings_deal_out_the_same_costs_by_usage_and_at_random() -> None:
    table = swept()
    found = rankings(table)
    assert found["sweep"] == [table]
    assert costs_of(found["usage"][0], 2) == [1.0, 4.0, 2.0, 3.0]
    assert len(found["random"]) == SEEDS
    assert all(sorted(costs_of(one, 2)) == sorted(COSTS) for one in found["random"])
    assert len({tuple(costs_of(one, 2)) for one in found["random"]}) > 1


def test_the_table_has_a_line_for_each_size() -> None:
    where = {"commit": "0123456789ab", "date": "2026-01-02", "settings": {},
             "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"}}  # fmt: skip
    rows = [Row("wiki, all at 2 bits: loss", 3.8, "%").within(3.4, 4.2), Row("wiki, all at 2 bits: experts", 3.9, "MB")]
    for ranking, loss in (("sweep", 2.3), ("usage", 2.7), ("random", 3.2)):
        rows.append(Row(f"wiki, 2.4 bits, {ranking}: loss", loss, "%"))
        rows.append(Row(f"wiki, 2.4 bits, {ranking}: experts", 4.2, "MB"))
    rows += [Row("wiki, 2.4 bits, random: least loss", 3.1, "%"), Row("wiki, 2.4 bits, random: largest loss", 3.4, "%")]
    lines = rendered(tables.parts(Result(where, rows)), Result(where, rows)).splitlines()
    assert lines[2] == "| wiki | 2 and scales | 3.90 MB | | | | 3.80% (3.40% to 4.20%) |"
    assert lines[3] == "| wiki | 2.4 | 4.20 MB | 2.30% | 2.70% | 3.10% to 3.40% | |"
