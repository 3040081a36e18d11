"""Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate; some layers may have one network in place of experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Norm, Router

_INSIDE = {
    "shared_gate": "mlp.shared_expert_gate",
    **{f"shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}


class Qwen2Moe(Family):
    """See `Family`."""

    model_type = "qwen2_moe"
    model_class = "Qwen2MoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("use_sliding_window")  # layer_types says it
        norm, biases = Norm(config.get("rms_norm_eps")), config.biases("qkv_bias", "qkv")
        experts = Experts(
            config.count("num_experts"), config.network("moe_intermediate_size"),
            Router(config.count("num_experts_per_tok"), config.get("norm_topk_prob"), None),
            config.network("shared_expert_intermediate_size"), shared_gate=True,
        )  # fmt: skip
        dense, step = config.network("intermediate_size"), config.count("decoder_sparse_step")
        without = config.get("mlp_only_layers") or ()
        layers = [
            Layer(
                norm, config.attention(biases=biases, window=window), None,
                dense if at in without or (at + 1) % step else experts,
            )
            for at, window in enumerate(config.windows())
        ]  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, Names(_INSIDE))
