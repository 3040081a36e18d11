"""Everything outside the experts, written tensor by tensor: never all of it in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from moeconv.quantizers.dense import DenseCoder
from moeconv.source.outline import CheckpointError
from moert.pack.codec import QuantizedMatrix, times_two
from moert.pack.errors import WriteFailed
from moert.pack.manifest import BACKBONE, Dense, part_names, stem_of
from moert.pack.writer import PackWriter

_LENGTH_BYTES = 8  # of a safetensors file, before its header, which is filled up to a whole number of these
_TYPES = {
    torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32",
    torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_LARGEST_FIRST = [*reversed(_TYPES)]  # so that every tensor is aligned, as the library lays them out


class Part(NamedTuple):
    """A tensor of the file: its type and shape, and what makes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_backbone(dense: DenseCoder, dtype16: str, writer: PackWriter) -> None:
    """Raises CheckpointError for values that are not finite, WriteFailed."""
    stored_as = writer.quantization.dense
    parts = [part for name in dense.checkpoint.spec.tensors for part in _parts(dense, name, dtype16, stored_as)]
    path = writer.add_file(BACKBONE)
    try:
        with path.open("wb") as file:
            write_tensors(file, parts)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WriteFailed(f"can't write {path}: {error.strerror}; free some space or choose another place") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    writer.seal_file(BACKBONE)


def write_tensors(file: BinaryIO, parts: Sequence[Part]) -> None:
    """A safetensors file, byte for byte what the library writes for the same tensors."""
    ordered = sorted(parts, key=lambda part: (_LARGEST_FIRST.index(part.dtype), part.name))
    header, end = {}, 0
    for part in ordered:
        start, end = end, end + part.dtype.itemsize * math.prod(part.shape)
        header[part.name] = {"dtype": _TYPES[part.dtype], "shape": part.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    for part in ordered:
        file.write(part.make().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _parts(dense: DenseCoder, name: str, dtype16: str, stored_as: Dense | None) -> list[Part]:
    """The tensors that stand for one of the checkpoint's."""
    if dense.width(name) is None:
        stored = _stored(dense, name)
        return [Part(name, stored.dtype, tuple(stored.shape), lambda: _finite(name, _stored(dense, name)))]

    def coded() -> dict[str, Tensor]:
        projection = dense.code(name)
        assert stored_as is not None
        if isinstance(projection, QuantizedMatrix):
            values = (projection.qweight, projection.scale, projection.minimum)
            return {
                part: torch.from_numpy(each) for part, each in zip(part_names(name, stored_as), values, strict=True)
            }
        whole = torch.from_numpy(times_two(projection, -stored_as.power(name)))
        return {f"{stem_of(name, stored_as)}.weight": whole.to(torch.bfloat16 if dtype16 == "BF16" else torch.float16)}

    found = {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in coded().items()}
    return [Part(part, *about, lambda part=part: coded()[part]) for part, about in found.items()]  # type: ignore[misc]


def _stored(dense: DenseCoder, name: str) -> Tensor:
    return dense.checkpoint.stored_tensor(name, dense.checkpoint.spec.tensors[name].shape)


def _finite(name: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{name} holds values that are not finite: the checkpoint is damaged")
    return tensor
