"""Qwen3-MoE: heads of queries and keys are normed one by one; some layers may have one network in place of experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Ffn, Norm, Router


class Qwen3Moe(Family):
    """See `Family`."""

    model_type = "qwen3_moe"
    model_class = "Qwen3MoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("attention_bias", False, "attention with biases can't be packed")
        config.only(use_qk_norm=(True,))
        norm = Norm(config.get("rms_norm_eps"))
        window = config.get("sliding_window", "max_window_layers")
        attention = config.attention(qk_norm="head", window=window if config.get("use_sliding_window") else None)
        act = config.activation("hidden_act")
        ffn, dense = (Ffn(config.get(name), act, gated=True) for name in ("moe_intermediate_size", "intermediate_size"))
        router = Router(config.count("num_experts_per_tok"), config.get("norm_topk_prob"), capacity=None)
        experts = Experts(config.count("num_experts", "num_local_experts"), ffn, router)
        step, without = config.count("decoder_sparse_step"), config.get("mlp_only_layers")
        layers = [
            Layer(norm, attention, None, dense if at in without or (at + 1) % step else experts)
            for at in range(config.count("num_hidden_layers"))
        ]
        return decoder(self.model_type, config, tokens, layers)
