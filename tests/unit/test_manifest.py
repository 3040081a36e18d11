"""The manifest: it comes back as it went out, and every field that is missing or wrong is one named error."""

from __future__ import annotations

import ast
import copy
import json
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_packs import DECODER, ENCODER_DECODER, NEURON_SPECS, QUANTIZATION, SPECS, sealed, write_pack

from moeconv.source.archs import FAMILIES
from moeconv.writer import dump_manifest, expert_path
from moert.pack.errors import HashMismatch, ManifestInvalid, PackError
from moert.pack.layout import NEURONS, Neurons, expert_layout
from moert.pack.manifest import BACKBONE, NGRAMS, Dense, ExpertEntry, LossEstimate, Quality, parse_manifest
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.reader import Pack
from tests.shapes import shapes_of

Where = tuple[str | int, ...]
EXPERTS: Where = ("model", "decoder", "kinds", 0, "ffn")
ROOT = Path(__file__).resolve().parents[2]
BASE = Pack.open(ROOT / "tests" / "golden" / "tiny.pack").manifest
TEXT = dump_manifest(BASE)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return document_of(tmp_path_factory, "encoder-decoder")


@pytest.fixture(scope="module", params=["encoder-decoder", "rich", "firing"])
def any_document(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return document_of(tmp_path_factory, request.param)


def document_of(tmp_path_factory: pytest.TempPathFactory, name: str) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("manifest") / "model.pack"
    if name in SPECS:
        write_pack(out, SPECS[name])
    else:
        write_pack(out, NEURON_SPECS[name], replace(QUANTIZATION, neurons=Neurons(512, bundled=True)))
    raw: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return raw


def fields_of(value: Any, at: Where = ()) -> list[Where]:
    """Every field of every object in the document; of lists of objects but kinds of layers the first object stands for
    all."""
    if isinstance(value, list):
        each = value if at[-1:] == ("kinds",) else value[:1]
        objects = [(place, inner) for place, inner in enumerate(each) if isinstance(inner, dict)]
        return [found for place, inner in objects for found in fields_of(inner, (*at, place))]
    if not isinstance(value, dict):
        return []
    return [place for name, inner in value.items() for place in [(*at, name), *fields_of(inner, (*at, name))]]


def changed(document: dict[str, Any], at: Where, value: Any) -> dict[str, Any]:
    """The document with one field set, or dropped if the value is Ellipsis; what does not lead there is not copied."""
    result = copy.copy(document)
    inner: Any = result
    for step in at[:-1]:
        inner[step] = copy.copy(inner[step])
        inner = inner[step]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return result


def value_at(document: dict[str, Any], at: Where) -> Any:
    inner: Any = document
    for step in at:
        inner = inner[step]
    return inner


# An object with free names: leaving one out is no error by itself.
FREE = {
    ("files", "backbone.safetensors"), ("files", "config.json"), ("files", NEURONS), ("files", NGRAMS), ("crc32",),
}  # fmt: skip
NULLABLE = {
    "quality", "target_loss", "calibration", "heldout", "encoder", "capacity", "clip", "max_positions", "bos", "pad",
    "start", "importance", "qk_norm", "rope", "buckets", "cross", "dense", "window", "softcap", "limit", "biases",
    "chunk", "q_rank", "groups", "shared", "beside", "after", "stretch", "positions", "first", "mixer", "ffn", "norm",
    "neurons", "rank", "bound", "streams", "ngrams", "pools", "indexer", "by_token",
}  # fmt: skip


def parts_of(kind: type[Any]) -> dict[str, type[Any]]:
    """A dataclass and all that its fields are made of, by the names of their classes."""
    found = {kind.__name__: kind}
    for annotation in get_type_hints(kind).values():
        for each in (annotation, *get_args(annotation)):
            if is_dataclass(each) and isinstance(each, type) and each.__name__ not in found:
                found |= parts_of(each)
    return found


def defaults_of(value: dict[str, Any]) -> set[str]:
    """Which fields of an object of the model need not be there."""
    named = set(value) - ({"kind"} if value.get("kind") in KINDS else set())
    [kind] = (
        part for part in PARTS.values()
        if {field.name for field in fields(part)} == named | {*getattr(part, "LEFT_OUT", ())}
    )  # fmt: skip
    return {field.name for field in fields(kind) if field.default is not MISSING}


PARTS = parts_of(ModelSpec)
KINDS = {part.KIND for part in PARTS.values() if hasattr(part, "KIND")}


def is_optional(document: dict[str, Any], at: Where) -> bool:
    if at[0] != "model" or len(at) == 1:
        return at in {("quantization", "dense"), ("quantization", "mxfp4"), ("quantization", "neurons")}
    return at[-1] in defaults_of(value_at(document, at[:-1]))


def test_every_missing_field_is_named(any_document: dict[str, Any]) -> None:
    document = any_document
    places = [at for at in fields_of(document) if at not in FREE]
    assert len(places) > 60
    for at in places:
        without = sealed(changed(document, at, ...))
        if is_optional(document, at):
            try:
                parse_manifest(without)
            except PackError as error:
                assert "lacks the field" not in str(error), at  # noqa: PT017
            continue
        with pytest.raises(ManifestInvalid) as caught:
            parse_manifest(without)
        message = str(caught.value)
        if at[-2:-1] != ("bits",):
            assert f"lacks the field '{at[-1]}'" in message, at
        assert "\n" not in message


@pytest.mark.parametrize("wrong", [None, True, "", "7", -1, 1.5, [], [None], {}, 1e300, "a\nb"], ids=repr)
def test_every_wrong_type_is_one_line(any_document: dict[str, Any], wrong: Any) -> None:
    """The wrong value either is refused in one line that names the field, or is a legal value of this field."""
    document, refused = any_document, 0
    for at in fields_of(document):
        if at == ("crc32",):
            continue
        text = sealed(changed(document, at, wrong))
        try:
            parse_manifest(text)
        except PackError as error:
            refused += 1
            message = str(error)
            assert "\n" not in message
            assert len(message) < 300
        else:
            was = value_at(document, at)
            same = type(wrong) is type(was) or (type(was) is float and type(wrong) is int)
            number = at[-1] in NULLABLE and type(wrong) in (int, float)
            assert same or number or (wrong is None and at[-1] in NULLABLE), (at, wrong)
    assert refused > len(fields_of(document)) * 0.6


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (("creator",), 3, "manifest.json: creator should be one line of text, found 3"),
        (("page_bytes",), "4096", "manifest.json: page_bytes should be a whole number, found '4096'"),
        ((*EXPERTS, "ffn", "gated"), 1, "ffn: ffn: gated should be true or false, found 1"),
        ((*EXPERTS, "ffn", "act", "name"), "tanh", "one of relu, silu, gelu, gelu_new, relu2, found 'tanh'"),
        ((*EXPERTS, "ffn", "act", "limit"), 0, "limit should be between 0.001 and 1e.09, found 0"),
        ((*EXPERTS, "kind"), "mamba", "ffn: kind should be one of ffn, experts, found 'mamba'"),
        ((*EXPERTS, "router", "top_k"), True, "top_k should be a whole number, found True"),
        (("model", "encoder", "layers"), [0.5], "layers should be a whole number, found 0.5"),
        (("model", "encoder", "norm", "eps"), "small", "eps should be a finite number, found 'small'"),
        (("model", "decoder", "norm", "plus_one"), True, "norm has the field 'plus_one', which this program does not"),
        (("quantization",), [1, 2], "quantization should be a JSON object, found a JSON array of 2"),
        (("quality", "target_loss"), "5%", "target_loss should be a finite number, found '5%'"),
        (("quality", "heldout_sha256"), "00ff", "heldout_sha256 should be a sha256 in hexadecimal, found '00ff'"),
        (("files", "config.json", "crc32"), 1 << 32, "crc32 should be between 0 and 4294967295"),
        (("experts", 0, "bits", "up"), 5, r"bits: up should be among \(2, 3, 4, 8, 16\), found 5"),
        (("experts", 0, "key"), ["middle", 0, 0], r"key should be \[.decoder., layer, expert\]"),
    ],
)  # fmt: skip
def test_the_message_says_what_was_expected(document: dict[str, Any], at: Where, wrong: Any, message: str) -> None:
    with pytest.raises(ManifestInvalid, match=message):
        parse_manifest(sealed(changed(document, at, wrong)))


