"""manifest.json: its fields, its strict reader, and the tensors that stand for each dense matrix."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from moert.pack.codec import (
    CODES,
    LEAST_POWER,
    MOST_POWER,
    WIDTHS,
    Codes,
    Form16,
    QuantizedMatrix,
    TrellisMatrix,
    Width,
)
from moert.pack.documents import (
    MAX_BYTES,
    MAX_COUNT,
    Fit,
    Read,
    Shared,
    Within,
    brief,
    check_version,
    mapping,
    parsed,
    read,
    unfit,
)
from moert.pack.errors import HashMismatch, HeaderInvalid, ManifestInvalid, SizeOverflow, UnsafePath
from moert.pack.layout import (
    NEURONS,
    PROJECTIONS,
    SECTOR,
    Coding,
    ExpertLayout,
    NeuronLayout,
    Neurons,
    expert_layout,
    group_of,
    tensors_of,
)
from moert.pack.model_spec import STACKS, ExpertKey, ModelSpec
from moert.pack.parts import TRELLIS_ROLES, Role
from moert.pack.tensors import check_size, known_bounds

FORMAT_NAME = "model.pack"
BACKBONE = "backbone.safetensors"  # the file with all weights but the experts'
NGRAMS = "ngrams.safetensors"  # the file with tables that stay on the drive
MAJOR = 2
WIDTHS_OF: Mapping[Codes, tuple[Width, ...]] = {"plain": WIDTHS, "trellis": (*CODES, 8, 16)}
"""The widths that experts' projections may have, by their codes."""
WIDTHS_BY_TEXT: Mapping[str, Width] = {str(bits): bits for bits in sorted({*chain(*WIDTHS_OF.values())})}
"""All of these by rising bits, by the text that stands for them in documents and options."""
SEAL = ',\n "crc32": '  # the text before the checksum that ends the file
_CRC32 = (1 << 32) - 1

Dtype16 = Literal["F16", "BF16"]


def safe_path(path: str, where: str = "manifest.json") -> str:
    """Returns `path` itself if it stays inside the pack. Raises UnsafePath otherwise, ManifestInvalid if it is no
    text."""
    if not isinstance(path, str):
        raise unfit(where, "a path", path)
    sound = path.isascii() and path.isprintable() and not set("\\:").intersection(path) and len(path) <= 200
    if not sound or {"", ".", ".."}.intersection(path.split("/")):
        raise UnsafePath(f"manifest.json names the file {path[:80]!r}, which is not a plain path inside the pack")
    return path


def _key(value: Any, where: str) -> ExpertKey:
    key = value if isinstance(value, list) else []
    if len(key) != 3 or key[0] not in STACKS or any(type(number) is not int for number in key[1:]):
        found = f"[{', '.join(brief(item) for item in key[:4])}]" if isinstance(value, list) else brief(value)
        raise ManifestInvalid(f'{where} should be ["decoder", layer, expert], found {found}')
    return ExpertKey(*key)


_Sha256 = Annotated[str, Fit(re.compile("[0-9a-f]{64}").fullmatch, "a sha256 in hexadecimal")]
_Projection = Annotated[str, Fit(frozenset(PROJECTIONS).__contains__, "gate, up or down")]


def _width(value: Any, where: str) -> Width:
    """Returns a width, which its codes may lack (_check_expert). Whole ones are written without a fraction."""
    if type(value) is not int and (type(value) is not float or value.is_integer()):
        raise unfit(where, "a width in bits", value)
    return value


