"""dots.llm1: windows by layer, heads normed one by one, DeepSeek-V3's routers, shared experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import experts, sigmoid_router
from moeconv.source.archs.description import Description, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Tokens
from moert.pack.parts import Layer, Norm


class Dots1(Family):
    """See `Family`."""

    model_type = "dots1"
    model_class = "Dots1ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        biases = config.biases("attention_bias", "qkvo")
        dense = config.network("intermediate_size")
        layers = [
            Layer(
                norm, config.attention(qk_norm="head", biases=biases, window=window), None,
                dense if at < config.get("first_k_dense_replace") else routed,
            )
            for at, window in enumerate(config.windows())
        ]  # fmt: skip
        return decoder(self.model_type, config, tokens, layers)
