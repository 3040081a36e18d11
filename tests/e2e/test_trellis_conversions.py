"""Conversions to trellis codes: with text and without, resumed, planned again, and run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_sources import MXFP4, coded_and_plain, in_mxfp4
from tiny_packs import PROMPTS, run_greedy

from moeconv.artifacts import Target
from moeconv.command.present import conversion_table, plan_table
from moeconv.conversion.planning import plan
from moeconv.conversion.settings import Settings
from moeconv.matrices import read_expert, stored_matrices
from moeconv.packing.packed import PackedModel, verify
from moeconv.report.writer import write_report
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import TRELLIS_MINOR
from moert.engine.engine import Engine
from moert.pack.codec import TrellisMatrix
from moert.pack.reader import Pack
from tests.e2e.conversions import Done, settings_for
from tests.kernels import needs_native

FAMILIES = ("olmoe", "switch")
TRELLIS: dict[str, Any] = {"quantizer": "trellis", "samples": 8, "sweep_samples": 4, "heldout_samples": 6}


def accepted(done: Done) -> None:
    """Its pack is its source within the error of its bits."""
    worst = verify(Pack.open(done.settings.out), Checkpoint.open(done.settings.model)).worst
    assert worst is not None
    assert 0 < worst < 1


@pytest.mark.parametrize("bits", [1, 1.5, 2, 2.5, 3, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_width_without_text(sources: dict[str, Path], tmp_path: Path, family: str, bits: float) -> None:
    done = Done(settings_for(sources, family, tmp_path, calib=None, bits=(bits,), quantizer="trellis"))
    manifest, pack = done.manifest, Pack.open(done.settings.out)
    assert (manifest.quantization.codes, manifest.minor) == ("trellis", TRELLIS_MINOR)
    assert {width for entry in manifest.experts for width in entry.bits.values()} == {bits}
    assert done.report.bits_histogram == {bits: sum(len(entry.bits) for entry in manifest.experts)}
    assert f"at {bits};" in conversion_table(done.report, "m.pack")
    key = manifest.model.expert_keys()[0]
    kinds = {type(matrix) for matrix in stored_matrices(pack, key, read_expert(pack, key)).values()}
    assert (kinds == {TrellisMatrix}) == (bits < 8)
    accepted(done)


def test_a_size_is_kept_by_several_widths(sources: dict[str, Path], tmp_path: Path) -> None:
    least = Done(settings_for(sources, "olmoe", tmp_path, calib=None, bits=(1.5,), quantizer="trellis"))
    target = Target("bits", least.report.effective_bits + 0.3)
    done = Done(settings_for(sources, "olmoe", tmp_path, calib=None, target=target, quantizer="trellis"))
    assert len(done.report.bits_histogram) > 1
    assert target.value - 0.2 < done.report.effective_bits <= target.value
    accepted(done)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_text_the_pack_is_the_model_that_was_measured(
    sources: dict[str, Path], tmp_path: Path, family: str
) -> None:
    done = Done(settings_for(sources, family, tmp_path, loss=0.01, **TRELLIS))
    manifest, report = done.manifest, done.report
    assert report.calibration is not None
    assert report.calibration.loss <= 0.01
    assert report.expert_bytes["pack"] == manifest.expert_tensor_bytes()
    packed, trial = PackedModel.open(Pack.open(done.settings.out)), done.bench.trial
    trial.assign({entry.key: tuple(entry.bits.values()) for entry in manifest.experts})
    for key in manifest.model.expert_keys():
        for name in manifest.model.moe.ffn.projections:
            weight = trial.family.expert_weight(trial.model, key, name)
            assert torch.equal(weight, packed.family.expert_weight(packed.model, key, name))
    accepted(done)
    page = write_report(Pack.open(done.settings.out), tmp_path / "page")
    text = (tmp_path / "page" / "index.html").read_text()
    assert page is not None
    assert all(f"{count:,} at {bits} bits" in text for bits, count in report.bits_histogram.items())


def test_another_target_measures_nothing_again(sources: dict[str, Path], tmp_path: Path) -> None:
    changes = {**TRELLIS, "bits": (1, 1.5, 2, 4), "per_projection": True}
    first = Done(settings_for(sources, "olmoe", tmp_path, target=Target("bits", 3.0), **changes))
    again = Done(settings_for(sources, "olmoe", tmp_path, target=Target("bits", 2.9), **changes, out=tmp_path / "b"))
    assert first.swept() > 0 == again.swept()
    planned = plan(tmp_path / "work", Target("bits", 3.0), "knapsack", "kl", None)
    assert planned.chosen.nbytes == first.report.expert_bytes["pack"]
    narrow = plan(tmp_path / "work", Target("size", 1e12), "knapsack", "kl", (1.5,))
    assert narrow.chosen.nbytes < planned.chosen.nbytes
    assert "trellis" in plan_table(planned, Target("bits", 3.0), False)
    assert math.isfinite(first.report.effective_bits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_has_trellis_codes_unless_another_quantizer_is_named(
    sources: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """And widths for all other matrices, which have trellis codes too, but of plans for speed the embedding's alone."""
    small = {**TRELLIS, "quantizer": None}
    done = Done(settings_for(sources, family, tmp_path, loss=0.3, dense_bits=None, **small))
    assert done.manifest.quantization.codes == "trellis"
    assert done.report.quantizer == "trellis"
    assert done.report.calibration is not None
    assert done.report.calibration.loss <= 0.3
    assert done.report.dense is not None
    assert done.manifest.quantization.dense is not None
    coded = done.manifest.quantization.dense.trellis
    planned = plan(tmp_path / "work", Target("loss", 0.3), "knapsack", "kl", None)
    assert coded
    assert any(unit.endswith(" in trellis codes") for unit in planned.units)
    assert all(unit.endswith(" in trellis codes") for unit, bits in planned.units.items() if bits < 8)
    accepted(done)
    swift = Done(settings_for(sources, family, tmp_path, loss=0.3, dense_bits=None, purpose="speed",
                              out=tmp_path / "swift", **small)).manifest.quantization.dense  # fmt: skip
    assert swift is not None
    assert min(swift.bits.values()) < 8
    assert set(swift.trellis) <= {"embed"}
    named = settings_for(sources, family, tmp_path, loss=0.3, dense_bits=None, out=tmp_path / "b", **TRELLIS)
    assert Done(named).report.bits_histogram == done.report.bits_histogram


