"""Mixtral: all layers have a few large experts; the weights of the chosen ones sum to 1."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import EXPERTS_W123, Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm, Router

_NAMES = Names({"router": "block_sparse_moe.gate"}, {"router": "mlp.gate"}, EXPERTS_W123)


class Mixtral(Family):
    """See `Family`."""

    model_type = "mixtral"
    model_class = "MixtralForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, dim = Norm(config.get("rms_norm_eps")), config.head_dim()
        attention = Attention(
            config.count("num_attention_heads"), config.get("num_key_value_heads"), dim, scale=dim**-0.5, qk_norm=None,
            clip=None, rope=0, buckets=None, window=config.get("sliding_window"),
        )  # fmt: skip
        ffn = Ffn(config.count("intermediate_size"), config.activation("hidden_act"), gated=True)
        router = Router(config.count("num_experts_per_tok"), renormalise=True, capacity=None)
        layer = Layer(norm, attention, None, Experts(config.count("num_local_experts"), ffn, router))
        return decoder(self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), _NAMES)
