"""GLM-4.5 and after: part of each head turns, DeepSeek-V3's routers, shared experts, first layers without experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import dense_first, experts, no_more_predicted, sigmoid_router
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Norm


class Glm4Moe(Family):
    """See `Family`."""

    model_type = "glm4_moe"
    model_class = "Glm4MoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        attention = config.attention(
            qk_norm="head" if config.get("use_qk_norm") else None,
            biases=config.biases("attention_bias", "qkv"),
        )
        dense = config.network("intermediate_size")
        layers = [Layer(norm, attention, None, ffn) for ffn in dense_first(config, dense, routed)]
        ropes = [config.rope(attention.dim, partial=True)]
        return decoder(
            self.model_type, config, tokens, layers, Names(left_out=no_more_predicted(config)), ropes
        )  # fmt: skip