@pytest.mark.parametrize(("bits", "codes"), [(2, "trellis"), (4, "trellis"), (8, "plain")])
def test_so_has_one_without_text(sources: dict[str, Path], tmp_path: Path, bits: int, codes: str) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, calib=None, bits=(bits,), quantizer=None))
    assert done.manifest.quantization.codes == codes
    accepted(done)


def test_blocks_of_neurons_have_plain_codes_and_a_note_says_so(sources: dict[str, Path], tmp_path: Path) -> None:
    small = {**TRELLIS, "quantizer": None, "layout": "columns", "bits": (2, 4)}
    done = Done(settings_for(sources, "switch", tmp_path, loss=0.3, **small))
    assert (done.manifest.quantization.codes, done.report.quantizer) == ("plain", "gptq")
    assert "note: --layout columns needs plain codes: --quantizer gptq in place of trellis" in done.said


def test_a_source_in_mxfp4_keeps_its_own_codes_beside_trellis_codes(tmp_path: Path) -> None:
    source = coded_and_plain("gpt_oss", in_mxfp4, MXFP4, tmp_path)[0]
    settings = Settings(str(source), tmp_path / "p", tmp_path / "w", Target("bits", 16.0))
    whole = Done(settings).report
    assert set(whole.bits_histogram) == {16}
    done = Done(replace(settings, target=Target("bits", whole.effective_bits - 0.2), out=tmp_path / "q"))
    quantization, widths = done.manifest.quantization, done.report.bits_histogram
    assert (quantization.codes, quantization.mxfp4) == ("trellis", True)
    assert 16 in widths
    assert min(widths) < 8
    with Engine.open(done.settings.out, predict="none") as engine:
        assert len(run_greedy(engine, engine.encode(PROMPTS[1]), 3)[0]) == 3


@needs_native
@pytest.mark.parametrize("bits", [1, 2.5])
def test_the_kernels_compute_what_the_reference_does(sources: dict[str, Path], tmp_path: Path, bits: float) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, calib=None, bits=(bits,), quantizer="trellis"))
    found = []
    for kernels in ("auto", "reference"):
        with Engine.open(done.settings.out, predict="none", kernels=kernels) as engine:
            found.append(run_greedy(engine, engine.encode(PROMPTS[1]), 1)[1][0])
    assert np.linalg.norm(found[0] - found[1]) < 0.1 * np.linalg.norm(found[1])
