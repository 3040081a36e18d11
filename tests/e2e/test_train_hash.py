"""moeconv train-hash from end to end, on a tiny pack of each shape of model."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversions import Done, settings_for
from converting import Started, run
from trainings import check_read_only, check_work_folders

from moeconv.command.cli import _exit_code
from moeconv.conversion.additions import HashAsked, train_hash
from moeconv.conversion.taught import lesson_of, usual_width
from moeconv.errors import ConversionError, SettingsError
from moeconv.foresight.examples import batches, collected
from moeconv.foresight.training import Course
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.packing.packed import PackedModel, described
from moeconv.progress import unseen
from moeconv.source.archs.weights import parameter
from moeconv.writer import add_files
from moert.pack.learnt import HASH, HashFunction
from moert.pack.reader import Pack


@pytest.fixture(scope="module")
def packs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An unquantized pack of each shape."""
    found = {}
    for family in ("switch", "olmoe"):
        root = tmp_path_factory.mktemp(family)
        found[family] = Done(settings_for(sources, family, root, bits=(16,), loss=0.9)).settings.out
    return found


def copied(pack: Path, root: Path) -> Path:
    return Path(shutil.copytree(pack, root / "m.pack"))


def trained(pack: Path, **asked: Any) -> Any:
    return train_hash(Pack.open(pack), HashAsked(**asked), lambda line: None, unseen)


