"""manifest.json: the one file that says what a pack holds. Read strictly, written last."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from moert.pack.errors import UnsafePath
from moert.pack.layout import ExpertLayout, expert_layout
from moert.pack.model_spec import ExpertKey, ModelSpec

FORMAT_NAME = "model.pack"
BACKBONE = "backbone.safetensors"  # the file with all weights but the experts'
MAJOR = 1
SEAL = ',\n "crc32": '  # what stands before the checksum that ends the file


@dataclass(frozen=True)
class FileEntry:
    """A file of the pack that is not an expert."""

    nbytes: int
    sha256: str
    crc32: int


@dataclass(frozen=True)
class Dense:
    """How matrices outside the experts were quantised: a width for each of DENSE_ROLES that has one, 16 among them.
    group_size as for experts."""

    quantizer: str
    group_size: int
    bits: Mapping[str, int]


@dataclass(frozen=True)
class Quantization:
    """How the experts were quantised. group_size 0 is one group per output channel. `dense` says what became of the
    other matrices; None: they are as in the source."""

    quantizer: str
    group_size: int
    dtype16: str  # "F16" or "BF16": how 16-bit projections are stored
    seed: int
    dense: Dense | None = None


@dataclass(frozen=True)
class LossEstimate:
    """One measured value of the metric and the loss it means, with a 95% interval of the loss (fractions)."""

    reference: float
    value: float
    loss: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Quality:
    """What the conversion aimed at and what it measured. Hashes are of the samples of each split. `target_loss` is None
    where the aim was a size."""

    metric: str
    target_loss: float | None
    calibration: LossEstimate | None
    heldout: LossEstimate | None
    calibration_sha256: str
    heldout_sha256: str


@dataclass(frozen=True)
class ExpertEntry:
    """One expert: its file, its widths, and what proves the file is the right one.

    `tensor_bytes` counts weights, scales and minima alone, `file_bytes` the whole file. `importance` is the loss
    measured when this expert alone goes to 2 bits, all others at 4, above that with all at 4; None where not measured.
    """

    key: ExpertKey
    path: str
    file_bytes: int
    tensor_bytes: int
    bits: Mapping[str, int]
    sha256: str
    crc32: int
    importance: float | None


@dataclass(frozen=True)
class Manifest:
    creator: str
    page_bytes: int
    model: ModelSpec
    quantization: Quantization
    quality: Quality | None
    files: Mapping[str, FileEntry]
    experts: tuple[ExpertEntry, ...]
    minor: int

    def layout(self, entry: ExpertEntry) -> ExpertLayout:
        quantization = self.quantization
        return expert_layout(
            self.model, entry.key, entry.bits, quantization.group_size, quantization.dtype16, self.page_bytes
        )

    def expert_tensor_bytes(self) -> int:
        return sum(entry.tensor_bytes for entry in self.experts)

    def effective_bits(self) -> float:
        """Bits per expert weight, scales and minima included, headers and padding not."""
        weights = len(self.experts) * self.model.weights_per_expert()
        return 8 * self.expert_tensor_bytes() / weights


def minor_of(model: ModelSpec, quantization: Quantization) -> int:
    """The minor version that first had all that such a pack uses."""
    return 0 if quantization.dense is None and model.moe.activation_limit is None else 1


def expert_path(key: ExpertKey) -> str:
    """Where an expert lies in the pack: experts/D03/E005.safetensors."""
    return f"experts/{key}.safetensors"


def dump_manifest(manifest: Manifest) -> str:
    """The manifest as JSON text, one expert a line so that a diff can be read; its last field is its own checksum."""
    document = asdict(manifest)
    document.pop("minor")
    for part, name in ((document["model"]["moe"], "activation_limit"), (document["quantization"], "dense")):
        if part[name] is None:
            del part[name]  # what version 1.0 does not know is there only where it is used
    experts = document.pop("experts")
    head = {"format": FORMAT_NAME, "major": MAJOR, "minor": manifest.minor, **document}
    lines = [
        json.dumps({**expert, "key": list(expert["key"])}, separators=(",", ":"), allow_nan=False) for expert in experts
    ]
    text = json.dumps(head, indent=1, allow_nan=False)
    return seal(text[: text.rindex("\n}")] + ',\n "experts": [\n  ' + ",\n  ".join(lines) + "\n ]")


def seal(body: str) -> str:
    """Ends the text of a manifest (a JSON object without its closing brace) with the checksum of what is there."""
    return f"{body}{SEAL}{zlib.crc32(body.encode())}\n}}\n"


def safe_path(path: str) -> str:
    """`path` itself if it stays inside the pack; raises UnsafePath otherwise."""
    pure = PurePosixPath(path)
    plain = path.isascii() and path.isprintable() and not set("\\:").intersection(path) and 0 < len(path) <= 200
    if not plain or not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise UnsafePath(f"manifest.json names the file {path[:80]!r}, which is not a plain path inside the pack")
    return path
