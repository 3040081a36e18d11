"""Which tensors of backbone.safetensors stand for a matrix outside the experts, at the width that a pack gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.codec import QuantizedMatrix, n_groups, row_bytes
from moert.pack.errors import HeaderInvalid
from moert.pack.layout import group_of
from moert.pack.manifest import BACKBONE, Dense, Quantization
from moert.pack.model_spec import ModelSpec

StoredTensors = dict[str, tuple[str | None, tuple[int, ...]]]
"""Name → dtype, as safetensors calls it, and shape. None: any floating-point type, that of the source."""


def dense_width(spec: ModelSpec, dense: Dense | None, name: str) -> int | None:
    """The width of the tensor of this canonical name; None where it is stored as in the source."""
    role = spec.tensors[name].role
    return None if dense is None or role is None else dense.bits.get(role)


def stem_of(name: str, dense: Dense | None) -> str:
    """NAME.weight → NAME; of a matrix that counts a power of two NAME.scaled, so that readers that do not know of
    powers refuse it."""
    return name.removesuffix(".weight") + (".scaled" if dense is not None and dense.power(name) else "")


def part_names(name: str, dense: Dense) -> tuple[str, str, str]:
    """NAME.weight → where its codes, scales and minima are."""
    stem = stem_of(name, dense)
    return f"{stem}.qweight", f"{stem}.scale", f"{stem}.min"


def stored_tensors(spec: ModelSpec, quantization: Quantization) -> dict[str, StoredTensors]:
    """Canonical name → the tensors that stand for it: itself, or codes, scales and minima."""
    dense, found = quantization.dense, dict[str, StoredTensors]()
    for name, (_, shape, _) in spec.tensors.items():
        width = dense_width(spec, dense, name)
        if dense is None or width is None or width == 16:
            whole = name if width is None else f"{stem_of(name, dense)}.weight"
            found[name] = {whole: (None if width is None else quantization.dtype16, shape)}
            continue
        out_features, in_features = shape
        groups = n_groups(in_features, group_of(in_features, dense.group_size))
        codes, scale, minimum = part_names(name, dense)
        wide = ("F16", (out_features, groups))
        found[name] = {codes: ("U8", (out_features, row_bytes(in_features, width))), scale: wide, minimum: wide}
    return found


def quantized(
    spec: ModelSpec, dense: Dense, name: str, in_features: int, read: Callable[[str], npt.NDArray[Any]]
) -> QuantizedMatrix:
    """The matrix of a width below 16 that stands for NAME.weight; `read` gives the tensors of `stored_tensors`.

    Raises HeaderInvalid for scales or minima that are not finite.
    """
    width = dense_width(spec, dense, name)
    assert width is not None
    codes, scale, minimum = (read(part) for part in part_names(name, dense))
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise HeaderInvalid(f"{BACKBONE}: the scales of {name} are not finite: the file is damaged, copy it again")
    group = group_of(in_features, dense.group_size)
    return QuantizedMatrix(width, in_features, group, codes, scale, minimum, dense.power(name))
