"""Conversions into blocks of neurons: what a pack gives back is what was measured, and nothing else changes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_olmoe, tiny_switch

from moeconv.artifacts import uniform
from moeconv.conversion.material import Coding
from moeconv.conversion.planning import Inputs as PlanInputs
from moeconv.conversion.settings import BY_NEURONS, LAYOUTS, Settings, blocks_of, files_of, neurons_of
from moeconv.errors import SettingsError, VerifyFailed
from moeconv.matrices import matrices_of, read_expert, stored_matrices
from moeconv.measure.codes import CodingJob, code_expert
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import PackedLayers, PackedModel, verify
from moeconv.plan.outlook import expert_files, quantization_of
from moeconv.plan.problem import Storage, layout_bytes
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder, KeptCodes, squared_errors
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import add_to_pack, checksums_to_bytes
from moert.pack.codec import QuantizedMatrix, dequantize
from moert.pack.errors import HashMismatch
from moert.pack.layout import NEURONS, Neurons
from moert.pack.manifest import Manifest
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from tests.pairs import each, thinned
from tests.unit.test_emit import Killed, Rounding, mixed_widths
from tests.unit.test_quantizers import PLAIN

SMALL = Neurons(512, bundled=False, together=True)


class Sideways(Rounding):
    def columns(self, weights, bits, inputs):  # type: ignore[no-untyped-def]
        return self.quantize(np.ascontiguousarray(weights.transpose(0, 2, 1)), bits, inputs)


@pytest.fixture(scope="module", params=["switch", "gated"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return Checkpoint.open(tiny_switch(folder) if request.param == "switch" else tiny_olmoe(folder, hidden_act="relu"))


def coder_of(checkpoint: Checkpoint, name: str = "group", neurons: Neurons | None = SMALL) -> ExpertCoder:
    return ExpertCoder(checkpoint, QUANTIZERS[name](None), None, neurons=neurons)


def written(checkpoint: Checkpoint, out: Path, neurons: Neurons = SMALL, name: str = "group") -> Manifest:
    return emit(coder_of(checkpoint, name, neurons), mixed_widths(checkpoint), out, seed=0, label=Label("tests"))


@thinned("name, neurons", PLAIN, [SMALL, Neurons(4096, bundled=True)], facts=each)
def test_a_pack_gives_back_what_was_measured(
    source: Checkpoint, tmp_path: Path, name: str, neurons: Neurons
) -> None:  # fmt: skip
    written(source, tmp_path / "p", neurons, name)
    pack, coder = Pack.open(tmp_path / "p"), coder_of(source, name, neurons)
    assert pack.manifest.quantization.neurons == neurons
    model = PackedModel.open(pack)
    trial = Trial(LoadedModel(source), coder)
    trial.assign(mixed_widths(source))
    for key, bits in mixed_widths(source).items():
        stored, weights = stored_matrices(pack, key, read_expert(pack, key)), coder.weights(key, bits)
        down = stored["down"]
        assert np.array_equal((dequantize(down) if isinstance(down, QuantizedMatrix) else down).T, weights["down"])
        read = PackedLayers._expert(_Only(pack), key)  # type: ignore[arg-type]
        for place, projection in enumerate(source.spec.moe.ffn.projections):
            assert np.array_equal(read[projection], weights[projection])
            assert weights[projection].shape == source.spec.projection_shape(projection)
            assert torch.equal(model.calls.weights(key)[place], torch.from_numpy(weights[projection]))
            assert torch.equal(trial.calls.weights(key)[place], torch.from_numpy(weights[projection]))
    found = verify(pack, source)
    assert found.worst <= 1


class _Only:
    """The one thing that PackedLayers asks of itself for an expert."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack


def test_down_is_coded_along_the_outputs(source: Checkpoint) -> None:
    key = source.spec.expert_keys()[1]
    rows, columns = (coder_of(source, "channel", neurons) for neurons in (None, SMALL))
    bits = (3,) * len(source.spec.moe.ffn.projections)
    along, across = rows.code(key, bits)["down"], columns.code(key, bits)["down"]
    d_model, d_ff = source.spec.projection_shape("down")
    assert (along.scale.shape, along.in_features) == ((d_model, 1), d_ff)
    assert (across.scale.shape, across.in_features) == ((d_ff, 1), d_model)
    assert not np.array_equal(rows.weights(key, bits)["down"], columns.weights(key, bits)["down"])
    assert np.array_equal(*(coder.weights(key, bits)["up"] for coder in (rows, columns)))
    original = columns.weights(key, (ORIGINAL,) * len(bits))["down"]
    assert np.array_equal(original, source.expert(key)["down"])
    assert np.array_equal(*(coder.weights(key, (16,) * len(bits))["down"] for coder in (rows, columns)))