def test_dump_and_parse(any_document: dict[str, Any]) -> None:
    document = any_document
    manifest = parse_manifest(sealed(document))
    text = dump_manifest(manifest)
    assert parse_manifest(text) == manifest
    assert dump_manifest(parse_manifest(text)) == text
    assert json.loads(text) == {**document, "crc32": json.loads(text)["crc32"]}


finite = st.floats(-1e6, 1e6, allow_nan=False)
measured = st.none() | st.builds(LossEstimate, finite, finite, finite, finite, finite, st.integers(0, 1 << 20))
line = st.text(st.characters(blacklist_categories=("C", "Z")), max_size=20)


@given(st.builds(Quality, line, st.none() | finite, measured, measured, st.just("1" * 64), st.just("2" * 64)), line)
def test_quality_comes_back(quality: Quality, creator: str) -> None:
    manifest = replace(BASE, quality=quality, creator=creator)
    assert parse_manifest(dump_manifest(manifest)) == manifest


@given(st.integers(0, 4000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(position: int, flip: int) -> None:
    body = bytearray(TEXT.encode())
    body[position % len(body)] ^= flip
    text = body.decode("latin-1")
    with pytest.raises(PackError):
        parse_manifest(text)


def name_of(path: Path) -> str:
    return path.parent.name


@pytest.mark.parametrize("config", sorted(ROOT.glob("recipes/models/*/config.json")), ids=name_of)
def test_the_reference_models_can_be_in_a_manifest(config: Path) -> None:
    read = json.loads(config.read_text(encoding="utf-8"))
    spec = FAMILIES[read["model_type"]].description(read, {}).spec
    experts = tuple(entry_of(spec, key) for key in spec.expert_keys())
    manifest = replace(BASE, model=spec, experts=experts, page_bytes=4096)
    assert parse_manifest(dump_manifest(manifest)) == manifest


def entry_of(spec: ModelSpec, key: ExpertKey) -> ExpertEntry:
    bits = dict.fromkeys(spec.moe.ffn.projections, 4)
    layout = expert_layout(spec, key, bits, BASE.quantization.coding, 4096)
    sizes = (layout.file_bytes, layout.tensor_bytes)
    return ExpertEntry(key, expert_path(key), *sizes, bits, sha256="3" * 64, crc32=0, importance=None)


def test_the_name_of_the_backbone_stands_in_one_place() -> None:
    places = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "moert").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == BACKBONE
    ]
    assert places == ["moert/pack/manifest.py"]


