"""Encoder–decoder models with relative position biases, as the ModelSpec describes them (Switch Transformers)."""

from __future__ import annotations

import torch
from torch import Tensor

from moert.kernels.backend import Backend, StoredWeights
from moert.models.attention import CrossAttention, SelfAttention
from moert.models.kv import KvCache, State
from moert.models.layers import Head, RelativeBias, rms_norm, vector
from moert.models.moe import ExpertRunner, feed_forward
from moert.pack.model_spec import ModelSpec, Stack


class _Layer:
    """One layer of either stack; only the decoder's have attention to the encoded input."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, StoredWeights], runner: ExpertRunner, stack: Stack, layer: int,
        backend: Backend,
    ) -> None:  # fmt: skip
        at = f"{stack}.{layer}"
        self.attn = SelfAttention(spec, weights, at, backend)
        if stack == "decoder":
            self.cross = CrossAttention(spec, weights, at, backend)
        self.ffn = feed_forward(spec, weights, runner, stack, layer, backend)


class SwitchModel:
    """See `moert.models.model.Model`."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, StoredWeights], runner: ExpertRunner, backend: Backend
    ) -> None:
        if spec.positions != "relative" or spec.encoder is None or spec.decoder_start_token_id is None:
            raise ValueError("an encoder–decoder model needs relative positions, an encoder and a start token")
        self.spec, self.backend = spec, backend
        self.start = spec.decoder_start_token_id
        self.embed = backend.matrix(weights.pop("embed.weight"))
        head = self.embed if spec.tied_head else backend.matrix(weights.pop("head.weight"))
        self.head = Head(vector(weights, "decoder.norm.weight"), head, spec, backend)
        self.encoder_norm = vector(weights, "encoder.norm.weight")
        distance = spec.relative_max_distance
        self.encoder_bias, self.decoder_bias = (
            RelativeBias(_table(weights, f"{stack}.relative_bias.weight"), distance, bidirectional=stack == "encoder")
            for stack in ("encoder", "decoder")
        )
        self.encoder = [
            _Layer(spec, weights, runner, "encoder", layer, backend) for layer in range(spec.encoder.n_layers)
        ]
        self.decoder = [
            _Layer(spec, weights, runner, "decoder", layer, backend) for layer in range(spec.decoder.n_layers)
        ]

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        state = self._new_state(ids)
        return state, self.step(state, self.start)

    @torch.inference_mode()
    def step(self, state: State, token: int) -> Tensor:
        if self.backend.steps is None:
            return self.head(self._decode([token], state))[0]
        x, bias = self.backend.rows(self.embed, [token]), self.decoder_bias.latest(state.length + 1)
        for layer, cache, (keys, values) in zip(self.decoder, state.caches, state.cross, strict=True):
            layer.attn.step(x, cache, None, bias.by_offset)
            layer.cross.step(x, keys, values)
            layer.ffn.step(x)
        return self.head(x)[0]

    @torch.inference_mode()
    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        if not target_ids:
            raise ValueError("an encoder–decoder model needs target_ids: what the decoder reads, start token included")
        return self.head(self._decode(target_ids, self._new_state(ids)))

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
        x = self.backend.rows(self.embed, ids)
        for layer in self.encoder:
            layer.attn.biased(x, None, bias)
            layer.ffn(x)
        return rms_norm(x, self.encoder_norm, self.spec.norm_eps)

    def _decode(self, ids: list[int], state: State) -> Tensor:
        """Runs decoder tokens after those in the state, several only as the first → [tokens, d_model]."""
        n = len(ids)
        bias = self.decoder_bias.causal(n) if state.length == 0 else self.decoder_bias.latest(state.length + 1)
        x = self.backend.rows(self.embed, ids)
        for layer, cache, (keys, values) in zip(self.decoder, state.caches, state.cross, strict=True):
            layer.attn.biased(x, cache, bias)
            layer.cross(x, keys, values)
            layer.ffn(x)
        return x


def _table(weights: dict[str, StoredWeights], name: str) -> Tensor:
    """Takes the biases of a stack, [buckets, heads], out of `weights`: a copy in float32."""
    stored = weights.pop(name)
    assert isinstance(stored, Tensor), f"{name} is never quantised"
    return stored.to(torch.float32, copy=True)
