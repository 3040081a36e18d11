"""The tables of `make bench-stream` find every row in what the bench makes of its races; nothing is run here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.bench import stream
from recipes.bench.blocks import rendered
from recipes.bench.race import Device, Entry, Outcome
from recipes.bench.result import Result, Row
from recipes.bench.stream_packs import Packs
from recipes.bench.streamed import Segment
from recipes.bench.tables import stream as tables
from tests import tiny_packs

WHERE = {"commit": "0123456789ab", "date": "2026-01-02", "settings": {"failed": []},
         "hardware": {"processor": "Some CPU", "cores": 2, "memory_gib": 24, "isa": "avx2"}}  # fmt: skip
PARTS = ("g2p", "wiki", "olmoe-shaped", "llama")


def raced(device: Device, entries: list[Entry], seconds: float, rounds: int) -> dict[str, Outcome]:
    facts = {"peak_bytes": 100, "cache_bytes": 6, "backbone_bytes": 4}
    segments = [Segment(10, 1.0, 50, 20, 5, 2)] * rounds
    return {entry.name: Outcome(segments, [30] * rounds, Segment(128, 4.0, 0, 0, 0), facts) for entry in entries}


@pytest.fixture
def imitated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = tiny_packs.write_pack(tmp_path / "tiny.pack", tiny_packs.DECODER)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("[1, 2]\n")
    packs = Packs("olmoe-shaped", pack, pack, pack, pack, None, 7)
    monkeypatch.setattr(stream, "shaped", lambda: packs)
    monkeypatch.setattr(stream, "reference", lambda name: replace(packs, name=name, routing=None))
    monkeypatch.setattr(stream, "race", raced)
    monkeypatch.setattr(stream, "texts", lambda spec: texts)
    monkeypatch.setattr(stream, "disk_bytes_per_s", lambda packs: 1e9)
    monkeypatch.setattr(stream.races, "start", lambda *arguments: 2.5)
    monkeypatch.setattr(stream.subprocess, "run", lambda *arguments, **options: None)


def rows_of(parts: tuple[str, ...]) -> list[Row]:
    steps = [(part, device) for part in parts for device in stream.DEVICES]
    rows, failed = stream.all_rows(steps, stream.Sizes())
    assert failed == []
    return rows


@pytest.mark.usefixtures("imitated")
def test_the_tables_find_their_rows() -> None:
    result = Result(WHERE, rows_of(PARTS))
    shaped, trained = (rendered(parts(result), result) for parts in (tables.shaped, tables.trained))
    assert "failed" not in shaped + trained
    assert "| unthrottled | 75% | 10 |" in shaped
    assert "| wiki | unthrottled | 75% | 10 |" in trained
    assert "| 500 MB/s | 300 MB | 10 | 10 | 1.0 | 4.0 | 4.0 | | 15% | 5e-06 | 5e-06 |" in shaped
    assert "| g2p | 2.5 s | 2.5 s | 2.5 s |" in trained


@pytest.mark.usefixtures("imitated")
def test_what_failed_is_told_in_the_table() -> None:
    result = Result({**WHERE, "settings": {"failed": ["llama, board"]}}, rows_of(PARTS[:-1]))
    assert "| 100 MB/s | ? MB | failed | failed | failed | failed | failed | | | | |" in rendered(
        tables.shaped(result), result
    )


@pytest.mark.usefixtures("imitated")
def test_a_program_that_ended_is_among_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*arguments: object) -> dict[str, Outcome]:
        outcomes = raced(*arguments)  # type: ignore[arg-type]
        return outcomes | {"STI-like 50%": Outcome(ended="it ended with status -9")}

    monkeypatch.setattr(stream, "race", ended)
    rows, failed = stream.all_rows([("g2p", "ssd")], stream.Sizes())
    assert failed == ["g2p, ssd: STI-like 50%"]
    assert "g2p, ssd: moert 50% to STI-like" not in {row.name for row in rows}
    assert "g2p, ssd: moert 50% to IO-EXP" in {row.name for row in rows}