_PlainWidth = Annotated[int, Fit(frozenset(WIDTHS).__contains__, f"among {WIDTHS}")]
_Width = Annotated[Width, Read(_width)]
_Power = Annotated[
    int, Fit(frozenset(range(LEAST_POWER, MOST_POWER + 1)).difference({0}).__contains__,
             f"{LEAST_POWER} to {MOST_POWER} and not 0"),
]  # fmt: skip
_TrellisRole = Annotated[str, Fit(frozenset(TRELLIS_ROLES).__contains__, " or ".join(TRELLIS_ROLES))]
_Path = Annotated[str, Read(safe_path)]
_Model = Annotated[ModelSpec, Read(lambda value, where: read(ModelSpec, value, where, closed=True))]
_Count = Annotated[int, Within(0, MAX_COUNT)]


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for a file of the pack that is not an expert."""

    nbytes: Annotated[int, Within(0, MAX_BYTES)]
    sha256: _Sha256
    crc32: Annotated[int, Within(0, _CRC32)]


@dataclass(frozen=True)
class Dense:
    """The quantization of matrices outside the experts: a width for each of ROLES that has one, 16 among them.
    group_size as for experts. `powers`: canonical name → the power of two that the matrix is multiplied with, where it
    is. `matrices`: canonical name → the width of a matrix that has another width than its role. `trellis`: the roles of
    TRELLIS_ROLES whose matrices have trellis codes where their width is below 8."""

    LEFT_OUT: ClassVar = ("powers", "matrices", "trellis")
    quantizer: str
    group_size: _Count
    bits: Mapping[str, _PlainWidth]
    powers: Mapping[str, _Power] | None = None
    matrices: Mapping[str, _PlainWidth] | None = None
    trellis: tuple[_TrellisRole, ...] = ()

    def coding(self, role: Role | None, dtype16: Dtype16) -> Coding:
        """Returns the coding of matrices of a role."""
        return Coding(self.group_size, dtype16, role in self.trellis)

    def power(self, name: str) -> int:
        """Returns the power of two that the matrix of this canonical name is multiplied with; 0 for most."""
        return (self.powers or {}).get(name, 0)


@dataclass(frozen=True)
class Quantization:
    """The quantization of the experts. group_size 0 is one group per output channel. `dense`: the quantization of the
    other matrices; None: they are as in the source."""

    LEFT_OUT: ClassVar = ("neurons", "codes")
    quantizer: str
    group_size: _Count
    dtype16: Dtype16  # how matrices of 16 bits are stored
    seed: Annotated[int, Within(0, 1 << 32)]
    dense: Dense | None = None
    mxfp4: bool = False
    """Whether experts' 16-bit projections are stored in the four bits that they have in the source."""
    neurons: Neurons | None = None
    """The settings for blocks of neurons, if experts lie in such blocks."""
    codes: Codes = "plain"
    """The codes of experts' projections; of trellis codes, group_size is about those of 8 bits alone."""

    @property
    def form16(self) -> Form16:
        """Returns the form in which experts' 16-bit projections are stored."""
        return "MXFP4" if self.mxfp4 else self.dtype16

    @property
    def coding(self) -> Coding:
        """Returns the coding of the experts."""
        return Coding(self.group_size, self.form16, self.codes == "trellis")

    def layout(
        self, spec: ModelSpec, key: ExpertKey, bits: Mapping[str, Width], powers: Mapping[str, int] | None,
        page_bytes: int,
    ) -> ExpertLayout:  # fmt: skip
        """Returns the layout of an expert whose projections have these widths and are multiplied with these powers."""
        return expert_layout(spec, key, bits, self.coding, page_bytes, self.neurons, powers)


@dataclass(frozen=True)
class LossEstimate:
    """One measured value of the metric and the loss that it means, with a 95% interval of the loss (fractions). Where
    the metric is a perplexity per word, `reference_per_token` and `value_per_token` are the perplexities per token."""

    LEFT_OUT: ClassVar = ("reference_per_token", "value_per_token")
    reference: float
    value: float
    loss: float
    low: float
    high: float
    samples: _Count
    reference_per_token: float | None = None
    value_per_token: float | None = None

    def per_token(self) -> tuple[float, float] | None:
        """Returns the perplexity per token of the unquantized model and of the pack, where both are known."""
        if self.reference_per_token is None or self.value_per_token is None:
            return None
        return self.reference_per_token, self.value_per_token


_METRICS = {"perplexity": "perplexity per word", "token_perplexity": "perplexity per token"}


def in_words(metric: str) -> str:
    """Returns the name of a metric as a person reads it, with the unit that it counts by."""
    return _METRICS.get(metric, metric)