def test_another_layout_is_another_pack_of_the_same_weights(source: Checkpoint, tmp_path: Path) -> None:
    packs = []
    for name, neurons in (("a", SMALL), ("b", Neurons(4096, bundled=True))):
        written(source, tmp_path / name, neurons)
        packs.append(Pack.open(tmp_path / name))
    for key in source.spec.expert_keys():
        one, other = (matrices_of(pack, key, read_expert(pack, key)) for pack in packs)
        assert np.array_equal(one["down"], other["down"])
        assert packs[0].entry(key).sha256 != packs[1].entry(key).sha256
    assert packs[0].manifest.effective_bits() == packs[1].manifest.effective_bits()


@pytest.mark.parametrize("changed", [SMALL, replace(SMALL, bundled=True, together=False), None], ids=str)
def test_a_killed_run_goes_on_with_the_same_layout_alone(
    source: Checkpoint, tmp_path: Path, changed: Neurons | None
) -> None:
    widths = uniform(source.spec, 4)
    count = len(source.spec.moe.ffn.projections) * len(widths)
    killed = Sideways(most=count - 1)  # a layer of them was written
    with pytest.raises(Killed):
        emit(ExpertCoder(source, killed, None, neurons=SMALL), widths, tmp_path / "p", seed=0, label=Label("tests"))
    again = Sideways()
    emit(ExpertCoder(source, again, None, neurons=changed), widths, tmp_path / "p", seed=0, label=Label("tests"))
    assert (again.calls == count) == (changed != SMALL)
    emit(ExpertCoder(source, Sideways(), None, neurons=changed), widths, tmp_path / "q", seed=0, label=Label("tests"))
    for path in (tmp_path / "q").rglob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "p" / path.relative_to(tmp_path / "q")).read_bytes()


def test_verify_refuses_other_weights_and_wrong_checksums(source: Checkpoint, tmp_path: Path) -> None:
    written(source, tmp_path / "p")
    pack = Pack.open(tmp_path / "p")
    assert verify(pack, None).experts == len(source.spec.expert_keys())

    class Swapped(Checkpoint):
        def expert(self, key):  # type: ignore[no-untyped-def]
            return super().expert(ExpertKey(key.stack, key.layer, (key.expert + 1) % self.spec.moe.n))

    with pytest.raises(VerifyFailed, match="times what its width allows"):
        verify(pack, Swapped.open(source.path))
    wrong = {entry.key: np.zeros(pack.neurons(entry.key).n_checksums, np.uint32) for entry in
             pack.manifest.experts}  # fmt: skip
    add_to_pack(tmp_path / "p", pack.manifest, NEURONS, checksums_to_bytes(wrong))
    with pytest.raises(HashMismatch, match="is not that of its neurons"):
        verify(Pack.open(tmp_path / "p"), None)


@pytest.mark.parametrize("name", PLAIN)
def test_codes_that_are_kept_are_the_same(source: Checkpoint, tmp_path: Path, name: str) -> None:
    """As they are made layer by layer, here and by workers."""
    kept, fresh = KeptCodes(tmp_path / "codes", "about"), coder_of(source, name)
    key, bits = source.spec.expert_keys()[2], (3,) * len(source.spec.moe.ffn.projections)
    own = tuple(torch.from_numpy(weight) for weight in source.expert(key).values())
    code_expert(fresh, kept, key, [3], own, None)
    mine = ExpertCoder(source, QUANTIZERS[name](None), None, kept, SMALL)
    for projection, weight in mine.weights(key, bits).items():
        if projection == "down" or name != "gptq":  # which codes gate and up as one there
            assert np.array_equal(weight, coder_of(source, name).weights(key, bits)[projection])
    job = CodingJob(source.path, name, None, tmp_path / "codes", "about", SMALL)
    assert pickle.loads(pickle.dumps(job)) == job


def test_what_widths_do_without_text(source: Checkpoint) -> None:
    key = source.spec.expert_keys()[0]
    found = squared_errors(coder_of(source), key, [2, 4, 16])
    weights = {bits: coder_of(source).weights(key, (bits,) * len(source.spec.moe.ffn.projections)) for bits in found}
    for bits, error in found.items():
        missed = sum(float(np.square(weights[bits][n] - w).sum()) for n, w in source.expert(key).items())
        assert error == pytest.approx(missed, rel=1e-3, abs=1e-9)  # of all rows: there are few


