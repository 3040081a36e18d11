"""K-EXAONE: layers with windows and rotary positions, and between them layers with neither."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import MORE_PREDICTED, experts, sigmoid_router
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Norm

_BIAS = "mlp.e_score_correction_bias"


class ExaoneMoe(Family):
    """See `Family`."""

    model_type = "exaone_moe"
    model_class = "ExaoneMoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(
            "sliding_window_pattern", "first_k_dense_replace"
        )  # layer_types and mlp_layer_types say it
        kinds = config.get("mlp_layer_types")
        config.only(is_moe_layer=([kind == "sparse" for kind in kinds],))
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config), shorter=True)
        dense = config.network("intermediate_size")
        layers = [
            Layer(
                norm, config.attention(qk_norm="head", window=window, rope=None if window is None else 0), None,
                dense if kind == "dense" else routed,
            )
            for window, kind in zip(config.windows(), kinds, strict=True)
        ]  # fmt: skip
        names = Names(
            {"router.choice_bias": _BIAS}, {"router.choice_bias": "mlp.gate.e_score_correction_bias"},
            left_out={r"mtp\.": MORE_PREDICTED},
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names)
