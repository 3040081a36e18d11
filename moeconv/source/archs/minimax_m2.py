"""MiniMax-M2: queries and keys normed as a whole, part of each head turns, sigmoid routers without groups."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import EXPERTS_W123, Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Norm, Router

_INSIDE = {
    "router": "block_sparse_moe.gate", "router.choice_bias": "block_sparse_moe.e_score_correction_bias",
}  # fmt: skip
_IN_MEMORY = {"router": "mlp.gate", "router.choice_bias": "mlp.e_score_correction_bias"}


class MiniMaxM2(Family):
    """See `Family`."""

    model_type = "minimax_m2"
    model_class = "MiniMaxM2ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        layers = config.count("num_hidden_layers")
        config.only(
            scoring_func=("sigmoid",), use_routing_bias=(True,), use_qk_norm=(True,), qk_norm_type=("per_layer",),
            shared_intermediate_size=(0,), attn_type_list=([1] * layers,),
        )  # fmt: skip
        config.without_effect(
            "rotary_dim", "mlp_intermediate_size", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"
        )  # the first is in rope_parameters
        attention = config.attention(qk_norm="whole")
        router = Router(config.count("num_experts_per_tok"), True, None, score="sigmoid", choice_bias=True)
        n = config.count("num_local_experts", "num_experts")
        experts = Experts(n, config.network("intermediate_size"), router)
        layer = Layer(Norm(config.get("rms_norm_eps")), attention, None, experts)
        ropes = [config.rope(attention.dim, partial=True)]
        return decoder(
            self.model_type, config, tokens, [layer] * layers, Names(_INSIDE, _IN_MEMORY, EXPERTS_W123), ropes
        )
