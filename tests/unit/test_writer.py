"""Writer and reader together: what goes in comes out, and no crash leaves half a pack."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_packs import (
    DECODER,
    FILES,
    QUALITY,
    QUANTIZATION,
    SPECS,
    flat,
    flat_experts,
    random_biases,
    random_expert,
    random_matrix,
    read_all,
    read_biases,
    read_experts,
    write_pack,
)
from safetensors import safe_open

from moeconv.matrices import matrices_of, projection_weights, read_expert
from moeconv.writer import PackWriter, add_files, add_to_pack, check_target
from moert.pack.codec import QuantizedMatrix, dequantize
from moert.pack.errors import FileMissing, WriteFailed
from moert.pack.files import write_atomically
from moert.pack.manifest import NGRAMS
from moert.pack.reader import Pack, bits_histogram
from tests.pairs import thinned


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@thinned("dtype16, group_size, family", ["F16", "BF16"], [0, 4, 128], SPECS)
def test_what_goes_in_comes_out(tmp_path: Path, family: str, group_size: int, dtype16: str) -> None:
    out = tmp_path / "model.pack"
    quantization = replace(QUANTIZATION, group_size=group_size, dtype16=dtype16)
    given = write_pack(out, SPECS[family], quantization)
    pack = Pack.open(out)
    assert flat_experts(read_experts(pack)) == flat_experts(given)
    biases = {key: random_biases(SPECS[family], key) for key in given}
    assert read_biases(pack) == {key: {name: each.tolist() for name, each in of.items()} for key, of in biases.items()}
    assert {name: pack.read_file(name) for name in pack.manifest.files if name != NGRAMS} == FILES
    assert sorted(pack.verify_hashes()) == sorted(name for name in everything(out) if name != "manifest.json")
    assert pack.manifest.model == SPECS[family]
    assert pack.manifest.quality == QUALITY


def test_an_expert_without_the_biases_that_it_has_is_no_expert(tmp_path: Path) -> None:
    spec = SPECS["rich"]
    key, writer = spec.expert_keys()[0], PackWriter(tmp_path / "p", spec, QUANTIZATION, "fresh")
    projections, biases = random_expert(spec, key, QUANTIZATION.group_size), random_biases(spec, key)
    for given in (None, {"up": biases["up"]}):
        with pytest.raises(ValueError, match=r"D00/E000: gate\.bias is not given"):
            writer.write_expert(key, projections, biases=given)
    writer.write_expert(key, projections, biases=biases)


def test_all_widths_are_in_the_test_pack(pack_dir: Path) -> None:
    histogram = bits_histogram(Pack.open(pack_dir).manifest.experts)
    assert set(histogram) == {2, 3, 4, 8, 16}
    assert sum(histogram.values()) == 6 * 3


def test_expert_files_are_safetensors_on_pages(pack_dir: Path) -> None:
    pack = Pack.open(pack_dir)
    for entry in pack.manifest.experts:
        path = pack.file(entry.path)
        body = path.read_bytes()
        assert len(body) % 4096 == 0
        assert (8 + int.from_bytes(body[:8], "little")) % 4096 == 0
        with safe_open(path, "np") as tensors:
            for name, part in matrices_of(pack, entry.key, read_expert(pack, entry.key)).items():
                if isinstance(part, QuantizedMatrix):
                    np.testing.assert_array_equal(tensors.get_tensor(f"{name}.qweight"), part.qweight)
                    np.testing.assert_array_equal(tensors.get_tensor(f"{name}.min"), part.minimum)
                else:
                    np.testing.assert_array_equal(tensors.get_tensor(f"{name}.weight").astype(np.float32), part)
        for slot in pack.layout(entry.key).slots:
            assert slot.start % 64 == 0 or slot.name.startswith("pad.")


def test_experts_are_read_into_a_given_buffer(pack_dir: Path) -> None:
    pack = Pack.open(pack_dir)
    entry = pack.manifest.experts[0]
    arena = np.full(entry.file_bytes + 100, 7, dtype=np.uint8)
    buffer = read_expert(pack, entry.key, into=arena)
    assert np.shares_memory(arena, buffer)
    assert buffer.tobytes() == (pack_dir / entry.path).read_bytes()
    assert (arena[entry.file_bytes :] == 7).all()
    assert all(
        np.shares_memory(part.qweight, arena)
        for part in matrices_of(pack, entry.key, buffer).values()
        if isinstance(part, QuantizedMatrix)
    )


def test_projection_weights_of_any_width() -> None:
    rng = np.random.default_rng(1)
    quantized = random_matrix(rng, 3, 10, 3, 4)
    plain = random_matrix(rng, 3, 10, 16, 4)
    np.testing.assert_array_equal(projection_weights(quantized), dequantize(quantized))
    np.testing.assert_array_equal(projection_weights(plain), plain)


def test_effective_bits_count_scales(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    write_pack(out)
    manifest = Pack.open(out).manifest
    total = sum(
        sum(array.nbytes for array in (part.qweight, part.scale, part.minimum))
        if isinstance(part, QuantizedMatrix)
        else 2 * part.size
        for parts in write_pack(tmp_path / "again").values()
        for part in parts.values()
    )
    assert manifest.effective_bits() == 8 * total / (6 * 3 * 10 * 7)


def test_a_file_that_the_pack_lacks(pack_dir: Path) -> None:
    with pytest.raises(FileMissing, match=r"has no paths\.safetensors"):
        Pack.open(pack_dir).read_file("paths.safetensors")


def start(out: Path, count: int, fingerprint: str = "seed 0") -> PackWriter:
    """A conversion that stops after `count` experts."""
    writer = PackWriter(out, DECODER, QUANTIZATION, fingerprint)
    for key in DECODER.expert_keys()[:count]:
        writer.write_expert(key, random_expert(DECODER, key, 4), importance=0.25)
    return writer


def test_resume_keeps_finished_experts(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    start(out, 4)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "model.pack.partial").rglob("*.safetensors")}
    writer = PackWriter(out, DECODER, QUANTIZATION, "seed 0")
    keys = DECODER.expert_keys()
    assert [writer.has(key) for key in keys] == [True] * 4 + [False] * 2
    for key in keys[4:]:
        writer.write_expert(key, random_expert(DECODER, key, 4))
    writer.finish("tests", None)
    assert len(stamps) == 4
    for path, stamp in stamps.items():
        assert (out / path.relative_to(tmp_path / "model.pack.partial")).stat().st_mtime_ns == stamp
    pack = Pack.open(out)
    assert flat_experts(read_experts(pack)) == flat_experts({key: random_expert(DECODER, key, 4) for key in keys})
    assert [entry.importance for entry in pack.manifest.experts] == [0.25] * 4 + [None] * 2


def test_resume_drops_another_fingerprint(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    start(out, 4)
    writer = PackWriter(out, DECODER, QUANTIZATION, "another plan")
    assert not any(writer.has(key) for key in DECODER.expert_keys())
    assert not list((tmp_path / "model.pack.partial").rglob("*.safetensors"))


def test_resume_drops_a_damaged_expert(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    first, second = DECODER.expert_keys()[:2]
    start(out, 2)
    path = tmp_path / "model.pack.partial" / "experts" / f"{first}.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    writer = PackWriter(out, DECODER, QUANTIZATION, "seed 0")
    assert (writer.has(first), writer.has(second)) == (False, True)


def test_resume_after_a_torn_journal_line(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    start(out, 2)
    journal = tmp_path / "model.pack.partial" / "experts.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    first, second, third = DECODER.expert_keys()[:3]
    writer = PackWriter(out, DECODER, QUANTIZATION, "seed 0")
    assert (writer.has(first), writer.has(second)) == (True, False)
    writer.write_expert(third, random_expert(DECODER, third, 4))
    del writer
    assert PackWriter(out, DECODER, QUANTIZATION, "seed 0").has(third)


def test_a_half_pack_is_not_there_yet(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    start(out, 4)
    assert not out.exists()
    assert not list(tmp_path.rglob("manifest.json"))


def test_an_old_pack_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    write_pack(out, seed=1)
    (out / "stale.txt").write_text("left over")
    write_pack(out, seed=2)
    write_pack(tmp_path / "fresh", seed=2)
    assert everything(out) == everything(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "model.pack"]


def test_killed_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.pack"
    write_pack(out, seed=1)
    before = everything(out)
    real = os.rename

    def second_fails(source: Any, target: Any) -> None:
        if str(source).endswith(".partial"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(KeyboardInterrupt):
        write_pack(out, seed=2)
    monkeypatch.undo()
    PackWriter(out, DECODER, QUANTIZATION, "seed 2")
    assert everything(out) == before


def somebody_elses(path: Path, what: str) -> dict[str, bytes]:
    """Puts something at `path` that is not ours."""
    name = {"file": ".", "directory": "letters.txt", "foreign manifest": "manifest.json"}[what]
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text('{"format": "something else"}')
    return everything(path.parent)


@pytest.mark.parametrize("ending", ["", ".partial", ".replaced"])
@pytest.mark.parametrize("what", ["file", "directory", "foreign manifest"])
def test_what_is_not_a_pack_is_never_replaced(tmp_path: Path, what: str, ending: str) -> None:
    out = tmp_path / "precious"
    before = somebody_elses(tmp_path / f"precious{ending}", what)
    for refuse in (lambda: check_target(out), lambda: PackWriter(out, DECODER, QUANTIZATION, "seed 0")):
        with pytest.raises(WriteFailed, match=f"precious{ending} .*choose another --out") as caught:
            refuse()
        assert "\n" not in str(caught.value)
        assert everything(tmp_path) == before


def test_a_link_is_never_replaced(tmp_path: Path) -> None:
    write_pack(tmp_path / "model.pack")
    (tmp_path / "link").symlink_to("model.pack")
    with pytest.raises(WriteFailed, match="choose another --out"):
        check_target(tmp_path / "link")


@pytest.mark.parametrize("when", ["files", "manifest", "journal"])
def test_a_run_killed_anywhere_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """While the old pack's files, at last its manifest, or the journal go away."""
    out = tmp_path / "model.pack"
    write_pack(out, seed=1)
    names = {"files": ".safetensors", "manifest": "manifest.json", "journal": "experts.jsonl"}
    real = os.unlink

    def killed(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path).endswith(names[when]):
            raise KeyboardInterrupt
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        write_pack(out, seed=2)
    monkeypatch.undo()
    check_target(out)
    write_pack(out, seed=3)
    write_pack(tmp_path / "fresh", seed=3)
    assert everything(out) == everything(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "model.pack"]


