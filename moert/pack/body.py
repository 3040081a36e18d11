"""The bytes of an expert's file, made of its matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.blocks import place
from moert.pack.codec import F32, Form16, QuantizedMatrix, power_of_halves, times_two, to_bfloat16, to_mxfp4
from moert.pack.layout import ExpertLayout
from moert.pack.manifest import Quantization
from moert.pack.model_spec import ExpertKey

Matrix = QuantizedMatrix | F32
"""As it is stored; float32 stands for 16 bits."""


def expert_body(
    key: ExpertKey, layout: ExpertLayout, quantization: Quantization, projections: Mapping[str, Matrix],
    biases: Mapping[str, F32],
) -> bytearray:  # fmt: skip
    """`projections` [out, in], in blocks of neurons `down` as its transpose; biases [out]. Raises ValueError for what
    is missing, or does not fit the layout."""
    body = bytearray(layout.file_bytes)
    body[: layout.data_offset] = layout.header
    named = {name: _tensors(name, part, quantization) for name, part in projections.items()}
    if layout.neurons is not None:
        tensors = {name: tuple(parts.values()) for name, parts in named.items()}
        try:
            place(layout.neurons, np.frombuffer(body, np.uint8), tensors, biases)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        return body
    plain = {f"{name}.{part}": values for name, parts in named.items() for part, values in parts.items()}
    plain |= {f"{name}.bias": values for name, values in biases.items()}
    if absent := [slot.name for slot in layout.slots if not slot.name.startswith("pad.") and slot.name not in plain]:
        raise ValueError(f"{key}: {absent[0]} is not given")
    for tensor, values in plain.items():
        slot = layout.slot(tensor)
        if values.nbytes != slot.stop - slot.start:
            raise ValueError(f"{key} {tensor}: {values.nbytes} bytes given, the layout has {slot}")
        at = layout.data_offset + slot.start
        body[at : at + values.nbytes] = values.tobytes()
    return body


def _tensors(name: str, part: Matrix, quantization: Quantization) -> dict[str, npt.NDArray[Any]]:
    if isinstance(part, QuantizedMatrix):
        return {"qweight": part.qweight, "scale": part.scale, "min": part.minimum}
    if quantization.mxfp4:
        if (exact := to_mxfp4(part)) is None:
            raise ValueError(f"{name}: weights that MXFP4 does not hold")
        return {"qweight": exact.qweight, "exponent": exact.exponent}
    if quantization.dtype16 == "BF16":
        return {"weight": to_bfloat16(part)}
    return {"weight": times_two(part, -power_of_halves(part)).astype(np.float16)}


def powers_of(projections: Mapping[str, Matrix], quantization: Quantization) -> dict[str, int] | None:
    """Projection → the power of two that it counts, of those that do; None: there are none."""
    found = {name: power_stored(part, quantization.form16) for name, part in projections.items()}
    return {name: power for name, power in found.items() if power} or None


def power_stored(part: Matrix, form16: Form16) -> int:
    """The power of two that a matrix counts where it is stored."""
    if isinstance(part, QuantizedMatrix):
        return part.power
    return power_of_halves(part) if form16 == "F16" else 0
