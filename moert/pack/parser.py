"""JSON text → Manifest, believing nothing: every field by type and range, then what must hold between the fields."""

from __future__ import annotations

import zlib
from typing import Any

from moert.pack.bounds import check_size, known_bounds
from moert.pack.dense import dense_width
from moert.pack.documents import parsed
from moert.pack.errors import FormatTooNew, HashMismatch, ManifestInvalid, SizeOverflow
from moert.pack.manifest import FORMAT_NAME, MAJOR, SEAL, ExpertEntry, Manifest
from moert.pack.neurons import NEURONS, SECTOR
from moert.pack.reading import MAX_BYTES, MAX_COUNT, brief, mapping, read

_WHERE = "manifest.json"


def parse_manifest(text: str | bytes) -> Manifest:
    """JSON text → Manifest. Raises ManifestInvalid, FormatTooNew, HashMismatch, UnsafePath or SizeOverflow."""
    body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        raw = parsed(body)
    except ValueError as error:
        raise ManifestInvalid(f"manifest.json is not JSON ({error}); convert the model again") from None
    document = mapping(raw, _WHERE)
    _check_version(document)
    _check_seal(body, document)
    manifest = read(Manifest, document, _WHERE)
    _check(manifest)
    return manifest


def _check_version(document: dict[str, Any]) -> None:
    if _field(document, "format") != FORMAT_NAME:
        raise ManifestInvalid(f"manifest.json has format {brief(document['format'])}, expected {FORMAT_NAME!r}")
    major = _whole(document, "major", MAX_COUNT)
    if major > MAJOR:
        raise FormatTooNew(f"the pack has format version {major}, this program reads up to {MAJOR}: upgrade moert")
    if major < MAJOR:
        raise ManifestInvalid(f"the pack has format version {major}, expected {MAJOR}: convert the model again")
    _whole(document, "minor", MAX_COUNT)


def _check_seal(body: bytes, document: dict[str, Any]) -> None:
    """The last field is a checksum of all the text before it: a changed digit anywhere is noticed."""
    crc32 = _whole(document, "crc32", (1 << 32) - 1)
    at = body.rfind(SEAL.encode())
    if at < 0 or body[at:] != f"{SEAL}{crc32}\n}}\n".encode():
        raise ManifestInvalid("manifest.json does not end with its crc32: it was cut, edited or laid out anew")
    if zlib.crc32(memoryview(body)[:at]) != crc32:
        raise HashMismatch("manifest.json differs from its own checksum: it is damaged or was edited; copy it again")


def _field(document: dict[str, Any], name: str) -> Any:
    if name not in document:
        raise ManifestInvalid(f"{_WHERE} lacks the field {name!r}")
    return document[name]


