"""A model of which only those neurons are computed that a predictor names, and what lies in one block with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeconv.foresight.lowrank import LayerNetwork, in_blocks
from moeconv.measure.trial import Trial
from moert.pack.codec import WIDTHS, Form16
from moert.pack.layout import Neurons, neuron_layout
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.neurons import NeuronOrder, NeuronPredictor

_WIDEST = max(WIDTHS)
_ANY_PAGE = 4096  # bytes: of which the neurons of a block do not depend


class NamedNeurons:
    """A Naming of moeconv.source.experts. `per_block`: how many neurons of an expert lie in a block, `order`: in which
    order they lie there (None: their own)."""

    def __init__(
        self, predictor: NeuronPredictor, per_block: Callable[[ExpertKey], int], order: NeuronOrder | None = None
    ) -> None:  # fmt: skip
        self._networks = {place: LayerNetwork.of(layer) for place, layer in predictor.layers.items()}
        self._thresholds = {place: layer.threshold for place, layer in predictor.layers.items()}
        self._per_block = per_block
        self._orders = {} if order is None else {
            place: torch.from_numpy(rows.astype(np.int64)) for place, rows in order.layers.items()
        }  # fmt: skip

    @torch.inference_mode()
    def computed(self, key: ExpertKey, x: Tensor) -> Tensor:
        """See Naming."""
        network, size = self._networks[key.at], self._per_block(key)
        scores = network.scores(key.expert, network.compressed(x))
        named = scores >= float(self._thresholds[key.at][key.expert])
        if not self._orders:
            return _in_blocks_of(named, size)
        order = self._orders[key.at][key.expert]
        found = torch.empty_like(named)
        found[:, order] = _in_blocks_of(named[:, order], size)
        return found


def _in_blocks_of(named: Tensor, size: int) -> Tensor:
    """named [rows, d_ff] → what lies in a block of so many with one that is named. [rows, d_ff]"""
    return in_blocks(named, size).repeat_interleave(size, dim=1)[:, : named.shape[1]]


def per_block(spec: ModelSpec, bits: tuple[int, ...], group_size: int, form16: Form16, neurons: Neurons) -> int:
    """How many neurons of an expert of these widths lie in a block; see moert.pack.layout.neuron_layout."""
    widths = dict(zip(spec.moe.ffn.projections, bits, strict=True))
    return neuron_layout(spec, widths, group_size, form16, _ANY_PAGE, neurons).per_block


@dataclass(frozen=True)
class PredictedNeurons:
    """An Instead of moeconv.measure.assignments: blocks are those of the widths that are on trial. `order`: in which
    neurons will lie there (None: their own), which the predictor does not have yet."""

    predictor: NeuronPredictor
    neurons: Neurons
    order: NeuronOrder | None = None

    @cached_property
    def rule(self) -> Any:
        digest = hashlib.sha256(self.predictor.to_bytes()).hexdigest()
        order = [] if self.order is None else [self.order.digest]
        return ["neurons", digest, self.neurons.piece_bytes, *order]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        coder = trial.coder
        form16: Form16 = "MXFP4" if coder.mxfp4 else "F16"

        def size(key: ExpertKey) -> int:
            bits = tuple(min(_WIDEST, width) for width in trial.widths(key))  # unquantised, a pack has them at 16 bits
            return per_block(trial.spec, bits, coder.quantizer.group_size, form16, self.neurons)

        with trial.calls.naming(NamedNeurons(self.predictor, size, self.order)):
            yield

    def seen(self, trial: Trial) -> dict[str, Any]:
        return {}
