"""GLM-4.7-Flash: DeepSeek-V3's layers; mlp_layer_types names the ones with experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import experts, latent, latent_names, no_more_predicted, sigmoid_router
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Norm


class Glm4MoeLite(Family):
    """See `Family`. Transformers ignores first_k_dense_replace: without mlp_layer_types, one layer has no experts."""

    model_type = "glm4_moe_lite"
    model_class = "Glm4MoeLiteForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        kinds = config.get("mlp_layer_types")
        config.only(first_k_dense_replace=(kinds.count("dense"),))
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        dense = config.network("intermediate_size")
        layers = [Layer(norm, latent(config), None, dense if kind == "dense" else routed) for kind in kinds]
        inside = latent_names(config, pairs=bool(config.get("rope_interleave")))
        return decoder(self.model_type, config, tokens, layers, Names(inside, left_out=no_more_predicted(config)))
