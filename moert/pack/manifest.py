"""manifest.json: the one file that says what a pack holds. Written last, and read strictly (moert.pack.parser)."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from moert.pack.codec import LEAST_POWER, MOST_POWER, WIDTHS, Form16
from moert.pack.errors import ManifestInvalid, UnsafePath
from moert.pack.layout import ExpertLayout, expert_layout, with_powers
from moert.pack.model_spec import STACKS, ExpertKey, LayerKey, ModelSpec
from moert.pack.neurons import NeuronLayout, Neurons
from moert.pack.reading import MAX_BYTES, MAX_COUNT, Above, Between, Read, Within, brief, mapping, plain, read

FORMAT_NAME = "model.pack"
BACKBONE = "backbone.safetensors"  # the file with all weights but the experts'
MAJOR = 2
PLAIN_MINOR, PREFERRING_MINOR, JOINED_MINOR, NEURONS_MINOR, TOGETHER_MINOR, POWERS_MINOR = 0, 1, 2, 3, 4, 5
"""Of a pack that has none of these, of one with preferences, of one with several experts in a file, of one whose
experts lie in blocks of neurons, of one of whose rows of neurons lie together, of one of whose matrices some count a
power of two."""
SEAL = ',\n "crc32": '  # what stands before the checksum that ends the file
_HEX = frozenset("0123456789abcdef")
_CRC32 = (1 << 32) - 1
_SHA256 = re.compile("[0-9a-f]{64}")
_WIDTHS = frozenset(WIDTHS)
_LARGEST = 1e30  # that any number of a manifest is

Dtype16 = Literal["F16", "BF16"]
Files = Literal["expert", "layer"]
"""What has a file of its own."""


# How single fields are read -----------------------------------------------------------------------------------------


def safe_path(path: str, where: str = "manifest.json") -> str:
    """`path` itself if it stays inside the pack; raises UnsafePath otherwise."""
    if not isinstance(path, str):
        raise ManifestInvalid(f"{where} should be a path, found {brief(path)}")
    pure = PurePosixPath(path)
    sound = path.isascii() and path.isprintable() and not set("\\:").intersection(path) and 0 < len(path) <= 200
    if not sound or not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise UnsafePath(f"manifest.json names the file {path[:80]!r}, which is not a plain path inside the pack")
    return path


def _digest(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) != 64 or not _HEX.issuperset(value):
        raise ManifestInvalid(f"{where} should be a sha256 in hexadecimal, found {brief(value)}")
    return value


def _key(value: Any, where: str) -> ExpertKey:
    key = value if isinstance(value, list) else []
    whole = [item for item in key[1:3] if isinstance(item, int) and not isinstance(item, bool)]
    if len(key) != 3 or len(whole) != 2 or not isinstance(key[0], str) or key[0] not in STACKS:
        found = f"[{', '.join(brief(item) for item in key[:4])}]" if isinstance(value, list) else brief(value)
        raise ManifestInvalid(f'{where} should be ["decoder", layer, expert], found {found}')
    return ExpertKey("encoder" if key[0] == "encoder" else "decoder", key[1], key[2])


def _widths(value: Any, where: str) -> dict[str, int]:
    widths = mapping(value, where)
    for name, width in widths.items():
        if not isinstance(width, int) or isinstance(width, bool) or width not in WIDTHS:
            raise ManifestInvalid(f"{where}: {name[:20]} should be among {WIDTHS}, found {brief(width)}")
    return widths


def _bits(value: Any, where: str) -> dict[str, int]:
    if not {"gate", "up", "down"}.issuperset(mapping(value, where)):
        raise ManifestInvalid(f"{where} should give widths for gate, up and down, found {brief(list(value))}")
    return _widths(value, where)


def _powers(value: Any, where: str) -> dict[str, int] | None:
    if value is None:
        return None
    powers = mapping(value, where)
    for name, power in powers.items():
        if type(power) is not int or not LEAST_POWER <= power <= MOST_POWER or not power:
            raise ManifestInvalid(
                f"{where}: {name[:60]} should be {LEAST_POWER} to {MOST_POWER} and not 0, found {brief(power)}"
            )
    return powers


def _model(value: Any, where: str) -> ModelSpec:
    return read(ModelSpec, value, where, closed=True)


def _files(value: Any, where: str) -> dict[str, FileEntry]:
    named = mapping(value, where).items()
    return {safe_path(name): read(FileEntry, item, f"{where}: {name[:60]}") for name, item in named}


def _experts(value: Any, where: str) -> tuple[ExpertEntry, ...]:
    """There may be ten thousand: what is sound is read at once, all else field by field, to say what is wrong."""
    if not isinstance(value, list) or len(value) > MAX_COUNT:
        raise ManifestInvalid(f"{where} should be a list, found {brief(value)}")
    widths: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}
    return tuple(_sound(item, widths) or read(ExpertEntry, item, where) for item in value)


def _sound(raw: Any, widths: dict[tuple[tuple[str, int], ...], Mapping[str, int]]) -> ExpertEntry | None:
    """None for anything that is not plainly right. `widths`: those seen so far, of which experts share one."""
    try:
        (stack, layer, expert), path, bits = raw["key"], raw["path"], raw["bits"]
        sha256, importance = raw["sha256"], raw["importance"]
        counts = raw["file_bytes"], raw["tensor_bytes"], raw["crc32"], raw.get("offset", 0)
        plain = raw.get("powers") is None
    except (TypeError, KeyError, ValueError):
        return None
    if (
        not plain
        or type(raw["key"]) is not list
        or stack not in STACKS
        or type(layer) is not int
        or type(expert) is not int
    ):
        return None
    key = ExpertKey(stack, layer, expert)
    if (
        path not in (expert_path(key), layer_path(key.at))
        or type(bits) is not dict
        or type(sha256) is not str
        or not _SHA256.fullmatch(sha256)
    ):
        return None
    if not all(type(count) is int for count in counts) or not all(type(width) is int for width in bits.values()):
        return None
    if not (0 < counts[0] <= MAX_BYTES and 0 < counts[1] <= MAX_BYTES and 0 <= counts[2] <= _CRC32):
        return None
    if not 0 <= counts[3] <= MAX_BYTES:
        return None
    if not {"gate", "up", "down"}.issuperset(bits) or not _WIDTHS.issuperset(bits.values()):
        return None
    if importance is not None and (type(importance) is not float or not abs(importance) <= _LARGEST):
        return None
    shared = widths.setdefault(tuple(bits.items()), bits)
    return ExpertEntry(key, path, counts[0], counts[1], shared, sha256, counts[2], importance, counts[3])


# What the manifest holds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileEntry:
    """A file of the pack that is not an expert."""

    nbytes: Annotated[int, Within(0, MAX_BYTES)]
    sha256: Annotated[str, Read(_digest)]
    crc32: Annotated[int, Within(0, _CRC32)]


@dataclass(frozen=True)
class Dense:
    """How matrices outside the experts were quantised: a width for each of ROLES that has one, 16 among them.
    group_size as for experts. `powers`: canonical name → the power of two that it counts, of matrices that do."""

    quantizer: str
    group_size: Annotated[int, Within(0, MAX_COUNT)]
    bits: Annotated[Mapping[str, int], Read(_widths)]
    powers: Annotated[Mapping[str, int] | None, Read(_powers)] = None

    def power(self, name: str) -> int:
        """Of two, which the matrix of this canonical name counts; 0 for most."""
        return (self.powers or {}).get(name, 0)


@dataclass(frozen=True)
class Quantization:
    """How the experts were quantised. group_size 0 is one group per output channel. `dense` says what became of the
    other matrices; None: they are as in the source."""

    quantizer: str
    group_size: Annotated[int, Within(0, MAX_COUNT)]
    dtype16: Dtype16  # how matrices of 16 bits are stored
    seed: Annotated[int, Within(0, 1 << 32)]
    dense: Dense | None = None
    mxfp4: bool = False
    """Experts' 16-bit projections are stored in the four bits that they have in the source."""
    neurons: Neurons | None = None
    """Experts lie in blocks of neurons."""

    @property
    def form16(self) -> Form16:
        """How experts' 16-bit projections are stored."""
        return "MXFP4" if self.mxfp4 else self.dtype16


