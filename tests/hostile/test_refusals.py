"""Each way a pack can be wrong is refused with its own error and one clear line."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from random_packs import DECODER, FIRING, QUANTIZATION, SPECS, read_all, sealed, write_pack

from moeconv.matrices import read_expert
from moeconv.writer import file_entry, seal
from moert.pack import reader
from moert.pack.documents import plain
from moert.pack.errors import (
    FileMissing,
    FileTruncated,
    FormatTooNew,
    HashMismatch,
    HeaderInvalid,
    ManifestInvalid,
    ManifestMissing,
    PackError,
    SizeOverflow,
    UnsafePath,
)
from moert.pack.layout import Neurons
from moert.pack.manifest import parse_manifest
from moert.pack.parts import Latent, Norm, Streams
from moert.pack.reader import Pack

FIRST, SECOND = "experts/D00/E000.safetensors", "experts/D00/E001.safetensors"


def document_of(pack_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((pack_dir / "manifest.json").read_text())
    return document


def refused(error: type[PackError], words: str, call: Callable[[], Any]) -> None:
    """`call` raises exactly this error, in one line that holds these words."""
    with pytest.raises(PackError, match=words) as caught:
        call()
    assert type(caught.value) is error, repr(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def lies(pack_dir: Path, error: type[PackError], words: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """The manifest says something else (with a right checksum), and that is refused."""
    document = document_of(pack_dir)
    change(document)
    (pack_dir / "manifest.json").write_text(sealed(document))
    refused(error, words, lambda: read_all(pack_dir))


# Manifest: missing or wrong.


def test_no_such_directory(tmp_path: Path) -> None:
    refused(ManifestMissing, "is not a directory", lambda: Pack.open(tmp_path / "nowhere"))


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.pack").write_bytes(b"GGUF")
    refused(ManifestMissing, "is not a directory", lambda: Pack.open(tmp_path / "model.pack"))


@pytest.mark.parametrize(
    "text",
    ["Once upon a time. " * 40, "word " * 2000, "two\nlines " * 40, "a\nb", "\0"],
    ids=lambda text: str(len(text)),
)
def test_a_prompt_instead_of_a_path(text: str) -> None:
    refused(ManifestMissing, "is not a directory", lambda: Pack.open(text))


def test_no_manifest(pack_dir: Path) -> None:
    (pack_dir / "manifest.json").unlink()
    refused(ManifestMissing, "has no manifest.json", lambda: Pack.open(pack_dir))


def test_the_manifest_is_a_directory(pack_dir: Path) -> None:
    (pack_dir / "manifest.json").unlink()
    (pack_dir / "manifest.json").mkdir()
    refused(ManifestMissing, "not a regular file", lambda: Pack.open(pack_dir))


def test_the_manifest_is_a_pipe(pack_dir: Path) -> None:
    (pack_dir / "manifest.json").unlink()
    os.mkfifo(pack_dir / "manifest.json")
    refused(ManifestMissing, "not a regular file", lambda: Pack.open(pack_dir))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe{}", b"[]", b"null", b"7", b'"text"', b"\xef\xbb\xbf{}", b"{}",
     b'{"format": "gguf"}', b"\0" * 64],
    ids=repr,
)  # fmt: skip
def test_the_manifest_is_something_else(pack_dir: Path, body: bytes) -> None:
    (pack_dir / "manifest.json").write_bytes(body)
    refused(ManifestInvalid, "manifest.json", lambda: Pack.open(pack_dir))


def test_the_manifest_is_cut_anywhere(pack_dir: Path) -> None:
    text = (pack_dir / "manifest.json").read_text()
    for length in range(0, len(text), 37):
        refused(ManifestInvalid, "manifest.json", lambda length=length: parse_manifest(text[:length]))


def test_the_manifest_was_edited(pack_dir: Path) -> None:
    path = pack_dir / "manifest.json"
    path.write_text(path.read_text().replace('"scale": 0.408', '"scale": 0.409'))
    refused(HashMismatch, "its own checksum", lambda: Pack.open(pack_dir))


def test_a_newer_major_version(pack_dir: Path) -> None:
    lies(pack_dir, FormatTooNew, "format version 3.*upgrade moert", lambda document: document.update(major=3))


def test_a_newer_major_version_of_another_shape(pack_dir: Path) -> None:
    (pack_dir / "manifest.json").write_text('{"format": "model.pack", "major": 9, "minor": 0}')
    refused(FormatTooNew, "format version 9", lambda: Pack.open(pack_dir))


def test_an_older_major_version(pack_dir: Path) -> None:
    lies(pack_dir, ManifestInvalid, "format version 1, expected 2", lambda document: document.update(major=1))


def test_a_field_given_twice(pack_dir: Path) -> None:
    path = pack_dir / "manifest.json"
    path.write_text(path.read_text().replace('"minor": 0', '"minor": 0, "minor": 0', 1))
    refused(ManifestInvalid, "names '.*' twice", lambda: Pack.open(pack_dir))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [300, 900, 990, 100_000])
def test_deeply_nested(pack_dir: Path, opening: str, depth: int) -> None:
    nested = opening * depth + ("" if opening == "[" else "1") + ("]" if opening == "[" else "}") * depth
    begun = '{"format": "model.pack", "major": 2, "minor": 0, "creator": '
    (pack_dir / "manifest.json").write_text(seal(begun + nested))
    refused(ManifestInvalid, "is not JSON|creator should be one line of text", lambda: Pack.open(pack_dir))


def test_a_huge_list(pack_dir: Path) -> None:
    lies(pack_dir, ManifestInvalid, "creator should be one line of text, found a JSON array of 1000000",
         lambda document: document.update(creator=[0] * 1_000_000))  # fmt: skip


def test_a_huge_list_of_experts(pack_dir: Path) -> None:
    lies(pack_dir, ManifestInvalid, "lists 3000 experts, the model has 6",
         lambda document: document.update(experts=document["experts"] * 500))  # fmt: skip


def test_a_model_that_claims_very_many_experts(pack_dir: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["model"]["decoder"]["kinds"][0]["ffn"]["n"] = 65535
        document["model"]["decoder"]["layers"] = [0] * 4096

    lies(pack_dir, ManifestInvalid, "the model has 268431360", change)


def test_a_huge_manifest(pack_dir: Path) -> None:
    os.truncate(pack_dir / "manifest.json", 1 << 40)  # sparse: takes no space
    refused(SizeOverflow, "none is larger than", lambda: Pack.open(pack_dir))


# Manifest: numbers.


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "1" + "0" * 5000])
@pytest.mark.parametrize("field", ['"eps": 1e-05', '"page_bytes": 4096', '"importance":0.0', '"loss": 0.02'])
def test_numbers_that_are_none(pack_dir: Path, field: str, number: str) -> None:
    text = (pack_dir / "manifest.json").read_text()
    assert field in text
    name, _ = field.split(":")
    body = text[: text.rindex(',\n "crc32"')].replace(field, f"{name}: {number}", 1)
    (pack_dir / "manifest.json").write_text(seal(body))
    refused(ManifestInvalid, "manifest.json", lambda: Pack.open(pack_dir))


@pytest.mark.parametrize(
    "at", [("experts", 0, "file_bytes"), ("experts", 0, "tensor_bytes"), ("files", "config.json", "nbytes")]
)
@pytest.mark.parametrize("size", [(1 << 46) + 1, 1 << 63, 1 << 64, 10**300])
def test_sizes_that_overflow(pack_dir: Path, at: tuple[Any, Any, Any], size: int) -> None:
    def change(document: dict[str, Any]) -> None:
        document[at[0]][at[1]][at[2]] = size

    lies(pack_dir, SizeOverflow, "larger than any file can be", change)


def test_shapes_that_overflow(pack_dir: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["model"]["d_model"] = document["model"]["decoder"]["kinds"][0]["ffn"]["ffn"]["d_ff"] = 1 << 24

    lies(pack_dir, SizeOverflow, "larger than any file can be", change)


@pytest.mark.parametrize("at", ["d_model", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_shapes_out_of_range(pack_dir: Path, at: str, value: int) -> None:
    lies(pack_dir, ManifestInvalid, f"{at} should be between", lambda document: document["model"].update({at: value}))


@pytest.mark.parametrize("at", ["n", "kv", "dim"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40])
def test_heads_out_of_range(pack_dir: Path, at: str, value: int) -> None:
    lies(pack_dir, ManifestInvalid, f"mixer: {at} should be between",
         lambda document: layer(document)["mixer"].update({at: value}))  # fmt: skip


# Manifest: what must hold between fields.


def layer(document: dict[str, Any], kind: int = 0, stack: str = "decoder") -> dict[str, Any]:
    """A kind of layer that the model has."""
    found: dict[str, Any] = document["model"][stack]["kinds"][kind]
    return found


def swap_widths(document: dict[str, Any]) -> None:
    document["experts"][0]["bits"]["gate"] = 8


def no_experts(document: dict[str, Any]) -> None:
    document["model"]["decoder"]["layers"], document["experts"] = [1, 1], []


def other_experts(document: dict[str, Any]) -> None:
    kinds = document["model"]["decoder"]["kinds"]
    kinds.append(copy.deepcopy(kinds[0]))
    kinds[-1]["ffn"]["n"] = 2
    document["model"]["decoder"]["layers"] = [0, 1, 2]


RELATIONS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "duplicate expert": ("each must be there once", lambda d: d["experts"].__setitem__(1, d["experts"][0])),
    "missing expert": ("lists 5 experts, the model has 6", lambda d: d["experts"].pop()),
    "extra expert": ("lists 7 experts", lambda d: d["experts"].append(d["experts"][0])),
    "order": ("order of execution", lambda d: d["experts"].reverse()),
    "no experts": ("lists 0 experts", lambda d: d.update(experts=[])),
    "no MoE layer": ("no layer with experts", no_experts),
    "no layers": ("there are 0 layers of 2 kinds", lambda d: d["model"]["decoder"].update(layers=[])),
    "no kinds": ("there are 3 layers of 0 kinds", lambda d: d["model"]["decoder"].update(kinds=[])),
    "too many layers": ("there are 5000 layers", lambda d: d["model"]["decoder"].update(layers=[0] * 5000)),
    "a kind beyond": ("a layer is of kind 2, there are 2", lambda d: d["model"]["decoder"].update(layers=[0, 2])),
    "experts of two sizes": ("layer D02 have another number or shape", other_experts),
    "dense layers without width": ("d_ff should be between", lambda d: layer(d, 1)["ffn"].update(d_ff=0)),
    "top_k": ("a token goes to 4 of 3 experts", lambda d: layer(d)["ffn"]["router"].update(top_k=4)),
    "heads": ("3 heads share 2 heads of keys", lambda d: layer(d)["mixer"].update(n=3, kv=2)),
    "page": ("multiple of 4096", lambda d: d.update(page_bytes=5000)),
    "another page": ("of them weights, scales and minima; its widths need", lambda d: d.update(page_bytes=8192)),
    "bits of nothing": ("gate, up or down", lambda d: d["experts"][0]["bits"].update({"a\nb": 4})),
    "bits missing": ("has widths for", lambda d: d["experts"][0]["bits"].pop("up")),
    "other widths": ("its widths need", swap_widths),
    "group size": ("its widths need", lambda d: d["quantization"].update(group_size=3)),
    "shape": ("its widths need", lambda d: d["model"].update(d_model=12)),
    "one path for two": ("names one file twice", lambda d: d["experts"][1].update(path=d["experts"][0]["path"])),
    "expert and file": ("names one file twice", lambda d: d["experts"][1].update(path="config.json")),
    "key of three words": ("key should be", lambda d: d["experts"][0].update(key=["decoder", "0", 0])),
    "key too long": ("key should be", lambda d: d["experts"][0].update(key=["decoder"] + [0] * 100_000)),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIONS)
def test_fields_that_contradict_each_other(pack_dir: Path, name: str) -> None:
    words, change = RELATIONS[name]
    lies(pack_dir, ManifestInvalid, words, change)


def dense(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Widths for dense matrices, with something wrong in them."""
    good = {"quantizer": "group", "group_size": 64, "bits": {"attention": 8, "ffn": 4}}
    merged = {name: value for name, value in {**good, **changes}.items() if value is not ...}
    return lambda document: document["quantization"].update(dense=merged)


