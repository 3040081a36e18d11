"""OLMoE: all layers have experts; keys and queries are normed before they are split into heads."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm, Router


class Olmoe(Family):
    """See `Family`."""

    model_type = "olmoe"
    model_class = "OlmoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("attention_bias", False, "attention with biases can't be packed")
        config.must_be("sliding_window", None, "this family's attention has no windows in transformers")
        dim, heads = config.head_dim(), config.count("num_attention_heads")
        if dim * heads != config.count("hidden_size"):
            config.must_be("head_dim", None, "heads must fill the hidden size exactly")
        norm = Norm(config.get("rms_norm_eps"))
        attention = Attention(
            heads, config.get("num_key_value_heads"), dim, scale=dim**-0.5, qk_norm="whole",
            clip=config.get("clip_qkv"), rope=0, buckets=None,
        )  # fmt: skip
        ffn = Ffn(config.count("intermediate_size"), config.activation("hidden_act"), gated=True)
        router = Router(config.count("num_experts_per_tok"), config.get("norm_topk_prob"), capacity=None)
        layer = Layer(norm, attention, None, Experts(config.count("num_experts"), ffn, router))
        return decoder(self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"))
