"""Codes of all experts at a width, made layer by layer from what the text asks of each, and kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moeconv.measure.layered import LayeredModel
from moeconv.measure.scorers.text import Texts
from moeconv.quantizers.kept import KeptCodes
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.source.experts import Call
from moert.pack.codec import QuantizedMatrix
from moert.pack.model_spec import ExpertKey, LayerKey


class LayerCoding:
    """`texts` are what the quantizer looks at. A run that was killed goes on with the experts that are still to do."""

    def __init__(self, model: LayeredModel, kept: KeptCodes, texts: Texts) -> None:
        self.model, self.kept, self.texts = model, kept, texts

    def ensure(self, widths: set[int]) -> None:
        """Every expert at each of these widths, of which the model is then asked. Raises ConversionError."""
        for bits in sorted(widths):
            left = self._left(bits)
            if left:
                self._code(bits, left)

    def _left(self, bits: int) -> dict[LayerKey, list[ExpertKey]]:
        left: dict[LayerKey, list[ExpertKey]] = {}
        for key in self.model.spec.expert_keys():
            if not self.kept.has(key, bits):
                left.setdefault(key.at, []).append(key)
        return left

    def _code(self, bits: int, left: Mapping[LayerKey, list[ExpertKey]]) -> None:
        model, ids, real = self.model, self.texts.ids, self.texts.real
        wants = model.coder.quantizer.wants
        model.original_experts()
        states = model.passage(ids, keeps=True)
        if wants != "nothing":
            with torch.inference_mode():
                model.through(states, ids, real, "what enters each layer")
        with model.show(f"coding at {bits} bits", sum(map(len, left.values())), "expert") as bar:
            for at, keys in left.items():
                call = None if wants == "nothing" else model.call_of(states, at, ids, real)
                model.shelf.expect(keys)
                for key in keys:
                    self._code_expert(key, bits, call, wants)
                    bar.update(1)
                model.shelf.clear()

    @torch.inference_mode()
    def _code_expert(self, key: ExpertKey, bits: int, call: Call | None, wants: Wants) -> None:
        projections = self.model.spec.moe.ffn.projections
        own = self.model.shelf.weights(key)
        weights = dict(zip(projections, own, strict=True))
        rows, inputs = 0, dict[str, Inputs | None](dict.fromkeys(projections))
        if call is not None:
            x = call.x[(call.chosen == key.expert).any(1)]
            rows, inner = len(x), self.model.calls.inner(key, x, own)
            sides = {"in": _moment(x, wants), "mid": _moment(inner, wants)}
            inputs = {name: sides["mid" if name == "down" else "in"] for name in projections}
        found: dict[str, QuantizedMatrix] = {}
        for name in projections:
            found[name] = self.model.coder.coded(key, name, bits, weights[name].numpy(), inputs[name])
        self.kept.put(key, bits, rows, found)


def _moment(x: Tensor, wants: Wants) -> Inputs:
    """See moeconv.quantizers.moments.Moments; x [tokens, in]."""
    seen = max(1, len(x))
    total = x.T @ x if wants == "products" else x.square().sum(0)
    return Inputs(np.array([len(x)]), (total / seen)[None].numpy())