DENSE: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no list": ("dense should be a JSON object", lambda d: d["quantization"].update(dense=[8])),
    "no widths": ("dense lacks the field 'bits'", dense(bits=...)),
    "no group size": ("dense lacks the field 'group_size'", dense(group_size=...)),
    "no quantizer": ("dense lacks the field 'quantizer'", dense(quantizer=...)),
    "two lines": ("quantizer should be one line of text", dense(quantizer="a\nb")),
    "a width for all": ("bits should be a JSON object", dense(bits=8)),
    "no role": ("matrices that the model has .attention, router, ffn, head, embed., found none", dense(bits={})),
    "another role": ("found 'tail'", dense(bits={"head": 8, "tail": 4})),
    "a role of many lines": ("found 'a", dense(bits={"a\nb" * 1000: 4})),
    "5 bits": ("head should be among", dense(bits={"head": 5})),
    "0 bits": ("head should be among", dense(bits={"head": 0})),
    "32 bits": ("head should be among", dense(bits={"head": 32})),
    "half a bit": ("head should be among", dense(bits={"head": 0.5})),
    "true": ("head should be among", dense(bits={"head": True})),
    "text": ("head should be among", dense(bits={"head": "8"})),
    "a width of null": ("head should be among", dense(bits={"head": None})),
    "a matrix that is not there": ("of the roles that have widths, found 'tail", dense(matrices={"tail.weight": 4})),
    "a matrix of no width": ("of the roles that have widths, found 'head", dense(matrices={"head.weight": 4})),
    "a norm": ("of the roles that have widths, found 'decoder", dense(matrices={"decoder.0.norm.weight": 4})),
    "a matrix of 5 bits": ("head.weight should be among", dense(matrices={"head.weight": 5})),
    "a list of matrices": ("matrices should be a JSON object", dense(matrices=["head.weight"])),
    "trellis codes of routers": ("trellis should be attention or mixer or", dense(trellis=["router"])),
    "trellis codes by name": ("trellis should be a list", dense(trellis="head")),
    "trellis codes of no width": ("roles that have widths, each once, found 'embed'", dense(trellis=["embed"])),
    "trellis codes twice": ("each once, found 'head'", dense(bits={"head": 4}, trellis=["head", "head"])),
    "groups below 0": ("group_size should be between", dense(group_size=-1)),
    "huge groups": ("group_size should be between", dense(group_size=1 << 40)),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_widths_of_dense_matrices_that_can_not_be(pack_dir: Path, name: str) -> None:
    words, change = DENSE[name]
    lies(pack_dir, ManifestInvalid, words, change)


