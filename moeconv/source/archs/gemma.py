"""Gemma 1 and 2: dense decoders with norms whose weights are stored less 1, and with embeddings times a factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moeconv.source.archs.config import Config
from moeconv.source.archs.dense import NO_ROUTERS, NORMS_AROUND, Dense, alone, scale_of
from moeconv.source.archs.description import (
    LAST_LESS_ONE,
    LESS_ONE,
    Description,
    Names,
    Place,
    decoder,
    less_one,
    named,
)
from moert.pack.model_spec import Head, Join, Layer, Tokens
from moert.pack.parts import Attention, Ffn, Norm


class Gemma(Dense):
    """Gemma 1: norms before attention and network alone."""

    model_type = "gemma"
    model_class = "GemmaForCausalLM"
    activation = "hidden_act"
    inside: Mapping[str, str | Place] = LESS_ONE

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.only(hidden_activation=(config.get("hidden_act"),))  # a name of older files, which have both
        biases = config.biases("attention_bias", "qkvo")
        return [config.attention(biases=biases)] * config.count("num_hidden_layers")

    def layer(self, norm: Norm, attention: Attention, network: Ffn) -> Layer:
        return Layer(norm, attention, None, alone(network))

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("use_bidirectional_attention", False, "text that sees what follows can't be packed")
        norm, network = Norm(config.get("rms_norm_eps")), config.network("intermediate_size", self.activation)
        attentions = self.attentions(config)
        layers = [self.layer(norm, attention, network) for attention in attentions]
        names = Names(
            self.inside, expert=named("mlp.{projection}", self.projections), zeros=NO_ROUTERS,
            outside=LAST_LESS_ONE,
        )  # fmt: skip
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, softcap=config.get("final_logit_softcapping"))
        return decoder(
            self.model_type, config, tokens, layers, names, self.ropes(config, attentions[0].dim), head=head,
            embed_scale=config.count("hidden_size") ** 0.5,
        )  # fmt: skip


class Gemma2(Gemma):
    """Gemma 2: norms also behind attention and network, windows by layer, bounded scores and logits."""

    model_type = "gemma2"
    model_class = "Gemma2ForCausalLM"
    activation = "hidden_activation"
    inside: Mapping[str, str | Place] = less_one(NORMS_AROUND)

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.only(hidden_act=(config.get("hidden_activation"),))
        config.without_effect("cache_implementation", "sliding_window_size")
        usual = config.attention(
            biases=config.biases("attention_bias", "qkvo"), scale=scale_of(config),
            softcap=config.get("attn_logit_softcapping"),
        )  # fmt: skip
        return [replace(usual, window=window) for window in config.windows()]

    def layer(self, norm: Norm, attention: Attention, network: Ffn) -> Layer:
        return Layer(norm, attention, None, alone(network), Join(norm), Join(norm))