@pytest.mark.parametrize("group", [0, 32])
def test_sizes_are_those_of_the_pack(source: Checkpoint, tmp_path: Path, group: int) -> None:
    quantizer = QUANTIZERS["gptq"](group)
    widths = mixed_widths(source)
    coder = ExpertCoder(source, quantizer, None, neurons=SMALL)
    manifest = emit(coder, widths, tmp_path / "p", seed=0, label=Label("tests"))
    storage, names = Storage(group, False, SMALL), source.spec.moe.ffn.projections
    nbytes = layout_bytes(source.spec, storage)
    planned = sum(nbytes(name, width) for bits in widths.values() for name, width in zip(names, bits, strict=True))
    assert planned == manifest.expert_tensor_bytes()
    files = expert_files(
        source.spec, quantization_of(storage, None), lambda key: dict(zip(names, widths[key], strict=True))
    )
    assert [size for sizes in files.values() for size in sizes] == [entry.file_bytes for entry in manifest.experts]


def test_how_each_layout_is_asked_for(source: Checkpoint) -> None:
    spec = source.spec
    assert LAYOUTS == ("expert", "layer", "neuron", "columns", "auto")
    assert [neurons_of(layout, spec, mxfp4=False) for layout in LAYOUTS] == [
        None, None, Neurons(512, bundled=True), SMALL, None,
    ]  # fmt: skip
    assert [files_of(layout) for layout in LAYOUTS] == ["expert", "layer", "expert", "expert", "expert"]
    with pytest.raises(SettingsError, match="--layout columns does not go with a source in MXFP4"):
        neurons_of("columns", spec, mxfp4=True)


def test_auto_takes_columns_where_large_experts_are_all_asked(
    source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves those whole that a router chooses."""
    spec = Checkpoint.open("recipes/models/opt").spec
    bytes_at_4_bits = spec.weights_per_expert() // 2
    for least, expected in ((bytes_at_4_bits, blocks_of(spec, bundled=False)), (bytes_at_4_bits + 1, None)):
        monkeypatch.setattr("moeconv.conversion.settings.PAYS_BYTES", least)
        assert neurons_of("auto", spec, mxfp4=False) == expected
        assert neurons_of("auto", spec, mxfp4=True) is None
    monkeypatch.setattr("moeconv.conversion.settings.PAYS_BYTES", 0)
    assert neurons_of("auto", source.spec, mxfp4=False) is None


def test_experts_that_are_never_exactly_zero_are_refused(tmp_path: Path) -> None:
    settings = Settings(str(tiny_olmoe(tmp_path / "m")), tmp_path / "p", tmp_path / "w", bits=(4,))
    assert Coding.open(replace(settings, layout="auto")).neurons is None
    for layout in BY_NEURONS:
        with pytest.raises(SettingsError) as caught:
            Coding.open(replace(settings, layout=layout))
        said = f"--layout {layout} is for experts whose neurons are often exactly zero (relu, relu2), and this model's "
        assert str(caught.value) == f"{said}activation is silu: leave it out"


def test_planning_knows_how_down_is_coded() -> None:
    from moeconv.artifacts import SensitivityTable, Summary

    table = SensitivityTable(4, Summary(1.0, 0.0, 1.0, 0.0), {}, {})
    for by_columns in (False, True):
        inputs = PlanInputs("m", "gptq", 0, "rouge2", "s", table, {}, by_columns)
        assert PlanInputs.from_json(inputs.to_json()) == inputs
        assert (inputs.storage(mxfp4=False).neurons is not None) == by_columns
        assert ("by_columns" in inputs.to_json()) == by_columns


@pytest.mark.parametrize(("width", "nbytes"), [(8, 512), (320, 512), (768, 1024), (2048, 2048), (8192, 4096)])
def test_blocks_have_a_few_neurons_and_no_less_than_a_drive_reads(source: Checkpoint, width: int, nbytes: int) -> None:
    assert blocks_of(replace(source.spec, d_model=width), bundled=False) == Neurons(
        nbytes, bundled=False, together=True
    )


def test_pieces_as_large_as_they_are_asked_for(source: Checkpoint, tmp_path: Path) -> None:
    settings = Settings(str(source.path), tmp_path / "p", tmp_path / "w", bits=(4,), layout="columns")
    assert Coding.open(replace(settings, piece_bytes=1536)).neurons == Neurons(1536, bundled=False, together=True)
    assert neurons_of("neuron", source.spec, mxfp4=False, piece_bytes=2048) == Neurons(2048, bundled=True)
    for wrong in (0, 511, 513, 1 << 21):
        with pytest.raises(
            SettingsError, match=f"--tune piece-bytes={wrong}: expected a multiple of 512, 512 to 1048576"
        ):
            replace(settings, piece_bytes=wrong)
    with pytest.raises(SettingsError, match="--tune piece-bytes has no effect on --layout layer"):
        replace(settings, layout="layer", piece_bytes=512)