@pytest.mark.parametrize(("family", "role"), [("encoder-decoder", "embed"), ("decoder", "cross")])
def test_roles_that_this_model_has_not(tmp_path: Path, family: str, role: str) -> None:
    write_pack(tmp_path / "p", SPECS[family])
    lies(tmp_path / "p", ManifestInvalid, f"found '{role}'", dense(bits={role: 8}))


def test_dense_layers_that_the_model_has_not(pack_dir: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["model"]["decoder"]["layers"] = [0, 0]
        dense(bits={"ffn": 8})(document)

    lies(pack_dir, ManifestInvalid, "found 'ffn'", change)


BLOCKS: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "a number": ("neurons should be a JSON object", lambda q: q.update(neurons=512)),
    "no size": ("neurons lacks the field 'piece_bytes'", lambda q: q["neurons"].pop("piece_bytes")),
    "no kind": ("neurons lacks the field 'bundled'", lambda q: q["neurons"].pop("bundled")),
    "a size that is text": ("piece_bytes should be a whole number", lambda q: q["neurons"].update(piece_bytes="512")),
    "no bytes": ("piece_bytes should be between 512", lambda q: q["neurons"].update(piece_bytes=0)),
    "below 0": ("piece_bytes should be between 512", lambda q: q["neurons"].update(piece_bytes=-512)),
    "huge": ("piece_bytes should be between 512", lambda q: q["neurons"].update(piece_bytes=(1 << 20) + 512)),
    "beyond any file": ("piece_bytes should be between", lambda q: q["neurons"].update(piece_bytes=1 << 50)),
    "no sectors": ("piece_bytes is 1000, expected a multiple of 512", lambda q: q["neurons"].update(piece_bytes=1000)),
    "together and bundled": ("both bundled and together", lambda q: q["neurons"].update(together=True)),
    "half together": ("together should be true or false", lambda q: q["neurons"].update(together=1)),
    "half bundled": ("bundled should be true or false", lambda q: q["neurons"].update(bundled=1)),
    "the other way": ("its widths need", lambda q: q["neurons"].update(bundled=False)),
    "other blocks": ("its widths need", lambda q: q["neurons"].update(piece_bytes=4096)),
    "four bits of the source": ("blocks of neurons and mxfp4", lambda q: q.update(mxfp4=True)),
    "no blocks after all": ("its widths need", lambda q: q.update(neurons=None)),
}  # fmt: skip


@pytest.fixture
def blocks_dir(tmp_path: Path) -> Path:
    write_pack(tmp_path / "p", FIRING, replace(QUANTIZATION, neurons=Neurons(512, bundled=True)))
    return tmp_path / "p"


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_neurons_that_can_not_be(blocks_dir: Path, name: str) -> None:
    words, change = BLOCKS[name]
    lies(blocks_dir, ManifestInvalid, words, lambda document: change(document["quantization"]))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new"])
def test_blocks_of_neurons_that_are_never_quite_zero(blocks_dir: Path, act: str) -> None:
    def change(document: dict[str, Any]) -> None:
        for kind in document["model"]["decoder"]["kinds"]:
            if kind["ffn"]["kind"] == "experts":
                kind["ffn"]["ffn"]["act"]["name"] = act

    lies(blocks_dir, ManifestInvalid, f"their activation is {act}: only relu and relu2", change)


