"""What is read of a pack is bounded before it is read, and asked of the memory that there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Moert
from damaged import resealed
from hypothesis import given, settings
from hypothesis import strategies as st
from random_packs import DECODER, sealed
from tiny_packs import DECODER_SHAPE, write_pack

from moert.command import cli
from moert.engine.budget import MemoryLimit, room_within
from moert.errors import BudgetTooSmall
from moert.experts.names import eviction_for
from moert.machine import held_bytes
from moert.pack.documents import parsed
from moert.pack.errors import HeaderInvalid, ManifestInvalid, PackError, SizeOverflow
from moert.pack.files import OpenedFile
from moert.pack.layout import Coding, expert_layout
from moert.pack.manifest import parse_manifest
from moert.pack.model_spec import ExpertKey
from moert.pack.paths import MOST_ENTRIES, TRACE, Trace
from moert.pack.reader import Pack
from moert.pack.tensors import check_size, json_bytes, known_bounds, marks, take_room, to_bytes, unbounded
from tests.alone import alone
from tests.cgroups import Group, missing

ROOT = Path(cli.__file__).parent.parent
TIB = 1 << 40


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("bounds") / "tiny.pack", DECODER_SHAPE.spec, paths=False)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack that a model can run of, and that may be changed."""
    return write_pack(tmp_path / "tiny.pack", DECODER_SHAPE.spec, paths=False)


