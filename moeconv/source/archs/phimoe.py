"""Phi-3.5-MoE: LayerNorms and biases everywhere, a sparsemixer in place of a router, long positions."""

from __future__ import annotations

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import EXPERTS_W123, Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.codec import F32
from moert.pack.model_spec import Head, Layer, Tokens
from moert.pack.parts import Experts, Norm, Rope, Router

_CHOSEN = 2  # whatever num_experts_per_tok is


class Phimoe(Family):
    """See `Family`."""

    model_type = "phimoe"
    model_class = "PhimoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("num_experts_per_tok", _CHOSEN, "the sparsemixer chooses two experts")
        config.without_effect("input_jitter_noise")
        attention = config.attention(
            biases=config.biases("attention_bias", "qkvo"), window=config.get("sliding_window")
        )
        router = Router(
            _CHOSEN, False, None, score="sparsemixer", jitter=float(config.get("router_jitter_noise"))
        )  # fmt: skip
        experts = Experts(config.count("num_local_experts"), config.network("intermediate_size"), router)
        layer = Layer(Norm(config.get("rms_norm_eps"), "layer"), attention, None, experts)
        names = Names({"router": "block_sparse_moe.gate"}, {"router": "mlp.router"}, EXPERTS_W123)
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, bias=bool(config.get("lm_head_bias")))
        return decoder(
            self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), names,
            [_rope(config, attention.dim)], head=head,
        )  # fmt: skip


def _rope(config: Config, dim: int) -> tuple[Rope, F32]:
    """Returns the rope and its frequencies. Of longrope, transformers uses the short factors for texts of any length;
    short_mscale and long_mscale must be equal. Raises UnsupportedModel."""
    parameters = config.rope_parameters()
    config.get("original_max_position_embeddings")
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return config.rope(dim)
    config.allowed["rope_type"] = ("default", "longrope")
    short, long = parameters.get("short_mscale"), parameters.get("long_mscale")
    if kind != "longrope" or short != long or short is None:
        raise UnsupportedModel(
            f"config.json sets the rope type {kind!r} with short_mscale {short!r} and long_mscale {long!r}: only "
            "default, and longrope with both alike, can be packed"
        )
    frequencies, _ = config.frequencies()
    return Rope(2 * len(frequencies), float(short)), frequencies