def test_leftovers_of_a_killed_run_are_not_in_the_pack(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    start(out, 3)
    folder = tmp_path / "model.pack.partial" / "experts"
    (folder / "D00" / "E000.safetensors.1a2b3c4d.tmp").write_bytes(b"half")
    (folder / "X").mkdir()
    given = write_pack(out)
    assert set(everything(out)) == {"manifest.json", *Pack.open(out).sizes()}
    assert not (out / "experts" / "X").exists()
    assert flat_experts(read_experts(Pack.open(out))) == flat_experts(given)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    writer = start(out, 2)
    before = everything(tmp_path)
    with pytest.raises(WriteFailed, match="another conversion is writing"):
        PackWriter(out, DECODER, QUANTIZATION, "another plan")
    assert everything(tmp_path) == before
    for key in DECODER.expert_keys()[2:]:
        writer.write_expert(key, random_expert(DECODER, key, 4))
    writer.finish("tests", None)
    write_pack(out)  # `writer` is still there, and has let go


def test_an_empty_directory_may_be_the_target(tmp_path: Path) -> None:
    (tmp_path / "model.pack").mkdir()
    write_pack(tmp_path / "model.pack")
    Pack.open(tmp_path / "model.pack")


class FullDisk:
    """os.fsync that fails after `room` calls, as a full disk does."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.real = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.real(descriptor)


# fsync is called once for each expert (6), for each other file (2), for the manifest.
@pytest.mark.parametrize("room", range(9))
def test_a_full_disk_leaves_the_old_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    out = tmp_path / "model.pack"
    write_pack(out, seed=1)
    before = everything(out)
    monkeypatch.setattr(os, "fsync", FullDisk(room))
    with pytest.raises(WriteFailed, match=r"No space left on device; free some space") as caught:
        write_pack(out, seed=2)
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    del caught  # it keeps the writer alive, and with it the lock
    assert everything(out) == before
    assert not list(tmp_path.glob("model.pack.partial/**/manifest.json"))
    assert not list(tmp_path.rglob("*.tmp"))
    given = write_pack(out, seed=2)
    assert flat_experts(read_experts(Pack.open(out))) == flat_experts(given)


def test_the_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file")
    with pytest.raises(WriteFailed, match="can't write"):
        PackWriter(tmp_path / "there" / "model.pack", DECODER, QUANTIZATION, "seed 0")


def test_a_read_only_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.pack"
    write_pack(out, seed=1)
    before = everything(out)

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(WriteFailed, match="Read-only file system"):
        write_pack(out, seed=2)
    assert everything(out) == before


def test_a_tensor_of_the_wrong_size_is_our_bug(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "model.pack", DECODER, QUANTIZATION, "seed 0")
    key = DECODER.expert_keys()[0]
    projections = random_expert(DECODER, key, 4)
    projections["up"] = np.zeros((2, 2), dtype=np.float32)
    with pytest.raises(ValueError, match=r"up\.weight: 8 bytes given"):
        writer.write_expert(key, projections)


def test_a_library_may_write_a_file_itself(tmp_path: Path) -> None:
    out = tmp_path / "model.pack"
    writer = start(out, 6)
    writer.add_file("tokenizer.json").write_bytes(b"{}")
    writer.seal_file("tokenizer.json")
    writer.finish("tests", None)
    assert Pack.open(out).read_file("tokenizer.json") == b"{}"


def test_a_file_is_added_to_a_finished_pack(pack_dir: Path) -> None:
    manifest, experts, files = read_all(pack_dir)
    for body in (b"first", b"the second, longer"):
        manifest = add_to_pack(pack_dir, manifest, "paths.safetensors", body)
        assert read_all(pack_dir) == (manifest, experts, {**files, "paths.safetensors": body})
        list(Pack.open(pack_dir).verify_hashes())


@pytest.mark.parametrize("room", range(3))
def test_a_full_disk_while_adding_changes_nothing(pack_dir: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    manifest = add_to_pack(pack_dir, read_all(pack_dir)[0], "paths.safetensors", b"first")
    before = everything(pack_dir)
    monkeypatch.setattr(os, "fsync", FullDisk(room))
    with pytest.raises(WriteFailed, match="free some space"):
        add_to_pack(pack_dir, manifest, "paths.safetensors", b"the second, longer")
    monkeypatch.undo()
    assert everything(pack_dir) == before


@pytest.mark.parametrize("renames", range(3))
def test_a_crash_while_adding_leaves_a_whole_pack(
    pack_dir: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    manifest, experts, files = read_all(pack_dir)
    manifest = add_to_pack(pack_dir, manifest, "paths.safetensors", b"first")
    real, left = os.replace, [None] * renames

    def killed(source: Any, target: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        add_to_pack(pack_dir, manifest, "paths.safetensors", b"the second, longer")
    monkeypatch.undo()
    _, found_experts, found_files = read_all(pack_dir)
    assert found_experts == experts
    assert found_files == ({**files, "paths.safetensors": b"first"} if renames == 0 else files)


@pytest.mark.parametrize("old", [{}, {"a": b"old"}, {"a": b"old", "b": b"older"}], ids=len)
@pytest.mark.parametrize("renames", range(5))
def test_two_files_come_together_or_not_at_all(
    pack_dir: Path, monkeypatch: pytest.MonkeyPatch, renames: int, old: dict[str, bytes]
) -> None:
    manifest, experts, files = read_all(pack_dir)
    if old:
        manifest = add_files(pack_dir, manifest, old)
    real, left = os.replace, [None] * renames

    def killed(source: Any, target: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(source, target)

    new = {"a": b"new", "b": b"newer"}
    monkeypatch.setattr(os, "replace", killed)
    with suppress(KeyboardInterrupt):
        add_files(pack_dir, manifest, new)
    monkeypatch.undo()
    _, found_experts, found = read_all(pack_dir)
    assert found_experts == experts
    finished = renames >= (4 if old else 3)
    begun = old and renames > 0
    assert found == {**files, **(new if finished else {} if begun else old)}


def test_two_runs_may_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def other_run(descriptor: int) -> None:
        monkeypatch.undo()
        write_atomically(tmp_path / "state", b"the other's")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", other_run)
    write_atomically(tmp_path / "state", b"ours")
    assert everything(tmp_path) == {"state": b"ours"}


def test_only_a_full_disk_asks_for_space(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file")
    with pytest.raises(WriteFailed, match=r"is not a directory: choose another --out$"):
        PackWriter(tmp_path / "there" / "model.pack", DECODER, QUANTIZATION, "seed 0")


def test_flat_sees_every_difference() -> None:
    rng = np.random.default_rng(3)
    matrix = random_matrix(rng, 2, 5, 4, 4)
    assert isinstance(matrix, QuantizedMatrix)
    changed = matrix.qweight.copy()
    changed[0, 0] ^= 1
    assert flat(replace(matrix, qweight=changed)) != flat(matrix)
