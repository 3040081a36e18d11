"""What goes wrong around a conversion: full and read-only disks, damaged weights, journals that are not its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from converting import command, complaint, journals, run, running_text
from safetensors.torch import load_file, save_file
from tiny import tiny_olmoe

from moeconv.command.cli import _exit_code

OPTIONS = ("--loss", "5%")
GATE = "model.layers.0.mlp.gate.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_olmoe(tmp_path_factory.mktemp("model") / "olmoe")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running_text(tmp_path_factory.mktemp("text") / "text.jsonl")


def damaged(model: Path, to: Path, **tensors: torch.Tensor) -> Path:
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    for name, value in tensors.items():
        assert name in weights
        weights[name] = value.to(weights[name].dtype)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@contextmanager
def small_disk(at: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of its own; the test is skipped where one can't be mounted."""
    at.mkdir()
    size = f"size={kilobytes}k"
    try:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(at)], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if sys.platform != "linux" or made.returncode != 0:
        pytest.skip("a file system can't be mounted here")
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def ballast(disk: Path, leave_kilobytes: int) -> Path:
    """Fills a disk but for a few kilobytes."""
    free = os.statvfs(disk)
    path = disk / "ballast"
    path.write_bytes(bytes(free.f_bavail * free.f_frsize - leave_kilobytes * 1024))
    return path


