"""Decoder-only models with rotary positions, as the ModelSpec describes them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.models.attention import SelfAttention
from moert.models.kv import KvCache, State
from moert.models.layers import RmsNorm, Rotary
from moert.models.moe import ExpertRunner, feed_forward
from moert.pack.model_spec import ModelSpec


class _Layer:
    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], runner: ExpertRunner, layer: int) -> None:
        at = f"decoder.{layer}"
        self.attn_norm = RmsNorm(weights.pop(f"{at}.attn_norm.weight"), spec.norm_eps)
        self.attn = SelfAttention(spec, weights, f"{at}.attn")
        self.ffn_norm = RmsNorm(weights.pop(f"{at}.ffn_norm.weight"), spec.norm_eps)
        self.ffn = feed_forward(spec, weights, runner, "decoder", layer)


class DecoderModel:
    """See `moert.models.model.Model`."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], runner: ExpertRunner) -> None:
        if spec.positions != "rope":
            raise ValueError(f"a decoder-only model needs rotary positions, the pack has {spec.positions!r}")
        self.spec = spec
        self.embed = weights.pop("embed.weight")
        self.head = self.embed if spec.tied_head else weights.pop("head.weight")
        self.norm = RmsNorm(weights.pop("decoder.norm.weight"), spec.norm_eps)
        self.rotary = Rotary(spec.head_dim, spec.rope_theta)
        self.layers = [_Layer(spec, weights, runner, layer) for layer in range(spec.decoder.n_layers)]

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        state = self._new_state(ids)
        return state, self._logits(self._forward(ids, state)[-1])

    @torch.inference_mode()
    def step(self, state: State, token: int) -> Tensor:
        return self._logits(self._forward([token], state)[0])

    @torch.inference_mode()
    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        if target_ids is not None:
            raise ValueError("a decoder-only model has one sequence: give all of it as ids")
        return self._logits(self._forward(ids, self._new_state(ids)))

    def _new_state(self, ids: list[int]) -> State:
        if not ids:
            raise ValueError("the prompt has no tokens")
        return State([KvCache(self.spec.n_kv_heads, self.spec.head_dim) for _ in self.layers])

    def _forward(self, ids: list[int], state: State) -> Tensor:
        """Runs the tokens after those in the state → hidden states [tokens, d_model]."""
        cos, sin = self.rotary.rows(state.length, len(ids))
        x = F.embedding(torch.tensor(ids), self.embed)
        for layer, cache in zip(self.layers, state.caches, strict=True):
            x = x + layer.attn.rotated(layer.attn_norm(x), cache, self.rotary, cos, sin)
            x = x + layer.ffn(layer.ffn_norm(x))
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """[..., d_model] → [..., vocab]."""
        hidden = self.norm(x)
        if self.spec.logit_scale != 1.0:
            hidden = hidden * self.spec.logit_scale
        return F.linear(hidden, self.head)
