"""moeconv train-neurons from end to end, on a tiny pack of each shape of model."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import Done, settings_for
from converting import run
from trainings import check_read_only, check_work_folders

from moeconv.calibration import load_splits
from moeconv.command.cli import _exit_code
from moeconv.conversion.additions import NeuronFigures, NeuronsAsked, train_neurons
from moeconv.conversion.taught import guessed_block, usual_rank
from moeconv.errors import ConversionError, SettingsError
from moeconv.foresight.examples import LARGEST, firings
from moeconv.foresight.neurons import NamedNeurons
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.packing.packed import PackedModel
from moeconv.progress import unseen
from moeconv.source.experts import Call
from moeconv.writer import add_files
from moert.pack.layout import Neurons
from moert.pack.learnt import PREDICTOR, NeuronPredictor
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack

FAMILIES = ("switch", "olmoe", "opt")


@pytest.fixture(scope="module")
def packs(firing: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A quantized pack of each, by neurons."""
    found = {}
    for family in FAMILIES:
        settings = settings_for(firing, family, tmp_path_factory.mktemp(family), bits=(4,), loss=0.9, layout="neuron")
        found[family] = Done(settings).settings.out
    return found


def copied(pack: Path, root: Path) -> Path:
    return Path(shutil.copytree(pack, root / "m.pack"))


def trained(pack: Path, **asked: Any) -> NeuronFigures:
    return train_neurons(Pack.open(pack), NeuronsAsked(**asked), lambda line: None, unseen)


