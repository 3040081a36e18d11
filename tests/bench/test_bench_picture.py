"""The picture of speed by memory, from made-up results."""

from __future__ import annotations

from xml.etree import ElementTree

from recipes.bench import picture
from recipes.bench.result import Result, Row

WHERE = {
    "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"processor": "Some <CPU>", "cores": 2, "memory_gib": 24, "isa": "avx2"},
    "settings": {"failed": ["llama, nvme"]},
}


def process(name: str, speed: float, mb: float) -> list[Row]:
    return [Row(f"{name}: decode", speed, "tokens/s"), Row(f"{name}: peak memory of the process", mb, "MB")]


def made() -> Result:
    rows = [Row("olmoe-shaped, board: moert 25% to IO-EXP", 1.0, "× its speed").at_least(6), Row("other", 1.0, "s")]
    for device in ("board", "ssd", "nvme"):
        for at, side in enumerate(("moert 25%", "moert 50%", "moert 75%", "moert, all in memory"), 1):
            rows += process(f"olmoe-shaped, {device}: {side}", 3.0 * at, 300.0 * at)
        if device != "nvme":
            rows += process(f"olmoe-shaped (own routers), {device}, 857 MB: moert", 5.0, 857.0)
            rows += process(f"olmoe-shaped (own routers), {device}, 857 MB: llama.cpp Q2_K", 0.5, 850.0)
    return Result(WHERE, rows)


def texts(drawn: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(drawn).iter() if each.tag.endswith("text")]


def test_it_is_the_same_each_time_and_says_where_it_is_from() -> None:
    drawn = picture.drawn({"stream": made()})
    assert drawn == picture.drawn({"stream": made(), "other": made()})
    assert drawn is not None
    assert any("Commit 0123456, 2026-01-02, Some <CPU>, 2 cores" in text for text in texts(drawn))
    assert picture.drawn({"other": made()}) is None


def test_what_failed_is_named() -> None:
    drawn = picture.drawn({"stream": made()}) or ""
    assert texts(drawn).count("llama.cpp Q2_K: failed") == 1
    assert texts(drawn).count("0.5") == 2


def test_all_rows_that_it_shows_are_kept() -> None:
    result = made()
    needed = picture.needed(result)
    assert "other" not in needed
    assert len(needed) == 2 * (3 * 4 + 2 * 2)
    less = Result(WHERE, [row for row in result.rows if row.name in needed or row.met is False])
    assert picture.drawn({"stream": less}) == picture.drawn({"stream": result})
