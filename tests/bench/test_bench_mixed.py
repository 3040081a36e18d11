"""The bench of mixed widths: its rows and its tables, from losses that are made up."""

from __future__ import annotations

from moert.pack.manifest import LossEstimate
from recipes.bench import mixed
from recipes.bench.blocks import rendered
from recipes.bench.mixed import EXPERTS, MODELS, SETTINGS, Measured, Outside, rows_of
from recipes.bench.result import Result
from recipes.bench.tables import mixed as tables

WHERE = {"commit": "0123456789ab", "date": "2026-01-02", "settings": {},
         "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"}}  # fmt: skip


def made_up(name: str, outside: Outside) -> dict[int, Measured]:
    def one(bits: int) -> Measured:
        loss = (16 - bits) / 100 + (16 - outside.bits) / 1000
        estimate = LossEstimate(200.0, 200 * (1 + loss), loss, loss - 0.01, loss + 0.01, 96)
        return Measured(bits * 1_000_000, outside.bits * 100_000, bits + 0.2, estimate)

    return {bits: one(bits) for bits in EXPERTS}


def test_every_cell_has_perplexity_loss_and_size(monkeypatch) -> None:
    monkeypatch.setattr(mixed, "measured", made_up)
    result = Result(WHERE, [row for name in MODELS for row in rows_of(name)])
    cell = result.by_name["wiki, attention at 4, experts at 2: loss"]
    assert (round(cell.value, 6), round(cell.low, 6), round(cell.high, 6), cell.n) == (15.2, 14.2, 16.2, 96)
    assert result.by_name["wiki, unquantised: perplexity"].value == 200
    assert len([name for name in result.by_name if name.endswith(": size")]) == 2 * 4 * (len(SETTINGS) + 1)
    wiki, wikids, origin = rendered(tables.parts(result), result).split("\n\n")
    lines = wiki.splitlines()
    assert lines[0].startswith("| wiki | experts 16 (16.20) | experts 4 (4.20) |")
    assert lines[2].startswith("| all 16 | 200.0 (+0.0%), 17.6 MB | 224.0 (+12.0%), 5.6 MB |")
    assert [line.split(" | ")[0][2:] for line in lines[2:]] == [str(each).replace(" at", "") for each in SETTINGS]
    assert len(wikids.splitlines()) == len(lines)
    assert origin.startswith("*Commit 0123456")


def test_attention_leaves_the_rest_as_it_is() -> None:
    assert Outside("attention", 4).dense_bits == {"attention": 4}
    assert Outside("all", 4).dense_bits == 4