def predictor_of(pack: Path) -> NeuronPredictor:
    return NeuronPredictor.from_bytes(Pack.open(pack).read_file(PREDICTOR))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_gets_a_predictor_that_is_the_same_for_the_same_seed(
    packs: dict[str, Path], family: str, tmp_path: Path
) -> None:
    pack = copied(packs[family], tmp_path)
    before = {
        path.name: path.read_bytes() for path in pack.iterdir() if path.is_file() and path.name != "manifest.json"
    }
    found = trained(pack, epochs=2, rank=6)
    opened = Pack.open(pack)
    body = opened.read_file(PREDICTOR)
    predictor = NeuronPredictor.from_bytes(body)
    predictor.check(opened.manifest.model)
    for at, layer in predictor.layers.items():
        assert layer.kept == pytest.approx(found.kept[at]), at
    assert (found.nbytes, found.rank, found.missed) == (len(body), 6, 0.02) == (
        len(body), predictor.rank, predictor.missed
    )  # fmt: skip
    assert found.per_block == opened.neurons(opened.manifest.experts[0].key).per_block
    assert found.tokens > 100
    assert found.heldout_tokens > 100
    assert {name: (pack / name).read_bytes() for name in before} == before
    assert not (tmp_path / "m.pack.neurons").exists()
    trained(pack, epochs=2, rank=6)
    assert Pack.open(pack).read_file(PREDICTOR) == body, "again, over the one that is there"
    other = trained(pack, epochs=2, rank=6, missed=0.2)
    assert all(other.kept[at].neurons < kept.neurons for at, kept in found.kept.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_are_what_the_experts_were_asked_and_gave(
    packs: dict[str, Path], firing: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """Also where text is written: each token of a sample is there once, with all its experts."""
    pack = Pack.open(packs[family])
    packed, tokenizer = PackedModel.open(pack), load_tokenizer(pack.file("tokenizer.json"))
    text = load_splits(str(firing["pairs" if family == "switch" else "text"]), None, seed=0, tokenizer=pack.root)
    scorer = build_scorer(packed, tokenizer, text.calibration, METRICS["perplexity"], Extent(8, 32, 6))
    found = firings(tmp_path / "there", "text", packed, scorer, unseen("", 1).__enter__())
    routed = list(scorer.routes())
    ffn = packed.spec.moe.ffn
    for at, layer in found.items():
        chosen = torch.cat([part.experts[at] for part in routed])
        assert np.array_equal(layer.chosen, chosen[(chosen >= 0).any(1)].numpy())
        for token, slot in np.argwhere(layer.chosen >= 0)[:20]:
            weights = packed.calls.weights(at.expert(int(layer.chosen[token, slot])))
            biases = packed.calls.supply.biases(at.expert(int(layer.chosen[token, slot])))
            x = torch.from_numpy(layer.x[token].astype(np.float32))
            first = [weight @ x + (biases[place] if biases else 0) for place, weight in enumerate(weights[:-1])]
            inner = torch.relu(first[0]) * (first[1] if ffn.gated else 1)
            lengths = inner.abs() * weights[-1].norm(dim=0)
            clear = first[0].abs() > 1e-2  # x is kept in 16 bits
            stored = torch.from_numpy(layer.weights[token, slot].astype(np.float32))
            assert torch.equal((stored > 0)[clear], (inner != 0)[clear])
            assert torch.allclose(stored, lengths / lengths.max() * LARGEST, atol=2)
    again = firings(tmp_path / "there", "text", packed, None, None)  # type: ignore[arg-type]
    assert all(np.array_equal(again[at].weights, layer.weights) for at, layer in found.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_model_only_named_blocks_are_computed(packs: dict[str, Path], family: str, tmp_path: Path) -> None:
    """Each token by itself, whatever runs beside it, by the plain words of SPEC.md."""
    pack = copied(packs[family], tmp_path)
    trained(pack, epochs=1, rank=4, missed=0.9)
    opened, predictor = Pack.open(pack), predictor_of(pack)
    packed = PackedModel.open(opened)
    spec, calls = packed.spec, packed.calls
    asked: dict[LayerKey, tuple[Call, torch.Tensor]] = {}

    def hear(at: LayerKey, call: Call) -> torch.Tensor:
        asked[at] = call, calls.given(at, call)
        return asked[at][1]

    ids = torch.tensor([[5, 9, 14, 3, 22, 7]])
    named = NamedNeurons(predictor, lambda key: opened.neurons(key).per_block)
    tower = packed.family.tower(packed.model, "encoder" if family == "switch" else "decoder")
    with torch.inference_mode(), calls.during(answer=hear), calls.during(naming=named):
        tower(input_ids=ids)
    assert asked
    left_out = 0
    for at, (call, given) in asked.items():
        layer = predictor.layers[at]
        for token in range(len(call.x)):
            x, expected = call.x[token], torch.zeros(spec.expert_width)
            for expert, weight in zip(call.chosen[token].tolist(), call.weights[token], strict=True):
                if expert < 0:
                    continue
                key = at.expert(expert)
                scores = torch.from_numpy(layer.heads[expert].astype(np.float32)) @ (
                    torch.from_numpy(layer.compress.astype(np.float32)) @ x
                )
                names = (scores.numpy() + layer.bias[expert]) >= layer.threshold[expert]
                inner = calls.inner(key, x[None])[0].clone()
                for k in range(opened.neurons(key).n_blocks):
                    block = opened.neurons(key).block(k)
                    if not names[block.start : block.stop].any():
                        left_out += int((inner[block.start : block.stop] != 0).sum())
                        inner[block.start : block.stop] = 0
                biases = calls.supply.biases(key)
                expected += weight * (calls.weights(key)[-1] @ inner + (biases[-1] if biases else 0))
            assert torch.allclose(given[token], expected, atol=1e-4), (at, token)
    assert left_out, "otherwise nothing was tried"
    assert calls.now.naming is None


def test_killed_it_goes_on_to_the_same_file(packs: dict[str, Path], tmp_path: Path) -> None:
    whole, other = (copied(packs["switch"], tmp_path / name) for name in ("whole", "other"))
    options = ["--epochs", "4", "--rank", "4", "--json"]
    done = run([sys.executable, "-m", "moeconv", "train-neurons", str(whole), *options])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told["kept"]) == ["E00", "E01", "D00", "D01"]
    assert set(told["kept"]["E00"]) == {"firing", "neurons", "blocks"}

    class Killed(Exception):
        pass

    def stop(line: str) -> None:
        if line.startswith("E01 after"):
            raise Killed

    with pytest.raises(Killed):
        train_neurons(Pack.open(other), NeuronsAsked(epochs=4, rank=4), stop, unseen)
    assert PREDICTOR not in Pack.open(other).manifest.files
    assert (tmp_path / "other" / "m.pack.neurons" / "E01.pt").exists()
    done = run([sys.executable, "-m", "moeconv", "train-neurons", str(other), *options])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == told
    assert Pack.open(other).read_file(PREDICTOR) == Pack.open(whole).read_file(PREDICTOR)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_computing_only_named_neurons_loses_is_measured(
    packs: dict[str, Path], firing: dict[str, Path], family: str, tmp_path: Path
) -> None:
    pack = copied(packs[family], tmp_path)
    found = trained(pack, epochs=1, rank=4, against=str(firing[family]))
    assert found.loss is not None
    assert found.loss.low <= found.loss.loss <= found.loss.high
    assert found.loss.loss != 0
    assert predictor_of(pack).loss == found.loss
    much = trained(pack, epochs=1, rank=4, missed=0.9, against=str(firing[family])).loss
    assert much is not None
    assert much.loss != found.loss.loss
    with pytest.raises(SettingsError, match="the pack was made from another model"):
        trained(pack, against=str(firing["olmoe" if family == "switch" else "switch"]))


def test_with_all_that_fires_named_nothing_is_lost(
    packs: dict[str, Path], firing: dict[str, Path], tmp_path: Path
) -> None:
    """The loss is then that of the pack's widths alone."""
    pack = copied(packs["opt"], tmp_path)
    width = Pack.open(pack).manifest.model.expert_width
    exact = Pack.open(pack).manifest.quality
    found = trained(pack, rank=width, missed=0.0, against=str(firing["opt"])).loss
    assert found is not None
    assert exact is not None
    assert exact.heldout is not None
    assert found.loss == pytest.approx(exact.heldout.loss, abs=2e-3)


def test_converted_again_a_pack_of_the_same_weights_keeps_it(firing: dict[str, Path], tmp_path: Path) -> None:
    def convert(bits: int) -> Done:
        return Done(settings_for(firing, "opt", tmp_path, bits=(bits,), loss=0.9, layout="neuron"))

    pack = convert(4).settings.out
    trained(pack, epochs=1)
    body = Pack.open(pack).read_file(PREDICTOR)
    convert(4)
    assert Pack.open(pack).read_file(PREDICTOR) == body
    gone = [line for line in convert(8).said if "is gone" in line]
    assert [line.partition("run ")[2] for line in gone] == [f"moeconv train-neurons {pack} again"]
    assert PREDICTOR not in Pack.open(pack).manifest.files


def test_a_pack_that_changed_meanwhile(packs: dict[str, Path], tmp_path: Path) -> None:
    """What was added to it stays; one of other weights is left as it is."""
    pack = copied(packs["olmoe"], tmp_path)

    def add(line: str) -> None:
        add_files(pack, Pack.open(pack).manifest, {"more.txt": line.encode()})

    train_neurons(Pack.open(pack), NeuronsAsked(epochs=1), add, unseen)
    assert {"more.txt", PREDICTOR} <= set(Pack.open(pack).manifest.files)

    def change(line: str) -> None:
        add_files(pack, Pack.open(pack).manifest, {"config.json": pack.joinpath("config.json").read_bytes() + b"\n"})

    before = Pack.open(pack).read_file(PREDICTOR)
    with pytest.raises(ConversionError, match="was replaced in the meantime"):
        train_neurons(Pack.open(pack), NeuronsAsked(epochs=1, seed=5), change, unseen)
    assert Pack.open(pack).read_file(PREDICTOR) == before


def test_what_is_wrong_is_one_line(packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = str(packs["olmoe"])
    for more, said in (
        (("--rank", "0"), "--rank 0: expected 1 or more"),
        (("--rank", "5000"), "--rank 5000: expected at most 4096"),
        (("--rank", "400"), "--rank 400: expected at most the 24 features of an expert"),
        (("--missed", "100%"), "--missed '100%': expected less than 100%"),
        (("--missed", "5"), "did you mean 5%?"),
        (("--epochs", "0"), "--epochs 0: expected 1 or more"),
        (("--samples", "-1"), "--samples -1: expected 1 or more"),
        (("--heldout", "x.jsonl"), "--heldout and --seed go with --calib"),
        (("--nonsense",), "No such option"),
    ):
        assert _exit_code(["train-neurons", pack, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err.splitlines()[-1]
        assert err.count("moeconv: ") == 1


def test_packs_that_it_is_not_for(firing: dict[str, Path], sources: dict[str, Path], tmp_path: Path) -> None:
    smooth = Done(settings_for(sources, "olmoe", tmp_path / "a", bits=(8,), calib=None)).settings.out
    with pytest.raises(SettingsError, match="this model's activation is silu"):
        trained(smooth)
    whole = Done(settings_for(firing, "switch", tmp_path / "b", bits=(8,), calib=None)).settings.out
    with pytest.raises(SettingsError, match=r"do not lie by neurons.* --layout neuron"):
        trained(whole)
    columns = settings_for(firing, "switch", tmp_path / "c", bits=(8,), calib=None, layout="columns")
    pack = Done(columns).settings.out
    with pytest.raises(SettingsError, match=r"--calib is missing|give --calib"):
        trained(pack)
    assert trained(pack, calib=str(firing["pairs"]), epochs=1, samples=6).tokens > 0


def test_a_disk_without_room_or_too_little_memory_is_one_line(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
        with pytest.raises(ConversionError, match=r"m.pack.neurons needs .* and its disk has .*--work"):
            trained(copied(packs["olmoe"], tmp_path))
    monkeypatch.setattr("moeconv.conversion.room.most_bytes", lambda: 10**8)
    with pytest.raises(SettingsError, match="a predictor of neurons is trained on a model in memory"):
        trained(packs["olmoe"])


def test_a_folder_with_other_things_is_no_work_folder(packs: dict[str, Path], tmp_path: Path) -> None:
    check_work_folders(trained, copied(packs["opt"], tmp_path), tmp_path / "other")


def test_a_pack_that_can_not_be_written_to_is_said_before_training(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_read_only(trained, packs["opt"], "neurons", monkeypatch)


def test_what_is_usual(packs: dict[str, Path]) -> None:
    spec = Pack.open(packs["olmoe"]).manifest.model
    assert usual_rank(spec) == 8
    assert guessed_block(spec, 0, Neurons(512, bundled=True)) == 512 // (24 // 2 + 4)
