"""Encoder–decoder models with relative position biases, as the ModelSpec describes them (Switch Transformers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moert.kernels.backend import Backend, StoredWeights
from moert.models.attention import CrossAttention, SelfAttention
from moert.models.kv import KvCache, State
from moert.models.layers import Head, RelativeBias, rms_norm, vector
from moert.models.moe import ExpertRunner, Guess, feed_forward, guesses
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

    def guesses(self) -> Mapping[tuple[Stack, int], Guess]:
        encoder = guesses("encoder", [layer.ffn for layer in self.encoder])
        return {**encoder, **guesses("decoder", [layer.ffn for layer in self.decoder])}

    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        return self.prefill_many([ids])[0]

    @torch.inference_mode()
    def prefill_many(self, prompts: Sequence[list[int]]) -> list[tuple[State, Tensor]]:
        states = self._new_states(prompts)
        return list(zip(states, self.step_many(states, [self.start] * len(states)), strict=True))

    @torch.inference_mode()
    def step(self, state: State, token: int) -> Tensor:
        if self.backend.steps is None:
            return self.head(self._decode([[token]], [state]))[0]
        x, bias = self.backend.rows(self.embed, [token]), self.decoder_bias.latest(state.length + 1)
        for layer, cache, (keys, values) in zip(self.decoder, state.caches, state.cross, strict=True):
            layer.attn.step(x, cache, None, bias.by_offset)
            layer.cross.step(x, keys, values)
            layer.ffn.step(x)
        return self.head(x)[0]

    @torch.inference_mode()
    def step_many(self, states: Sequence[State], tokens: Sequence[int]) -> Tensor:
        if self.backend.steps is None:
            return self.head(self._decode([[token] for token in tokens], states))
        if len(states) == 1:
            return self.step(states[0], tokens[0])[None]
        x = self.backend.rows(self.embed, tokens)
        rows, biases = torch.split(x, 1), [self.decoder_bias.latest(state.length + 1).by_offset for state in states]
        for at, layer in enumerate(self.decoder):
            for row, state, bias in zip(rows, states, biases, strict=True):
                layer.attn.step(row, state.caches[at], None, bias)
                layer.cross.step(row, *state.cross[at])
            layer.ffn.step_many(x)
        return torch.cat([self.head(row) for row in rows])

    @torch.inference_mode()
    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        if not target_ids:
            raise ValueError("an encoder–decoder model needs target_ids: what the decoder reads, start token included")
        return self.head(self._decode([target_ids], self._new_states([ids])))

    def _new_states(self, prompts: Sequence[list[int]]) -> list[State]:
        """Encodes the inputs, and keeps of each what every decoder layer attends to."""
        if not all(prompts):
            raise ValueError("the prompt has no tokens")
        return [
            State(
                [KvCache(self.spec.n_kv_heads, self.spec.head_dim) for _ in self.decoder],
                [layer.cross.encode(encoded) for layer in self.decoder],
            )
            for encoded in self._encode(prompts)
        ]

    def _encode(self, prompts: Sequence[list[int]]) -> Sequence[Tensor]:
        """Runs the encoder over each prompt → its hidden states, [tokens, d_model]."""
        lengths = [len(ids) for ids in prompts]
        bias = self.encoder_bias.both_ways(lengths[0])
        x = self.backend.rows(self.embed, [token for ids in prompts for token in ids])
        for layer in self.encoder:
            for part, n in zip(torch.split(x, lengths), lengths, strict=True):
                if bias.keys != n:  # one at a time, since each keeps what it has made
                    bias = self.encoder_bias.both_ways(n)
                layer.attn.biased(part, None, bias)
            layer.ffn(x, lengths)
        return torch.split(rms_norm(x, self.encoder_norm, self.spec.norm_eps), lengths)

    def _decode(self, sequences: Sequence[list[int]], states: Sequence[State]) -> Tensor:
        """Runs decoder tokens after those in each state, several only as the first → [all tokens, d_model]."""
        lengths = [len(ids) for ids in sequences]
        biases = [
            self.decoder_bias.latest(state.length + 1) if state.length else self.decoder_bias.causal(n)
            for state, n in zip(states, lengths, strict=True)
        ]
        x = self.backend.rows(self.embed, [token for ids in sequences for token in ids])
        for at, layer in enumerate(self.decoder):
            for part, state, bias in zip(torch.split(x, lengths), states, biases, strict=True):
                layer.attn.biased(part, state.caches[at], bias)
                layer.cross(part, *state.cross[at])
            layer.ffn(x, lengths)
        return x


def _table(weights: dict[str, StoredWeights], name: str) -> Tensor:
    """Takes the biases of a stack, [buckets, heads], out of `weights`: a copy in float32."""
    stored = weights.pop(name)
    assert isinstance(stored, Tensor), f"{name} is never quantised"
    return stored.to(torch.float32, copy=True)
