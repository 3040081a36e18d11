"""StableLM: dense decoders with LayerNorms, of whose heads a part turns; attention and network one after the other, or
side by side."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.dense import NO_ROUTERS, Dense, alone
from moeconv.source.archs.description import Description, Inside, Names, decoder, named
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Norm

_ONE_NORM: Inside = {"ffn_norm": "input_layernorm"}


class StableLm(Dense):
    """See `Dense`."""

    model_type = "stablelm"
    model_class = "StableLmForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("qk_layernorm", False, "heads with LayerNorms can't be packed")
        config.must_be("head_dim", None, "heads fill the hidden size in transformers")
        parallel, norm = bool(config.get("use_parallel_residual")), Norm(config.number("layer_norm_eps"), "layer")
        attention = config.attention(biases=config.biases("use_qkv_bias", "qkv"))
        layer = Layer(norm, attention, None, alone(config.network("intermediate_size")), parallel=parallel)
        names = Names(
            _ONE_NORM if parallel else {}, expert=named("mlp.{projection}", self.projections), zeros=NO_ROUTERS
        )
        return decoder(
            self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), names,
            [config.rope(attention.dim, partial=True)],
        )  # fmt: skip
