"""LFM2 with experts: short convolutions in most layers, heads normed one by one in the others, sigmoid routers with a
bias for the choice."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Names, Place, decoder, named
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, StackName, Tokens
from moert.pack.parts import Act, Attention, Experts, Ffn, Norm, Router, ShortConv

_INSIDE: dict[str, str | Place] = {
    "mixer_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn.o": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm", "mixer.in": "conv.in_proj",
    "mixer.out": "conv.out_proj", "router": "feed_forward.gate", "router.choice_bias": "feed_forward.expert_bias",
    "ffn.gate": "feed_forward.w1", "ffn.up": "feed_forward.w3", "ffn.down": "feed_forward.w2",
}  # fmt: skip
_EXPERT = named("feed_forward.experts.{expert}.{projection}", {"gate": "w1", "up": "w3", "down": "w2"})


class Lfm2Moe(Family):
    """See `Family`."""

    model_type = "lfm2_moe"
    model_class = "Lfm2MoeForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.feed_forward.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.get("tie_word_embeddings", "tie_embedding")
        norm, d_model, act = Norm(config.get("norm_eps")), config.count("hidden_size"), Act("silu")
        conv = ShortConv(config.count("conv_L_cache"), bool(config.get("conv_bias")))
        mixers: Mapping[str, ShortConv | Attention] = {
            "conv": conv, "full_attention": config.attention(qk_norm="head"),
        }  # fmt: skip
        router = Router(
            config.count("num_experts_per_tok"), bool(config.get("norm_topk_prob")), None, "sigmoid",
            choice_bias=bool(config.get("use_expert_bias")), factor=config.number("routed_scaling_factor"),
        )  # fmt: skip
        experts = Experts(config.count("num_experts"), Ffn(config.count("moe_intermediate_size"), act, True), router)
        dense, first = Ffn(config.count("intermediate_size"), act, True), config.count("num_dense_layers", least=0)
        layers = [
            Layer(norm, mixer, None, dense if at < first else experts)
            for at, mixer in enumerate(config.of_layers("layer_types", mixers))
        ]
        taps = Place("conv.conv", shape=(d_model, 1, conv.taps))
        names = Names({**_INSIDE, "mixer.conv": taps}, expert=_EXPERT, outside={"decoder.norm": "embedding_norm"})
        return decoder(self.model_type, config, tokens, layers, names)