def words(pack: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "moeconv", "train-hash", str(pack), *more]


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_a_pack_gets_a_function_that_is_the_same_for_the_same_seed(
    packs: dict[str, Path], family: str, tmp_path: Path
) -> None:
    pack = copied(packs[family], tmp_path)
    before = {
        path.name: path.read_bytes() for path in pack.iterdir() if path.is_file() and path.name != "manifest.json"
    }
    found = trained(pack, epochs=3)
    opened = Pack.open(pack)
    body = opened.read_file(HASH)
    function = HashFunction.from_bytes(body)
    function.check(opened.manifest.model)
    assert function.layer_hits(opened.manifest.model) == found.hits
    assert (found.nbytes, found.width, found.top_k) == (len(body), 24, opened.manifest.model.moe.router.top_k)
    assert found.tokens > 100
    assert found.heldout_tokens > 100
    assert {name: (pack / name).read_bytes() for name in before} == before
    assert not (tmp_path / "m.pack.hash").exists()
    trained(pack, epochs=3)
    assert Pack.open(pack).read_file(HASH) == body, "again, over the one that is there"
    trained(pack, epochs=3, seed=1)
    assert Pack.open(pack).read_file(HASH) != body


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_examples_are_what_the_routers_said(
    packs: dict[str, Path], sources: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """The choice of each token is what its largest numbers say, and its tokens are those of the text."""
    from moeconv.calibration import load_splits

    pack = Pack.open(packs[family])
    packed, (_, description) = PackedModel.open(pack), described(pack)
    text = load_splits(str(sources["pairs" if family == "switch" else "text"]), None, seed=0, tokenizer=pack.root)
    tokenizer = load_tokenizer(pack.file("tokenizer.json"))
    scorer = build_scorer(packed, tokenizer, text.calibration, METRICS["perplexity"], Extent(None, 32, 6))
    examples = collected(tmp_path / "there", "text", packed, description, scorer, unseen("", 1).__enter__())
    routed = list(scorer.routes())
    for name, stack in examples.stacks.items():
        places = packed.spec.moe_layers(name)
        top_k = packed.spec.moe.router.top_k
        chosen = torch.cat([torch.stack([part.experts[at] for at in places], 1) for part in routed]).numpy()
        assert np.array_equal(stack.whole.chosen, chosen)
        first = np.sort(stack.whole.experts[..., :top_k].astype(np.int64), -1)
        assert (np.sort(chosen, -1) == first).all(-1)[(chosen >= 0).all(-1)].mean() > 0.999
        assert (np.diff(stack.whole.numbers.astype(np.float32), axis=-1) <= 0).all()
        assert stack.lengths.tolist() == [length for part in routed for length in part.lengths[name]]
    if family == "switch":
        order = [place for part in routed for place in part.samples]
        ids = [tokenizer.encode(text.calibration[place].source).ids for place in order]
        assert examples.stacks["encoder"].whole.tokens.tolist() == [token for row in ids for token in row]
        starts = examples.stacks["decoder"].starts
        assert set(examples.stacks["decoder"].whole.tokens[starts].tolist()) == {packed.spec.tokens.start}
    again = collected(tmp_path / "there", "text", packed, description, None, None)  # type: ignore[arg-type]
    assert again.tokens == examples.tokens
    embedding = parameter(packed.model, description, "embed.weight")
    assert torch.equal(embedding, packed.model.get_input_embeddings().weight)
    lesson = lesson_of(packed, description, (scorer, scorer), Course(8), tmp_path / "lesson", {"about": 1}, unseen)
    assert (
        sum(int(batch["decoder"].real.sum()) for batch in batches(lesson.train))
        == examples.stacks["decoder"].lengths.sum()
    )


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_what_is_trained_names_more_than_chance(packs: dict[str, Path], family: str, tmp_path: Path) -> None:
    pack = copied(packs[family], tmp_path)
    found = trained(pack, epochs=30)
    moe = Pack.open(pack).manifest.model.moe
    first = np.mean([shares[0] for shares in found.hits.values()])
    assert first > 1.5 * moe.router.top_k / moe.n, found.hits


def test_killed_and_interrupted_it_goes_on_to_the_same_file(packs: dict[str, Path], tmp_path: Path) -> None:
    whole, other = (copied(packs["switch"], tmp_path / name) for name in ("whole", "other"))
    options = ("--epochs", "60", "--width", "8", "--json")
    done = run(words(whole, *options))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told["hits"]) == ["E00", "E01", "D00", "D01"]
    for end in (signal.SIGKILL, signal.SIGINT):
        process = Started(words(other, *options))
        checkpoint, seen = tmp_path / "other" / "m.pack.hash" / "checkpoint.pt", 0.0
        before = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
        while seen <= before and process.poll() is None:
            time.sleep(0.001)
            seen = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
        process.send_signal(end)
        _, err = process.communicate(timeout=600)
        assert "Traceback" not in err
        if end == signal.SIGINT and process.returncode:
            assert process.returncode == 130, err
            assert err.splitlines()[-1].endswith("what was measured is kept, run the same command to go on")
        assert HASH not in Pack.open(other).manifest.files or process.returncode == 0
    done = run(words(other, *options))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == told
    assert Pack.open(other).read_file(HASH) == Pack.open(whole).read_file(HASH)


@pytest.mark.parametrize("family", ["switch", "olmoe"])
def test_what_routing_by_it_loses_is_measured_against_the_source(
    packs: dict[str, Path], sources: dict[str, Path], family: str, tmp_path: Path
) -> None:
    pack = copied(packs[family], tmp_path)
    found = trained(pack, epochs=2, against=str(sources[family]))
    assert found.routed is not None
    assert found.routed.low <= found.routed.loss <= found.routed.high
    assert found.routed.loss != 0
    assert HashFunction.from_bytes(Pack.open(pack).read_file(HASH)).routed == found.routed
    other = "olmoe" if family == "switch" else "switch"
    with pytest.raises(SettingsError, match="the pack was made from another model"):
        trained(pack, epochs=2, against=str(sources[other]))


