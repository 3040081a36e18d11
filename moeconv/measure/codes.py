"""Codes of all experts at a width, made layer by layer from what the text asks of each, and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
import torch
from torch import Tensor

from moeconv.measure.layered import LayeredModel
from moeconv.measure.scorers.text import Texts
from moeconv.quantizers.kept import KeptCodes
from moeconv.quantizers.moments import Side, summed, told, widest
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.quantizers.sample import LayerSample
from moeconv.source.experts import Call, Weights
from moert.pack.model_spec import ExpertKey, LayerKey


class LayerCoding:
    """`texts` are what the quantizer looks at. `likely` are widths that will be asked for one after the other: where
    one of them is, all are made, as looking at the text again would take longer. A run that was killed goes on with
    the experts that are still to do."""

    def __init__(self, model: LayeredModel, kept: KeptCodes, texts: Texts, likely: Set[int] = frozenset()) -> None:
        self.model, self.kept, self.texts, self.likely = model, kept, texts, likely
        self._complete: set[int] = set()

    def ensure(self, widths: set[int]) -> None:
        """Every expert at each of these widths, of which the model is then asked. Raises ConversionError."""
        if not widths <= self._complete:
            widths = widths | self.likely if widths & self.likely else widths
            left = self._left(sorted(widths - self._complete))
            if left:
                self._code(left)
            self._complete |= widths

    def _left(self, widths: Sequence[int]) -> dict[LayerKey, dict[ExpertKey, list[int]]]:
        left: dict[LayerKey, dict[ExpertKey, list[int]]] = {}
        for key in self.model.spec.expert_keys():
            missing = [bits for bits in widths if not self.kept.has(key, bits)]
            if missing:
                left.setdefault(key.at, {})[key] = missing
        return left

    def _code(self, left: Mapping[LayerKey, Mapping[ExpertKey, list[int]]]) -> None:
        model, ids, real = self.model, self.texts.ids, self.texts.real
        wants = model.coder.quantizer.wants
        model.original_experts()
        states = model.passage(ids, keeps=True)
        if wants != "nothing":
            with torch.inference_mode():
                model.through(states, ids, real, "what enters each layer")
        widths = sorted({bits for experts in left.values() for missing in experts.values() for bits in missing})
        with model.show(f"coding at {', '.join(map(str, widths))} bits", sum(map(len, left.values())), "expert") as bar:
            for at, experts in left.items():
                seen = None if wants == "nothing" else _Seen(model, model.call_of(states, at, ids, real), wants)
                model.shelf.expect(list(experts))
                for key, missing in experts.items():
                    self._code_expert(key, missing, seen)
                    bar.update(1)
                model.shelf.clear()

    @torch.inference_mode()
    def _code_expert(self, key: ExpertKey, widths: Sequence[int], seen: _Seen | None) -> None:
        own = self.model.shelf.weights(key)
        weights = {name: weight.numpy() for name, weight in zip(self.model.spec.moe.ffn.projections, own, strict=True)}
        rows, inputs = (0, None) if seen is None else seen.by(key, own)
        for bits in widths:
            self.kept.put(key, bits, rows, self.model.coder.coded(key, bits, weights, inputs))


class _Seen:
    """What one layer's experts were asked, and the moments of it: see moeconv.quantizers.moments.Moments."""

    def __init__(self, model: LayeredModel, call: Call, wants: Wants) -> None:
        self.calls, self.call, self.wants = model.calls, call, wants
        sample = LayerSample(widest(model.spec), model.spec.expert_width)
        sample.add(call)
        self.sample = sample.tokens(model.spec.moe.ffn.d_ff)  # of which each expert makes what enters its down matrix
        entering = sample.tokens(model.spec.expert_width)
        self.entering = summed(entering, wants), len(entering)

    def by(self, key: ExpertKey, weights: Weights) -> tuple[int, dict[Side, Inputs]]:
        """Tokens that an expert saw, and the moments of what its matrices saw."""
        x = self.call.x[(self.call.chosen == key.expert).any(1)]
        inner, sampled = (self.calls.inner(key, each, weights) for each in (x, self.sample))
        inside = summed(sampled, self.wants), len(sampled)
        return len(x), {"in": self._told(x, *self.entering), "mid": self._told(inner, *inside)}

    def _told(self, x: Tensor, sampled: Tensor, tokens: int) -> Inputs:
        moment, counted = told(summed(x, self.wants), len(x), sampled, tokens, self.wants)
        return Inputs(np.array([len(x)]), moment[None].numpy(), np.array([counted], np.float32))
