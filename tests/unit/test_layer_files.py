"""Packs whose layers each have one file: the same experts, read from their places, written so that a kill is mended."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_packs import minor_of
from tiny_packs import DECODER, SPECS, run_greedy, write_pack

from moeconv import writer as writing
from moeconv.matrices import read_expert
from moeconv.writer import JOINED_MINOR, expert_path, seal
from moert.engine.engine import Engine
from moert.pack.documents import plain
from moert.pack.errors import FileTruncated, HashMismatch, ManifestInvalid, PackError, SizeOverflow, WriteFailed
from moert.pack.reader import MANIFEST, Pack

FIRST, SECOND = DECODER.expert_keys()[:2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packs")
    return {files: write_pack(folder / f"{files}.pack", DECODER, files=files) for files in ("expert", "layer")}  # type: ignore[arg-type]


@pytest.fixture
def pack_dir(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["layer"], tmp_path / "m.pack"))


def resealed(root: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Changes what the manifest says of experts, and makes it whole again."""
    document = json.loads((root / MANIFEST).read_text())
    change(document["experts"])
    del document["crc32"]
    (root / MANIFEST).write_text(seal(json.dumps(document)[:-1]))


@pytest.mark.parametrize("name", SPECS)
def test_a_layers_file_has_its_experts_one_behind_the_other(tmp_path: Path, name: str) -> None:
    spec = SPECS[name]
    apart, joined = (
        Pack.open(write_pack(tmp_path / f"{files}.pack", spec, paths=False, files=files))  # type: ignore[arg-type]
        for files in ("expert", "layer")
    )
    assert joined.manifest.minor == minor_of(spec, JOINED_MINOR)
    assert [path.name for path in sorted((joined.root / "experts").iterdir())] == sorted(
        f"{at}.experts" for at in spec.moe_layers()
    )
    for key in spec.expert_keys():
        assert bytes(read_expert(joined, key)) == bytes(read_expert(apart, key))
        assert joined.entry(key).sha256 == apart.entry(key).sha256
    assert len(list(joined.verify_hashes())) == len(spec.expert_keys()) + len(joined.manifest.files)
    assert all(joined.file(path).stat().st_size == nbytes for path, nbytes in joined.sizes().items())