@pytest.mark.parametrize("work", ["x.pack", "x.pack/work"])
def test_a_work_directory_in_the_place_of_the_pack_is_refused_at_once(
    model: Path, text: Path, tmp_path: Path, work: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.pack"
    asked = ["quantize", str(model), "--calib", str(text), "--out", str(out), "--work", str(tmp_path / work)]
    assert _exit_code(asked) == 2
    assert capsys.readouterr().err == f"moeconv: --work {tmp_path / work}: --out {out} holds it: give another --work\n"
    assert not out.exists()


def test_a_full_work_directory_is_one_line_and_its_journal_is_used(model: Path, text: Path, tmp_path: Path) -> None:
    words = command(model, text, tmp_path / "m.pack", tmp_path / "disk" / "work", *OPTIONS)
    with small_disk(tmp_path / "disk", 8192) as disk:
        filling = ballast(disk, leave_kilobytes=160)
        said = complaint(run(words))
        assert "No space left on device" in said
        assert str(disk) in said
        assert not (tmp_path / "m.pack").exists()
        before = journals(disk / "work")[0].read_bytes().split(b"\n")[:-1]
        assert before, "it was full before anything was measured: nothing was tested"
        filling.unlink()
        done = run(words)
        assert done.returncode == 0, done.stderr
        after = journals(disk / "work")[0].read_bytes().splitlines()
        assert after[: len(before)] == before
        names = [json.loads(line)["id"] for line in after]
        assert len(set(names)) == len(names), "something was measured twice"


def unaware(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which a conversion in this process ends that was told that there is room."""
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as told:
        told.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
        assert _exit_code(words[3:]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moeconv: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_full_output_is_one_line_and_nothing_is_measured_again(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(model, text, tmp_path / "disk" / "m.pack", tmp_path / "work", *OPTIONS)
    with small_disk(tmp_path / "disk", 8192) as disk:
        filling = ballast(disk, leave_kilobytes=32)
        said = complaint(run(words))
        assert "m.pack needs" in said
        assert "free some space" in said
        assert list(disk.iterdir()) == [filling], "nothing was begun"
        said = unaware(words, monkeypatch, capsys)
        assert "No space left on device" in said
        assert str(disk) in said
        assert not (disk / "m.pack").exists()
        before = journals(tmp_path / "work")[0].read_bytes()
        filling.unlink()
        done = run(words)
        assert done.returncode == 0, done.stderr
        assert journals(tmp_path / "work")[0].read_bytes() == before
        assert (disk / "m.pack" / "manifest.json").exists()


def test_a_disk_that_is_full_before_the_backbone_is_one_line_and_the_experts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve experts of 16 KiB fit, an embedding of 1.5 MB does not."""
    wide = tiny_olmoe(tmp_path / "wide", vocab_size=32_000)
    with small_disk(tmp_path / "disk", 4096) as disk:
        filling = ballast(disk, leave_kilobytes=768)
        words = command(wide, None, disk / "m.pack", tmp_path / "work", "--bits", "16")
        assert "m.pack needs" in complaint(run(words))
        said = unaware(words, monkeypatch, capsys)
        assert "No space left on device" in said
        assert f"{disk / 'm.pack.partial'} are kept: the same command goes on with them" in said
        left = {str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file() and path.suffix != ".lock"}
        assert not any("backbone" in name for name in left)
        experts = {path: path.stat().st_mtime_ns for path in (disk / "m.pack.partial").rglob("E*.safetensors")}
        assert len(experts) == 12
        filling.unlink()
        done = run(words)
        assert done.returncode == 0, done.stderr
        for path, written in experts.items():
            there = disk / "m.pack" / path.relative_to(disk / "m.pack.partial")
            assert there.stat().st_mtime_ns == written, "it was written again"
        assert not (disk / "m.pack.partial").exists()


@pytest.mark.parametrize("where", ["out", "work"])
def test_a_read_only_place_is_one_line_before_anything_long(
    model: Path, text: Path, tmp_path: Path, where: str
) -> None:
    places = {"out": tmp_path / "m.pack", "work": tmp_path / "work"}
    with small_disk(tmp_path / "disk", 1024) as disk:
        places[where] = disk / "here"
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        said = complaint(run(command(model, text, places["out"], places["work"], *OPTIONS)))
    assert {"out": "can't be written to", "work": "Read-only file system"}[where] in said
    assert str(places[where]) in said
    assert all(path.stat().st_size == 0 for path in journals(places["work"])), "it measured first and complained then"


@pytest.mark.parametrize("where", ["out", "work"])
def test_a_file_where_a_directory_must_be_is_one_line(model: Path, text: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("keep me")
    places = {"out": tmp_path / "m.pack", "work": tmp_path / "work", where: tmp_path / "file" / "here"}
    said = complaint(run(command(model, text, places["out"], places["work"], *OPTIONS)))
    assert str(tmp_path / "file") in said
    assert (tmp_path / "file").read_text() == "keep me"
    assert not journals(tmp_path / "work")


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_is_not_finite_is_named(model: Path, text: Path, tmp_path: Path, value: float) -> None:
    weight = load_file(model / "model.safetensors")[UP]
    weight[3, 5] = value
    broken = damaged(model, tmp_path / "broken", **{UP: weight})
    said = complaint(run(command(broken, text, tmp_path / "m.pack", tmp_path / "work", *OPTIONS)))
    assert "D01/E003" in said
    assert "up" in said
    assert "not finite" in said
    assert not (tmp_path / "m.pack").exists()


def test_an_expert_that_no_token_reached_is_reported_as_such(model: Path, text: Path, tmp_path: Path) -> None:
    """Two of the others always score higher than expert 5: one of 0 and 1, and one of 2 and 3."""
    gate = load_file(model / "model.safetensors")[GATE].clone()
    gate[1], gate[3], gate[5] = -gate[0], -gate[2], 0 * gate[4]
    lonely = damaged(model, tmp_path / "lonely", **{GATE: gate})
    done = run(command(lonely, text, tmp_path / "m.pack", tmp_path / "work", *OPTIONS))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "m.pack" / "report.json").read_text())
    coverage = report["sensitivity"]["coverage"]
    assert [key for key, tokens in coverage.items() if tokens == 0] == ["D00/E005"]
    assert report["sweep_cost"]["free_probes"] > 0


@pytest.fixture(scope="module")
def finished(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of a conversion that is done."""
    root = tmp_path_factory.mktemp("finished")
    done = run(command(model, text, root / "m.pack", root / "work", *OPTIONS))
    assert done.returncode == 0, done.stderr
    return root / "work"


def test_a_journal_of_another_model_is_refused(model: Path, text: Path, finished: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    other = tiny_olmoe(tmp_path / "other", seed=1)
    words = command(other, text, tmp_path / "m.pack", work, *OPTIONS)
    assert run(words).returncode == 0
    mine = journals(work)[0]
    kept = mine.read_bytes()
    mine.write_bytes(journals(finished)[0].read_bytes())
    shutil.rmtree(tmp_path / "m.pack")
    assert "another model" in complaint(run(words))
    assert not (tmp_path / "m.pack").exists()
    mine.write_bytes(kept)
    assert run(words).returncode == 0
    assert mine.read_bytes() == kept, "what was measured was not used"


def test_a_damaged_line_of_the_journal_is_named(model: Path, text: Path, finished: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(finished, work)
    journal = journals(work)[0]
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], lines[2][:40] + b"\n", *lines[3:]]))
    words = command(model, text, tmp_path / "m.pack", work, *OPTIONS)
    said = complaint(run(words))
    assert f"{journal}:3 is damaged" in said
    journal.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert len(journal.read_bytes().splitlines()) == len(lines), "more than that line was measured again"
