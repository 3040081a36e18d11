"""Decoder-only models with rotary positions, as the ModelSpec describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moert.kernels.backend import Backend, StoredWeights
from moert.models.attention import SelfAttention
from moert.models.kv import KvCache, State
from moert.models.layers import Head, Rotary, vector
from moert.models.moe import ExpertRunner, Guess, feed_forward, guesses
from moert.pack.model_spec import ModelSpec, Stack


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

    def guesses(self) -> Mapping[tuple[Stack, int], Guess]:
        return guesses("decoder", [ffn for _, ffn in self.layers])

    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        return self.prefill_many([ids])[0]

    @torch.inference_mode()
    def prefill_many(self, prompts: Sequence[list[int]]) -> list[tuple[State, Tensor]]:
        states = [self._new_state(ids) for ids in prompts]
        ends = self._forward(prompts, states)[torch.tensor([len(ids) for ids in prompts]).cumsum(0) - 1]
        return [(state, self.head(end)[0]) for state, end in zip(states, torch.split(ends, 1), strict=True)]

    @torch.inference_mode()
    def step(self, state: State, token: int) -> Tensor:
        if self.backend.steps is None:
            return self.head(self._forward([[token]], [state]))[0]
        x, turn = self.backend.rows(self.embed, [token]), self.rotary.turn(state.length)
        for (attention, ffn), cache in zip(self.layers, state.caches, strict=True):
            attention.step(x, cache, turn, None)
            ffn.step(x)
        return self.head(x)[0]

    @torch.inference_mode()
    def step_many(self, states: Sequence[State], tokens: Sequence[int]) -> Tensor:
        if self.backend.steps is None:
            return self.head(self._forward([[token] for token in tokens], states))
        if len(states) == 1:
            return self.step(states[0], tokens[0])[None]
        x = self.backend.rows(self.embed, tokens)
        rows, turns = torch.split(x, 1), [self.rotary.turn(state.length) for state in states]
        for layer, (attention, ffn) in enumerate(self.layers):
            for row, state, turn in zip(rows, states, turns, strict=True):
                attention.step(row, state.caches[layer], turn, None)
            ffn.step_many(x)
        return torch.cat([self.head(row) for row in rows])

    @torch.inference_mode()
    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        if target_ids is not None:
            raise ValueError("a decoder-only model has one sequence: give all of it as ids")
        return self.head(self._forward([ids], [self._new_state(ids)]))

    def _new_state(self, ids: list[int]) -> State:
        if not ids:
            raise ValueError("the prompt has no tokens")
        return State([KvCache(self.spec.n_kv_heads, self.spec.head_dim, len(ids)) for _ in self.layers])

    def _forward(self, sequences: Sequence[list[int]], states: Sequence[State]) -> Tensor:
        """Runs the tokens of each sequence after those in its state → hidden states [all tokens, d_model]."""
        lengths = [len(ids) for ids in sequences]
        x = self.backend.rows(self.embed, [token for ids in sequences for token in ids])
        for layer, (attention, ffn) in enumerate(self.layers):
            for part, state in zip(torch.split(x, lengths), states, strict=True):
                attention.rotated(part, state.caches[layer], self.rotary)
            ffn(x, lengths)
        return x