@dataclass(frozen=True)
class Quality:
    """The aim of a conversion and the losses that it measured. Hashes are of the samples of each split. `target_loss`
    is None where the aim was a size."""

    metric: str
    target_loss: float | None
    calibration: LossEstimate | None
    heldout: LossEstimate | None
    calibration_sha256: _Sha256
    heldout_sha256: _Sha256


@dataclass(frozen=True)
class Preference:
    """Cache-aware routing, which prefers experts that a sequence has used lately, made for room for `share` of all
    experts.

    In each layer of the decoder the last `recent` experts that tokens went to get the layer's `bonus` on the scores
    that they are chosen by, but for the `sure` best of all experts, which are taken as they are; `bonus` has a number
    for each layer with experts. `calibration` and `heldout`: the loss of this routing and the widths together.
    """

    share: Annotated[float, Fit(lambda share: share > 0, "a finite number above 0")]
    recent: Annotated[int, Within(1, MAX_COUNT)]
    sure: _Count
    bonus: Annotated[tuple[float, ...], Within(0, 1e6)]
    calibration: LossEstimate | None = None
    heldout: LossEstimate | None = None


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """The manifest's entry for one expert: its file, its widths, and checksums of the file's bytes.

    `tensor_bytes` counts weights, scales and minima alone, `file_bytes` all bytes of its file that are the expert's,
    from `offset` on. `importance` is the loss measured when this expert alone goes to 2 bits, all others at 4, above
    the loss with all at 4; None where not measured. `powers`: projection → the power of two that it is multiplied with,
    where it is.
    """

    LEFT_OUT: ClassVar = ("offset", "powers")
    key: Annotated[ExpertKey, Read(_key)]
    path: _Path
    file_bytes: Annotated[int, Within(1, MAX_BYTES)]
    tensor_bytes: Annotated[int, Within(1, MAX_BYTES)]
    bits: Annotated[Mapping[_Projection, _Width], Shared]
    sha256: _Sha256
    crc32: Annotated[int, Within(0, _CRC32)]
    importance: float | None
    offset: Annotated[int, Within(0, MAX_BYTES)] = 0
    powers: Mapping[str, _Power] | None = None


@dataclass(frozen=True)
class Manifest:
    LEFT_OUT: ClassVar = ("preferences",)
    creator: str
    page_bytes: Annotated[int, Within(4096, 1 << 20)]
    model: _Model
    quantization: Quantization
    quality: Quality | None
    files: Mapping[_Path, FileEntry]
    experts: tuple[ExpertEntry, ...]
    preferences: tuple[Preference, ...] = ()
    """The preferences, ascending by share."""
    minor: _Count = 0

    def layout(self, entry: ExpertEntry) -> ExpertLayout:
        return self.quantization.layout(self.model, entry.key, entry.bits, entry.powers, self.page_bytes)

    def neurons(self, entry: ExpertEntry) -> NeuronLayout:
        """Returns the places of the neurons of an expert, in a pack that has them in blocks
        (`Quantization.neurons`)."""
        neurons = self.layout(entry).neurons
        assert neurons is not None
        return neurons

    def expert_tensor_bytes(self) -> int:
        return sum(entry.tensor_bytes for entry in self.experts)

    def nbytes(self, without: Collection[str] = ()) -> int:
        """Returns the bytes of all files but the manifest, and but the files named in `without`."""
        others = sum(entry.nbytes for name, entry in self.files.items() if name not in without)
        return others + sum(entry.file_bytes for entry in self.experts)

    @property
    def mean_expert_bytes(self) -> float:
        """Returns the mean bytes of an expert in its file."""
        return sum(entry.file_bytes for entry in self.experts) / len(self.experts)

    def effective_bits(self) -> float:
        """Returns the bits per expert weight, scales and minima included, headers and padding not."""
        weights = len(self.experts) * self.model.weights_per_expert()
        return 8 * self.expert_tensor_bytes() / weights


StoredTensors = dict[str, tuple[str | None, tuple[int, ...]]]
"""Name → dtype, as safetensors calls it, and shape. None: the source's type, any floating-point type."""


