"""JSON text → Manifest, believing nothing: every field by type and range, then what must hold between the fields."""

from __future__ import annotations

import json
import zlib
from typing import Any

from moert.pack.codec import WIDTHS
from moert.pack.errors import FormatTooNew, HashMismatch, ManifestInvalid, SizeOverflow
from moert.pack.fields import MAX_BYTES, MAX_COUNT, Fields, brief
from moert.pack.manifest import (
    FORMAT_NAME,
    MAJOR,
    SEAL,
    Dense,
    ExpertEntry,
    FileEntry,
    LossEstimate,
    Manifest,
    Quality,
    Quantization,
    minor_of,
    safe_path,
)
from moert.pack.model_spec import (
    STACKS,
    ExpertKey,
    ModelSpec,
    MoeSpec,
    Stack,
    StackSpec,
    contradictions,
    dense_roles,
)


def parse_manifest(text: str) -> Manifest:
    """JSON text → Manifest. Raises ManifestInvalid, FormatTooNew, HashMismatch, UnsafePath or SizeOverflow."""
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"manifest.json is not JSON ({error}); convert the model again") from None
    document = Fields(raw, "manifest.json")
    _check_version(document)
    _check_seal(text, document)
    manifest = Manifest(
        creator=document.text("creator"),
        page_bytes=document.integer("page_bytes", 4096, 1 << 20),
        model=_model(document.fields("model")),
        quantization=_quantization(document.fields("quantization")),
        quality=None if document.get("quality") is None else _quality(document.fields("quality")),
        files={safe_path(name): _file(document.fields("files").fields(name)) for name in document.fields("files").raw},
        experts=tuple(_expert(Fields(item, "manifest.json: an expert")) for item in document.array("experts")),
        minor=document.integer("minor", 0, MAX_COUNT),
    )
    _check(manifest)
    return manifest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ManifestInvalid("manifest.json names a field twice in one object; convert the model again")
    return table


def _check_version(document: Fields) -> None:
    if document.text("format") != FORMAT_NAME:
        raise ManifestInvalid(f"manifest.json has format {document.raw['format']!r}, expected {FORMAT_NAME!r}")
    major = document.integer("major", 0, MAX_COUNT)
    if major > MAJOR:
        raise FormatTooNew(f"the pack has format version {major}, this program reads up to {MAJOR}: upgrade moert")
    if major < MAJOR:
        raise ManifestInvalid(f"the pack has format version {major}, expected {MAJOR}: convert the model again")


def _check_seal(text: str, document: Fields) -> None:
    """The last field is a checksum of all the text before it: a changed digit anywhere is noticed."""
    crc32 = document.integer("crc32", 0, (1 << 32) - 1)
    body, mark, _ = text.rpartition(SEAL)
    if not mark or text != f"{body}{SEAL}{crc32}\n}}\n":
        raise ManifestInvalid("manifest.json does not end with its crc32: it was cut, edited or laid out anew")
    if zlib.crc32(body.encode()) != crc32:
        raise HashMismatch("manifest.json differs from its own checksum: it is damaged or was edited; copy it again")


def _file(fields: Fields) -> FileEntry:
    return FileEntry(
        nbytes=fields.integer("nbytes", 0, MAX_BYTES),
        sha256=fields.digest("sha256"),
        crc32=fields.integer("crc32", 0, (1 << 32) - 1),
    )


def _stack(fields: Fields) -> StackSpec:
    return StackSpec(n_layers=fields.integer("n_layers", 1, 4096), moe_layers=fields.integers("moe_layers"))


def _moe(fields: Fields) -> MoeSpec:
    capacity = fields.optional_integer("capacity")
    return MoeSpec(
        num_experts=fields.integer("num_experts", 1, 65535),
        top_k=fields.integer("top_k", 1, 65535),
        d_ff=fields.integer("d_ff", 1, MAX_COUNT),
        activation=fields.choice("activation", ("relu", "silu", "gelu", "gelu_new")),
        gated=fields.flag("gated"),
        norm_topk=fields.flag("norm_topk"),
        capacity=capacity,
        activation_limit=None if fields.absent("activation_limit") else fields.number("activation_limit"),
    )


