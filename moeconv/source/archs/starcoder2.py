"""StarCoder2: a dense decoder with LayerNorms, networks without gates, and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.config import Config
from moeconv.source.archs.dense import NO_ROUTERS, Dense, alone
from moeconv.source.archs.description import Description, Names, decoder, named
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Ffn, Norm

_IDLE = (
    "residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32", "scale_attn_weights",
)  # fmt: skip


class Starcoder2(Dense):
    """See `Dense`."""

    model_type = "starcoder2"
    model_class = "Starcoder2ForCausalLM"
    projections: Mapping[str, str] = {"up": "c_fc", "down": "c_proj"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(mlp_type=("default",), norm_type=("layer_norm",))
        config.without_effect(*_IDLE)
        norm, bias = Norm(config.number("norm_epsilon"), "layer"), bool(config.get("use_bias"))
        attention = config.attention(biases=config.biases("use_bias", "qkvo"), window=config.get("sliding_window"))
        network = Ffn(config.count("intermediate_size"), config.activation("hidden_act"), gated=False, bias=bias)
        layers = [Layer(norm, attention, None, alone(network))] * config.count("num_hidden_layers")
        weights, biases = (named("mlp.{projection}", self.projections, last) for last in ("weight", "bias"))
        names = Names(expert=weights, bias=biases if bias else None, zeros=NO_ROUTERS)
        return decoder(self.model_type, config, tokens, layers, names)
