"""Checkpoints from strangers: each way to lie is one line, before memory or time is spent on the lie."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limited import Limited
from safetensors.torch import load_file, save_file
from tiny import tiny_olmoe

from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError

INDEX = "model.safetensors.index.json"
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_olmoe(tmp_path_factory.mktemp("single") / "m")


@pytest.fixture(scope="module")
def sharded(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(single, tmp_path_factory.mktemp("sharded") / "m"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for file, half in zip(PARTS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {
        name: file for file, half in zip(PARTS, halves, strict=True) for name in half
    }}  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def edited(name: str, **fields: Any) -> Change:
    """Sets fields of a JSON file; None takes one out."""

    def change(folder: Path) -> None:
        document = json.loads((folder / name).read_text()) | fields
        (folder / name).write_text(json.dumps({key: value for key, value in document.items() if value is not None}))

    return change


def renamed(old: str, new: str) -> Change:
    """In the index, whatever lies there."""

    def change(folder: Path) -> None:
        (folder / INDEX).write_text((folder / INDEX).read_text().replace(old, new))

    return change


def outside(name: str) -> Change:
    """A second part that lies beside the folder, and that the index names as `name`."""

    def change(folder: Path) -> None:
        beside = folder.parent / f"{folder.name}.beside"
        beside.mkdir()
        shutil.copy(folder / PARTS[1], beside / "part.safetensors")
        renamed(PARTS[1], name.format(beside=beside))(folder)

    return change


def linked(name: str) -> Change:
    """A file that became a link to itself beside the folder."""

    def change(folder: Path) -> None:
        beside = folder.parent / f"{folder.name}.{name}"
        shutil.move(folder / name, beside)
        (folder / name).symlink_to(beside)

    return change


def written(name: str, body: bytes | str) -> Change:
    return lambda folder: (folder / name).write_bytes(body if isinstance(body, bytes) else body.encode())


def header(make: Callable[[dict[str, Any]], Any], file: str = "model.safetensors") -> Change:
    """The header as `make` leaves it, or as it gives it, before the same data."""

    def change(folder: Path) -> None:
        body = (folder / file).read_bytes()
        length = int.from_bytes(body[:8], "little")
        said = json.loads(body[8 : 8 + length])
        changed = make(said)
        text = changed if isinstance(changed, bytes) else json.dumps(said).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + body[8 + length :])

    return change


def _overlap(said: dict[str, Any]) -> None:
    first, second = [name for name in said if name != "__metadata__"][:2]
    said[second]["data_offsets"] = said[first]["data_offsets"]
    said[second]["shape"] = said[first]["shape"]


def _lie(said: dict[str, Any]) -> None:
    said["model.norm.weight"]["shape"] = [1 << 40]


CONFIG = "config.json"
OF_SINGLE: dict[str, tuple[Change, str]] = {
    "a milliard experts": (edited(CONFIG, num_experts=10**9), "num_experts|experts"),
    "as many experts as parts may have": (edited(CONFIG, num_experts=65535), "matrices of experts, there are"),
    "a milliard layers": (edited(CONFIG, num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "layers without end": (edited(CONFIG, num_hidden_layers=1e30), "num_hidden_layers is 1e"),
    "a billion features": (edited(CONFIG, hidden_size=10**12), "hidden_size 1000000000000"),
    "wide features": (edited(CONFIG, hidden_size=1 << 16), "config.json implies"),
    "a wide network": (edited(CONFIG, intermediate_size=1 << 24), "config.json implies"),
    "a large vocabulary": (edited(CONFIG, vocab_size=1 << 24), "config.json implies"),
    "a milliard labels": (edited(CONFIG, num_labels=10**9), "num_labels is 1000000000"),
    "wider features": (edited(CONFIG, hidden_size=1 << 24), "dim should be between 1 and 65535"),
    "wide heads": (edited(CONFIG, num_attention_heads=1, head_dim=10**9), "head_dim|implies|heads"),
    "a setting without a name": (edited(CONFIG, **{"": 3}), "sets a setting without a name 3, which is not known"),
    "no heads": (edited(CONFIG, num_attention_heads=0), "num_attention_heads"),
    "text for a number": (edited(CONFIG, num_experts_per_tok="two"), "num_experts_per_tok"),
    "a list for a number": (edited(CONFIG, vocab_size=[96]), "vocab_size"),
    "a number of 5,000 digits": (
        lambda folder: (folder / CONFIG).write_text('{"model_type": "olmoe", "num_experts": ' + "9" * 5000 + "}"),
        "config.json",
    ),
    "a deep config": (written(CONFIG, '{"a": ' * 100_000), "config.json can't be read as JSON"),
    "a deep config that Python parses": (
        written(CONFIG, '{"model_type": "olmoe", "a": ' + "[" * 900 + "]" * 900 + "}"), "nested too deeply"
    ),
    "a field twice": (written(CONFIG, '{"model_type": "olmoe", "model_type": "mixtral"}'), "'model_type' twice"),
    "a config that is a list": (written(CONFIG, "[]"), "should hold a JSON object"),
    "a config that leads out": (linked(CONFIG), "is a link that leads out"),
    "weights that lead out": (linked("model.safetensors"), "is a link that leads out"),
    "a tokenizer that leads out": (linked("tokenizer.json"), "is a link that leads out"),
    "a header of 2⁶³ bytes": (written("model.safetensors", b"\xff" * 7 + b"\x7f" + b"{}"), "is damaged .its header"),
    "no header": (written("model.safetensors", b"\x01"), "is damaged"),
    "a deep header": (header(lambda said: b'{"a": ' + b"[" * 200_000), "is damaged .its header is not JSON"),
    "a header with a tensor twice": (header(lambda said: b'{"a": {}, "a": {}}'), "'a' twice"),
    "tensors that overlap": (header(_overlap), "is damaged"),
    "a tensor that lies of its shape": (header(_lie), "is damaged .'model.norm.weight' has"),
    "a header of another kind": (header(lambda said: b"[1, 2]"), "should be a JSON object"),
}  # fmt: skip
OF_SHARDED: dict[str, tuple[Change, str]] = {
    "an index without weight_map": (edited(INDEX, weight_map=None), "lacks its weight_map"),
    "an index of numbers": (edited(INDEX, weight_map={"a": 1}), "lacks its weight_map"),
    "an index that climbs out": (outside("../{beside.name}/part.safetensors"), "does not lie inside"),
    "an index with a whole path": (outside("{beside}/part.safetensors"), "does not lie inside"),
    "a part that leads out": (linked(PARTS[1]), "is a link that leads out"),
    "an index that names a folder": (renamed(PARTS[1], "."), "does not lie inside|missing"),
    "a part that is missing": (renamed(PARTS[1], "none.safetensors"), "is named in .* but missing"),
    "an index that mixes parts up": (
        lambda folder: (folder / INDEX).write_text((folder / INDEX).read_text().replace(PARTS[1], PARTS[0])),
        "and it does not",
    ),
    "an index of a tensor without a name": (edited(INDEX, weight_map={"": PARTS[0]}), "holds '', and it does not"),
    "an index of a file without a name": (edited(INDEX, weight_map={"a": ""}), "names the file '', which does not lie"),
    "a deep index": (written(INDEX, "[" * 100_000), "can't be read as JSON"),
}  # fmt: skip
CHECKED = ("a milliard experts", "wide features", "tensors that overlap", "an index that climbs out")
"""moeconv check reads as plan does, but asks what the machine has first, which takes a while."""
CONVERTED = ("a part that is missing",)
"""Of which only a conversion complains: plan looks at names, and notes what is not there."""
CASES = {**{name: (False, *case) for name, case in OF_SINGLE.items()},
         **{name: (True, *case) for name, case in OF_SHARDED.items()}}  # fmt: skip


def made(case: str, single: Path, sharded: Path, to: Path) -> tuple[Path, str]:
    of_parts, change, says = CASES[case]
    folder = Path(shutil.copytree(sharded if of_parts else single, to / "m"))
    change(folder)
    return folder, says


@pytest.mark.parametrize("case", CASES)
def test_a_lie_is_one_line(case: str, single: Path, sharded: Path, tmp_path: Path, limited: Limited) -> None:
    folder, says = made(case, single, sharded, tmp_path)
    looked = (("check",), ("plan",)) if case in CHECKED else () if case in CONVERTED else (("plan",),)
    for words in (*looked, ("quantize", "--bits", "16", "--out", tmp_path / "p")):
        said = limited.moeconv(words[0], folder, *words[1:]).complaint
        assert re.search(says, said), (words[0], said)
    assert not (tmp_path / "p").exists()


def test_both_are_read_as_they_were(single: Path, sharded: Path) -> None:
    one, other = Checkpoint.open(single), Checkpoint.open(sharded)
    assert sorted(one.tensors.names) == sorted(other.tensors.names)
    key = one.spec.expert_keys()[0]
    assert (one.expert(key)["up"] == other.expert(key)["up"]).all()


def test_an_index_without_metadata_is_enough(sharded: Path, tmp_path: Path) -> None:
    """Transformers asks for it, and for nothing in it."""
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    edited(INDEX, metadata=None)(folder)
    found, wanted = (Checkpoint.open(path).model(torch.float32).state_dict() for path in (folder, sharded))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_layout_of_the_hubs_cache_goes_on_working(sharded: Path, tmp_path: Path) -> None:
    """snapshots/REVISION has links to blobs beside it; those that lead elsewhere are refused."""
    repository = tmp_path / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(sharded.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    assert Checkpoint.open(snapshot).spec == Checkpoint.open(sharded).spec
    (tmp_path / "latest").symlink_to(snapshot)
    assert Checkpoint.open(tmp_path / "latest").spec == Checkpoint.open(sharded).spec
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(sharded / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link that leads out"):
        Checkpoint.open(snapshot)


def test_a_pipe_in_place_of_a_config_is_one_line(single: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(single, tmp_path / "m"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint.open(folder)


def test_mutations_of_published_configs() -> None:
    """Bounded in time and memory; each is read, or refused in one line."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mutated_configs.py")), "8"], capture_output=True, text=True,
        check=False, timeout=900, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    refused, read = map(int, done.stdout.split())
    assert refused > 100
    assert read > 50
