"""dots.llm1: windows by layer, heads normed one by one, DeepSeek-V3's routers, shared experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import dense_first, experts, sigmoid_router
from moeconv.source.archs.description import Description, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Norm


class Dots1(Family):
    """See `Family`."""

    model_type = "dots1"
    model_class = "Dots1ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        norm, routed = (
            Norm(config.get("rms_norm_eps")),
            experts(config, sigmoid_router(config, ("sigmoid", "noaux_tc"))),
        )
        biases = config.biases("attention_bias", "qkvo")
        dense = config.network("intermediate_size")
        layers = [
            Layer(norm, config.attention(qk_norm="head", biases=biases, window=window), None, ffn)
            for window, ffn in zip(config.windows(), dense_first(config, dense, routed), strict=True)
        ]
        return decoder(self.model_type, config, tokens, layers)
