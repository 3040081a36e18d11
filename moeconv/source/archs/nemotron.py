"""Nemotron 3 and 4 without experts, and Arcee: dense decoders whose networks have no gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moeconv.source.archs.config import Config
from moeconv.source.archs.dense import Dense
from moeconv.source.archs.description import LAST_LESS_ONE, Names, less_one
from moert.pack.codec import F32
from moert.pack.parts import Attention, Ffn, Norm, Rope


class Arcee(Dense):
    """Arcee's AFM: as Llama, with networks without gates."""

    model_type = "arcee"
    model_class = "ArceeForCausalLM"
    projections: Mapping[str, str] = {"up": "up_proj", "down": "down_proj"}
    biased = True

    def attentions(self, config: Config) -> Sequence[Attention]:
        attention = config.attention(biases=config.biases("attention_bias", "qkvo"))
        return [attention] * config.count("num_hidden_layers")

    def network(self, config: Config) -> Ffn:
        return replace(super().network(config), gated=False)


class Nemotron(Arcee):
    """Nemotron: LayerNorms whose weights are stored less 1; part of each head turns."""

    model_type = "nemotron"
    model_class = "NemotronForCausalLM"

    def norm(self, config: Config) -> Norm:
        return Norm(config.number("norm_eps"), "layer")

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return [config.rope(dim, partial=True)]

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        places = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        return replace(
            super().names(config, attention, network), outside=LAST_LESS_ONE,
            inside=less_one(places),
        )  # fmt: skip
