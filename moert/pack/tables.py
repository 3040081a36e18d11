"""Tables that stay on the drive: their rows are read when they are asked for (SPEC.md, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moert.pack.errors import HeaderInvalid
from moert.pack.files import OpenedFile
from moert.pack.manifest import NGRAMS
from moert.pack.reader import Pack
from moert.pack.tensors import Place, header_of

_TYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class StoredRows:
    """The rows of a table in an open file: in place of an array [rows, dim]."""

    def __init__(self, file: OpenedFile, place: Place) -> None:
        self._file, self._start, self._dim = file, place.start, place.shape[1]
        self.dtype, self._type = place.dtype, np.dtype(_TYPES[place.dtype])

    def __getitem__(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns the rows of these numbers [numbers, dim], of the type F32, F16 or, as uint16, BF16. Raises
        FileTruncated or FileMissing."""
        asked, places = np.unique(numbers, return_inverse=True)
        found = np.empty((len(asked), self._dim), self._type)
        for number, row in zip(asked.tolist(), found, strict=True):
            self._file.read_into(row.view(np.uint8).data, self._start + number * row.nbytes)
        return found[places]

    def __del__(self) -> None:
        self._file.close()


def tables_of(pack: Pack) -> dict[str, StoredRows]:
    """Returns the pack's tables by their canonical names. Raises FileMissing, FileTruncated, HeaderInvalid, or the
    error that the pack's room raises."""
    expected = pack.manifest.model.tables
    if not expected:
        return {}
    with pack.opened(NGRAMS) as file:
        found = header_of(file, pack.room).tensors
    if found.keys() != expected.keys():
        raise HeaderInvalid(f"{NGRAMS} has other tables than the model: it is not that of this model")
    for name, place in found.items():
        if place.dtype not in _TYPES or place.shape != expected[name].shape:
            raise HeaderInvalid(
                f"{NGRAMS}: {name} has the shape {place.shape} and the type {place.dtype}, expected "
                f"{expected[name].shape} of {', '.join(_TYPES)}"
            )
    return {name: StoredRows(pack.opened(NGRAMS), place) for name, place in found.items()}
