"""Conversions without calibration text: nothing is measured, and that is said."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from moeconv.artifacts import Target
from moeconv.command.cli import _exit_code
from moeconv.errors import ConversionError, SettingsError, TargetMissed
from moeconv.packing.packed import verify
from moeconv.plan.search import uniform_bytes
from moeconv.source.checkpoint import Checkpoint
from moert.pack.reader import Pack
from tests.e2e.conversions import Done, settings_for

FAMILIES = ("olmoe", "switch")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_width_for_all(sources: dict[str, Path], tmp_path: Path, family: str) -> None:
    done = Done(settings_for(sources, family, tmp_path, calib=None, bits=(4,)))
    assert done.manifest.quality is None
    assert done.manifest.quantization.quantizer == "group"
    assert set(done.report.bits_histogram) == {4}
    assert any("not measured" in line for line in done.said)
    assert f"writing of {len(done.manifest.experts)}" in done.said
    worst = verify(Pack.open(done.settings.out), Checkpoint.open(done.settings.model)).worst
    assert worst is not None
    assert 0 < worst < 1


def test_layers_may_have_one_file_each(sources: dict[str, Path], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"calib": None, "bits": (4,)}
    apart = Done(settings_for(sources, "olmoe", tmp_path, **changes, out=tmp_path / "a.pack"))
    joined = Done(settings_for(sources, "olmoe", tmp_path, **changes, layout="layer"))
    spec = joined.manifest.model
    assert {entry.path for entry in joined.manifest.experts} == {f"experts/{at}.experts" for at in spec.moe_layers()}
    assert [one.sha256 for one in joined.manifest.experts] == [one.sha256 for one in apart.manifest.experts]
    assert verify(Pack.open(joined.settings.out), Checkpoint.open(joined.settings.model)).worst is not None
    assert not list(joined.settings.out.rglob("E000.safetensors"))
    again = Done(settings_for(sources, "olmoe", tmp_path, **changes))
    assert again.manifest.experts == apart.manifest.experts
    assert not list(again.settings.out.rglob("*.experts"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_size_is_kept_and_used_up(sources: dict[str, Path], tmp_path: Path, family: str) -> None:
    spec = Checkpoint.open(sources[family]).spec
    sizes = [uniform_bytes(spec, bits) for bits in (3, 4)]
    target = Target("size", sum(sizes) / 2)
    done = Done(settings_for(sources, family, tmp_path, calib=None, target=target, quantizer="channel"))
    assert len(done.report.bits_histogram) > 1
    found = sum(entry.tensor_bytes for entry in done.manifest.experts)
    assert sizes[0] < found <= target.value
    assert target.value - found < (sizes[1] - sizes[0]) / len(spec.expert_keys())


def test_wider_is_given_to_what_would_change_more(sources: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint in which one expert's weights are ten times those of the others."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(sources["olmoe"], model)
    file = model / "model.safetensors"
    tensors, key = load_file(file), Checkpoint.open(model).spec.expert_keys()[3]
    described = Checkpoint.open(model).description
    for projection in ("gate", "up", "down"):
        tensors[described.experts(key, projection).name] *= 10
    save_file(tensors, file, {"format": "pt"})
    changes = {"calib": None, "model": str(model), "bits": (2, 4), "quantizer": "channel"}
    least = Done(settings_for(sources, "olmoe", tmp_path, **{**changes, "bits": (2,)})).report.effective_bits
    target = Target("bits", least + 0.25)
    done = Done(settings_for(sources, "olmoe", tmp_path, target=target, **changes, out=tmp_path / "b.pack"))
    assert {entry.key for entry in done.manifest.experts if 4 in entry.bits.values()} == {key}


def test_a_size_below_all_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(TargetMissed, match="more than the"):
        Done(settings_for(sources, "olmoe", tmp_path, calib=None, target=Target("bits", 1.0)))
    assert not (tmp_path / "m.pack").exists()


def test_widths_of_the_rest_need_no_text_either(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, calib=None, bits=(4,), dense_bits=8))
    assert done.report.dense is not None
    assert done.report.dense.alone is None
    assert verify(Pack.open(done.settings.out), Checkpoint.open(done.settings.model)).worst is not None


def test_a_disk_without_room_is_said_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ConversionError, match="free some space"):
        Done(settings_for(sources, "olmoe", tmp_path, calib=None, bits=(4,)))
    assert not (tmp_path / "m.pack").exists()


def test_what_goes_without_text_is_said(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--bits 4.*--bits-per-weight"):
        settings_for(sources, "olmoe", tmp_path, calib=None)


def test_on_the_command_line(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "m.pack")]
    model = str(sources["olmoe"])
    assert _exit_code(["quantize", model, "--bits", "3", *out]) == 0
    shown = capsys.readouterr()
    assert "what this pack loses was not measured" in shown.out
    assert "nothing is promised" in shown.err
    assert _exit_code(["quantize", model, "--bits", "4", "--dense-bits", "8", *out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"] is None
    assert _exit_code(["quantize", model, "--bits", "4", "--loss", "5%", *out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
