"""Encoder–decoder models with relative position biases, as the ModelSpec describes them (Switch Transformers)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moert.models.attention import CrossAttention, SelfAttention
from moert.models.kv import KvCache, State
from moert.models.layers import RelativeBias, RmsNorm
from moert.models.moe import ExpertRunner, feed_forward
from moert.pack.model_spec import ModelSpec, Stack


class _Layer:
    """One layer of either stack; only the decoder's have attention to the encoded input."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, Tensor], runner: ExpertRunner, stack: Stack, layer: int
    ) -> None:
        at = f"{stack}.{layer}"
        self.attn_norm = RmsNorm(weights.pop(f"{at}.attn_norm.weight"), spec.norm_eps)
        self.attn = SelfAttention(spec, weights, f"{at}.attn")
        if stack == "decoder":
            self.cross_norm = RmsNorm(weights.pop(f"{at}.cross_norm.weight"), spec.norm_eps)
            self.cross = CrossAttention(spec, weights, f"{at}.cross")
        self.ffn_norm = RmsNorm(weights.pop(f"{at}.ffn_norm.weight"), spec.norm_eps)
        self.ffn = feed_forward(spec, weights, runner, stack, layer)


class SwitchModel:
    """See `moert.models.model.Model`."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], runner: ExpertRunner) -> None:
        if spec.positions != "relative" or spec.encoder is None or spec.decoder_start_token_id is None:
            raise ValueError("an encoder–decoder model needs relative positions, an encoder and a start token")
        self.spec = spec
        self.start = spec.decoder_start_token_id
        self.embed = weights.pop("embed.weight")
        self.head = self.embed if spec.tied_head else weights.pop("head.weight")
        self.encoder_norm = RmsNorm(weights.pop("encoder.norm.weight"), spec.norm_eps)
        self.decoder_norm = RmsNorm(weights.pop("decoder.norm.weight"), spec.norm_eps)
        distance = spec.relative_max_distance
        self.encoder_bias = RelativeBias(weights.pop("encoder.relative_bias.weight"), distance, bidirectional=True)
        self.decoder_bias = RelativeBias(weights.pop("decoder.relative_bias.weight"), distance, bidirectional=False)
        self.encoder = [_Layer(spec, weights, runner, "encoder", layer) for layer in range(spec.encoder.n_layers)]
        self.decoder = [_Layer(spec, weights, runner, "decoder", layer) for layer in range(spec.decoder.n_layers)]

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        state = self._new_state(ids)
        return state, self._logits(self._decode([self.start], state)[0])

    @torch.inference_mode()
    def step(self, state: State, token: int) -> Tensor:
        return self._logits(self._decode([token], state)[0])

    @torch.inference_mode()
    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        if not target_ids:
            raise ValueError("an encoder–decoder model needs target_ids: what the decoder reads, start token included")
        return self._logits(self._decode(target_ids, self._new_state(ids)))

    def _new_state(self, ids: list[int]) -> State:
        """Encodes the input, and keeps of it what each decoder layer attends to."""
        if not ids:
            raise ValueError("the prompt has no tokens")
        encoded = self._encode(ids)
        caches = [KvCache(self.spec.n_kv_heads, self.spec.head_dim) for _ in self.decoder]
        return State(caches, [layer.cross.encode(encoded) for layer in self.decoder])

    def _encode(self, ids: list[int]) -> Tensor:
        """→ [tokens, d_model]."""
        bias = self.encoder_bias.both_ways(len(ids))
        x = F.embedding(torch.tensor(ids), self.embed)
        for layer in self.encoder:
            x = x + layer.attn.biased(layer.attn_norm(x), None, bias)
            x = x + layer.ffn(layer.ffn_norm(x))
        return self.encoder_norm(x)

    def _decode(self, ids: list[int], state: State) -> Tensor:
        """Runs decoder tokens after those in the state, several only as the first → [tokens, d_model]."""
        n = len(ids)
        bias = self.decoder_bias.causal(n) if state.length == 0 else self.decoder_bias.latest(state.length + 1)
        x = F.embedding(torch.tensor(ids), self.embed)
        for layer, cache, (keys, values) in zip(self.decoder, state.caches, state.cross, strict=True):
            x = x + layer.attn.biased(layer.attn_norm(x), cache, bias)
            x = x + layer.cross(layer.cross_norm(x), keys, values)
            x = x + layer.ffn(layer.ffn_norm(x))
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """[..., d_model] → [..., vocab]."""
        hidden = self.decoder_norm(x)
        if self.spec.logit_scale != 1.0:
            hidden = hidden * self.spec.logit_scale
        return F.linear(hidden, self.head)