def dense_width(spec: ModelSpec, dense: Dense | None, name: str) -> int | None:
    """Returns the width of the tensor of this canonical name; None where it is stored as in the source."""
    role = spec.tensors[name].role
    if dense is None or role is None or role not in dense.bits:
        return None
    return (dense.matrices or {}).get(name, dense.bits[role])


def widths_by_role(spec: ModelSpec, dense: Dense) -> dict[str, dict[int, int]]:
    """Returns for each role that has widths the number of its matrices at each width, by rising width."""
    found: dict[str, dict[int, int]] = {role: {} for role in spec.roles() if role in dense.bits}
    for name, tensor in spec.tensors.items():
        width = dense_width(spec, dense, name)
        if tensor.role is not None and width is not None:
            found[tensor.role][width] = found[tensor.role].get(width, 0) + 1
    return {role: dict(sorted(counts.items())) for role, counts in found.items()}


def widths_text(widths: Mapping[int, int]) -> str:
    """Returns the text of one role's widths: "8 bits", or "4 bits (12 matrices), 8 bits (4)"."""
    if len(widths) == 1:
        return f"{next(iter(widths))} bits"
    parts = (
        f"{bits} bits ({count}{' matrices' if at == 0 else ''})" for at, (bits, count) in enumerate(widths.items())
    )
    return ", ".join(parts)


def stem_of(name: str, dense: Dense | None) -> str:
    """Returns NAME for NAME.weight; NAME.scaled for a matrix that is multiplied with a power of two, so that readers
    that do not know of powers refuse it."""
    return name.removesuffix(".weight") + (".scaled" if dense is not None and dense.power(name) else "")


def stored_tensors(spec: ModelSpec, quantization: Quantization) -> dict[str, StoredTensors]:
    """Returns for each canonical name the tensors that stand for it: itself, or codes and scales, and the minima of
    plain codes."""
    dense, found = quantization.dense, dict[str, StoredTensors]()
    for name, (_, shape, role) in spec.tensors.items():
        width = dense_width(spec, dense, name)
        if dense is None or width is None:
            found[name] = {name: (None, shape)}
            continue
        rows, inputs = shape
        parts = tensors_of(width, (rows, inputs), dense.coding(role, quantization.dtype16))
        found[name] = {f"{stem_of(name, dense)}.{part}": (dtype, each) for part, dtype, each in parts}
    return found


def quantized(
    spec: ModelSpec, quantization: Quantization, name: str, read: Callable[[str], npt.NDArray[Any]]
) -> QuantizedMatrix | TrellisMatrix:
    """Returns the matrix of a width below 16 that stands for NAME.weight; `read` returns a tensor of `stored_tensors`.

    Raises HeaderInvalid for scales or minima that are not finite.
    """
    dense, (_, (rows, inputs), role) = quantization.dense, spec.tensors[name]
    width = dense_width(spec, dense, name)
    assert dense is not None
    assert width is not None
    coding = dense.coding(role, quantization.dtype16)
    parts = tensors_of(width, (rows, inputs), coding)
    codes, *scales = (read(f"{stem_of(name, dense)}.{part}") for part, _, _ in parts)
    if not all(np.isfinite(each).all() for each in scales):
        raise HeaderInvalid(f"{BACKBONE}: the scales of {name} are not finite: the file is damaged, copy it again")
    if coding.is_trellis(width):
        return TrellisMatrix(width, inputs, codes, scales[0][:, None], dense.power(name))
    scale, minimum = scales
    group = group_of(inputs, dense.group_size)
    return QuantizedMatrix(width, inputs, group, codes, scale, minimum, dense.power(name))


_WHERE = "manifest.json"


def parse_manifest(text: str | bytes) -> Manifest:
    """Returns the manifest that JSON text holds. Raises ManifestInvalid, FormatTooNew, HashMismatch, UnsafePath or
    SizeOverflow."""
    body = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        raw = parsed(body)
    except ValueError as error:
        raise ManifestInvalid(f"manifest.json is not JSON ({error}); convert the model again") from None
    document = mapping(raw, _WHERE)
    check_version(document, _WHERE, FORMAT_NAME, MAJOR, "major")
    if document["major"] < MAJOR:
        raise ManifestInvalid(
            f"{_WHERE} has format version {document['major']}, expected {MAJOR}: convert the model again"
        )
    _check_seal(body, read(_Ends, document, _WHERE).crc32)
    manifest = read(Manifest, document, _WHERE)
    _check(manifest)
    return manifest


