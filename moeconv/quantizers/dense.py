"""Quantises the matrices outside the experts, for measuring (`trial`) and for writing the pack (`emit`) alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moeconv.errors import WeightsUnusable
from moeconv.quantizers.coder import check_16, dtype16_of, restored
from moeconv.quantizers.group import GroupQuantizer
from moeconv.quantizers.quantizer import times_powers
from moeconv.source.checkpoint import Checkpoint
from moert.pack.layout import DTYPE_BYTES
from moert.pack.manifest import Dense, Quantization, dense_width, stored_tensors
from moert.pack.reader import Projection
from moert.pack.writer import power_stored


class DenseCoder:
    """`dense` gives the widths; None leaves all as it is. What was quantised is kept, for the trial and the pack."""

    def __init__(self, checkpoint: Checkpoint, dense: Dense | None) -> None:
        self.checkpoint = checkpoint
        self.dense = dense
        self._tensors = checkpoint.spec.tensors
        self._coded: dict[str, Projection] = {}

    @property
    def names(self) -> list[str]:
        """Canonical names of the matrices that have a width."""
        return [name for name in self._tensors if self.width(name) is not None]

    def recorded(self) -> Dense | None:
        """What a pack says of them: `dense` with the powers of two that matrices count."""
        if self.dense is None:
            return None
        form16 = dtype16_of(self.checkpoint)
        powers = {name: power_stored(self.code(name), form16) for name in self.names}
        return replace(self.dense, powers={name: power for name, power in powers.items() if power} or None)

    def width(self, name: str) -> int | None:
        return dense_width(self.checkpoint.spec, self.dense, name)

    def code(self, name: str) -> Projection:
        """What a pack stores for one of `names`: a QuantizedMatrix, or weights [out, in] for 16 bits.

        Raises CheckpointError or WeightsUnusable, naming it, for values that the width can't hold.
        """
        width = self.width(name)
        assert width is not None, f"{name} is stored as in the source"
        if width == 16:
            weight = self.source(name).float().numpy()
            check_16(name, weight)
            return weight
        if name not in self._coded:
            self._coded[name] = self._quantize(name, width)
        return self._coded[name]

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Each of `names` with its weights as a pack gives them back, float32 [out, in]."""
        for name in self.names:
            yield name, self.stored_weight(name)

    def stored_weight(self, name: str) -> Tensor:
        return torch.from_numpy(restored(self.code(name), dtype16_of(self.checkpoint)))

    def originals(self) -> Iterator[tuple[str, Tensor]]:
        """The same as the checkpoint has them."""
        for name in self.names:
            yield name, self.source(name).float()

    def source(self, name: str) -> Tensor:
        """Any tensor of the backbone, in the checkpoint's own type."""
        return self.checkpoint.backbone_tensor(name, self._tensors[name].shape)

    def backbone_bytes(self) -> tuple[int, int]:
        """Bytes of all tensors outside the experts: as a pack stores them, and as the checkpoint does."""
        spec, stored, original = self.checkpoint.spec, 0, 0
        quantization = Quantization("", 0, dtype16_of(self.checkpoint), 0, self.dense)
        there = self.checkpoint.description.backbone
        for name, tensors in stored_tensors(spec, quantization).items():
            element = self.checkpoint.stored_tensor(name, self._tensors[name].shape).element_size()
            original += element * int(np.prod(self._tensors[name].shape)) if name in there else 0
            for dtype, shape in tensors.values():
                stored += (element if dtype is None else DTYPE_BYTES[dtype]) * int(np.prod(shape))
        return stored, original

    def _quantize(self, name: str, width: int) -> Projection:
        assert self.dense is not None
        weight = self.source(name).float().numpy()
        try:
            matrix = times_powers(GroupQuantizer(self.dense.group_size).quantize, weight[None], width, None)[0]
        except WeightsUnusable as error:
            raise WeightsUnusable(f"{name}, at {width} bits: {error}") from None
        if not (np.isfinite(matrix.scale).all() and np.isfinite(matrix.minimum).all()):
            raise WeightsUnusable(f"{name}: its scales at {width} bits are not finite in float16")
        return matrix