@pytest.mark.parametrize("room", ["30%", None])
@pytest.mark.parametrize("io", ["direct,2", "buffered,1", None])
def test_a_run_gives_the_same(made: dict[str, Path], room: str | None, io: str | None) -> None:
    found = []
    for path in made.values():
        with Engine.open(path, cache=room, io=io, notify=lambda note: None) as engine:
            found.append(run_greedy(engine, [5, 6, 7], 6))
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def test_large_experts_are_used_where_the_page_cache_has_them(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moert.experts.store.MAPPED_BYTES", 1)
    monkeypatch.setattr("moert.experts.store.in_page_cache", lambda *_: True)
    with Engine.open(made["layer"], notify=lambda note: None) as engine:
        mapped = run_greedy(engine, [5, 6, 7], 6)
    with Engine.open(made["expert"], notify=lambda note: None, cache="40%") as engine:
        assert run_greedy(engine, [5, 6, 7], 6)[0] == mapped[0]


def test_damage_is_found_in_the_expert_that_has_it(pack_dir: Path) -> None:
    pack = Pack.open(pack_dir)
    path, entry = pack.file(pack.entry(SECOND).path), pack.entry(SECOND)
    body = bytearray(path.read_bytes())
    body[entry.offset + entry.file_bytes - 1] ^= 1
    path.write_bytes(body)
    read_expert(pack, FIRST)
    with pytest.raises(HashMismatch):
        read_expert(pack, SECOND)
    with pytest.raises(HashMismatch, match="sha256 differs"):
        list(pack.verify_hashes())


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_refused(pack_dir: Path, change: int) -> None:
    path = pack_dir / Pack.open(pack_dir).entry(FIRST).path
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(FileTruncated, match="copy the pack again"):
        Pack.open(pack_dir)


def swap(experts: list[dict[str, Any]]) -> None:
    experts[0]["offset"], experts[1]["offset"] = experts[1]["offset"], 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda experts: experts[1].update(offset=experts[1]["offset"] + 4096), "follows without a gap"),
        (lambda experts: experts[1].update(offset=4096), "follows without a gap|names one file twice"),
        (lambda experts: experts[1].update(offset=0), "names one file twice"),
        (lambda experts: experts[0].update(offset=4096), "follows without a gap"),
        (lambda experts: experts[1].update(offset=-1), "offset"),
        (lambda experts: experts[1].update(offset=1 << 60), "offset"),
        (lambda experts: experts[1].update(offset=True), "offset"),
        (lambda experts: experts[1].update(offset=1.5), "offset"),
        (lambda experts: experts[1].update(path="backbone.safetensors"), "names one file twice|follows without"),
        (swap, "follows without a gap|names one file twice"),
    ],
)  # fmt: skip
def test_places_that_can_not_be_are_refused(
    pack_dir: Path, change: Callable[[list[dict[str, Any]]], object], says: str
) -> None:
    before = Pack.open(pack_dir).manifest
    resealed(pack_dir, lambda experts: None)
    assert Pack.open(pack_dir).manifest == before
    resealed(pack_dir, change)
    with pytest.raises((ManifestInvalid, SizeOverflow), match=says):
        Pack.open(pack_dir)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_killed_while_layers_are_joined_goes_on(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Before a layer's file is in its place, and after it is but its experts' own files are still there."""
    out, calls = tmp_path / "m.pack", list[Path]()
    replaced, unlinked = os.replace, Path.unlink

    def replace(source: Path, target: Path) -> None:
        if str(target).endswith(".experts"):
            calls.append(Path(target))
            if len(calls) == at and at < 3:
                raise KeyboardInterrupt
        replaced(source, target)

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if at == 3 and self.name == "E001.safetensors" and calls:
            raise KeyboardInterrupt
        unlinked(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "replace", replace)
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            write_pack(out, DECODER, paths=False, files="layer")
    again = writing.PackWriter(out, DECODER, Pack.open(made["layer"]).manifest.quantization, "seed 0", "layer")
    assert all(again.has(key) for key in DECODER.expert_keys())
    again._lock.release()
    write_pack(out, DECODER, paths=False, files="layer")
    whole = write_pack(tmp_path / "whole.pack", DECODER, paths=False, files="layer")
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)


def test_what_one_way_left_is_not_taken_for_the_other(made: dict[str, Path], tmp_path: Path) -> None:
    quantization = Pack.open(made["layer"]).manifest.quantization
    left = shutil.copytree(made["layer"], tmp_path / "m.pack.partial")
    (left / "experts.jsonl").write_text("seed 0 layer\n")
    writer = writing.PackWriter(tmp_path / "m.pack", DECODER, quantization, "seed 0")
    assert not any(writer.has(key) for key in DECODER.expert_keys())
    assert not list(left.rglob("*.experts"))
    writer._lock.release()


def test_a_full_disk_while_joining_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.shutil, "copyfileobj", full)
    with pytest.raises(WriteFailed, match="free some space") as caught:
        write_pack(tmp_path / "m.pack", DECODER, paths=False, files="layer")
    assert isinstance(caught.value, PackError)
    assert not (tmp_path / "m.pack").exists()


@pytest.mark.parametrize("files", ["expert", "layer"])
def test_a_longer_file_is_not_taken_for_a_finished_one(made: dict[str, Path], tmp_path: Path, files: Any) -> None:
    pack = Pack.open(made[files])
    left = Path(shutil.copytree(pack.root, tmp_path / "m.pack.partial"))
    lines = [plain(replace(one, path=expert_path(one.key), offset=0)) for one in pack.manifest.experts]
    journal = "\n".join(["seed 0" if files == "expert" else "seed 0 layer", *map(json.dumps, lines), ""])
    (left / "experts.jsonl").write_text(journal)
    with (left / pack.entry(FIRST).path).open("ab") as stream:
        stream.write(b"\0")
    writer = writing.PackWriter(tmp_path / "m.pack", DECODER, pack.manifest.quantization, "seed 0", files)
    lost = [key for key in DECODER.expert_keys() if not writer.has(key)]
    writer._lock.release()
    path = pack.entry(FIRST).path
    assert lost == [key for key in DECODER.expert_keys() if pack.entry(key).path == path]
