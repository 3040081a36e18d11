"""Conversions of models that do not fit --memory: layer by layer, with the same promise, and resumed."""

from __future__ import annotations

import pickle
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import TINY

from moeconv.artifacts import Target
from moeconv.conversion import additions, measuring, room
from moeconv.conversion.additions import profile_paths
from moeconv.conversion.planning import plan
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.codes import CodingWorker
from moeconv.measure.passes import LayeredModel
from moeconv.packing.packed import PackedLayers, verify
from moeconv.source.checkpoint import Checkpoint
from moeconv.sweep.cluster import runner_for
from moeconv.sweep.fisher import PairGradients
from moert.pack.paths import PATHS, TRACE
from moert.pack.reader import Pack
from tests.e2e.conversions import Done, settings_for
from tests.refusing import one_line

SMALL = {"loss": 0.3, "samples": 8, "sweep_samples": 4, "heldout_samples": 6}


def tight(monkeypatch: pytest.MonkeyPatch) -> int:
    """A --memory that no model fits, and one layer of a tiny one does."""
    monkeypatch.setattr(room, "LEAST_TOKENS", 32)
    return room.PROCESS_BYTES + (2 << 20)


@pytest.mark.parametrize("quantizer", ["group", "gptq", "channel", "trellis"])
def test_the_same_widths_mean_the_same_weights(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantizer: str
) -> None:
    """Coded by layers or in memory: the same loss, and weights that only the order of sums tells apart."""
    changes: dict[str, Any] = {**SMALL, "bits": (3,), "quantizer": quantizer}
    whole = Done(settings_for(sources, "olmoe", tmp_path, **changes, out=tmp_path / "a.pack"))
    memory = tight(monkeypatch)
    layered = Done(settings_for(sources, "olmoe", tmp_path, **changes, memory_bytes=memory, work=tmp_path / "w2"))
    assert any("coding at 3 bits" in line for line in layered.said)
    for split in ("calibration", "heldout"):
        mine, theirs = getattr(layered.report, split), getattr(whole.report, split)
        assert mine.reference == pytest.approx(theirs.reference, rel=1e-5)
        assert mine.value == pytest.approx(theirs.value, rel=2e-3)
    assert verify(Pack.open(layered.settings.out), Checkpoint.open(layered.settings.model)).worst is not None


@pytest.mark.parametrize("quantizer", ["group", "gptq", "channel", "trellis"])
def test_workers_code_what_one_process_does(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantizer: str
) -> None:
    """Here in this process, and on a cluster in test_ray_cluster.py; nothing that they were told stays on the disk."""
    tasks: list[Any] = []

    def local(cluster: str, make: Any, reads: list[Path]) -> Any:
        assert cluster == "here:1"
        assert all(path.is_absolute() and path.exists() for path in reads)
        return runner_for(None, lambda job: Heard(make(job)), reads)

    class Heard:
        def __init__(self, worker: CodingWorker) -> None:
            self.worker = worker

        def measure(self, task: Any) -> int:
            tasks.append(pickle.loads(pickle.dumps(task)))
            return self.worker.measure(task)

    memory = tight(monkeypatch)
    changes: dict[str, Any] = {**SMALL, "bits": (3,), "quantizer": quantizer, "memory_bytes": memory}
    alone = Done(settings_for(sources, "olmoe", tmp_path, **changes, out=tmp_path / "a.pack", work=tmp_path / "w1"))
    monkeypatch.setattr(measuring, "runner_for", local)
    shared = Done(settings_for(sources, "olmoe", tmp_path, **changes, cluster="here:1", work=tmp_path / "w2"))
    assert shared.manifest.experts == alone.manifest.experts
    coded = [(key, bits) for task in tasks for key, widths in task.experts for bits in widths]
    assert len(set(coded)) == len(coded), "nothing is coded twice"
    assert {key for key, _ in coded} == set(shared.manifest.model.expert_keys())
    assert not list((tmp_path / "w2").rglob("asked"))


def test_widths_are_chosen_and_kept_for_other_targets(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, **{**SMALL, "loss": 0.03}, memory_bytes=tight(monkeypatch))
    done = Done(settings)
    assert done.report.heldout is not None
    assert any("--tune signal=fisher" in line for line in done.said)
    assert done.report.sweep_cost is not None
    assert 0 < done.report.sweep_cost.flops < done.report.sweep_cost.naive_flops
    planned = plan(settings.work, Target("loss", 0.2), "knapsack", "fisher", None)
    assert planned.chosen.nbytes <= done.report.expert_bytes["pack"]
    passes: list[int] = []
    ready = LayeredModel.ready
    monkeypatch.setattr(LayeredModel, "ready", lambda self, at: passes.append(at) or ready(self, at))
    again = Done(settings_for(sources, "olmoe", tmp_path, **{**SMALL, "loss": 0.03}, memory_bytes=tight(monkeypatch)))
    assert again.manifest.experts == done.manifest.experts
    assert passes == [], "everything was measured before"