@dataclass(frozen=True)
class LossEstimate:
    """One measured value of the metric and the loss it means, with a 95% interval of the loss (fractions). Where the
    metric is a perplexity per word, `reference_per_token` and `value_per_token` are those per token."""

    reference: float
    value: float
    loss: float
    low: float
    high: float
    samples: Annotated[int, Within(0, MAX_COUNT)]
    reference_per_token: float | None = None
    value_per_token: float | None = None

    def per_token(self) -> tuple[float, float] | None:
        """Returns the perplexity per token of the unquantised model and of the pack, where both are known."""
        if self.reference_per_token is None or self.value_per_token is None:
            return None
        return self.reference_per_token, self.value_per_token


_METRICS = {"perplexity": "perplexity per word", "token_perplexity": "perplexity per token"}


def in_words(metric: str) -> str:
    """The name of a metric as a person reads it, with the unit that it counts by."""
    return _METRICS.get(metric, metric)


@dataclass(frozen=True)
class Quality:
    """What the conversion aimed at and what it measured. Hashes are of the samples of each split. `target_loss` is None
    where the aim was a size."""

    metric: str
    target_loss: float | None
    calibration: LossEstimate | None
    heldout: LossEstimate | None
    calibration_sha256: Annotated[str, Read(_digest)]
    heldout_sha256: Annotated[str, Read(_digest)]