def test_a_pack_that_changed_meanwhile(packs: dict[str, Path], tmp_path: Path) -> None:
    """What was added to it stays; one of other weights is left as it is."""
    pack = copied(packs["olmoe"], tmp_path)

    def add(line: str) -> None:
        add_files(pack, Pack.open(pack).manifest, {"more.txt": line.encode()})

    train_hash(Pack.open(pack), HashAsked(epochs=1), add, unseen)
    assert {"more.txt", HASH} <= set(Pack.open(pack).manifest.files)

    def change(line: str) -> None:
        add_files(pack, Pack.open(pack).manifest, {"config.json": pack.joinpath("config.json").read_bytes() + b"\n"})

    before = Pack.open(pack).read_file(HASH)
    with pytest.raises(ConversionError, match="was replaced in the meantime"):
        train_hash(Pack.open(pack), HashAsked(epochs=1, seed=5), change, unseen)
    assert Pack.open(pack).read_file(HASH) == before


def test_what_is_wrong_is_one_line(packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = str(packs["olmoe"])
    for more, said in (
        (("--width", "7"), "--width 7: expected an even number"),
        (("--width", "0"), "--width 0: expected 1 or more"),
        (("--epochs", "0"), "--epochs 0: expected 1 or more"),
        (("--samples", "-1"), "--samples -1: expected 1 or more"),
        (("--heldout", "x.jsonl"), "--heldout and --seed go with --calib"),
        (("--calib", str(tmp_path / "none.jsonl")), "none.jsonl"),
        (("--nonsense",), "No such option"),
    ):
        assert _exit_code(["train-hash", pack, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err.splitlines()[-1]
        assert err.count("moeconv: ") == 1


def test_a_pack_without_text_wants_some(sources: dict[str, Path], tmp_path: Path) -> None:
    pack = Done(settings_for(sources, "olmoe", tmp_path, bits=(8,), calib=None)).settings.out
    with pytest.raises(SettingsError, match=r"--calib is missing|give --calib"):
        trained(pack)
    with pytest.raises(ConversionError, match=r"needs the fields? 'text'"):
        trained(pack, calib=str(sources["pairs"]))
    assert trained(pack, calib=str(sources["text"]), epochs=1, samples=6, context=16).tokens == 6 * 16


def test_a_pack_judged_by_a_module_says_that_it_wants_that(packs: dict[str, Path], tmp_path: Path) -> None:
    opened = Pack.open(copied(packs["switch"], tmp_path))
    quality = opened.manifest.quality
    assert quality is not None
    opened.manifest = replace(opened.manifest, quality=replace(quality, metric="ours.py"))
    with pytest.raises(SettingsError, match=r"judged by ours\.py, a module: say where it is with --metric"):
        train_hash(opened, HashAsked(epochs=1), lambda line: None, unseen)
    assert train_hash(opened, HashAsked(epochs=1, metric=quality.metric), lambda line: None, unseen).tokens


def test_a_disk_without_room_is_one_line(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
    with pytest.raises(ConversionError, match=r"m.pack.hash needs .* and its disk has .*--work"):
        trained(copied(packs["olmoe"], tmp_path))


def test_a_folder_with_other_things_is_no_work_folder(packs: dict[str, Path], tmp_path: Path) -> None:
    check_work_folders(trained, copied(packs["olmoe"], tmp_path), tmp_path / "other")


def test_a_pack_that_can_not_be_written_to_is_said_before_training(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_read_only(trained, packs["olmoe"], "hash", monkeypatch)


def test_a_model_that_does_not_fit_is_refused(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeconv.conversion.room.most_bytes", lambda: 10**8)
    with pytest.raises(SettingsError, match="a hash function is trained on a model in memory"):
        trained(packs["olmoe"])


def test_the_usual_width_is_small_beside_the_pack(packs: dict[str, Path]) -> None:
    spec = Pack.open(packs["olmoe"]).manifest.model
    assert usual_width(spec, 10**12) == 24, "as wide as the model"
    assert usual_width(spec, 10) == 24, "less than the least"


def test_hits_are_of_what_is_stored(packs: dict[str, Path], tmp_path: Path) -> None:
    pack = copied(packs["olmoe"], tmp_path)
    found = trained(pack, epochs=2, work=tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    opened = Pack.open(pack)
    function = HashFunction.from_bytes(opened.read_file(HASH))
    assert function.layer_hits(opened.manifest.model) == found.hits
