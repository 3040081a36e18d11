"""`moert bench --drive`: what it prints and draws of a curve. Nothing here is timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Moert

from moert.bench import drive as module
from moert.bench.drive import FIRING
from moert.experts.probe import CHUNKS, IN_FLIGHT, Curve, best_piece
from tests import tiny_packs

SPEEDS = {(chunk, count): float(chunk * count * 1000) for chunk in CHUNKS for count in IN_FLIGHT}


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    monkeypatch.setattr(module, "curve_of", lambda files: Curve(SPEEDS, sum(file.stat().st_size for file in files)))
    return Moert(capsys, monkeypatch)


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return tiny_packs.write_pack(tmp_path / "relu.pack", tiny_packs.SWITCH)


def test_a_table_and_a_line(moert: Moert, pack: Path) -> None:
    assert moert("bench", pack, "--drive") == 0
    lines = moert.out.splitlines()
    assert lines[0] == "Reading from the drive of tiny.pack (MB/s)"
    assert lines[1].split("  ")[0] == "bytes of a read"
    assert [line.split()[0] for line in lines[2 : 2 + len(CHUNKS)]] == list(map(str, CHUNKS))
    found = json.loads(lines[-1])
    assert {(row["chunk_bytes"], row["in_flight"]): row["bytes_per_s"] for row in found["speeds"]} == SPEEDS
    assert found["pieces"] == [], "its activation has no exact zeros"


def test_pieces_are_advised_where_neurons_may_be_zero(moert: Moert, relu: Path) -> None:
    assert moert("bench", relu, "--drive", "--json") == 0
    (line,) = moert.out.splitlines()
    found = json.loads(line)
    files = [*(relu / "experts").rglob("*.safetensors"), relu / "backbone.safetensors"]
    assert found["spread_bytes"] == sum(file.stat().st_size for file in files)
    assert [one["firing"] for one in found["pieces"]] == list(FIRING)
    for one in found["pieces"]:
        assert one["best_bytes"] == best_piece({int(at): s for at, s in one["seconds"].items()})
    assert moert("bench", relu, "--drive") == 0
    assert moert.out.count("--piece-bytes") == 1


def test_a_picture_of_each(moert: Moert, pack: Path, relu: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert moert("bench", pack, relu, "--drive", "--plot", tmp_path / "new") == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"drive-tiny.pack.png", "drive-relu.pack.png"}


def test_options_of_a_run_have_no_effect(moert: Moert, pack: Path) -> None:
    for options in (("--memory", "1GB"), ("--io", "auto"), ("--prompt", "hello")):
        assert moert("bench", pack, "--drive", *options) == 2
        assert moert.err == f"moert: {options[0]} has no effect with --drive: it runs no model: leave it out\n"
