"""Settings of tiny models of the families that share one shape of decoder, and what to try of each."""

from __future__ import annotations

from typing import Any, NamedTuple

Variants = dict[str, dict[str, Any]]


class Tiny(NamedTuple):
    """`model`: its class in transformers, and `config` that of its settings, both without ForCausalLM or Config where
    they are called after each other. Of a model that is published inside a larger one, `whole` is that."""

    model: str
    settings: dict[str, Any]
    variants: Variants
    config: str = ""
    whole: str = ""


_SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_THETA = {"rope_theta": 1e4}
_YARN = {
    **_THETA,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LLAMA3 = {
    **_THETA,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
}
_LATENT_VARIANTS: Variants = {
    "plain": {},
    "queries without a rank": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "yarn": {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "tied head": {"tie_word_embeddings": True},
}
_GROUPS: Variants = {
    "not normed": {"norm_topk_prob": False},
    "one group": {"n_group": 1, "topk_group": 1},
    "factor": {"routed_scaling_factor": 2.5},
    "two shared": {"n_shared_experts": 2},
}
_V3 = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5}

_LLAMA4 = {
    **_SIZES,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "intermediate_size": 20,
    "intermediate_size_mlp": 52,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 11,
    "floor_scale": 4,
    "interleave_moe_layer_step": 2,
}
_LLAMA4_VARIANTS: Variants = {
    "plain": {},
    "heads not normed": {"use_qk_norm": False},
    "not tuned": {"attn_temperature_tuning": False},
    "all layers with experts": {"interleave_moe_layer_step": 1},
    "biases": {"attention_bias": True},
    "llama3": {"rope_parameters": _LLAMA3},
}
_GEMMA4 = {
    **_SIZES,
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "intermediate_size": 28,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 4.0,
}
_GEMMA4_VARIANTS: Variants = {
    "plain": {},
    "values of their own": {"attention_k_eq_v": False, "num_global_key_value_heads": None},
    "not bounded": {"final_logit_softcapping": None},
    "biases": {"attention_bias": True},
}

_QWEN3_5 = {
    **_SIZES,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "rms_norm_eps": 1e-3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_QWEN3_NEXT = {**_QWEN3_5, "intermediate_size": 52}
_QWEN3_5_VARIANTS: Variants = {
    "plain": {},
    "biases": {"attention_bias": True},
    "whole heads turn": {"rope_parameters": {**_THETA, "rope_type": "default", "partial_rotary_factor": 1.0}},
    "yarn": {"rope_parameters": {**_YARN, "partial_rotary_factor": 0.5}},
    "longer convolutions": {"linear_conv_kernel_dim": 5},
    "convolutions of one token": {"linear_conv_kernel_dim": 1},
    "as many heads of keys": {"linear_num_value_heads": 2},
    "tied head": {"tie_word_embeddings": True},
    "all layers attend": {"layer_types": ["full_attention"] * 3},
}

FAMILIES: dict[str, Tiny] = {
    "qwen2_moe": Tiny(
        "Qwen2Moe",
        {
            **_SIZES,
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
        {
            "plain": {},
            "no biases": {"qkv_bias": False},
            "normed top-k": {"norm_topk_prob": True},
            "some layers dense": {"mlp_only_layers": [0]},
            "every second layer dense": {"decoder_sparse_step": 2},
            "windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            "llama3": {"rope_parameters": _LLAMA3},
        },
    ),
    "gpt_oss": Tiny(
        "GptOss",
        {
            **_SIZES,
            "head_dim": 8,
            "intermediate_size": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
        },
        {
            "plain": {},
            "no biases": {"attention_bias": False},
            "plain rope": {"rope_parameters": {**_THETA, "rope_type": "default"}},
            "other bounds": {"swiglu_limit": 1.5, "swiglu_alpha": 1.1},
            "all windows": {"layer_types": ["sliding_attention"] * 2},
            "tied head": {"tie_word_embeddings": True},
        },
    ),
    "deepseek_v2": Tiny(
        "DeepseekV2",
        {**_LATENT, "first_k_dense_replace": 1},
        {
            **_LATENT_VARIANTS,
            "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "factor": {"routed_scaling_factor": 2.5},
            "biases of networks": {"mlp_bias": True, "n_shared_experts": 2},
            "all layers with experts": {"first_k_dense_replace": 0},
        },
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3",
        {**_LATENT, **_V3, "first_k_dense_replace": 1},
        {
            **_LATENT_VARIANTS,
            **_GROUPS,
            "halves": {"rope_interleave": False},
            "all layers with experts": {"first_k_dense_replace": 0},
        },
    ),
    "kimi_k2": Tiny("DeepseekV3", {**_LATENT, **_V3, "first_k_dense_replace": 1}, {"plain": {}}),
    "glm4_moe_lite": Tiny(
        "Glm4MoeLite",
        {**_LATENT, **_V3},
        {
            **_LATENT_VARIANTS,
            **_GROUPS,
            "halves": {"rope_interleave": False},
            "other layers dense": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
        },
    ),
    "glm4_moe": Tiny(
        "Glm4Moe",
        {
            **_SIZES,
            **_V3,
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "head_dim": 8,
        },
        {
            "plain": {},
            **_GROUPS,
            "heads normed": {"use_qk_norm": True},
            "biases": {"attention_bias": True},
            "whole heads turn": {"partial_rotary_factor": 1.0},
            "all layers with experts": {"first_k_dense_replace": 0},
        },
    ),
    "dots1": Tiny(
        "Dots1",
        {
            **_SIZES,
            **_V3,
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
        {
            "plain": {},
            **_GROUPS,
            "biases": {"attention_bias": True},
            "no windows": {"sliding_window": None, "max_window_layers": 2},
        },
    ),
    "exaone_moe": Tiny(
        "ExaoneMoe",
        {
            **_SIZES,
            **_V3,
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
        },
        {
            "plain": {},
            "one group": _GROUPS["one group"],
            "not normed": _GROUPS["not normed"],
            "two shared": {"num_shared_experts": 2},
            "all layers with experts": {"first_k_dense_replace": 0},
            "all layers see all": {"layer_types": ["full_attention"] * 2},
        },
    ),
    "minimax_m2": Tiny(
        "MiniMaxM2",
        {
            **_SIZES,
            "head_dim": 8,
            "intermediate_size": 20,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 4,
        },
        {"plain": {}, "whole heads turn": {"rotary_dim": 8}, "tied head": {"tie_word_embeddings": True}},
    ),
    "ernie4_5_moe": Tiny(
        "Ernie4_5_Moe",
        {
            **_SIZES,
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": False,
            "num_hidden_layers": 3,
        },
        {
            "plain": {},
            "tied head": {"tie_word_embeddings": True},
            "biases": {"use_bias": True},
            "none shared": {"moe_num_shared_experts": 0},
            "every second layer": {"moe_layer_start_index": 0, "moe_layer_interval": 2},
            "ends early": {"moe_layer_end_index": 1},
        },
    ),
    "hunyuan_v1_moe": Tiny(
        "HunYuanMoEV1",
        {**_SIZES, "head_dim": 8, "intermediate_size": 20, "num_experts": 6, "moe_topk": 2},
        {
            "plain": {},
            "biases": {"attention_bias": True},
            "alpha": {"rope_parameters": {**_THETA, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
            "top-k by layer": {"moe_topk": [2, 2]},
        },
    ),
    "granitemoe": Tiny(
        "GraniteMoe",
        {
            **_SIZES,
            "intermediate_size": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 6.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
        },
        {"plain": {}, "biases": {"attention_bias": True}, "tied head": {"tie_word_embeddings": True}},
    ),
    "granitemoeshared": Tiny(
        "GraniteMoeShared",
        {
            **_SIZES,
            "intermediate_size": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 6.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "shared_intermediate_size": 28,
        },
        {"plain": {}, "none shared": {"shared_intermediate_size": 0}},
    ),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybrid",
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
            "intermediate_size": 20,
            "shared_intermediate_size": 28,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 6.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "mamba_n_heads": 6,
            "mamba_d_head": 8,
            "mamba_d_state": 5,
        },
        {
            "plain": {},
            "positions": {"position_embedding_type": "rope"},
            "llama3": {"position_embedding_type": "rope", "rope_parameters": _LLAMA3},
            "no word on positions": {"position_embedding_type": None},
            "biases": {"attention_bias": True, "mamba_proj_bias": True},
            "convolutions without biases": {"mamba_conv_bias": False},
            "groups": {"mamba_n_groups": 3},
            "a group for each head": {"mamba_n_groups": 6},
            "other heads": {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_expand": 3, "mamba_d_state": 16},
            "longer convolutions": {"mamba_d_conv": 6},
            "convolutions of one token": {"mamba_d_conv": 1},
            "heads of three features": {"num_attention_heads": 8, "num_key_value_heads": 4},
            "small chunks": {"mamba_chunk_size": 8},
            "all layers attend": {"layer_types": ["attention"] * 3},
            "tied head": {"tie_word_embeddings": True},
        },
    ),
    "phimoe": Tiny(
        "Phimoe",
        {**_SIZES, "intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2},
        {
            "plain": {},
            "biases": {"attention_bias": True, "lm_head_bias": True},
            "window": {"sliding_window": 7},
            "wide jitter": {"router_jitter_noise": 0.2},
            "longrope": {
                "rope_parameters": {
                    **_THETA,
                    "rope_type": "longrope",
                    "short_factor": [1.0, 1.5, 2.0],
                    "long_factor": [2.0, 3.0, 4.0],
                    "short_mscale": 1.2,
                    "long_mscale": 1.2,
                    "original_max_position_embeddings": 64,
                }
            },
        },
    ),
    "lfm2_moe": Tiny(
        "Lfm2Moe",
        {
            **_SIZES,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
        },
        {
            "plain": {},
            "biases": {"conv_bias": True},
            "longer convolutions": {"conv_L_cache": 5},
            "convolutions of one token": {"conv_L_cache": 1},
            "no bias for the choice": {"use_expert_bias": False},
            "not normed": {"norm_topk_prob": False},
            "untied head": {"tie_word_embeddings": False},
            "all layers with experts": {"num_dense_layers": 0},
            "all layers attend": {"layer_types": ["full_attention"] * 3},
        },
    ),
    "jamba": Tiny(
        "Jamba",
        {
            **_SIZES,
            "num_hidden_layers": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_d_state": 5,
            "mamba_dt_rank": 7,
        },
        {
            "plain": {},
            "other biases": {"mamba_conv_bias": False, "mamba_proj_bias": True},
            "rank by width": {"mamba_dt_rank": "auto", "hidden_size": 72},
            "wider states": {"mamba_d_state": 16, "mamba_expand": 3, "mamba_d_conv": 2},
            "convolutions of one token": {"mamba_d_conv": 1},
            "heads of three features": {"num_attention_heads": 8, "num_key_value_heads": 4},
            "all layers with experts": {"expert_layer_period": 1, "expert_layer_offset": 0},
            "all layers attend": {"attn_layer_period": 1, "attn_layer_offset": 0},
            "tied head": {"tie_word_embeddings": True},
        },
    ),
    "qwen3_next": Tiny(
        "Qwen3Next",
        _QWEN3_NEXT,
        {
            **_QWEN3_5_VARIANTS,
            "not normed": {"norm_topk_prob": False},
            "some layers dense": {"mlp_only_layers": [0]},
            "every second layer dense": {"decoder_sparse_step": 2},
        },
    ),
    "qwen3_5_moe_text": Tiny("Qwen3_5Moe", _QWEN3_5, _QWEN3_5_VARIANTS, "Qwen3_5MoeText"),
    "qwen3_5_moe": Tiny("Qwen3_5Moe", _QWEN3_5, {"plain": {}}, "Qwen3_5MoeText", "Qwen3_5Moe"),
    "nemotron_h": Tiny(
        "NemotronH",
        {
            **{name: value for name, value in _SIZES.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "mlp"],
            "head_dim": 7,
            "intermediate_size": 52,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "moe_latent_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "mamba_num_heads": 6,
            "mamba_head_dim": 5,
            "n_groups": 2,
            "ssm_state_size": 9,
            "chunk_size": 16,
        },
        {
            "plain": {},
            "experts as wide as the stream": {"moe_latent_size": None},
            "biases": {"use_bias": True, "mlp_bias": True},
            "experts wider than the stream": {"moe_latent_size": 32},
            "groups of experts": {"n_group": 4, "topk_group": 2},
            "not normed": {"norm_topk_prob": False},
            "another activation": {"mlp_hidden_act": "silu"},
            "one group of heads": {"n_groups": 1, "use_conv_bias": False, "conv_kernel": 2},
            "convolutions of one token": {"conv_kernel": 1},
            "long steps of new weights": {"time_step_min": 0.5, "time_step_max": 0.9},
            "other order": {"layers_block_type": ["moe", "linear_attention", "moe", "full_attention"]},
            "all attend": {"layers_block_type": ["full_attention", "moe"] * 2},
        },
    ),
    "opt": Tiny(
        "OPT",
        {**{name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}, "ffn_dim": 40},
        {
            "plain": {},
            "untied head": {"tie_word_embeddings": False},
            "gelu": {"activation_function": "gelu"},
            "no biases": {"enable_bias": False},
            "norms without weights": {"layer_norm_elementwise_affine": False},
            "no last norm": {"_remove_final_layer_norm": True},
            "heads of three features": {"num_attention_heads": 8},
        },
    ),
    "llama4_text": Tiny("Llama4", _LLAMA4, _LLAMA4_VARIANTS, "Llama4Text"),
    "llama4": Tiny("Llama4", _LLAMA4, {"plain": {}}, "Llama4Text", "Llama4"),
    "gemma4_text": Tiny("Gemma4", _GEMMA4, _GEMMA4_VARIANTS, "Gemma4Text"),
    "gemma4": Tiny("Gemma4", _GEMMA4, {"plain": {}}, "Gemma4Text", "Gemma4"),
}
"""By model_type."""
