"""What a command writes never takes the place of something that it did not write, unless --overwrite says so; and a
path is followed as every program follows it."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Moert
from report_packs import full_pack
from tiny import tiny_olmoe
from tiny_packs import SWITCH, write_pack

import moeconv
from moeconv.command.cli import _exit_code
from moeconv.conversion.additions import _others
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.workdir import WorkDir
from moeconv.writer import PackWriter, check_addable
from moert.pack.errors import WriteFailed
from moert.pack.files import beside, placed
from moert.pack.manifest import FORMAT_NAME
from moert.pack.reader import MANIFEST, Pack, pack_around, strangers
from recipes.bench.sweeps import DrawingImpossible, check_drawing

ROOT = Path(moeconv.__file__).parents[1]
NEW = ("--max-new-tokens", "3")


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(tmp_path / "switch.pack", SWITCH)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs moeconv and returns the line by which it refuses."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert _exit_code([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err.splitlines()[-1]

    return run


def test_answers_replace_only_what_may_be_lost(moert: Moert, pack: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    command = ["run", pack, "--input", prompts, *NEW, "--output"]
    answers.touch()  # as mktemp does
    assert moert(*command, answers) == 0
    first = answers.read_text()
    assert f"--output {answers} is there already" in moert.refuses(*command, answers)
    assert answers.read_text() == first
    assert moert(*command, answers, "--overwrite", "--json") == 0
    assert answers.read_text() != first
    assert moert(*command, os.devnull) == 0
    assert "--overwrite goes with --output" in moert.refuses("run", pack, "a", "--overwrite")


def test_no_answers_go_into_a_pack_or_over_the_prompts(moert: Moert, pack: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    before = contents(pack)
    (tmp_path / "link.json").symlink_to(pack / MANIFEST)
    (tmp_path / "folder").symlink_to(pack)
    for name in (pack / MANIFEST, pack / "new.jsonl", tmp_path / "link.json", tmp_path / "folder" / "experts" / "x"):
        said = moert.refuses("run", pack, "--input", prompts, "--output", name, "--overwrite", *NEW)
        assert f"lies in the pack {pack}" in said
    assert "would replace the prompts" in moert.refuses(
        "run", pack, "--input", prompts, "--output", prompts, "--overwrite"
    )
    assert contents(pack) == before


def test_only_a_pack_of_the_same_model_is_replaced(tmp_path: Path, refused: Refused) -> None:
    one, other = tiny_olmoe(tmp_path / "one"), tiny_olmoe(tmp_path / "other", num_hidden_layers=3)
    tuned = shutil.copytree(one, tmp_path / "tuned")
    out = tmp_path / "m.pack"
    command = ["--bits", "4", "--json", "--out", str(out)]
    assert _exit_code(["quantize", str(one), *command]) == 0
    assert _exit_code(["quantize", str(one), "--bits", "3", "--out", str(out)]) == 0
    before = contents(out)
    for model in (other, tuned):
        refusal = refused("quantize", model, "--bits", "4", "--out", out)
        assert refusal == (
            f"moeconv: {out} is a pack of another model (one), and would be lost: choose another --out, or give "
            "--overwrite"
        )
    with pytest.raises(SettingsError, match=r"another model \(one\)"):
        moeconv.quantize(other, out, bits=[4])
    assert contents(out) == before
    moeconv.quantize(other, out, bits=[4], overwrite=True)
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 3


def test_a_file_of_the_users_in_a_pack_is_not_lost(tmp_path: Path, refused: Refused) -> None:
    source, out = tiny_olmoe(tmp_path / "hf"), tmp_path / "m.pack"
    command = ["quantize", str(source), "--bits", "4", "--out", str(out)]
    assert _exit_code(command) == 0
    (out / "config.json.0123abcd.tmp").touch()  # as a writer leaves it that is killed
    assert _exit_code(command) == 0
    (out / "notes.txt").write_text("mine")
    assert f"{out} holds notes.txt, which no conversion wrote" in refused(*command)
    assert (out / "notes.txt").read_text() == "mine"
    assert _exit_code([*command, "--overwrite"]) == 0
    assert strangers(out) == []
    (out / MANIFEST).write_text(json.dumps({"format": FORMAT_NAME, "version": 99}))
    assert "which no conversion wrote" in refused(*command)


def test_a_file_that_comes_while_a_pack_is_written_is_not_lost(pack: Path) -> None:
    (pack / "old.txt").touch()
    manifest = Pack.open(pack).manifest
    writer = PackWriter(pack, manifest.model, manifest.quantization, "again")
    writer._experts = {entry.key: entry for entry in manifest.experts}
    (pack / "new.txt").touch()
    with pytest.raises(WriteFailed, match=r"got the file new\.txt meanwhile"):
        writer.finish("tests", None)
    assert (pack / "new.txt").exists()


def test_what_is_added_to_a_pack_replaces_nothing_of_the_users(pack: Path) -> None:
    (pack / "hash.safetensors").touch()
    with pytest.raises(WriteFailed, match=r"hash\.safetensors is there and is not the pack's"):
        check_addable(pack, "hash.safetensors")
    check_addable(pack, "paths.safetensors")
    assert _others(beside(pack, "passes")) == []
    beside(pack, "passes").mkdir()
    (beside(pack, "passes") / "plans").mkdir()
    assert _others(beside(pack, "passes")) == []
    (beside(pack, "passes") / "mine").touch()
    assert _others(beside(pack, "passes")) == ["mine"]


def test_nothing_is_written_into_a_pack(tmp_path: Path, pack: Path, refused: Refused) -> None:
    source, inside = tiny_olmoe(tmp_path / "hf"), f"lies in the pack {pack}"
    assert inside in refused("quantize", source, "--bits", "4", "--out", pack / "new.pack")
    assert inside in refused("report", full_pack(tmp_path / "r.pack"), "--out", pack / "page")
    with pytest.raises(ConversionError, match="lies in the pack"), WorkDir(pack / "work"):
        pass
    with pytest.raises(DrawingImpossible, match="lies in the pack"):
        check_drawing(pack / "pictures", [pack])
    with pytest.raises(DrawingImpossible, match="lies in the pack"):
        check_drawing(pack, [pack])
    assert strangers(pack) == []


def test_pictures_of_others_are_not_drawn_over(tmp_path: Path, pack: Path) -> None:
    pytest.importorskip("matplotlib")
    check_drawing(tmp_path, [pack])
    (tmp_path / "budgets.png").write_bytes(b"\x89PNG of a holiday")
    with pytest.raises(DrawingImpossible, match=r"holds budgets\.png, which this program did not draw"):
        check_drawing(tmp_path, [pack])
    check_drawing(tmp_path, [pack], overwrite=True)


def test_a_link_is_followed_before_two_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "far" / "folder").mkdir(parents=True)
    here = tmp_path / "here"
    here.mkdir()
    (here / "link").symlink_to(tmp_path / "far" / "folder")
    source = tiny_olmoe(tmp_path / "hf")
    monkeypatch.chdir(here)
    assert placed("link/../x") == tmp_path / "far" / "x"
    assert placed("..") == tmp_path
    assert placed("link") == here / "link"
    assert _exit_code(["quantize", str(source), "--bits", "4", "--out", "link/../x.pack"]) == 0
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["folder", "x.pack"]
    moeconv.quantize(source, "link/../y.pack", bits=[4])
    assert Pack.open("link/../y.pack").root.is_dir()
    (here / "r.toml").write_text(f'model = "{source}"\nbits = [4]\nprofile_paths = false\n')
    assert _exit_code(["recipe", "run", "r.toml", "--out", "link/.."]) == 0
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["folder", "r.pack", "x.pack", "y.pack"]
    assert [path.name for path in here.iterdir() if path.suffix == ".pack"] == []
    full_pack(tmp_path / "far" / "r.pack2")
    monkeypatch.chdir(tmp_path / "far" / "r.pack2")
    assert _exit_code(["report", "."]) == 0
    assert (tmp_path / "far" / "r.pack2.report" / "index.html").is_file()
    assert pack_around(Path("experts")) == tmp_path / "far" / "r.pack2"


def test_no_path_is_shortened_as_text() -> None:
    """The text a/../b is b only where a is no link."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("moert", "moeconv", "recipes")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("abspath", "normpath")
    ]
    assert found == []
