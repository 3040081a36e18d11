"""Decoder-only models with rotary positions, as the ModelSpec describes them."""

from __future__ import annotations

import torch
from torch import Tensor

from moert.kernels.backend import Backend, StoredWeights
from moert.models.attention import SelfAttention
from moert.models.kv import KvCache, State
from moert.models.layers import Head, Rotary, vector
from moert.models.moe import ExpertRunner, feed_forward
from moert.pack.model_spec import ModelSpec


class DecoderModel:
    """See `moert.models.model.Model`."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, StoredWeights], runner: ExpertRunner, backend: Backend
    ) -> None:
        if spec.positions != "rope":
            raise ValueError(f"a decoder-only model needs rotary positions, the pack has {spec.positions!r}")
        self.spec, self.backend = spec, backend
        self.embed = backend.matrix(weights.pop("embed.weight"))
        head = self.embed if spec.tied_head else backend.matrix(weights.pop("head.weight"))
        self.head = Head(vector(weights, "decoder.norm.weight"), head, spec, backend)
        self.rotary = Rotary(spec.head_dim, spec.rope_theta)
        self.layers = [
            (
                SelfAttention(spec, weights, f"decoder.{layer}", backend),
                feed_forward(spec, weights, runner, "decoder", layer, backend),
            )
            for layer in range(spec.decoder.n_layers)
        ]

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        state = self._new_state(ids)
        return state, self.head(self._forward(ids, state)[-1:])[0]

    @torch.inference_mode()
    def step(self, state: State, token: int) -> Tensor:
        if self.backend.steps is None:
            return self.head(self._forward([token], state))[0]
        x, turn = self.backend.rows(self.embed, [token]), self.rotary.turn(state.length)
        for (attention, ffn), cache in zip(self.layers, state.caches, strict=True):
            attention.step(x, cache, turn, None)
            ffn.step(x)
        return self.head(x)[0]

    @torch.inference_mode()
    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        if target_ids is not None:
            raise ValueError("a decoder-only model has one sequence: give all of it as ids")
        return self.head(self._forward(ids, self._new_state(ids)))

    def _new_state(self, ids: list[int]) -> State:
        if not ids:
            raise ValueError("the prompt has no tokens")
        return State([KvCache(self.spec.n_kv_heads, self.spec.head_dim) for _ in self.layers])

    def _forward(self, ids: list[int], state: State) -> Tensor:
        """Runs the tokens after those in the state → hidden states [tokens, d_model]."""
        x = self.backend.rows(self.embed, ids)
        for (attention, ffn), cache in zip(self.layers, state.caches, strict=True):
            attention.rotated(x, cache, self.rotary)
            ffn(x)
        return x
