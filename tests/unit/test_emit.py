"""From checkpoint to pack: what goes in comes out, and a run that was cut short goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import rewrite, tiny_olmoe

from moeconv.artifacts import Bits, uniform
from moeconv.matrices import matrices_of, projection_weights, read_expert
from moeconv.packing.emit import Label, Profile, emit
from moeconv.packing.packed import verify
from moeconv.quantizers.coder import ExpertCoder
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.codec import F32, Codes, QuantizedMatrix, pack_codes
from moert.pack.manifest import Manifest
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack


class Killed(BaseException):
    pass


class Rounding:
    """The plainest quantizer: one scale and minimum for each output channel. Is killed after `most` matrices."""

    name, group_size = "rounding", 0
    codes: Codes = "plain"
    wants: Wants = "nothing"

    def __init__(self, most: int | None = None) -> None:
        self.calls, self.batches, self.most = 0, 0, most

    def too_few(self, rows: int, in_features: int) -> bool:
        return False

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        self.batches += 1
        return [self._matrix(weight, bits) for weight in weights]

    def _matrix(self, weight: F32, bits: int) -> QuantizedMatrix:
        if self.calls == self.most:
            raise Killed
        self.calls += 1
        low = weight.min(1, keepdims=True).astype(np.float16)
        scale = ((weight.max(1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16)
        codes = np.clip(np.rint((weight - low) / scale), 0, 2**bits - 1).astype(np.uint8)
        return QuantizedMatrix(bits, weight.shape[1], weight.shape[1], pack_codes(codes, bits), scale, low)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_olmoe(tmp_path_factory.mktemp("olmoe"))


def mixed_widths(checkpoint: Checkpoint) -> dict[ExpertKey, Bits]:
    widths = (2, 3, 4, 8, 16)
    return {
        key: tuple(widths[(index + place) % 5] for place in range(len(checkpoint.spec.moe.ffn.projections)))
        for index, key in enumerate(checkpoint.spec.expert_keys())
    }


def write(source: Path, out: Path, quantizer: Rounding | None = None, **options: Any) -> Manifest:
    checkpoint = Checkpoint.open(source)
    coder, label = ExpertCoder(checkpoint, quantizer or Rounding(), None), Label("tests", **options)
    return emit(coder, mixed_widths(checkpoint), out, seed=7, label=label)


def recast(original: Path, to: Path, dtype: torch.dtype, factor: float = 1.0) -> Path:
    source = Path(shutil.copytree(original, to))
    rewrite(source, lambda stored: {name: (value * factor).to(dtype) for name, value in stored.items()})
    return source


def test_mixed_widths_come_back_within_their_error_and_as_they_were_tried(original: Path, tmp_path: Path) -> None:
    importance = {ExpertKey("decoder", 0, 2): 0.25}
    write(original, tmp_path / "p", importance=importance)
    checkpoint, pack = Checkpoint.open(original), Pack.open(tmp_path / "p")
    tried = ExpertCoder(checkpoint, Rounding(), None)
    for key, widths in mixed_widths(checkpoint).items():
        assert pack.entry(key).importance == importance.get(key)
        stored, weights = matrices_of(pack, key, read_expert(pack, key)), tried.weights(key, widths)
        for width, (projection, weight) in zip(widths, checkpoint.expert(key).items(), strict=True):
            found = projection_weights(stored[projection])
            assert np.array_equal(found, weights[projection])
            error, span = np.abs(found - weight).max(), float((weight.max(1) - weight.min(1)).max())
            assert error == 0 if width == 16 else error <= 0.6 * span / (2**width - 1)
    assert len(list(pack.verify_hashes())) == len(checkpoint.spec.expert_keys()) + len(pack.manifest.files)


def test_backbone_and_files_are_copied_as_they_are(original: Path, tmp_path: Path) -> None:
    manifest = write(original, tmp_path / "p", files={"report.json": b"{}"})
    backbone, stored = load_file(tmp_path / "p" / "backbone.safetensors"), load_file(original / "model.safetensors")
    assert backbone["decoder.1.attn.q.weight"].dtype == torch.bfloat16
    assert torch.equal(backbone["decoder.1.attn.q.weight"], stored["model.layers.1.self_attn.q_proj.weight"])
    assert not any("expert" in name for name in backbone)
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(manifest.files) == copied | {"backbone.safetensors", "report.json"}
    for name in copied:
        assert (tmp_path / "p" / name).read_bytes() == (original / name).read_bytes()
    assert (manifest.quantization.quantizer, manifest.quantization.seed) == ("rounding", 7)


def test_a_profile_goes_in_with_the_pack_where_the_weights_are_the_same(original: Path, tmp_path: Path) -> None:
    profiled = write(original, tmp_path / "p")
    profile = Profile(profiled, {"paths.safetensors": b"paths"})
    assert set(write(original, tmp_path / "p", profile=profile).files) == {*profiled.files, "paths.safetensors"}
    assert (tmp_path / "p" / "paths.safetensors").read_bytes() == b"paths"
    coder, spec = ExpertCoder(Checkpoint.open(original), Rounding(), None), profiled.model
    others = emit(coder, uniform(spec, 8), tmp_path / "p", seed=7, label=Label("tests", profile=profile))
    assert set(others.files) == set(profiled.files)
    retrained = Path(shutil.copytree(original, tmp_path / "retrained"))
    rewrite(retrained, lambda stored: stored["model.norm.weight"].add_(1))
    assert set(write(retrained, tmp_path / "p", profile=profile).files) == set(profiled.files)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_every_file_has_the_mode_that_the_user_gives_new_files(original: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(original, tmp_path / "p", files={"report.json": b"{}"})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "p").rglob("*") if path.is_file()}
    assert len(modes) > len(("moe.json", "backbone.safetensors", "config.json"))
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)


def test_a_run_cut_short_goes_on_and_gives_the_same_bytes(original: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        write(original, tmp_path / "p", Rounding(most=16))  # the first layer has 15 and is written
    assert not (tmp_path / "p").exists()
    quantizer, untouched = Rounding(), Rounding()
    write(original, tmp_path / "p", quantizer)
    write(original, tmp_path / "q", untouched)
    assert quantizer.calls == untouched.calls - 15
    names = sorted(path.relative_to(tmp_path / "q") for path in (tmp_path / "q").rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(tmp_path / "p") for path in (tmp_path / "p").rglob("*") if path.is_file())
    assert all((tmp_path / "p" / name).read_bytes() == (tmp_path / "q" / name).read_bytes() for name in names)


@pytest.mark.parametrize("change", ["seed", "widths"])
def test_another_plan_starts_afresh(change: str, original: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        write(original, tmp_path / "p", Rounding(most=13))
    again, checkpoint = Rounding(), Checkpoint.open(original)
    widths = mixed_widths(checkpoint) if change == "seed" else uniform(checkpoint.spec, 4)
    seed = 8 if change == "seed" else 7
    emit(ExpertCoder(checkpoint, again, None), widths, tmp_path / "p", seed=seed, label=Label("tests"))
    assert again.calls == sum(width < 16 for bits in widths.values() for width in bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_sources_are_stored_as_float16(original: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    source = recast(original, tmp_path / "hf", dtype)
    assert write(source, tmp_path / "p").quantization.dtype16 == "F16"
    assert load_file(tmp_path / "p" / "backbone.safetensors")["embed.weight"].dtype == dtype


def test_values_beyond_float16_count_a_power_of_two(original: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(recast(original, tmp_path / "hf", torch.float32, factor=1e6))
    coder = ExpertCoder(checkpoint, Rounding(), None)
    for width in (16, 4):
        emit(coder, uniform(checkpoint.spec, width), tmp_path / "p", seed=0, label=Label("tests"))
        verify(Pack.open(tmp_path / "p"), checkpoint)


@pytest.mark.parametrize("wrong", [None, (4, 4), (4, 4, 5), (4, 4, 32)])
def test_widths_must_cover_every_expert(wrong: Bits | None, original: Path, tmp_path: Path) -> None:
    checkpoint, key = Checkpoint.open(original), ExpertKey("decoder", 1, 1)
    widths = mixed_widths(checkpoint)
    del widths[key]
    if wrong is not None:
        widths[key] = wrong
    with pytest.raises(ValueError, match="D01/E001"):
        emit(ExpertCoder(checkpoint, Rounding(), None), widths, tmp_path / "p", seed=0, label=Label("tests"))


def test_a_backbone_that_is_not_finite_is_refused(original: Path, tmp_path: Path) -> None:
    source = recast(original, tmp_path / "hf", torch.bfloat16)
    rewrite(source, lambda stored: stored["model.norm.weight"][3:4].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"decoder\.norm\.weight holds values that are not finite"):
        write(source, tmp_path / "p")
    assert not (tmp_path / "p").exists()
