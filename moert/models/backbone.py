"""The weights of everything but the experts: backbone.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from moert.kernels.backend import Floats, Stored
from moert.kernels.checksum import crc32
from moert.machine.memory import drop_mapped
from moert.pack.codec import U8, QuantizedMatrix
from moert.pack.dense import StoredTensors, quantized, stored_tensors
from moert.pack.errors import FileMissing, HashMismatch, HeaderInvalid
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack

_CHUNK = 1 << 20


_FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_TYPES: Mapping[str, Any] = {**_FLOATS, "U8": np.uint8}


class MappedWeights(dict[str, Stored]):
    """Views of a mapped file. What is taken out with `pop` must be copied before the next call, which lets go of its
    pages: so not much more than the copies is ever in memory."""

    _latest: Stored | None = None

    def pop(self, name: str) -> Stored:  # type: ignore[override]
        if self._latest is not None:
            _drop(self._latest)
        self._latest = super().pop(name)
        return self._latest


def load_backbone(pack: Pack) -> MappedWeights:
    """Canonical name → weights as they are stored: views of the mapped file. What is kept must be copied: where memory
    is short, the pages of a mapped file are read from disk again and again.

    Raises FileMissing, HashMismatch or HeaderInvalid.
    """
    if BACKBONE not in pack.manifest.files:
        raise FileMissing(f"the pack at {pack.root} lists no {BACKBONE}: convert the model again")
    _check_checksum(pack)
    spec, quantization = pack.manifest.model, pack.manifest.quantization
    expected, (about, body) = stored_tensors(spec, quantization), _mapped(pack)
    _check(
        {name: (each["dtype"], tuple(each["shape"])) for name, each in about.items()},
        {name: what for tensors in expected.values() for name, what in tensors.items()},
    )

    def view(name: str) -> npt.NDArray[Any]:
        dtype, (start, stop) = about[name]["dtype"], about[name]["data_offsets"]
        data: npt.NDArray[Any] = body[start:stop].view(_TYPES[dtype]).reshape(about[name]["shape"])
        return data

    weights = MappedWeights()
    for name, tensors in expected.items():
        if name not in tensors:
            assert quantization.dense is not None
            inputs = spec.tensors[name].shape[1]
            weights[name] = quantized(spec, quantization.dense, name, inputs, view)
        else:
            weights[name] = Floats(about[name]["dtype"], view(name))
    return weights


def _mapped(pack: Pack) -> tuple[dict[str, Any], U8]:
    """What the header says of each tensor, and the mapped bytes behind it.

    Raises HeaderInvalid.
    """
    path = pack.file(BACKBONE)
    try:
        with safe_open(path, framework="numpy") as file:  # the library looks at the header
            names = list(file.keys())
        body = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(body[:8].tobytes(), "little")
        header = json.loads(body[8:start].tobytes())
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise HeaderInvalid(f"{BACKBONE} is not a safetensors file ({reason}): copy the pack again") from None
    return {name: header[name] for name in names}, body[start:]


def _check_checksum(pack: Pack) -> None:
    """Reads the file once in pieces, so that it is never in memory as a whole beside its copy."""
    checksum = 0
    with open(pack.file(BACKBONE), "rb") as handle:
        while chunk := handle.read(_CHUNK):
            checksum = crc32(chunk, checksum)
    if checksum != pack.manifest.files[BACKBONE].crc32:
        raise HashMismatch(f"{BACKBONE}: checksum differs from the manifest: the file is damaged, copy it again")


def _drop(stored: Stored) -> None:
    parts = (stored.qweight, stored.scale, stored.minimum) if isinstance(stored, QuantizedMatrix) else (stored.data,)
    for part in parts:
        drop_mapped(part.ctypes.data, part.nbytes)


def _check(found: dict[str, tuple[str, tuple[int, ...]]], expected: StoredTensors) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which the model has not"
        raise HeaderInvalid(f"{BACKBONE} {what}: it is not that of this model")
    for name, (dtype, shape) in expected.items():
        found_dtype, found_shape = found[name]
        if found_shape != shape:
            raise HeaderInvalid(f"{BACKBONE}: {name} has the shape {found_shape}, expected {shape}")
        if dtype is None and found_dtype not in _FLOATS:
            raise HeaderInvalid(
                f"{BACKBONE}: {name} should hold floating-point numbers, {', '.join(_FLOATS)}, found {found_dtype}"
            )
        if dtype not in (None, found_dtype):
            raise HeaderInvalid(f"{BACKBONE}: {name} is of the type {found_dtype}, expected {dtype}")
