"""bench-size: what it makes of conversions, and that one of a checkpoint without weights on the disk goes through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moert.pack.reader import Pack
from recipes.bench.shape_list import config_of
from recipes.bench.size import FITTED, PLAIN, _remove
from recipes.bench.size_rows import Aim, growth_rows, line, rows_of, step_rows
from recipes.bench.size_run import Ran, conversion, run
from recipes.bench.virtual import VirtualTensors
from recipes.bench.virtual_run import mark, tensors_of
from tests.cgroups import missing

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 128, "eos_token_id": 1,
}  # fmt: skip
RAN = Ran(300, 500, 28 * 10**9, 19 * 10**8, 4 * 10**9, {"references": 40.0, "fisher": 120.0})


@pytest.fixture
def virtual(tmp_path: Path) -> Path:
    """A small checkpoint whose weights are made when they are read."""
    folder = tmp_path / "virtual"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("olmoe", 2) | SMALL))
    mark(folder, 2, 5)
    return folder


def test_a_conversion_reads_what_is_made(virtual: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.pack"
    command = conversion(["quantize", str(virtual), "--bits", "16", "--out", str(out)], virtual=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    made = tensors_of(virtual)
    assert isinstance(made, VirtualTensors)
    pack = Pack.open(out)
    assert len(pack.manifest.experts) == 16
    assert pack.manifest.quality is None


def test_other_folders_have_files(tmp_path: Path) -> None:
    assert tensors_of(tmp_path) is None
    command = conversion(["quantize", str(tmp_path), "--bits", "16"], virtual=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "safetensors" in done.stderr


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_what_a_process_held_is_seen_also_where_it_fails(tmp_path: Path) -> None:
    """Both write 200 MB; one then ends with 3."""
    program = "import sys; held = b'x' * 200_000_000; import time; time.sleep(0.5); print('so much'); sys.exit({})"
    well = run([sys.executable, "-c", program.format(0)], tmp_path / "a.pack", 1 << 30)
    assert well.failed is None
    assert 200e6 < well.resident_peak_bytes < 400e6
    assert 200e6 < well.group_peak_bytes <= 1 << 30
    assert well.steps == {}
    ill = run([sys.executable, "-c", program.format(3)], tmp_path / "b.pack", 1 << 30)
    assert ill.failed == "exit code 3: so much"
    killed = run([sys.executable, "-c", program.format(0)], tmp_path / "c.pack", 100 << 20)
    assert killed.failed is not None
    assert "out of memory" in killed.failed


def test_an_aim_in_seconds_is_met_by_what_the_machine_allows_too() -> None:
    met = {bound: rows_of("x", RAN, Aim(240, None), bound)[0].met for bound in (None, 100, 269, 270)}
    assert met == {None: False, 100: False, 269: False, 270: True}
    assert rows_of("x", RAN, Aim(300, None))[0].met
    by_name = {row.name: row for row in rows_of("x", RAN, Aim(None, 4 * 10**9), 150)}
    assert by_name["x: time"].met is None
    assert by_name["x: most memory of the group, page cache included"].met
    assert by_name["x: share of the bound"].value == 0.5


def test_steps_stand_beside_a_pass() -> None:
    values = {row.name: row.value for row in step_rows("x", RAN, 20)}
    assert values == {
        "x: references": 40, "x: references, in passes at their bound": 2,
        "x: fisher": 120, "x: fisher, in passes at their bound": 6,
    }  # fmt: skip


def test_time_by_layers_is_a_line_or_is_said_to_be_none() -> None:
    assert line({1: 15, 2: 20, 4: 30}) == pytest.approx((10, 5))
    straight = {row.name: row for row in growth_rows("x", {1: 15.0, 2: 20.0, 4: 30.0}, 16)}
    assert straight["x: furthest from a line"].met
    assert straight["x: all 16 layers, extrapolated from 1, 2, 4"].value == pytest.approx(90)
    squares = {row.name: row for row in growth_rows("x", {n: float(n * n) for n in (1, 2, 4, 8)}, 8)}
    assert squares["x: furthest from a line"].met is False
    assert squares["x: time of 8 layers, of as many times 1"].met is False
    assert not any("extrapolated" in name for name in squares)
    with pytest.raises(ValueError, match="two points"):
        line({4: 1.0})


def test_a_pack_and_what_was_kept_beside_it_go(tmp_path: Path) -> None:
    for name in ("a.pack", "a.pack.work", "a.pack.partial", "b.pack"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.pack.log").write_text("what was said")
    _remove(tmp_path / "a.pack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pack.log", "b.pack"]


def test_what_is_run_is_what_was_asked_for() -> None:
    assert PLAIN == ("--bits", "4", "--quantizer", "group")
    assert int(FITTED[FITTED.index("--samples") + 1]) + int(FITTED[FITTED.index("--sweep-samples") + 1]) == 64