@dataclass(frozen=True)
class _Ends:
    """The fields that a manifest begins and ends with, which every file has and no Manifest needs."""

    minor: _Count
    crc32: Annotated[int, Within(0, _CRC32)]


def _check_seal(body: bytes, crc32: int) -> None:
    """Raises HashMismatch unless the last field is the checksum of all the text before it, so that a changed digit
    anywhere is noticed; ManifestInvalid if the text does not end with that field."""
    at = body.rfind(SEAL.encode())
    if at < 0 or body[at:] != f"{SEAL}{crc32}\n}}\n".encode():
        raise ManifestInvalid("manifest.json does not end with its crc32: it was cut, edited or laid out anew")
    if zlib.crc32(memoryview(body)[:at]) != crc32:
        raise HashMismatch("manifest.json differs from its own checksum: it is damaged or was edited; copy it again")


def _check(manifest: Manifest) -> None:
    """Checks the rules between fields: every expert once, each with the sizes that its widths imply."""
    if manifest.page_bytes % 4096:
        raise ManifestInvalid(f"page_bytes is {manifest.page_bytes}, expected a multiple of 4096")
    if (contradiction := next(manifest.model.contradictions(), None)) is not None:
        raise ManifestInvalid(f"the model in manifest.json can't be: {contradiction}")
    for name in known_bounds().keys() & manifest.files.keys():
        check_size(name, manifest.files[name].nbytes)
    _check_dense(manifest)
    _check_neurons(manifest)
    _check_keys(manifest)
    _check_tables(manifest)
    _check_preferences(manifest)
    _check_places(manifest)
    known: dict[tuple[int, tuple[tuple[str, Width], ...], str], tuple[int, int]] = {}
    for entry in manifest.experts:
        alike = (len(str(entry.key)), tuple(entry.bits.items()), str(entry.powers))  # all that their sizes depend on
        if known.get(alike) != (entry.file_bytes, entry.tensor_bytes):
            _check_expert(manifest, entry)
            known[alike] = entry.file_bytes, entry.tensor_bytes


def _check_places(manifest: Manifest) -> None:
    """Checks that experts in one file lie one behind the other, in the order of execution."""
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
    for name in dense.matrices or {}:
        if name not in tensors or dense_width(manifest.model, dense, name) is None:
            raise ManifestInvalid(
                f"manifest.json: matrices of dense should be of the roles that have widths, found {brief(name)}"
            )
    if unfitting := [role for role in dense.trellis if role not in dense.bits or dense.trellis.count(role) > 1]:
        raise ManifestInvalid(
            f"manifest.json: trellis of dense should be roles that have widths, each once, found {brief(unfitting[0])}"
        )
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
    if any(experts.ffn.act.bound is not None for experts in manifest.model.experts.values()):
        raise ManifestInvalid("manifest.json has experts in blocks of neurons, and bounds behind their activation")
    if how.mxfp4 or how.codes == "trellis":
        other = "mxfp4" if how.mxfp4 else "trellis codes"
        raise ManifestInvalid(f"manifest.json has experts in blocks of neurons and {other}: a pack has one of them")
    if NEURONS not in manifest.files:
        raise ManifestInvalid(f"manifest.json has experts in blocks of neurons, and no {NEURONS} with their checksums")


def _check_tables(manifest: Manifest) -> None:
    if manifest.model.tables and NGRAMS not in manifest.files:
        raise ManifestInvalid(f"manifest.json has a model that embeds tokens together, and no {NGRAMS} with the rows")


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
    widths = WIDTHS_OF[manifest.quantization.codes]
    if (other := next((name for name, width in entry.bits.items() if width not in widths), None)) is not None:
        raise unfit(f"{_WHERE}: experts: bits: {other}", f"among {widths}", entry.bits[other])
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