def test_a_minor_version_may_add_fields(document: dict[str, Any]) -> None:
    newer = {**document, "minor": 3, "speed_of_light": 299792458}
    manifest = parse_manifest(sealed(newer))
    assert manifest.minor == 3
    assert replace(manifest, minor=0) == parse_manifest(sealed(document))


DENSE = Dense("group", 64, {"attention": 4, "head": 8})


@pytest.mark.parametrize("dense", [DENSE, replace(DENSE, bits={"router": 16})], ids=["some", "a role at 16 bits"])
def test_widths_of_dense_matrices_come_back(dense: Dense) -> None:
    manifest = replace(BASE, quantization=replace(BASE.quantization, dense=dense), minor=2)
    assert parse_manifest(dump_manifest(manifest)) == manifest


def test_what_has_a_default_need_not_be_there(document: dict[str, Any]) -> None:
    bare = changed(changed(document, ("quantization", "dense"), ...), (*EXPERTS, "ffn", "act", "limit"), ...)
    assert parse_manifest(sealed(bare)) == parse_manifest(sealed(document))


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.family)
def test_every_matrix_has_a_role_and_nothing_else(spec: ModelSpec) -> None:
    roles = {name: spec.tensors[name].role for name in shapes_of(spec)}
    by_feature = tuple(
        f"decoder.{at}." for at in range(len(spec.decoder)) if getattr(spec.decoder[at].mixer, "by_feature", False)
    )
    for name, role in roles.items():
        apart = ("norm", "bias", "rope", "positions", "after", "sinks", "shared_gate", "scale", "conv", "a_log")
        apart = (*apart, "streams", "ngrams", "router.table", ".places", "mixer.b.", "mixer.d")
        apart = (*apart, *(() if name.startswith(by_feature) else ["mixer.a."]))
        plain = any(each in name for each in apart)
        assert (role is None) == plain, name
    assert roles["embed.weight"] == ("head" if spec.head.tied else "embed")
    assert roles.get("decoder.0.attn.o.weight", "attention") == "attention"
    assert roles.get("decoder.0.mixer.out.weight", "mixer") == "mixer"
    assert roles["decoder.0.router.weight"] == "router"
    assert roles.get("decoder.0.cross.q.weight", "attention") == "attention"
    assert roles.get("decoder.1.ffn.up.weight", "ffn") == roles.get("encoder.0.ffn.down.weight", "ffn") == "ffn"
    assert set(spec.roles()) == set(roles.values()) - {None}


def test_a_manifest_that_was_edited(document: dict[str, Any]) -> None:
    text = sealed(document)
    with pytest.raises(HashMismatch, match="edited"):
        parse_manifest(text.replace('"eps": 1e-05', '"eps": 1e-04'))
    with pytest.raises(ManifestInvalid, match="does not end with its crc32"):
        parse_manifest(json.dumps(json.loads(text)))


def test_expert_paths() -> None:
    assert expert_path(ExpertKey("decoder", 3, 5)) == "experts/D03/E005.safetensors"
    assert expert_path(ExpertKey("encoder", 100, 1000)) == "experts/E100/E1000.safetensors"


def test_backbone_of_a_decoder() -> None:
    shapes = shapes_of(DECODER)
    assert shapes["head.weight"] == (11, 10)
    assert shapes["decoder.0.attn.k.weight"] == (6, 10)
    assert shapes["decoder.0.attn.q_norm.weight"] == (12,)
    assert shapes["decoder.2.router.weight"] == (3, 10)
    assert shapes["decoder.1.ffn.down.weight"] == (10, 9)
    assert "decoder.0.ffn.up.weight" not in shapes
    assert not any("cross" in name or "relative" in name for name in shapes)


def test_backbone_of_an_encoder_decoder() -> None:
    shapes = shapes_of(ENCODER_DECODER)
    assert "head.weight" not in shapes
    assert shapes["encoder.relative_bias.weight"] == (8, 2)
    assert shapes["decoder.1.cross.q.weight"] == (12, 10)
    assert not any(name.startswith("encoder") and "cross" in name for name in shapes)
    assert "encoder.0.ffn.gate.weight" not in shapes
