"""DeepSeek-V3: latent attention, sigmoid routers with groups and a bias for the choice, a shared expert."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import dense_first, experts, latent, latent_names, no_more_predicted, sigmoid_router
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Norm


class DeepseekV3(Family):
    """See `Family`."""

    model_type = "deepseek_v3"
    model_class = "DeepseekV3ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        dense = config.network("intermediate_size")
        layers = [Layer(norm, latent(config), None, ffn) for ffn in dense_first(config, dense, routed)]
        inside = latent_names(config, pairs=bool(config.get("rope_interleave")))
        return decoder(self.model_type, config, tokens, layers, Names(inside, left_out=no_more_predicted(config)))


class KimiK2(DeepseekV3):
    """DeepSeek-V3's architecture by another name (Kimi K2), published with experts of four bits."""

    model_type = "kimi_k2"
    config_type = "deepseek_v3"
    loads_by_names = False