def one_line(error: type[PackError], words: str, call: Any) -> None:
    with pytest.raises(PackError, match=words) as caught:
        call()
    assert type(caught.value) is error, repr(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


# Sizes.


def grown(pack: Path, name: str, nbytes: int) -> Path:
    """A file that is so long, in the manifest too, and takes no space."""
    (pack / name).touch()
    os.truncate(pack / name, nbytes)

    def change(document: dict[str, Any]) -> None:
        document["files"][name] = {"nbytes": nbytes, "sha256": "0" * 64, "crc32": 0}

    document = json.loads((pack / "manifest.json").read_text())
    change(document)
    (pack / "manifest.json").write_text(sealed(document))
    return pack


@pytest.mark.parametrize("name", sorted(set(known_bounds()) - {"manifest.json"}))
def test_a_file_that_is_larger_than_any_is_refused_before_it_is_read(
    pack: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = known_bounds()[name]
    one_line(SizeOverflow, f"{name} has {most + 1} bytes", lambda: Pack.open(grown(pack, name, most + 1)))
    opened = Pack.open(grown(pack, name, most))
    os.truncate(pack / name, most + 1)  # after it was looked at
    monkeypatch.setattr(OpenedFile, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(PackError, match=name):
        opened.read_file(name)


def test_a_manifest_that_is_larger_than_any(pack: Path) -> None:
    os.truncate(pack / "manifest.json", known_bounds()["manifest.json"] + 1)
    one_line(SizeOverflow, "manifest.json has 33554433 bytes", lambda: Pack.open(pack))


@pytest.mark.parametrize("command", ["info", "run"])
def test_a_sparse_tokenizer_of_10_tb_is_one_line(pack: Path, moert: Moert, command: str) -> None:
    try:
        grown(pack, "tokenizer.json", 10 * TIB)
    except OSError:
        pytest.skip("this file system has no files so large")
    assert "tokenizer.json has 10995116277760 bytes" in moert.refuses(
        command, pack, *(["abc"] if command == "run" else [])
    )


def test_what_the_largest_models_have_passes() -> None:
    """SPEC.md, section 11."""
    for name, nbytes in {
        "manifest.json": 14_848 * 320, "tokenizer.json": 34_400_000, "paths.safetensors": 160 << 20,
        "trace.safetensors": 2 * MOST_ENTRIES + (64 << 10), "config.json": 100 << 10, "chat.json": 64 << 10,
    }.items():  # fmt: skip
        check_size(name, nbytes)


def test_a_manifest_of_14848_experts_has_few_enough_values() -> None:
    entry = {
        "key": ["decoder", 60, 255], "path": "experts/D60/E255.safetensors", "file_bytes": 22_000_000,
        "tensor_bytes": 21_999_000, "bits": {"gate": 4, "up": 4, "down": 4}, "sha256": "0" * 64, "crc32": 4_000_000_000,
        "importance": 0.000123456789, "offset": 5_000_000_000,
    }  # fmt: skip
    body = ("[" + ",".join([json.dumps(entry)] * 14_848) + "]").encode()
    assert len(body) < known_bounds()["manifest.json"] // 4
    assert json_bytes("manifest.json", body, 1 << 21) < 100 << 20


# Values and names.


@pytest.mark.parametrize("filling", ["[],", "{},", '"a",', "1,", '{"a":1},', "[[[]]],"])
def test_a_manifest_of_many_values_that_nobody_knows(pack: Path, filling: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["extra"] = "HERE"

    resealed(pack, change)
    many = (filling * (3_000_000 // marks(filling.encode())))[:-1]
    text = (pack / "manifest.json").read_text().replace('"HERE"', f"[{many}]")
    (pack / "manifest.json").write_text(text)
    one_line(SizeOverflow, r"manifest.json has \d+ values and names, none has more", lambda: Pack.open(pack))


def test_a_tokenizer_of_many_entries(pack: Path) -> None:
    body = ('{"model":{"vocab":{' + ",".join(f'"{n:x}":1' for n in range(2_200_000)) + "}}}").encode()
    assert len(body) < known_bounds()["tokenizer.json"]
    one_line(SizeOverflow, r"tokenizer.json has \d+ values", lambda: take_room("tokenizer.json", body, unbounded))


def test_a_model_that_claims_very_many_tensors(pack_dir: Path) -> None:
    document = json.loads((pack_dir / "manifest.json").read_text())
    document["model"]["decoder"]["layers"] = [1] * 4095 + [0]
    document["model"]["decoder"]["kinds"][1]["ffn"]["bias"] = True
    document["model"]["decoder"]["kinds"][1]["mixer"]["biases"] = "qkvo"
    one_line(ManifestInvalid, "tensors outside the experts", lambda: parse_manifest(sealed(document)))


def test_experts_of_many_widths_in_large_pages_take_little(tmp_path: Path) -> None:
    """A header is filled up to a page of a MiB: what 125 kinds of experts have in common is kept without that."""
    tracemalloc.start()
    try:
        for index, widths in enumerate(product((2, 3, 4, 8, 16), repeat=3)):
            bits = dict(zip(("gate", "up", "down"), widths, strict=True))
            layout = expert_layout(DECODER, ExpertKey("decoder", 0, index), bits, Coding(4, "F16"), 1 << 20)
            assert layout.data_offset == 1 << 20
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


def test_files_beside_those_of_the_manifest_are_not_remembered(pack_dir: Path) -> None:
    for number in range(50):
        (pack_dir / f"other{number}").touch()
    assert set(Pack.open(pack_dir)._regular_files("", {"config.json", "backbone.safetensors"})) == {
        "config.json", "backbone.safetensors",
    }  # fmt: skip


# Traces.


def trace_of(entries: int) -> bytes:
    experts = np.zeros((entries // 6, 3, 2), np.uint16)
    tensors = {"decoder.experts": experts, "decoder.samples": np.array([0, len(experts)], np.uint32)}
    return to_bytes(tensors, {"format": "model.pack trace", "version": 1, "num_experts": 8})


def test_a_trace_with_more_entries_than_writers_record(pack: Path) -> None:
    assert Trace.from_bytes(trace_of(MOST_ENTRIES)).num_experts == 8
    one_line(HeaderInvalid, "entries, none has more than 131072", lambda: Trace.from_bytes(trace_of(MOST_ENTRIES + 6)))
    (pack / TRACE).write_bytes(trace_of(MOST_ENTRIES + 6))
    resealed(pack, lambda document: document["files"].update({TRACE: document["files"]["config.json"]}))
    resealed(pack)
    heard: list[str] = []
    eviction_for(Pack.open(pack), "auto", 0.5, heard.append)
    assert "none has more than 131072" in heard[0]


# Memory.


SHAPES = {
    "empty lists": "[" + "[]," * 20_000 + "0]",
    "empty objects": "[" + "{}," * 20_000 + "0]",
    "one large object": "{" + ",".join(f'"{n}":1.5' for n in range(20_000)) + "}",
    "objects of one": "[" + '{"a":{}},' * 20_000 + "0]",
    "short names": "{" + ",".join(f'"{n}":{{}}' for n in range(20_000)) + "}",
    "strings": "[" + '"ab",' * 20_000 + "0]",
    "wide strings": "[" + '"\U0001f600abcdefgh",' * 5_000 + "0]",
    "escaped strings": "[" + '"\\ud83d\\ude00' + "a" * 40 + '",' * 1 + "0]",
    "one wide string": '"\U0001f600' + "a" * 300_000 + '"',
    "an escape in a long string": '"\\ud83d\\ude00' + "a" * 300_000 + '"',
    "long numbers": "[" + ("1" * 400 + ",") * 500 + "0]",
    "floats": "[" + "1.5," * 20_000 + "0]",
    "depth": "[" * 400 + "]" * 400,
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_json_takes_more_than_was_asked_for(name: str) -> None:
    body = SHAPES[name].encode()
    allowed = json_bytes("x", body, 1 << 30)
    tracemalloc.start()
    try:
        parsed(body)
        assert tracemalloc.get_traced_memory()[1] <= allowed + 4096
    finally:
        tracemalloc.stop()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=60,
)  # fmt: skip


@settings(max_examples=100)
@given(_VALUES, st.booleans())
def test_nor_does_any_other(value: Any, escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    tracemalloc.start()
    try:
        parsed(body)
    except ValueError:
        return  # half of a surrogate pair is no UTF-8
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= json_bytes("x", body, 1 << 30) + 4096


def test_room_is_asked_for_before_anything_is_read(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def room(nbytes: int, name: str) -> None:
        asked.append((name, nbytes))

    opened = Pack.open(pack, room)
    nbytes = (pack / "manifest.json").stat().st_size
    assert asked[0] == ("manifest.json", nbytes)
    assert asked[1][1] > 2 * nbytes
    opened.read_file("tokenizer.json")
    assert asked[2] == ("tokenizer.json", (pack / "tokenizer.json").stat().st_size)
    assert asked[3][1] > 2 * asked[2][1]

    def none(nbytes: int, name: str) -> None:
        raise BudgetTooSmall("full", 1)

    monkeypatch.setattr(OpenedFile, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(BudgetTooSmall, match="full"):
        Pack.open(pack, none)


def test_the_room_is_that_of_the_budget() -> None:
    alone(_room)


def _room() -> None:
    held = held_bytes()
    room = room_within(MemoryLimit(held + (60 << 20)))
    room(20 << 20, "paths.safetensors")
    with pytest.raises(
        BudgetTooSmall, match=r"too small to read paths.safetensors of the pack.*give at least memory="
    ) as caught:
        room(100 << 20, "paths.safetensors")
    assert "\n" not in str(caught.value)
    again = room_within(MemoryLimit(caught.value.smallest_bytes + (16 << 20)))
    again(100 << 20, "paths.safetensors")
    room_within(MemoryLimit(1))(1 << 20, "small.json")  # what every margin covers


def test_a_run_asks_its_budget(pack: Path, moert: Moert) -> None:
    """30 MiB of JSON that nobody knows are 180 at most, and more than is left of the limit."""
    resealed(pack, lambda document: document.update(extra="x" * (30 << 20)))
    limit = held_bytes() + (60 << 20)
    said = moert.refuses("run", pack, "abc", "--memory", limit)
    assert f"a memory budget of {limit} bytes is too small to read manifest.json" in said
    assert moert("run", pack, "abc", "--max-new-tokens", "1", "--tune", "cache=100%") == 0


# A control group that has no more.

in_a_group = pytest.mark.skipif(missing() is not None, reason=str(missing()))
GROUP_BYTES = 400_000_000


def in_group(*arguments: object) -> tuple[int, str, int]:
    """(exit code, stderr, processes that the system ended) of moert in a group of 400 MB."""
    with Group(memory_bytes=GROUP_BYTES) as group:
        done = subprocess.run(
            [sys.executable, "-m", "moert", *map(str, arguments)],
            cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=lambda: group.add(0),
        )  # fmt: skip
        return done.returncode, done.stderr, group.oom_kills


def unknown_fields(pack: Path) -> None:
    """As much as passes the bounds: values, and letters that take four bytes each."""
    resealed(pack, lambda document: document.update(extra="HERE"))
    text = (pack / "manifest.json").read_text()
    body = text[: text.rindex(',\n "crc32"')].replace(
        '"HERE"', '["\U0001f600' + "a" * (24 << 20) + '"' + ",{}" * 1_000_000 + "]"
    )
    from moeconv.writer import seal

    (pack / "manifest.json").write_text(seal(body))


def many_entries(pack: Path) -> None:
    vocabulary = ",".join(f'"{n:x}":{n}' for n in range(2_000_000))
    text = '{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{' + vocabulary + '},"merges":[]}}'
    (pack / "tokenizer.json").write_text(text)
    sized(pack, "tokenizer.json")


def long_paths(pack: Path) -> None:
    tensors = {"decoder.0.frequency": np.zeros(30 << 20, np.uint64)}
    metadata = {"format": "model.pack paths", "version": 2, "num_experts": 8, "decoder_layers": "0"}
    (pack / "paths.safetensors").write_bytes(to_bytes(tensors, metadata))
    sized(pack, "paths.safetensors")


def sized(pack: Path, name: str) -> None:
    from moeconv.writer import file_entry

    found = file_entry((pack / name).read_bytes())
    entry = {"nbytes": found.nbytes, "sha256": found.sha256, "crc32": found.crc32}
    resealed(pack, lambda document: document["files"].update({name: entry}))


@in_a_group
@pytest.mark.parametrize("change", [unknown_fields, many_entries, long_paths])
@pytest.mark.parametrize("command", ["info", "run"])
def test_in_a_group_of_400_mb_nothing_that_passes_the_bounds_ends_the_process(
    pack: Path, change: Any, command: str
) -> None:
    change(pack)
    more = (
        ("abc", "--memory", "400MB", "--tune", "predict=transitions", "--max-new-tokens", "2")
        if command == "run"
        else ()
    )
    code, errors, kills = in_group(command, pack, *more)
    assert kills == 0, errors
    assert code in (0, 2), errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 2