def _model(fields: Fields) -> ModelSpec:
    return ModelSpec(
        family=fields.text("family"),
        vocab_size=fields.integer("vocab_size", 1, MAX_COUNT),
        d_model=fields.integer("d_model", 1, MAX_COUNT),
        n_heads=fields.integer("n_heads", 1, 65535),
        n_kv_heads=fields.integer("n_kv_heads", 1, 65535),
        head_dim=fields.integer("head_dim", 1, 65535),
        encoder=None if fields.get("encoder") is None else _stack(fields.fields("encoder")),
        decoder=_stack(fields.fields("decoder")),
        moe=_moe(fields.fields("moe")),
        d_ff_dense=fields.integer("d_ff_dense", 0, MAX_COUNT),
        norm_eps=fields.number("norm_eps"),
        positions=fields.choice("positions", ("rope", "relative")),
        rope_theta=fields.number("rope_theta"),
        relative_buckets=fields.integer("relative_buckets", 0, 65535),
        relative_max_distance=fields.integer("relative_max_distance", 0, MAX_COUNT),
        attention_scale=fields.number("attention_scale"),
        qk_norm=fields.flag("qk_norm"),
        clip_qkv=fields.optional_number("clip_qkv"),
        tied_head=fields.flag("tied_head"),
        logit_scale=fields.number("logit_scale"),
        max_positions=fields.optional_integer("max_positions"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_ids=fields.integers("eos_token_ids"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        decoder_start_token_id=fields.optional_integer("decoder_start_token_id"),
    )


def _quantization(fields: Fields) -> Quantization:
    return Quantization(
        quantizer=fields.text("quantizer"),
        group_size=fields.integer("group_size", 0, MAX_COUNT),
        dtype16=fields.choice("dtype16", ("F16", "BF16")),
        seed=fields.integer("seed", 0, 1 << 32),
        dense=None if fields.absent("dense") else _dense(fields.fields("dense")),
    )


def _dense(fields: Fields) -> Dense:
    return Dense(
        quantizer=fields.text("quantizer"),
        group_size=fields.integer("group_size", 0, MAX_COUNT),
        bits=_widths(fields.fields("bits")),
    )


def _measured(fields: Fields, name: str) -> LossEstimate | None:
    if fields.get(name) is None:
        return None
    inner = fields.fields(name)
    values = {field: inner.number(field) for field in ("reference", "value", "loss", "low", "high")}
    return LossEstimate(**values, samples=inner.integer("samples", 0, MAX_COUNT))


def _quality(fields: Fields) -> Quality:
    return Quality(
        metric=fields.text("metric"),
        target_loss=fields.optional_number("target_loss"),
        calibration=_measured(fields, "calibration"),
        heldout=_measured(fields, "heldout"),
        calibration_sha256=fields.digest("calibration_sha256"),
        heldout_sha256=fields.digest("heldout_sha256"),
    )


def _expert(fields: Fields) -> ExpertEntry:
    return ExpertEntry(
        key=_key(fields),
        path=safe_path(fields.text("path")),
        file_bytes=fields.integer("file_bytes", 1, MAX_BYTES),
        tensor_bytes=fields.integer("tensor_bytes", 1, MAX_BYTES),
        bits=_bits(fields.fields("bits")),
        sha256=fields.digest("sha256"),
        crc32=fields.integer("crc32", 0, (1 << 32) - 1),
        importance=fields.optional_number("importance"),
    )


def _key(fields: Fields) -> ExpertKey:
    key = fields.array("key")
    whole = [item for item in key[1:3] if isinstance(item, int) and not isinstance(item, bool)]
    if len(key) != 3 or len(whole) != 2 or not isinstance(key[0], str) or key[0] not in STACKS:
        found = ", ".join(brief(item) for item in key[:4])
        raise ManifestInvalid(f'{fields.where}: key should be ["decoder", layer, expert], found [{found}]')
    stack: Stack = "encoder" if key[0] == "encoder" else "decoder"
    return ExpertKey(stack, key[1], key[2])


def _bits(fields: Fields) -> dict[str, int]:
    if not {"gate", "up", "down"}.issuperset(fields.raw):
        raise ManifestInvalid(
            f"{fields.where} should give widths for gate, up and down, found {brief(list(fields.raw))}"
        )
    return _widths(fields)


def _widths(fields: Fields) -> dict[str, int]:
    widths = {name: fields.integer(name, 0, MAX_COUNT) for name in fields.raw}
    if any(width not in WIDTHS for width in widths.values()):
        raise ManifestInvalid(f"{fields.where}: widths should be among {WIDTHS}, found {sorted(widths.values())}")
    return widths


def _check(manifest: Manifest) -> None:
    """What must hold between fields: every expert once, each with the sizes that its widths imply."""
    if manifest.page_bytes % 4096:
        raise ManifestInvalid(f"page_bytes is {manifest.page_bytes}, expected a multiple of 4096")
    _check_model(manifest.model)
    _check_dense(manifest)
    _check_keys(manifest)
    paths = {entry.path for entry in manifest.experts} | set(manifest.files)
    if len(paths) != len(manifest.experts) + len(manifest.files):
        raise ManifestInvalid("manifest.json names one file twice: each file of a pack has one purpose")
    for entry in manifest.experts:
        _check_expert(manifest, entry)


def _check_model(spec: ModelSpec) -> None:
    if spec.moe.top_k > spec.moe.num_experts or spec.n_heads % spec.n_kv_heads:
        raise ManifestInvalid("the model in manifest.json selects more experts, or shares more heads, than it has")
    if (contradiction := next(contradictions(spec), None)) is not None:
        raise ManifestInvalid(f"the model in manifest.json can't be: {contradiction}")
    for name in STACKS:
        stack = spec.stack(name)
        if stack is None:
            continue
        layers = stack.moe_layers
        if list(layers) != sorted(set(layers)) or (layers and layers[-1] >= stack.n_layers):
            raise ManifestInvalid(
                f"manifest.json: moe_layers of the {name} should rise and stay below {stack.n_layers}, the number of "
                "its layers"
            )
        if len(layers) < stack.n_layers and spec.d_ff_dense == 0:
            raise ManifestInvalid(f"manifest.json: the {name} has layers without experts, but d_ff_dense is 0")
    if not spec.moe_layers():
        raise ManifestInvalid("the model in manifest.json has no layer with experts: such a pack can't exist")


def _check_dense(manifest: Manifest) -> None:
    needed = minor_of(manifest.model, manifest.quantization)
    if manifest.minor < needed:
        raise ManifestInvalid(
            f"manifest.json has minor version {manifest.minor}, but what it says of dense matrices or of an "
            f"activation_limit is there from {needed} on: convert the model again"
        )
    dense = manifest.quantization.dense
    if dense is None:
        return
    roles = dense_roles(manifest.model)
    unknown = sorted(set(dense.bits) - set(roles))
    if unknown or not dense.bits:
        found = f"found {brief(unknown[0])}" if unknown else "found none"
        raise ManifestInvalid(
            f"manifest.json: dense should give widths to matrices that the model has ({', '.join(roles)}), {found}"
        )


def _check_keys(manifest: Manifest) -> None:
    spec = manifest.model
    expected = len(spec.moe_layers()) * spec.moe.num_experts
    if len(manifest.experts) != expected or [entry.key for entry in manifest.experts] != spec.expert_keys():
        raise ManifestInvalid(
            f"manifest.json lists {len(manifest.experts)} experts, the model has {expected}: each must be there once, "
            "in the order of execution"
        )


def _check_expert(manifest: Manifest, entry: ExpertEntry) -> None:
    if sorted(entry.bits) != sorted(manifest.model.moe.projections):
        raise ManifestInvalid(
            f"expert {entry.key} has widths for {sorted(entry.bits)}, expected {manifest.model.moe.projections}"
        )
    layout = manifest.layout(entry)
    if max(layout.file_bytes, layout.tensor_bytes) > MAX_BYTES:
        raise SizeOverflow(f"expert {entry.key} would take {layout.file_bytes} bytes, larger than any file can be")
    if (layout.file_bytes, layout.tensor_bytes) != (entry.file_bytes, entry.tensor_bytes):
        raise ManifestInvalid(
            f"expert {entry.key} is listed with {entry.file_bytes} bytes, {entry.tensor_bytes} of them weights, scales "
            f"and minima; its widths need {layout.file_bytes} and {layout.tensor_bytes}"
        )