@dataclass(frozen=True)
class Preference:
    """Routing that prefers experts which a sequence has used lately, made for room for `share` of all experts.

    In each layer of the decoder the last `recent` experts that tokens went to get the layer's `bonus` on what they are
    chosen by, but for the `sure` best of all, which are taken as they are; `bonus` has a number for each layer with
    experts. `calibration` and `heldout` say what this and the widths cost together.
    """

    share: Annotated[float, Above(0)]
    recent: Annotated[int, Within(1, MAX_COUNT)]
    sure: Annotated[int, Within(0, MAX_COUNT)]
    bonus: Annotated[tuple[float, ...], Between(0, 1e6)]
    calibration: LossEstimate | None = None
    heldout: LossEstimate | None = None


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """One expert: its file, its widths, and what proves the file is the right one.

    `tensor_bytes` counts weights, scales and minima alone, `file_bytes` all that it has of its file, from `offset` on.
    `importance` is the loss measured when this expert alone goes to 2 bits, all others at 4, above that with all at 4;
    None where not measured. `powers`: projection → the power of two that it counts, of those that do.
    """

    key: Annotated[ExpertKey, Read(_key)]
    path: Annotated[str, Read(safe_path)]
    file_bytes: Annotated[int, Within(1, MAX_BYTES)]
    tensor_bytes: Annotated[int, Within(1, MAX_BYTES)]
    bits: Annotated[Mapping[str, int], Read(_bits)]
    sha256: Annotated[str, Read(_digest)]
    crc32: Annotated[int, Within(0, _CRC32)]
    importance: float | None
    offset: Annotated[int, Within(0, MAX_BYTES)] = 0
    powers: Annotated[Mapping[str, int] | None, Read(_powers)] = None


@dataclass(frozen=True)
class Manifest:
    creator: str
    page_bytes: Annotated[int, Within(4096, 1 << 20)]
    model: Annotated[ModelSpec, Read(_model)]
    quantization: Quantization
    quality: Quality | None
    files: Annotated[Mapping[str, FileEntry], Read(_files)]
    experts: Annotated[tuple[ExpertEntry, ...], Read(_experts)]
    preferences: tuple[Preference, ...] = ()
    """Ascending by share."""
    minor: Annotated[int, Within(0, MAX_COUNT)] = PLAIN_MINOR

    def layout(self, entry: ExpertEntry) -> ExpertLayout:
        quantization = self.quantization
        layout = expert_layout(
            self.model, entry.key, entry.bits, quantization.group_size, quantization.form16, self.page_bytes,
            quantization.neurons,
        )  # fmt: skip
        return with_powers(layout, entry.powers, self.page_bytes)

    def neurons(self, entry: ExpertEntry) -> NeuronLayout:
        """Where the neurons of an expert lie, in a pack that has them in blocks (`Quantization.neurons`)."""
        neurons = self.layout(entry).neurons
        assert neurons is not None
        return neurons

    def expert_tensor_bytes(self) -> int:
        return sum(entry.tensor_bytes for entry in self.experts)

    def nbytes(self, without: Collection[str] = ()) -> int:
        """Of all files but the manifest, and but those of these names."""
        others = sum(entry.nbytes for name, entry in self.files.items() if name not in without)
        return others + sum(entry.file_bytes for entry in self.experts)

    @property
    def mean_expert_bytes(self) -> float:
        """Of their files."""
        return sum(entry.file_bytes for entry in self.experts) / len(self.experts)

    def effective_bits(self) -> float:
        """Bits per expert weight, scales and minima included, headers and padding not."""
        weights = len(self.experts) * self.model.weights_per_expert()
        return 8 * self.expert_tensor_bytes() / weights


def expert_path(key: ExpertKey) -> str:
    """Where an expert lies in the pack: experts/D03/E005.safetensors."""
    return f"experts/{key}.safetensors"


def layer_path(at: LayerKey) -> str:
    """Where all experts of a layer lie that have one file, one behind the other: experts/D03.experts."""
    return f"experts/{at}.experts"


def dump_manifest(manifest: Manifest) -> str:
    """The manifest as JSON text, one expert a line so that a diff can be read; its last field is its own checksum."""
    document = plain(manifest)
    minor, experts = document.pop("minor"), document.pop("experts")
    if not manifest.preferences:
        del document["preferences"]
    if manifest.quantization.neurons is None:
        del document["quantization"]["neurons"]
    elif not manifest.quantization.neurons.together:
        del document["quantization"]["neurons"]["together"]
    if document["quantization"]["dense"] is not None and not manifest.quantization.dense.powers:  # type: ignore[union-attr]
        del document["quantization"]["dense"]["powers"]
    for expert in experts:
        for name in ("offset", "powers"):
            if not expert[name]:
                del expert[name]
    for measured in (document["quality"], *document.get("preferences", ())):
        for found in (measured["calibration"], measured["heldout"]) if measured else ():
            for name in ("reference_per_token", "value_per_token"):
                if found and found[name] is None:
                    del found[name]
    head = {"format": FORMAT_NAME, "major": MAJOR, "minor": minor, **document}
    lines = [json.dumps(expert, separators=(",", ":"), allow_nan=False) for expert in experts]
    text = json.dumps(head, indent=1, allow_nan=False)
    return seal(text[: text.rindex("\n}")] + ',\n "experts": [\n  ' + ",\n  ".join(lines) + "\n ]")


def seal(body: str) -> str:
    """Ends the text of a manifest (a JSON object without its closing brace) with the checksum of what is there."""
    return f"{body}{SEAL}{zlib.crc32(body.encode())}\n}}\n"