def test_codes_outside_the_experts_are_weighed_by_their_inputs_too(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {**SMALL, "quantizer": "gptq", "dense_bits": None, "memory_bytes": tight(monkeypatch)}
    done = Done(settings_for(sources, "olmoe", tmp_path, **changes))
    dense = done.manifest.quantization.dense
    assert dense is not None
    assert dense.quantizer == "gptq"
    assert verify(Pack.open(done.settings.out), Checkpoint.open(done.settings.model)).worst is not None
    (kept,) = done.settings.work.glob("*/moments-beside.safetensors")
    monkeypatch.setattr(measuring, "collect_beside", lambda *_: pytest.fail("collected again"))
    again = Done(settings_for(sources, "olmoe", tmp_path, **changes)).manifest
    assert again.files["backbone.safetensors"] == done.manifest.files["backbone.safetensors"]
    kept.write_bytes(kept.read_bytes()[:-8] + bytes(8))
    with one_line(ConversionError, "was changed since it was made"):
        Done(settings_for(sources, "olmoe", tmp_path, **changes))


def test_gradients_rank_a_model_in_memory_too(sources: dict[str, Path], tmp_path: Path) -> None:
    done = Done(settings_for(sources, "olmoe", tmp_path, **{**SMALL, "loss": 0.03}, signal="fisher"))
    assert done.report.signal == "fisher"
    assert done.report.sensitivity is not None
    assert done.report.heldout is not None
    assert not any("coding at" in line for line in done.said)
    changes = {**SMALL, "loss": 0.03, "per_projection": True, "out": tmp_path / "b.pack"}
    split = Done(settings_for(sources, "olmoe", tmp_path, **changes, signal="fisher"))
    assert split.report.sensitivity is not None
    assert any(len(set(probe.bits)) > 1 for probe in split.report.sensitivity.costs)


@pytest.mark.parametrize("family", ["switch", "nllb-moe"])
def test_gradients_rank_both_stacks_of_an_encoder_decoder(
    family: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"nllb-moe": TINY["nllb-moe"][0](tmp_path / "nllb", seed=1), **sources}
    settings = settings_for(models, family, tmp_path, **{**SMALL, "loss": 0.02}, signal="fisher")
    done = Done(settings)
    assert (done.report.signal, done.report.heldout is not None) == ("fisher", True)
    table, cost = done.report.sensitivity, done.report.sweep_cost
    assert table is not None
    assert {probe.key for probe in table.costs} == set(done.manifest.model.expert_keys())
    for stack in ("encoder", "decoder"):
        assert any(table.cost(probe, "kl") > 0 for probe in table.costs if probe.key.stack == stack)
    assert cost is not None
    assert cost.flops > 0
    monkeypatch.setattr(PairGradients, "_measured", lambda self, part: pytest.fail("it was measured before"))
    again = Done(replace(settings, out=tmp_path / "b.pack"))
    assert again.manifest.experts == done.manifest.experts


def test_what_takes_a_model_in_memory_is_refused(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tight(monkeypatch)
    for family, changes, says in (
        ("olmoe", {"signal": "nll"}, "--tune signal=nll takes a model in memory"),
        ("switch", {}, "is converted in memory, which takes at least"),
    ):
        with pytest.raises(SettingsError, match=says):
            Done(settings_for(sources, family, tmp_path, **changes, memory_bytes=memory))
    with pytest.raises(SettingsError, match=r"text takes at least \d+MB"):
        Done(settings_for(sources, "olmoe", tmp_path, memory_bytes=10**6))
    with pytest.raises(SettingsError, match="--tune cluster shares out the exact sweep, or coding layer by layer"):
        Done(settings_for(sources, "olmoe", tmp_path, signal="fisher", cluster="auto"))
    gptsan = {**sources, "gptsan": TINY["gptsan-japanese"][0](tmp_path / "gptsan")}
    with pytest.raises(
        SettingsError, match="--tune signal=fisher: gradients cannot go back through a gptsan-japanese model"
    ):
        Done(settings_for(gptsan, "gptsan", tmp_path, signal="fisher"))
    assert not (tmp_path / "m.pack").exists()


def test_room_on_the_disk_is_said_and_checked_before(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    settings = settings_for(sources, "olmoe", tmp_path, **SMALL, memory_bytes=tight(monkeypatch))
    with pytest.raises(ConversionError, match=r"needs .* free some space, or choose another place with --work"):
        Done(settings)
    assert not settings.work.exists()


def test_paths_are_profiled_layer_by_layer_where_a_model_does_not_fit(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same choices as in memory; a run that was killed goes on at its layer, and nothing of it stays behind."""
    settings = settings_for(sources, "olmoe", tmp_path, bits=(4,), loss=0.9)
    Done(settings)
    calls: dict[str, Any] = {"calib": None, "heldout": None, "seed": None, "samples": None, "context": None}
    profile_paths(Pack.open(settings.out), **calls, say=lambda line: None)
    whole = {name: (settings.out / name).read_bytes() for name in (PATHS, TRACE)}
    memory, passes = tight(monkeypatch), settings.out.with_name(f"{settings.out.name}.passes")
    monkeypatch.setattr(additions, "whole_bytes", lambda spec: memory + 1)
    ready, entered = PackedLayers.ready, list[int]()

    def killed(self: PackedLayers, at: int) -> Any:
        if at == 1 and not entered:
            raise KeyboardInterrupt
        entered.append(at)
        return ready(self, at)

    monkeypatch.setattr(PackedLayers, "ready", lambda self, at: killed(self, at) if at else ready(self, at))
    with pytest.raises(KeyboardInterrupt):
        profile_paths(Pack.open(settings.out), **calls, say=lambda line: None, memory_bytes=memory)
    assert list(passes.rglob("*.states"))
    monkeypatch.setattr(PackedLayers, "ready", lambda self, at: entered.append(at) or ready(self, at))
    profile_paths(Pack.open(settings.out), **calls, say=lambda line: None, memory_bytes=memory)
    assert entered[0] == 1, "the first layer is not run again"
    assert {name: (settings.out / name).read_bytes() for name in (PATHS, TRACE)} == whole
    assert not passes.exists()
    with pytest.raises(SettingsError, match=r"--memory 1000MB: text takes at least"):
        profile_paths(Pack.open(settings.out), **calls, say=lambda line: None, memory_bytes=10**9)