def test_a_pack_becomes_no_pack_of_blocks(pack_dir: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["quantization"]["neurons"] = {"piece_bytes": 512, "bundled": True}

    lies(pack_dir, ManifestInvalid, "their activation is silu", change)


def test_blocks_of_neurons_without_checksums(blocks_dir: Path) -> None:
    lies(blocks_dir, ManifestInvalid, "and no neurons.safetensors", lambda d: d["files"].pop("neurons.safetensors"))


def test_blocks_of_neurons_that_overflow(blocks_dir: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        for kind in document["model"]["decoder"]["kinds"]:
            if kind["ffn"]["kind"] == "experts":
                kind["ffn"]["ffn"]["d_ff"] = 1 << 24

    lies(blocks_dir, ManifestInvalid, "its widths need", change)


@pytest.mark.parametrize("at", [0, 100, 4100, -1])
def test_a_changed_byte_of_an_expert_in_blocks(blocks_dir: Path, at: int) -> None:
    body = bytearray((blocks_dir / FIRST).read_bytes())
    body[at] ^= 1
    (blocks_dir / FIRST).write_bytes(body)
    refused((HeaderInvalid if 0 <= at < 4096 else HashMismatch), "damaged", lambda: read_all(blocks_dir))


# Routing that no reader could follow: words of the refusal, and what is changed of one that it could.
PREFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "of no share": ("share should be a finite number above 0", {"share": 0}),
    "of all experts": ("for shares below 1", {"share": 1.0}),
    "of a share that is no number": ("share should be a finite number", {"share": "25%"}),
    "fewer recent ones than a token takes": ("prefers 1 experts of a layer, it should be 2 to 3", {"recent": 1}),
    "more recent ones than there are": ("prefers 5 experts of a layer, it should be 2 to 3", {"recent": 5}),
    "more sure ones than a token takes": ("takes 3 experts first, a token goes to 2", {"sure": 3}),
    "sure ones below 0": ("sure should be between 0", {"sure": -1}),
    "no bonus for a layer": ("a bonus of 0 or more for each of 2 layers", {"bonus": [0.1]}),
    "a bonus below 0": ("bonus should be between 0 and 1e.06, found -0.1", {"bonus": [0.1, -0.1]}),
    "a bonus without end": ("bonus should be a finite number", {"bonus": [0.1, 1e31]}),
    "a bonus that is no number": ("bonus should be a finite number", {"bonus": [0.1, None]}),
    "bonuses that are no list": ("bonus should be a list", {"bonus": 0.1}),
    "a loss without its interval": (
        "heldout lacks the field 'low'",
        {"heldout": {"reference": 1, "value": 1, "loss": 0}},
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_that_can_not_be(pack_dir: Path, name: str) -> None:
    words, changes = PREFERENCES[name]
    sound = {"share": 0.5, "recent": 3, "sure": 1, "bonus": [0.1, 0.2]}

    def change(document: dict[str, Any]) -> None:
        document["preferences"] = [{**sound, **changes}]

    lies(pack_dir, ManifestInvalid, words, change)


@pytest.mark.parametrize("shares", [(0.5, 0.25), (0.5, 0.5)])
def test_preferences_out_of_order(pack_dir: Path, shares: tuple[float, ...]) -> None:
    def change(document: dict[str, Any]) -> None:
        document["preferences"] = [{"share": share, "recent": 2, "sure": 0, "bonus": [0, 0]} for share in shares]

    lies(pack_dir, ManifestInvalid, "ascending", change)


def router(document: dict[str, Any], kind: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = layer(document, kind)["ffn"]["router"]
    return found


def latent(heads: int) -> dict[str, Any]:
    return plain(Latent(heads, None, 4, 3, 4, 6, 1.0, Norm(1e-5), None))  # type: ignore[no-any-return]


# What the model should not say, by family: words of the refusal, fields of the model.
MODELS: dict[str, list[tuple[str, Callable[[dict[str, Any]], Any]]]] = {
    "decoder": [
        ("attends to an encoder's output, and there is no",
         lambda d: layer(d).update(cross={**layer(d)["mixer"], "rope": None})),
        ("a layer has rope 1, there are 1", lambda d: layer(d)["mixer"].update(rope=1)),
        ("rope 0 turns 6 features of 4", lambda d: layer(d)["mixer"].update(dim=4)),
        ("5 features turn", lambda d: d["model"]["ropes"][0].update(dims=5)),
        ("factor should be between 1e-06 and 1e.06, found 0.0", lambda d: d["model"]["ropes"][0].update(factor=0.0)),
        ("eps should be between 1e-30 and 1, found 0", lambda d: d["model"]["decoder"]["norm"].update(eps=0)),
        ("eps should be between 1e-30 and 1, found -1e-06", lambda d: layer(d)["norm"].update(eps=-1e-6)),
        ("clip should be between 0.001 and 1e.09, found -1", lambda d: layer(d)["mixer"].update(clip=-1)),
        ("scale should be between 1e-06 and 1e.06, found 0.0", lambda d: layer(d)["mixer"].update(scale=0.0)),
        (r"scale should be between 1e-06 and 1e\+06, found -1e\+30", lambda d: layer(d)["mixer"].update(scale=-1e30)),
        ("head: scale should be between 1e-06", lambda d: d["model"]["head"].update(scale=-0.0)),
        ("embed_scale should be between 1e-06", lambda d: d["model"].update(embed_scale=0)),
        ("a first token is given", lambda d: d["model"]["tokens"].update(first=3)),
        ("the decoder has positions for 63 tokens, the model takes 64",
         lambda d: d["model"]["decoder"].update(positions={"n": 63})),
        ("positions has the field 'offset'",
         lambda d: d["model"]["decoder"].update(positions={"n": 64, "offset": 2})),
    ],
    "encoder-decoder": [
        ("there is no encoder", lambda d: d["model"].update(encoder=None)),
        ("not all layers of the decoder attend to", lambda d: layer(d).update(cross=None)),
        ("a parallel layer needs a mixer and a feed-forward", lambda d: layer(d).update(parallel=True)),
        ("the encoder attends", lambda d: layer(d, 0, "encoder").update(cross=layer(d)["cross"])),
        ("has positions, which that output", lambda d: layer(d)["cross"].update(buckets={"n": 8, "max_distance": 16})),
        ("in the encoder, a layer has a window", lambda d: layer(d, 0, "encoder")["mixer"].update(window=4)),
        ("output has a window", lambda d: layer(d)["cross"].update(window=4)),
        ("start token is None", lambda d: d["model"]["tokens"].update(start=None)),
        ("start token is 11", lambda d: d["model"]["tokens"].update(start=11)),
        ("first token is 11", lambda d: d["model"]["tokens"].update(first=11)),
        ("first should be between 0", lambda d: d["model"]["tokens"].update(first=-1)),
        ("the encoder has positions for 64 tokens, the model takes any number of",
         lambda d: d["model"].update(max_positions=None)),
        ("the encoder has positions for 64 tokens, the model takes 65", lambda d: d["model"].update(max_positions=65)),
        ("the positions of the encoder skip the pad token", lambda d: d["model"]["tokens"].update(pad=None)),
        ("n should be between 1 and 65535", lambda d: d["model"]["encoder"]["positions"].update(n=65536)),
        ("skips_pad should be true or false", lambda d: d["model"]["encoder"]["positions"].update(skips_pad=1)),
        ("n should be between 4", lambda d: layer(d)["mixer"]["buckets"].update(n=2)),
        ("9 buckets of distances", lambda d: layer(d)["mixer"]["buckets"].update(n=9)),
        ("max_distance should be between 1", lambda d: layer(d)["mixer"]["buckets"].update(max_distance=0)),
        ("distance is 4, it should be above 4", lambda d: layer(d)["mixer"]["buckets"].update(max_distance=4)),
        ("of several sizes, but share one table",
         lambda d: layer(d, 1, "encoder")["mixer"]["buckets"].update(n=16)),
        ("in the encoder, a layer has a window", lambda d: layer(d, 0, "encoder")["mixer"].update(chunk=4)),
        ("output has a window", lambda d: layer(d)["cross"].update(chunk=4)),
        ("see each other, and there is an encoder", lambda d: d["model"]["tokens"].update(prefix_end=3)),
        ("latent attention, which only decoders",
         lambda d: layer(d, 0, "encoder").update(mixer=latent(2))),
        ("in the encoder, a layer has streams, which only decoders",
         lambda d: [kind.update(streams=plain(Streams(2, 5, 1e-6))) for kind in d["model"]["encoder"]["kinds"]]),
        ("a layer with streams is parallel or scaled, or has positions or attention",
         lambda d: layer(d).update(streams=plain(Streams(2, 5, 1e-6)))),
        ("a layer has no mixer, which only decoders", lambda d: layer(d, 0, "encoder").update(mixer=None)),
        ("a state of fixed size, which only",
         lambda d: layer(d, 0, "encoder").update(mixer={"kind": "conv", "taps": 3})),
        ("something is added to up", lambda d: layer(d)["ffn"]["ffn"]["act"].update(plus=1.0)),
    ],
    "rich": [
        ("mixer: kind should be one of heads, latent, conv, delta, mamba2, mamba",
         lambda d: layer(d)["mixer"].update(kind="rnn")),
        ("mixer lacks the field 'kind'", lambda d: layer(d)["mixer"].pop("kind")),
        ("has the field 'kv'", lambda d: layer(d)["mixer"].update(kv=1)),
        ("its heads have 16842495 features together", lambda d: layer(d)["mixer"].update(n=257, v=65535)),
        ("scale should be between 1e-06 and 1e.06, found -1", lambda d: layer(d)["mixer"].update(scale=-1)),
        ("rope 1 turns 6 features of 4", lambda d: layer(d)["mixer"].update(rope=1)),
        ("rope 0 turns 4 features of 6", lambda d: layer(d)["mixer"].update(turning=6)),
        ("turning should be between 2", lambda d: layer(d)["mixer"].update(turning=1)),
        ("q_rank should be between 1", lambda d: layer(d)["mixer"].update(q_rank=0)),
        ("its gate has a bias, and there is no gate", lambda d: layer(d, 1)["mixer"].update(gate=False)),
        ("its gate has an output a head, and there is no gate",
         lambda d: layer(d, 1)["mixer"].update(gate=False, biases=None)),
        ("bound should be between 0.001", lambda d: layer(d)["ffn"]["ffn"]["act"].update(bound=0)),
        ("biases should be one of qkv, qkvo, qkvog", lambda d: layer(d, 1)["mixer"].update(biases="q")),
        ("chunk should be between 1", lambda d: layer(d, 1)["mixer"].update(chunk=0)),
        ("kind should be one of rms, layer", lambda d: layer(d)["norm"].update(kind="batch")),
        ("parallel should be true or false, found 1", lambda d: layer(d).update(parallel=1)),
        ("scaled should be true or false, found 0.5", lambda d: layer(d).update(scaled=0.5)),
        ("mixer_join: add should be between", lambda d: layer(d)["mixer_join"].update(add=0)),
        ("ffn_join: add should be between", lambda d: layer(d)["ffn_join"].update(add=0)),
        ("slope should be between 1e-06", lambda d: layer(d)["ffn"]["ffn"]["act"].update(slope=0)),
        ("activation is relu with a slope", lambda d: layer(d)["ffn"]["ffn"]["act"].update(name="relu")),
        ("something is added to up", lambda d: layer(d)["ffn"]["shared"]["act"].update(plus=1)),
        ("something is added to up", lambda d: layer(d)["ffn"]["beside"]["ffn"]["act"].update(plus=1)),
        ("4 experts are in 3 groups", lambda d: router(d)["groups"].update(n=3)),
        ("a token goes to 2 experts of 3 of 2 groups", lambda d: router(d)["groups"].update(best=3)),
        ("a token goes to 2 experts of 1 of 4 groups", lambda d: router(d)["groups"].update(n=4)),
        ("router: factor should be between 1e-06", lambda d: router(d).update(factor=0)),
        ("jitter should be between 0 and 1, found -0.1", lambda d: router(d, 2).update(jitter=-0.1)),
        ("a sparsemixer with groups or a bias", lambda d: router(d).update(score="sparsemixer")),
        ("a sparsemixer with groups or a bias", lambda d: router(d, 2).update(choice_bias=True)),
        ("score should be one of softmax, sigmoid, sigmoid_of_chosen, sparsemixer",
         lambda d: router(d).update(score="tanh")),
        ("weighs what experts get", lambda d: router(d).update(weigh="input")),
        ("a gate for a shared expert, and", lambda d: layer(d)["ffn"].update(shared=None)),
        ("another number or shape", lambda d: layer(d, 2)["ffn"]["ffn"].update(bias=False)),
        ("another number or shape", lambda d: layer(d, 2)["ffn"]["narrow"].update(features=10)),
        ("features should be between 1", lambda d: layer(d)["ffn"]["narrow"].update(features=0)),
        ("narrow should be a JSON object", lambda d: layer(d)["ffn"].update(narrow=8)),
        ("softcap should be between 0.001", lambda d: d["model"]["head"].update(softcap=0)),
    ],
    "mixers": [
        ("taps should be between 1", lambda d: layer(d)["mixer"].update(taps=0)),
        ("has the field 'keys'", lambda d: layer(d)["mixer"].update(keys=1)),
        ("4 heads share 3 heads of keys", lambda d: layer(d, 1)["mixer"].update(keys=3)),
        ("numbers of its state are", lambda d: layer(d, 1)["mixer"].update(dim=65535, v=65535)),
        ("features of its convolution are", lambda d: layer(d, 1)["mixer"].update(n=60000, v=60000)),
        ("normed by one of the kind layer", lambda d: layer(d, 1)["mixer"]["norm"].update(kind="layer")),
        ("by_feature should be true or false, found 1", lambda d: layer(d, 7)["mixer"].update(by_feature=1)),
        ("rank should be between 1", lambda d: layer(d, 7)["mixer"].update(rank=0)),
        ("bound should be between 0.001", lambda d: layer(d, 7)["mixer"].update(bound=0)),
        ("gate should be true or false, found 1", lambda d: layer(d, 8)["mixer"].update(gate=1)),
        ("gate should be one of silu, sigmoid", lambda d: layer(d, 7)["mixer"].update(gate="tanh")),
        ("4 heads are in 3 groups", lambda d: layer(d, 2)["mixer"].update(groups=3)),
        ("features of its convolution are", lambda d: layer(d, 2)["mixer"].update(n=60000, dim=999)),
        ("normed by one of the kind layer", lambda d: layer(d, 2)["mixer"]["norm"].update(kind="layer")),
        ("numbers of its state are", lambda d: layer(d, 4)["mixer"].update(features=1 << 24)),
        ("rank should be between 1", lambda d: layer(d, 4)["mixer"].update(rank=0)),
        ("neither a mixer nor a feed-forward", lambda d: layer(d, 3).update(ffn=None)),
        ("says how something joins", lambda d: layer(d, 3).update(mixer_join={"add": 0.5})),
        ("says how something joins", lambda d: layer(d, 1).update(ffn_join={"add": 0.5})),
        ("a parallel layer needs a mixer and a feed-forward", lambda d: layer(d, 1).update(parallel=True)),
        ("a parallel layer needs a mixer and a feed-forward", lambda d: layer(d, 3).update(parallel=True)),
        ("identities should be between 0", lambda d: router(d, 5).update(identities=-1)),
        ("chooses among 65536 numbers", lambda d: router(d, 5).update(identities=65533)),
        ("beside groups, a capacity or a sparsemixer", lambda d: router(d, 5).update(capacity=4)),
        ("beside groups, a capacity or a sparsemixer",
         lambda d: router(d, 5).update(groups={"n": 1, "best": 1, "top": 1})),
        ("beside groups, a capacity or a sparsemixer",
         lambda d: router(d, 5).update(score="sparsemixer", choice_bias=False)),
        ("that stand for no expert, and weighs what experts get",
         lambda d: [router(d, at).update(top_k=1, weigh="input") for at in (0, 3, 4, 5, 6)]),
        ("shortcut should be true or false, found 1", lambda d: layer(d, 5)["ffn"].update(shortcut=1)),
        ("take a shortcut, and there is a network beside", lambda d: layer(d, 5)["ffn"].update(bypass=True)),
        ("take a shortcut, and do not join by a plain sum", lambda d: layer(d, 5).update(ffn_join={"add": 0.5})),
        ("experts of the last layer take a shortcut", lambda d: d["model"]["decoder"]["layers"].append(5)),
        ("mixer should be a JSON object", lambda d: layer(d).update(mixer="none")),
        ("see each other, and a layer has a mixer with a state", lambda d: d["model"]["tokens"].update(prefix_end=3)),
    ],
    "streaming": [
        ("the experts of a layer with streams take a shortcut", lambda d: layer(d, 2)["ffn"].update(shortcut=True)),
        ("n should be between 2 and 64, found 1", lambda d: layer(d)["streams"].update(n=1)),
        ("n should be between 2 and 64, found 65", lambda d: layer(d)["streams"].update(n=65)),
        ("rounds should be between 1 and 1000, found 0", lambda d: layer(d)["streams"].update(rounds=0)),
        ("rounds should be between 1 and 1000, found 1000000", lambda d: layer(d)["streams"].update(rounds=10**6)),
        ("floor should be between 1e-30 and 1, found 0", lambda d: layer(d)["streams"].update(floor=0)),
        ("kind should be one of sinkhorn, gated", lambda d: layer(d)["streams"].update(kind="plain")),
        ("streams lacks the field 'kind'", lambda d: layer(d)["streams"].pop("kind")),
        ("streams has the field 'end'", lambda d: layer(d)["streams"].update(end="mean")),
        ("streams should be a JSON object, found 4", lambda d: layer(d).update(streams=4)),
        ("its layers differ in their streams", lambda d: layer(d, 1).update(streams=None)),
        ("its layers differ in their streams", lambda d: layer(d, 1)["streams"].update(rounds=4)),
        ("have the eps of the layer's norm", lambda d: layer(d, 1).update(norm=None)),
        ("a layer with streams is parallel or scaled", lambda d: layer(d, 1).update(parallel=True)),
        ("a layer with streams is parallel or scaled", lambda d: layer(d, 1).update(scaled=True)),
        ("a layer with streams is parallel or scaled", lambda d: layer(d, 1).update(positions={"n": 64})),
        ("it has 3 streams of 8388608 features, it should have at most 2",
         lambda d: d["model"].update(d_model=1 << 23)),
    ],
    "pooling": [
        ("4 heads are in 3 groups", lambda d: layer(d)["mixer"].update(groups=3)),
        ("groups should be between 1 and 64, found 0", lambda d: layer(d)["mixer"].update(groups=0)),
        ("groups should be between 1 and 64, found 65535", lambda d: layer(d)["mixer"].update(groups=65535)),
        ("8 features of a head turn, and a head has fewer", lambda d: layer(d)["mixer"].update(turning=8)),
        ("5 features of a head turn, and a head has fewer",
         lambda d: [layer(d, 1)["mixer"].update(turning=5), layer(d, 1)["mixer"]["pools"]["indexer"].update(dim=4)]),
        ("rope 0 turns 4 features of 2", lambda d: layer(d)["mixer"].update(turning=2)),
        ("a layer has rope 1, there are 1", lambda d: layer(d)["mixer"].update(rope=1)),
        ("window should be between 1", lambda d: layer(d)["mixer"].update(window=0)),
        ("numbers of its state are 100663290", lambda d: layer(d)["mixer"].update(window=1 << 24)),
        ("features of its heads are", lambda d: layer(d)["mixer"].update(n=65532, dim=60000)),
        ("features of its indexer's heads are",
         lambda d: layer(d, 1)["mixer"]["pools"]["indexer"].update(n=65535, dim=1000)),
        ("every should be between 1 and 65535, found 0", lambda d: layer(d, 2)["mixer"]["pools"].update(every=0)),
        ("top should be between 1", lambda d: layer(d, 1)["mixer"]["pools"]["indexer"].update(top=0)),
        ("overlap should be true or false", lambda d: layer(d, 2)["mixer"]["pools"].update(overlap=None)),
        ("what it gives is normed by one of the kind layer",
         lambda d: layer(d)["mixer"]["norm"].update(kind="layer")),
        ("has no norm before it, or does not join by a plain sum", lambda d: layer(d).update(mixer_join={"add": 0.5})),
        ("has no norm before it, or does not join by a plain sum",
         lambda d: [layer(d, at).update(norm=None) or layer(d, at).pop("streams") for at in range(4)]),
        ("a router's table is not of the model's 11 tokens", lambda d: router(d).update(by_token=12)),
        ("by_token should be between 1", lambda d: router(d).update(by_token=0)),
        ("its router has what is for a choice alone", lambda d: router(d).update(choice_bias=True)),
        ("its router has what is for a choice alone", lambda d: router(d).update(capacity=3)),
        ("its router has what is for a choice alone", lambda d: router(d).update(score="sigmoid_of_chosen")),
        ("score should be one of", lambda d: router(d, 1).update(score="softplus")),
        ("weighed should be true or false", lambda d: layer(d)["streams"].update(weighed=1)),
        ("its layers differ in their streams", lambda d: layer(d)["streams"].update(weighed=False)),
    ],
    "gated": [
        ("rank should be between 1", lambda d: layer(d)["streams"].update(rank=0)),
        ("its streams are normed by one of the kind layer", lambda d: layer(d)["streams"]["norm"].update(kind="layer")),
        ("its layers differ in their streams", lambda d: layer(d)["streams"].update(rank=4)),
        ("n should be between 2 and 16, found 17", lambda d: layer(d)["ngrams"].update(n=17)),
        ("dim should be between 1", lambda d: layer(d)["ngrams"].update(dim=0)),
        ("3 multipliers and 4 heads are for up to 4", lambda d: layer(d)["ngrams"].update(n=4)),
        ("3 multipliers and 5 heads are for up to 3", lambda d: layer(d)["ngrams"]["sizes"].append(1)),
        ("3 multipliers and 0 heads are for up to 3", lambda d: layer(d)["ngrams"].update(sizes=[])),
        ("multipliers should be between 1 and", lambda d: layer(d)["ngrams"].update(multipliers=[1, 0, 1])),
        ("sizes should be between 1 and", lambda d: layer(d)["ngrams"].update(sizes=[1, 0, 1, 1])),
        ("together have 31 rows, their table has 30", lambda d: layer(d)["ngrams"].update(rows=30)),
        ("rows should be between 1 and", lambda d: layer(d)["ngrams"].update(rows=1 << 41)),
        ("are for fewer than 11 tokens", lambda d: layer(d)["ngrams"].update(end=11)),
        ("are for fewer than 11 tokens", lambda d: layer(d)["ngrams"].update(multipliers=[5, 7, 1 << 60])),
        ("are normed by one of the kind layer", lambda d: layer(d)["ngrams"]["norm"].update(kind="layer")),
        ("should be at most 16777216", lambda d: layer(d)["ngrams"].update(n=3, taps=65535, dim=65535, sizes=[1] * 512,
                                                                           rows=512)),
        ("no streams that they join, or no mixer with", lambda d: layer(d, 1).update(ngrams=layer(d)["ngrams"])),
        ("no ngrams.safetensors with the rows", lambda d: d["files"].pop("ngrams.safetensors")),
    ],
    "late": [
        ("prefix_end should be between 0", lambda d: d["model"]["tokens"].update(prefix_end=-1)),
        ("see each other, and a layer has a window", lambda d: layer(d)["mixer"].update(window=4)),
        ("see each other, and a layer has a window", lambda d: layer(d)["mixer"].update(chunk=4)),
        ("see each other, and a layer has latent", lambda d: layer(d).update(mixer=latent(2))),
        ("see each other, and a bias by distance is",
         lambda d: layer(d)["mixer"].update(buckets={"n": 8, "max_distance": 16})),
        ("has norms with the eps of the layer's",
         lambda d: (layer(d).pop("mixer_join"), layer(d)["mixer"].update(qk_norm="head"))),
        ("has norms with the eps of the layer's",
         lambda d: (layer(d).pop("mixer_join"), layer(d)["mixer"].update(v_norm=True))),
        ("has norms with the eps of the layer's", lambda d: router(d).update(own_norm=True)),
        ("positions of a layer skip the pad", lambda d: layer(d, 1)["positions"].update(skips_pad=True)),
        ("the decoder has positions for 63 tokens, the model takes 64",
         lambda d: layer(d, 1)["positions"].update(n=63)),
        ("what a token gets whose expert is full", lambda d: router(d).update(capacity=None)),
        ("overflow should be one of nothing, itself", lambda d: router(d).update(overflow="half")),
        ("bypass should be true or false", lambda d: layer(d)["ffn"].update(bypass=1)),
        ("projected should be true or false", lambda d: d["model"]["head"].update(projected="silu")),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "words", "change"), [(family, *case) for family, cases in MODELS.items() for case in cases]
)
def test_models_that_can_not_be(
    tmp_path: Path, family: str, words: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    write_pack(tmp_path / "model.pack", SPECS[family])
    lies(tmp_path / "model.pack", ManifestInvalid, words, change)


@pytest.mark.parametrize("family", SPECS)
def test_ids_of_no_token_where_nothing_looks_them_up(tmp_path: Path, family: str) -> None:
    """Configurations in the wild have such ids for filling and for ends."""
    write_pack(tmp_path / "model.pack", SPECS[family])
    document = document_of(tmp_path / "model.pack")
    document["model"]["tokens"].update(bos=11, pad=4000, eos=[1, 5000])
    assert parse_manifest(sealed(document)).model.tokens.eos == (1, 5000)


@pytest.mark.parametrize("change", [
    lambda document: layer(document)["mixer"]["buckets"].update(n=4, max_distance=3),
    lambda document: document["model"]["tokens"].update(start=10),
])  # fmt: skip
def test_the_last_legal_values(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    write_pack(tmp_path / "model.pack", SPECS["encoder-decoder"])
    document = document_of(tmp_path / "model.pack")
    change(document)
    parse_manifest(sealed(document))


# Paths.

BAD_PATHS = [
    "/etc/passwd", "../outside", "experts/../../outside", "experts/..", "..", ".", "", "./config.json", "a//b", "a/",
    "C:/windows", "a\\b", "a\0b", "a\nb", "\ud800", "é" * 10, "a" * 201, "//host/share", "~\x7f",
]  # fmt: skip


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_paths_that_are_not_plain(pack_dir: Path, path: str) -> None:
    original = document_of(pack_dir)
    entry = original["files"].pop("config.json")
    original["files"][path] = entry
    refused(UnsafePath, "not a plain path", lambda: parse_manifest(sealed(original)))


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "experts/../../outside"])
def test_expert_paths_that_climb_out(pack_dir: Path, path: str) -> None:
    lies(pack_dir, UnsafePath, "not a plain path", lambda document: document["experts"][0].update(path=path))


def move_out(pack_dir: Path, relative: str) -> None:
    """Puts a file or directory of the pack outside and links to it: same bytes, but not in the pack."""
    outside = pack_dir.parent / "outside"
    shutil.move(pack_dir / relative, outside)
    (pack_dir / relative).symlink_to(outside)


@pytest.mark.parametrize("relative", [FIRST, "experts/D00", "experts", "config.json", "manifest.json"])
def test_links_out_of_the_pack(pack_dir: Path, relative: str) -> None:
    move_out(pack_dir, relative)
    refused(UnsafePath, "leads out of the pack", lambda: Pack.open(pack_dir))


def test_a_folder_outside_is_not_taken_for_one_inside_because_a_link_in_it_leads_back(pack_dir: Path) -> None:
    move_out(pack_dir, "experts/D00")
    back = pack_dir.parent / "outside" / Path(FIRST).name
    shutil.move(back, pack_dir / "first")
    back.symlink_to(pack_dir / "first")
    refused(UnsafePath, "leads out of the pack", lambda: Pack.open(pack_dir))


@pytest.mark.parametrize("relative", [FIRST, "config.json", "backbone.safetensors"])
def test_links_put_there_after_opening(pack_dir: Path, relative: str) -> None:
    pack = Pack.open(pack_dir)
    move_out(pack_dir, relative)
    key = pack.manifest.experts[0].key
    read = (lambda: read_expert(pack, key)) if relative == FIRST else (lambda: pack.read_file(relative))
    refused(UnsafePath, "leads out of the pack", read)
    refused(UnsafePath, "leads out of the pack", lambda: pack.file(relative))
    refused(UnsafePath, "leads out of the pack", lambda: list(pack.verify_hashes()))


def test_links_in_a_circle(pack_dir: Path) -> None:
    (pack_dir / FIRST).unlink()
    (pack_dir / FIRST).symlink_to(pack_dir / FIRST)
    with pytest.raises((UnsafePath, FileMissing)):
        Pack.open(pack_dir)


def test_a_link_inside_the_pack_and_a_link_to_the_pack_are_fine(pack_dir: Path) -> None:
    shutil.move(pack_dir / "config.json", pack_dir / "real.json")
    (pack_dir / "config.json").symlink_to("real.json")
    (pack_dir.parent / "link.pack").symlink_to(pack_dir)
    assert read_all(pack_dir.parent / "link.pack") == read_all(pack_dir)


@pytest.mark.parametrize("relative", ["../outside", "/etc/passwd"])
def test_asking_for_a_file_outside(pack_dir: Path, relative: str) -> None:
    (pack_dir.parent / "outside").write_text("secret")
    pack = Pack.open(pack_dir)
    refused(UnsafePath, "leads out of the pack", lambda: pack.file(relative))
    refused(FileMissing, "has no", lambda: pack.read_file(relative))


# Files.


@pytest.mark.parametrize("relative", [FIRST, "config.json", "experts/D02", "experts"])
def test_files_that_are_missing(pack_dir: Path, relative: str) -> None:
    path = pack_dir / relative
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    refused(FileMissing, "is missing from the pack", lambda: Pack.open(pack_dir))


def test_a_directory_in_place_of_a_file(pack_dir: Path) -> None:
    (pack_dir / FIRST).unlink()
    (pack_dir / FIRST).mkdir()
    refused(FileMissing, "not a regular file", lambda: Pack.open(pack_dir))


def test_a_file_in_place_of_a_directory(pack_dir: Path) -> None:
    shutil.rmtree(pack_dir / "experts/D00")
    (pack_dir / "experts/D00").write_text("flat")
    refused(FileMissing, "is missing from the pack", lambda: Pack.open(pack_dir))


@pytest.mark.parametrize("relative", [FIRST, "config.json"])
@pytest.mark.parametrize("change", [-1, 1, -4096, 4096])
def test_files_of_another_length(pack_dir: Path, relative: str, change: int) -> None:
    size = (pack_dir / relative).stat().st_size
    os.truncate(pack_dir / relative, max(0, size + change))
    refused(FileTruncated, "copy the pack again", lambda: Pack.open(pack_dir))


@pytest.mark.parametrize("relative", [FIRST, "config.json"])
def test_files_cut_or_removed_after_opening(pack_dir: Path, relative: str) -> None:
    pack = Pack.open(pack_dir)
    key = pack.manifest.experts[0].key
    read = (lambda: read_expert(pack, key)) if relative == FIRST else (lambda: pack.read_file(relative))
    os.truncate(pack_dir / relative, 10)
    refused(FileTruncated, "copy the pack again", read)
    refused(FileTruncated, "copy the pack again", lambda: list(pack.verify_hashes()))
    (pack_dir / relative).unlink()
    refused(FileMissing, "is missing", read)
    refused(FileMissing, "is missing", lambda: list(pack.verify_hashes()))


def test_a_file_that_fails_to_be_read_is_named_while_hashes_are_checked(
    pack_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, piece: object, ended: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    pack = Pack.open(pack_dir)
    monkeypatch.setattr(reader, "_sha256", failing)
    first = next(iter(pack.sizes()))
    words = f"{first} in the pack at .* can't be read: Input/output error"
    refused(FileMissing, words, lambda: list(pack.verify_hashes()))


def test_hashes_that_nobody_waits_for_are_given_up(pack_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Ctrl-C ends the loop: files at work are not read to their end."""
    pack, ended = Pack.open(pack_dir), list[bool]()
    hashes = {pack.root / piece.path: piece.sha256 for piece in pack.pieces()}
    first = next(iter(hashes))

    def waiting(path: Path, piece: object, event: Event) -> str:
        if path != first:
            ended.append(event.wait(60))
        return hashes[path]

    monkeypatch.setattr(reader, "_sha256", waiting)
    checks = pack.verify_hashes()
    assert pack.root / next(checks) == first
    checks.close()
    assert ended
    assert all(ended)


def test_swapped_experts(pack_dir: Path) -> None:
    body, other = (pack_dir / FIRST).read_bytes(), (pack_dir / SECOND).read_bytes()
    assert len(body) == len(other)
    (pack_dir / FIRST).write_bytes(other)
    (pack_dir / SECOND).write_bytes(body)
    refused(HeaderInvalid, "belongs to another expert", lambda: read_all(pack_dir))


def test_a_swap_of_paths_in_the_manifest(pack_dir: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        first, second = document["experts"][:2]
        first["path"], second["path"] = second["path"], first["path"]
        for field in ("sha256", "crc32"):
            first[field], second[field] = second[field], first[field]

    lies(pack_dir, HeaderInvalid, "belongs to another expert", change)


def test_an_expert_of_another_conversion(pack_dir: Path, tmp_path: Path) -> None:
    write_pack(tmp_path / "other", seed=5)
    shutil.copy(tmp_path / "other" / FIRST, pack_dir / FIRST)
    refused(HashMismatch, "checksum differs", lambda: read_all(pack_dir))


def header_lies() -> dict[str, Callable[[dict[str, Any]], Any]]:
    def first_slot(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
        return lambda table: change(next(value for name, value in table.items() if name.endswith("weight")))

    return {
        "dtype": first_slot(lambda slot: slot.update(dtype="I8")),
        "shape": first_slot(lambda slot: slot.update(shape=slot["shape"][::-1])),
        "huge shape": first_slot(lambda slot: slot.update(shape=[1 << 62, 1 << 62])),
        "negative offset": first_slot(lambda slot: slot.update(data_offsets=[-64, 0])),
        "offset beyond the end": first_slot(lambda slot: slot.update(data_offsets=[1 << 40, 1 << 41])),
        "tensors overlap": lambda table: table["up.scale"].update(data_offsets=table["up.min"]["data_offsets"]),
        "a tensor less": lambda table: table.pop("up.scale"),
        "a tensor more": lambda table: table.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        "a tensor renamed": lambda table: table.update(down=table.pop("up.scale")),
        "another expert": lambda table: table["__metadata__"].update(expert="D00/E001"),
        "no metadata": lambda table: table.pop("__metadata__"),
        "other order": lambda table: table.update({"up.scale": table.pop("up.scale")}),
    }


@pytest.mark.parametrize("lie", header_lies())
def test_headers_that_lie(pack_dir: Path, lie: str) -> None:
    """Even when manifest and hashes have been made to fit the changed file."""
    body = (pack_dir / FIRST).read_bytes()
    length = int.from_bytes(body[:8], "little")
    table = json.loads(body[8 : 8 + length])
    before = copy.deepcopy(table)
    header_lies()[lie](table)
    assert list(table.items()) != list(before.items())
    text = json.dumps(table, separators=(",", ":")).encode().ljust(length)
    forge(pack_dir, body[:8] + text + body[8 + length :])


@pytest.mark.parametrize("length", [0, 1, 4087, 4089, 8184, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_header_lengths_that_lie(pack_dir: Path, length: int) -> None:
    body = (pack_dir / FIRST).read_bytes()
    forge(pack_dir, length.to_bytes(8, "little") + body[8:])


def test_a_header_with_other_white_space(pack_dir: Path) -> None:
    body = bytearray((pack_dir / FIRST).read_bytes())
    at = int.from_bytes(body[:8], "little") + 7
    assert body[at : at + 1] == b" "
    body[at] = ord("\t")
    forge(pack_dir, bytes(body))


def forge(pack_dir: Path, body: bytes) -> None:
    """Puts `body` in place of the first expert, with matching hashes and size, and expects HeaderInvalid."""
    entry = file_entry(body)
    assert entry.nbytes == (pack_dir / FIRST).stat().st_size
    (pack_dir / FIRST).write_bytes(body)
    lies(pack_dir, HeaderInvalid, "its header is not that of expert D00/E000",
         lambda document: document["experts"][0].update(sha256=entry.sha256, crc32=entry.crc32))  # fmt: skip


@pytest.mark.parametrize("relative", [FIRST, "backbone.safetensors"])
def test_a_flipped_bit(pack_dir: Path, relative: str) -> None:
    body = bytearray((pack_dir / relative).read_bytes())
    body[-1] ^= 0x10
    (pack_dir / relative).write_bytes(body)
    refused(HashMismatch, "is damaged", lambda: read_all(pack_dir))
    refused(HashMismatch, "sha256 differs", lambda: list(Pack.open(pack_dir).verify_hashes()))


def test_a_fast_checksum_that_was_forged(pack_dir: Path) -> None:
    """crc32 guards against accidents; sha256, checked by verify, against everything else."""
    body = b"x" * 23
    assert len(body) == (pack_dir / "config.json").stat().st_size
    (pack_dir / "config.json").write_bytes(body)
    document = document_of(pack_dir)
    document["files"]["config.json"]["crc32"] = file_entry(body).crc32
    (pack_dir / "manifest.json").write_text(sealed(document))
    pack = Pack.open(pack_dir)
    assert pack.read_file("config.json") == body
    refused(HashMismatch, "sha256 differs", lambda: list(pack.verify_hashes()))


def test_the_test_pack_itself_is_fine(pack_dir: Path) -> None:
    manifest, experts, files = read_all(pack_dir)
    assert manifest.model == DECODER
    assert len(experts) == 6
    assert len(files) == 2
