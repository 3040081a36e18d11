"""Experts as the native kernels take them: what those of equal widths have in common is worked out once."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import addressof, c_char
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.kernels.backend import I64, ExpertView, ProjectionView
from moert.kernels.structs import KINDS, Ffn, Matrix
from moert.pack.codec import MX_GROUP

_MOST = 256  # kinds of expert that are remembered


class NativeExpert:
    """A feed-forward part; `alive` is what holds its bytes. `ffn`: the struct of this name, or its words."""

    __slots__ = ("_alive", "_ffn", "address")

    def __init__(self, ffn: Ffn | I64, address: int, alive: object) -> None:
        self._ffn, self.address, self._alive = ffn, address, alive


class _Kind(NamedTuple):
    """The words of the struct of an expert that lies at address 0, and which of them are addresses (1, others 0)."""

    words: I64
    places: I64
    alive: object


class Kinds:
    """Of experts seen so far. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[int, _Kind] = {}

    def expert(self, view: ExpertView) -> NativeExpert:
        """Experts whose `projections` are the same object are of one kind."""
        kind = self._known.get(id(view.projections))
        if kind is None:
            kind = self._learn(view.projections)
        words = kind.places * _at(view.buffer)
        words += kind.words
        return NativeExpert(words, _at(words), view.buffer)

    def _learn(self, projections: Mapping[str, ProjectionView]) -> _Kind:
        near, far = (_words(projections, start) for start in (1 << 12, 1 << 13))
        places = (far - near) >> 12
        if len(self._known) >= _MOST:
            self._known.clear()
        kind = self._known[id(projections)] = _Kind(near - (places << 12), places, projections)
        return kind


def _words(projections: Mapping[str, ProjectionView], start: int) -> I64:
    """Of the struct of an expert that lies at this address."""
    ffn = Ffn()
    for name, part in projections.items():
        places = [start + at for at in part.places]
        kind = part.bits if part.form is None else KINDS[part.form]
        group = {None: part.group_size, "MXFP4": MX_GROUP}.get(part.form, part.shape[1])
        bias = None if part.bias_place is None else start + part.bias_place
        parts, (rows, cols) = (*places, *[None] * (3 - len(places))), part.shape
        setattr(ffn, name, Matrix(*parts, bias, kind, rows, cols, min(group, cols), power=part.power))
    assert ctypes.sizeof(ffn) % 8 == 0
    return np.frombuffer(bytes(ffn), np.int64)


def _at(array: npt.NDArray[Any]) -> int:
    """The address of its first number."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not to be written
        return int(array.ctypes.data)
