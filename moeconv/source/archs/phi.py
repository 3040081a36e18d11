"""Phi 1, 1.5 and 2: dense decoders with LayerNorms and biases everywhere, attention and network side by side."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.config import Config
from moeconv.source.archs.dense import NO_ROUTERS, Dense, alone
from moeconv.source.archs.description import Description, Inside, Names, decoder, named
from moert.pack.model_spec import Head, Layer, Tokens
from moert.pack.parts import Ffn, Norm

_INSIDE: Inside = {"ffn_norm": "input_layernorm", "attn.o": "self_attn.dense"}


class Phi(Dense):
    """See `Dense`."""

    model_type = "phi"
    model_class = "PhiForCausalLM"
    projections: Mapping[str, str] = {"up": "fc1", "down": "fc2"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("resid_pdrop", "embd_pdrop")
        config.must_be("qk_layernorm", False, "heads with LayerNorms can't be packed")
        attention = config.attention(biases="qkvo")
        network = Ffn(config.count("intermediate_size"), config.activation("hidden_act"), gated=False, bias=True)
        layer = Layer(Norm(config.number("layer_norm_eps"), "layer"), attention, None, alone(network), parallel=True)
        weights, biases = (named("mlp.{projection}", self.projections, last) for last in ("weight", "bias"))
        names = Names(
            _INSIDE, expert=weights, bias=biases, zeros=NO_ROUTERS, outside={"decoder.norm": "final_layernorm"}
        )
        return decoder(
            self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), names,
            [config.rope(attention.dim, partial=True)],
            head=Head(bool(config.get("tie_word_embeddings")), 1.0, bias=True),
        )  # fmt: skip