def _whole(document: dict[str, Any], name: str, high: int) -> int:
    value = _field(document, name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise ManifestInvalid(f"{_WHERE}: {name} should be between 0 and {high}, found {brief(value)}")
    return value


def _check(manifest: Manifest) -> None:
    """What must hold between fields: every expert once, each with the sizes that its widths imply."""
    if manifest.page_bytes % 4096:
        raise ManifestInvalid(f"page_bytes is {manifest.page_bytes}, expected a multiple of 4096")
    if (contradiction := next(manifest.model.contradictions(), None)) is not None:
        raise ManifestInvalid(f"the model in manifest.json can't be: {contradiction}")
    for name in known_bounds().keys() & manifest.files.keys():
        check_size(name, manifest.files[name].nbytes)
    _check_dense(manifest)
    _check_neurons(manifest)
    _check_keys(manifest)
    _check_preferences(manifest)
    _check_places(manifest)
    known: dict[tuple[int, tuple[tuple[str, int], ...], str], tuple[int, int]] = {}
    for entry in manifest.experts:
        alike = (len(str(entry.key)), tuple(entry.bits.items()), str(entry.powers))  # all that their sizes depend on
        if known.get(alike) != (entry.file_bytes, entry.tensor_bytes):
            _check_expert(manifest, entry)
            known[alike] = entry.file_bytes, entry.tensor_bytes


def _check_places(manifest: Manifest) -> None:
    """Experts in one file lie one behind the other, in the order of execution."""
    ends = dict.fromkeys(manifest.files, -1)
    for entry in manifest.experts:
        end = ends.get(entry.path, 0)
        if end < 0 or (end and not entry.offset):
            raise ManifestInvalid("manifest.json names one file twice: each file of a pack has one purpose")
        if entry.offset != end:
            raise ManifestInvalid(
                f"expert {entry.key} begins at byte {entry.offset} of {entry.path}, expected {end}: what lies in one "
                "file follows without a gap"
            )
        ends[entry.path] = end + entry.file_bytes
    if max(ends.values(), default=0) > MAX_BYTES:
        raise SizeOverflow(f"a file of experts would take {max(ends.values())} bytes, larger than any file can be")


def _check_dense(manifest: Manifest) -> None:
    dense = manifest.quantization.dense
    if dense is None:
        return
    roles = manifest.model.roles()
    unknown = sorted(set(dense.bits) - set(roles))
    if unknown or not dense.bits:
        found = f"found {brief(unknown[0])}" if unknown else "found none"
        raise ManifestInvalid(
            f"manifest.json: dense should give widths to matrices that the model has ({', '.join(roles)}), {found}"
        )
    tensors = manifest.model.tensors
    for name in dense.powers or {}:
        width = dense_width(manifest.model, dense, name) if name in tensors else None
        if width is None or (width == 16 and manifest.quantization.dtype16 == "BF16"):
            raise ManifestInvalid(
                f"manifest.json: powers of dense should be of its codes and float16, found {brief(name)}"
            )


def _check_neurons(manifest: Manifest) -> None:
    how = manifest.quantization
    if how.neurons is None:
        return
    if how.neurons.piece_bytes % SECTOR:
        raise ManifestInvalid(f"piece_bytes is {how.neurons.piece_bytes}, expected a multiple of {SECTOR}")
    if how.neurons.bundled and how.neurons.together:
        raise ManifestInvalid("manifest.json has rows of neurons both bundled and together: a pack has one of them")
    act = manifest.model.moe.ffn.act
    if not act.exact_zeros:
        raise ManifestInvalid(
            f"manifest.json has experts in blocks of neurons, and their activation is {act.name}: only relu and relu2 "
            "give zeros that make neurons needless"
        )
    if how.mxfp4:
        raise ManifestInvalid("manifest.json has experts in blocks of neurons and mxfp4: a pack has one of them")
    if NEURONS not in manifest.files:
        raise ManifestInvalid(f"manifest.json has experts in blocks of neurons, and no {NEURONS} with their checksums")


def _check_keys(manifest: Manifest) -> None:
    expected = len(manifest.model.experts) * manifest.model.moe.n
    if len(manifest.experts) != expected or [entry.key for entry in manifest.experts] != manifest.model.expert_keys():
        raise ManifestInvalid(
            f"manifest.json lists {len(manifest.experts)} experts, the model has {expected}: each must be there once, "
            "in the order of execution"
        )


def _check_preferences(manifest: Manifest) -> None:
    moe, layers = manifest.model.moe, sum(at.stack == "decoder" for at in manifest.model.moe_layers())
    for number, one in enumerate(manifest.preferences):
        where = f"manifest.json: preferences: {number}"
        if not moe.router.top_k <= one.recent <= moe.n:
            raise ManifestInvalid(
                f"{where} prefers {one.recent} experts of a layer, it should be {moe.router.top_k} to {moe.n} of them"
            )
        if one.sure > moe.router.top_k:
            raise ManifestInvalid(f"{where} takes {one.sure} experts first, a token goes to {moe.router.top_k}")
        if len(one.bonus) != layers or min(one.bonus, default=0) < 0:
            raise ManifestInvalid(f"{where} should have a bonus of 0 or more for each of {layers} layers with experts")
    shares = [one.share for one in manifest.preferences]
    if shares != sorted(set(shares)) or max(shares, default=0) >= 1:
        raise ManifestInvalid("manifest.json: preferences should be for shares below 1 of the experts, ascending")


def _check_expert(manifest: Manifest, entry: ExpertEntry) -> None:
    projections = manifest.model.moe.ffn.projections
    if sorted(entry.bits) != sorted(projections):
        raise ManifestInvalid(f"expert {entry.key} has widths for {sorted(entry.bits)}, expected {projections}")
    plain = () if manifest.quantization.form16 == "F16" else (16,)
    if any(entry.bits.get(name, plain) in (plain, *plain) for name in entry.powers or {}):
        raise ManifestInvalid(
            f"expert {entry.key} has powers for {brief(list(entry.powers or {}))}: only codes and float16 count them"
        )
    layout = manifest.layout(entry)
    if max(layout.file_bytes, layout.tensor_bytes) > MAX_BYTES:
        raise SizeOverflow(f"expert {entry.key} would take {layout.file_bytes} bytes, larger than any file can be")
    if (layout.file_bytes, layout.tensor_bytes) != (entry.file_bytes, entry.tensor_bytes):
        raise ManifestInvalid(
            f"expert {entry.key} is listed with {entry.file_bytes} bytes, {entry.tensor_bytes} of them weights, scales "
            f"and minima; its widths need {layout.file_bytes} and {layout.tensor_bytes}"
        )
