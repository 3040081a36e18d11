"""GPTSAN-japanese as a torch module: transformers dropped it in version 5. The results are those of 4.57.6."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moeconv.source.gptsan_config import GptsanJapaneseConfig

Pasts = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer so far, [rows, heads, tokens, features] each; layers append theirs in turn."""


class Seen(NamedTuple):
    """The facts about tokens that all layers share: `mask` [rows, 1, tokens, keys], true where a token sees a key;
    their places [tokens]; and keys and values of earlier tokens, if any are kept."""

    mask: Tensor
    places: Tensor
    pasts: Pasts | None


class Output(NamedTuple):
    """The final states of the layers [rows, tokens, d_model]."""

    last_hidden_state: Tensor


class Logits(NamedTuple):
    """The logits [rows, tokens, vocab_size]."""

    logits: Tensor


class Attention(nn.Module):
    """Attention without biases."""

    def __init__(self, config: GptsanJapaneseConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.d_model, config.d_model, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, seen: Seen, layer: int) -> Tensor:
        """Returns the attention's output for x, both [rows, tokens, d_model]."""
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (made(x).view(split).transpose(1, 2) for made in (self.q_proj, self.k_proj, self.v_proj))
        if seen.pasts is not None:
            if layer < len(seen.pasts):
                k, v = (torch.cat(pair, dim=2) for pair in zip(seen.pasts[layer], (k, v), strict=True))
            seen.pasts[layer : layer + 1] = [(k, v)]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen.mask)
        found: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(x.shape))
        return found


class Experts(nn.Module):
    """Matrices of all experts of a layer: up [experts, d_ff, d_model], down [experts, d_model, d_ff]."""

    def __init__(self, config: GptsanJapaneseConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.num_experts, config.d_ff, config.d_model))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.d_model, config.d_ff))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns weight · expert(x), 0 for no expert, for x [tokens, d_model], chosen (-1: none) and weights [tokens,
        1]."""
        found = torch.zeros_like(x)
        for expert in sorted({*chosen[chosen >= 0].tolist()}):
            tokens = (chosen[:, 0] == expert).nonzero()[:, 0]
            made = nn.functional.relu(x[tokens] @ self.up[expert].T) @ self.down[expert].T
            found[tokens] = weights[tokens] * made
        return found


class SparseNetwork(nn.Module):
    """x + norm(weight · expert(x) + tanh(bypass · x)), for one expert. An expert takes the first `expert_capacity`
    tokens of a row that choose it; for other tokens x stands in for expert(x)."""

    def __init__(self, config: GptsanJapaneseConfig) -> None:
        super().__init__()
        self.capacity = config.expert_capacity
        self.router = nn.Linear(config.d_model, config.num_experts, bias=config.router_bias)
        self.experts = Experts(config)
        self.bypass = nn.Linear(config.d_model, config.d_model, bias=False)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the network's output for x, both [rows, tokens, d_model]."""
        weights, chosen = self.router(x).softmax(dim=-1).max(dim=-1, keepdim=True)
        taken = nn.functional.one_hot(chosen[..., 0], self.router.out_features).cumsum(dim=1)  # counted from 1
        full = taken.gather(2, chosen) > self.capacity
        flat, share = x.flatten(0, 1), weights.flatten(0, 1)
        made = self.experts(flat, chosen.masked_fill(full, -1).flatten(0, 1), share)
        made = (made + flat * share * full.flatten(0, 1)).view(x.shape)
        return x + self.norm(made + torch.tanh(self.bypass(x)))  # type: ignore[no-any-return]


class DenseNetwork(nn.Module):
    """x + norm(wo · silu(wi · x)), with biases."""

    def __init__(self, config: GptsanJapaneseConfig) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(config.d_model, config.d_ext), nn.Linear(config.d_ext, config.d_model)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the network's output for x, both [rows, tokens, d_model]."""
        return x + self.norm(self.wo(nn.functional.silu(self.wi(x))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + norm(attention(x)), and a network. The first block without experts adds `positions` of its own before
    that."""

    def __init__(self, config: GptsanJapaneseConfig, layer: int) -> None:
        super().__init__()
        sparse, first = layer < config.num_switch_layers, layer == config.num_switch_layers
        self.layer = layer
        self.positions = nn.Embedding(config.max_position_embeddings, config.d_model) if first else None
        self.attention = Attention(config)
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.network = SparseNetwork(config) if sparse else DenseNetwork(config)

    def forward(self, x: Tensor, seen: Seen) -> Tensor:
        """Returns the block's output for x, both [rows, tokens, d_model]."""
        if self.positions is not None:
            x = x + self.positions(seen.places)
        x = x + self.norm(self.attention(x, seen, self.layer))
        found: Tensor = self.network(x)
        return found


class Layers(nn.Module):
    """All layers: from tokens to the states that the head multiplies."""

    def __init__(self, config: GptsanJapaneseConfig) -> None:
        super().__init__()
        assert config.num_layers is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.project = nn.Linear(config.d_model, config.d_model)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        past_key_values: Pasts | None = None, use_cache: bool = False,
    ) -> Output:  # fmt: skip
        """Returns the final states. `input_ids` [rows, tokens], or `inputs_embeds` [rows, tokens, d_model], which go
        into the first block as they are. Keys with 0 in attention_mask [rows, keys], at the end of a row, are seen by
        no token; keys with 1 in token_type_ids [rows, tokens] by all. `past_key_values`: the list in which keys and
        values are kept, whatever `use_cache` says."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        tokens, before = given.shape[1], past_key_values[0][0].shape[2] if past_key_values else 0
        places = torch.arange(before, before + tokens)
        mask = (torch.arange(before + tokens) <= places[:, None])[None, None]
        if token_type_ids is not None and not before:
            mask = mask | (token_type_ids == 1)[:, None, None]
        if attention_mask is not None:
            mask = mask & (attention_mask != 0)[:, None, None]
        x = inputs_embeds
        if x is None:
            x = self.embed_tokens(input_ids) + self.positions(places)
        seen = Seen(mask, places, past_key_values)
        for block in self.blocks:
            x = block(x, seen)
        return Output(nn.functional.silu(self.project(x)))


class GptsanJapanese(nn.Module):
    """The model with its head, whose matrix is the embedding's, and which has a bias."""

    config_class = GptsanJapaneseConfig

    def __init__(self, config: GptsanJapaneseConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Layers(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.tie()

    def tie(self) -> None:
        """Makes head and embedding share one matrix."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, **more: Any) -> Logits:
        """Returns the logits. `more`: see Layers."""
        return Logits(self.lm_head(self.model(input_ids, **more).last_hidden_state))
