"""Families of models as llama.cpp knows them: the settings of config.json from a file's metadata."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeconv.source.archs.qwen4 import multipliers_of
from moeconv.source.gguf.facts import Facts
from moeconv.source.gguf.settings import (
    EMBED,
    LONG,
    ROPE,
    SHORT,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    TABLE,
    Settings,
    biases_of,
    by_kind,
    check_scores,
    dense_of,
    experts_of,
    first_dense,
    groups_of,
    in_part,
    longrope,
    networks_of,
    norm_eps,
    plain_positions,
    positions,
    positions_of_llama3,
    rows_of,
    scores_of,
    shared_experts,
    turning_share,
    widths_of,
    windows_of,
    with_llama3,
)
from moeconv.source.outline import CheckpointError


def llama(facts: Facts) -> Settings:
    if facts.count("expert_count", 0):
        return {**experts_of(facts, "num_local_experts"), "sliding_window": None, **with_llama3(facts)}
    return {**biases_of(facts), "mlp_bias": facts.some("ffn_up.bias"), **with_llama3(facts)}


def mistral3(facts: Facts) -> Settings:
    beta, factor = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
    rope = positions(facts)
    if facts.said(beta):
        rope["llama_4_scaling_beta"] = facts.number(beta)
    if facts.said(factor):
        rope["mscale"] = rope["mscale_all_dim"] = facts.number(factor)
    return {"sliding_window": None, "rope_parameters": rope}


def mistral3_type(facts: Facts) -> str:
    return "ministral3" if facts.said("attention.temperature_scale") else "mistral"


def qwen2_dense(facts: Facts) -> Settings:
    return {"layer_types": ["full_attention"] * facts.layers}


def qwen3_dense(facts: Facts) -> Settings:
    return {**qwen2_dense(facts), **biases_of(facts)}


def phi3(facts: Facts) -> Settings:
    rope, length = in_part(facts), "rope.scaling.original_context_length"
    if SHORT in facts.container.tensors and LONG in facts.container.tensors:
        rope |= {**longrope(facts), "attention_factor": facts.number("rope.scaling.attn_factor", 1.0)}
    return {
        "sliding_window": facts.count("attention.sliding_window", 0) or None, "rope_parameters": rope,
        "original_max_position_embeddings": facts.count(length, facts.count("context_length")),
    }  # fmt: skip


def gemma3(facts: Facts) -> Settings:
    head, hidden, softcap = facts.head_dim, facts.count("embedding_length"), "final_logit_softcapping"
    window = "attention.sliding_window"
    return {
        "head_dim": head, "query_pre_attn_scalar": hidden // facts.heads if facts.layers == _LARGEST_GEMMA3 else head,
        "sliding_window": facts.count(window), **biases_of(facts),
        "layer_types": ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(facts.layers)],
        "final_logit_softcapping": facts.number(softcap) if facts.said(softcap) else None,
        "rope_parameters": {
            "full_attention": positions(facts),
            "sliding_attention": {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10000.0)},
        },
    }  # fmt: skip


_LARGEST_GEMMA3 = 62  # layers of the model whose scores have a scale of their own
_LARGEST_GEMMA2 = 46


def gemma(facts: Facts) -> Settings:
    return biases_of(facts)


def gemma2(facts: Facts) -> Settings:
    hidden, largest = facts.count("embedding_length"), facts.layers == _LARGEST_GEMMA2
    return {
        **windows_of(facts, 2), **biases_of(facts),
        "query_pre_attn_scalar": hidden // facts.heads if largest else facts.head_dim,
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
    }  # fmt: skip


def _layer_norms(facts: Facts) -> Settings:
    return {"rms_norm_eps": None, "layer_norm_eps": norm_eps(facts)}


def cohere(facts: Facts) -> Settings:
    return {**biases_of(facts), **_layer_norms(facts), "logit_scale": facts.number("logit_scale", 1.0)}


def cohere2(facts: Facts) -> Settings:
    return {**cohere(facts), **windows_of(facts, 4)}


def phi2(facts: Facts) -> Settings:
    return {**_layer_norms(facts), "rope_parameters": in_part(facts)}


def arcee(facts: Facts) -> Settings:
    return {**biases_of(facts), "mlp_bias": facts.some("ffn_up.bias")}


def nemotron_dense(facts: Facts) -> Settings:
    return {
        **arcee(facts), "rms_norm_eps": None, "norm_eps": norm_eps(facts), "head_dim": facts.head_dim,
        "rope_parameters": in_part(facts),
    }  # fmt: skip


def stablelm(facts: Facts) -> Settings:
    return {**biases_of(facts, "use_qkv_bias"), **_layer_norms(facts), "rope_parameters": in_part(facts)}


def cohere2_moe(facts: Facts) -> Settings:
    check_scores(facts, SIGMOID)
    rms = norm_eps(facts) if facts.said("attention.layer_norm_rms_epsilon") else None
    return {
        **cohere2(facts), **experts_of(facts), "rms_norm_eps": rms, "expert_selection_fn": "sigmoid",
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": facts.count("feed_forward_length"), "mlp_layer_types": networks_of(facts),
        "num_shared_experts": facts.count("expert_shared_count", 0), "prefix_dense_sliding_window_pattern": 1,
        "norm_topk_prob": facts.flag("expert_weights_norm", False),
    }  # fmt: skip


def olmo2(facts: Facts) -> Settings:
    if olmo_type(facts) == "olmo2":
        return biases_of(facts)
    return {**biases_of(facts), **windows_of(facts, 4), **_ropes(facts)}


def _ropes(facts: Facts) -> Settings:
    """Returns a rope for layers without a window, and a plain one for those with one."""
    return {"rope_parameters": {"full_attention": positions(facts), "sliding_attention": plain_positions(facts)}}


def olmo_type(facts: Facts) -> str:
    return "olmo3" if facts.count("attention.sliding_window", 0) else "olmo2"


def olmo(facts: Facts) -> Settings:
    return {**_clip(facts), "rms_norm_eps": None}


def olmoe(facts: Facts) -> Settings:
    return {**experts_of(facts), "norm_topk_prob": False, **_clip(facts)}


def _clip(facts: Facts) -> Settings:
    return {"clip_qkv": facts.number("attention.clamp_kqv") if facts.said("attention.clamp_kqv") else None}


def qwen2(facts: Facts) -> Settings:
    return {
        **experts_of(facts), **widths_of(facts), **dense_of(facts), **biases_of(facts, "qkv_bias"),
        "norm_topk_prob": False, "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
    }  # fmt: skip


def qwen3(facts: Facts) -> Settings:
    return {**experts_of(facts), **widths_of(facts), **dense_of(facts), "norm_topk_prob": True}


def mellum(facts: Facts) -> Settings:
    windows = windows_of(facts, 4 if facts.count("attention.sliding_window", 0) else 1)
    return {
        **experts_of(facts), **widths_of(facts), **biases_of(facts), **windows, **_ropes(facts),
        "mlp_layer_types": networks_of(facts), "norm_topk_prob": True,
    }  # fmt: skip


def qwen_next(facts: Facts) -> Settings:
    return {
        **experts_of(facts), **widths_of(facts), "norm_topk_prob": True, **deltas(facts),
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
    }  # fmt: skip


def deltas(facts: Facts) -> Settings:
    values = facts.count("ssm.time_step_rank")
    kinds = ["full_attention" if attends else "linear_attention" for attends in facts.has("attn_k.weight")]
    return {
        "layer_types": kinds, **biases_of(facts),
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"), "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_num_key_heads": facts.count("ssm.group_count"), "linear_num_value_heads": values,
        "linear_value_head_dim": facts.count("ssm.inner_size") // max(values, 1), "rope_parameters": in_part(facts),
    }  # fmt: skip


def qwen4(facts: Facts) -> Settings:
    pooled = max(facts.each("attention.compress_ratios"))
    kinds = ["indexed_attention" if attends else "linear_attention" for attends in facts.has("attn_k.weight")]
    return {
        **qwen_next(facts), "layer_types": kinds, "output_gate_type": "sigmoid", **_ngrams(facts),
        "hc_count": facts.count("hyper_connection.count"), "hc_lowrank": facts.count("hyper_connection.low_rank"),
        "indexer_n_heads": facts.count("attention.indexer.head_count"), "indexer_kv_heads": 1,
        "indexer_head_dim": facts.count("attention.indexer.key_length"), "indexer_compress_ratio": pooled,
        "indexer_budget": facts.count("attention.indexer.top_k"),
    }  # fmt: skip


def _ngrams(facts: Facts) -> Settings:
    """Returns the settings of tokens together, of which a file has the primes and multipliers that follow from them."""
    metadata, ple = facts.container.metadata, f"{facts.arch}.ple"
    layers = metadata.listed(f"{ple}.layers", int)
    if not layers:
        return {"ple_layer_ids": None}
    if len(layers) > 1:
        raise metadata.wrong(f"{ple}.layers", "names several layers, of which llama.cpp knows one")
    if (table := facts.container.tensors.get(TABLE)) is None:
        raise CheckpointError(f"{facts.container.files[0]} has no {TABLE}: it is incomplete")
    n, heads = facts.count("ple.ngram_size"), facts.count("ple.heads_per_ngram")
    sizes, multipliers = (
        metadata.listed(f"{ple}.{name}", int) or () for name in ("head_vocab_sizes", "layer_multipliers")
    )
    return {
        "ple_layer_ids": [layers[0] + 1], "ngram_size": n, "heads_per_ngram": heads, "split_ngram_parts": 1,
        "ple_embed_dim": (n - 1) * heads * facts.count("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": facts.count("ple.conv_kernel"), "eos_token_id": facts.count("ple.eos_token_id"),
        "ngram_vocab_size_base": min(sizes, default=0), "make_ngram_vocab_size_divisible_by": table.shape[0],
        "seed": _seed(facts.container.tensors[EMBED].shape[0], tuple(multipliers)),
    }  # fmt: skip


def _seed(vocab: int, multipliers: tuple[int, ...]) -> int:
    """Returns the number that gives the first of these multipliers: transformers' own, or the least."""
    tried: list[int] = [1234, *range(_SEEDS)]
    return next((seed for seed in tried if multipliers_of(vocab, 1, seed) == multipliers[:1]), tried[0])


_SEEDS = 1 << 16


def qwen3_next(facts: Facts) -> Settings:
    return {**qwen_next(facts), **dense_of(facts)}


def gpt_oss(facts: Facts) -> Settings:
    rope = positions(facts)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **experts_of(facts, "num_local_experts"), **biases_of(facts), "rope_parameters": rope,
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": [("sliding_attention", "full_attention")[at % 2] for at in range(facts.layers)],
    }  # fmt: skip


def _latent(facts: Facts) -> Settings:
    """Returns the settings of DeepSeek's layers."""
    rope, turning = positions(facts), facts.count("rope.dimension_count")
    if facts.said(key := "rope.scaling.yarn_log_multiplier"):
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * facts.number(key), 6)
    whole, value = (
        facts.count(f"attention.{name}_mla", facts.count(f"attention.{name}"))
        for name in ("key_length", "value_length")
    )
    rank = facts.count("attention.q_lora_rank") if facts.said("attention.q_lora_rank") else None
    return {
        **shared_experts(facts), **first_dense(facts), "rope_parameters": rope, "num_key_value_heads": facts.heads,
        "head_dim": turning, "q_lora_rank": rank, "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": whole - turning, "qk_rope_head_dim": turning, "v_head_dim": value,
    }  # fmt: skip


def deepseek(facts: Facts) -> Settings:
    found = _latent(facts)
    if deepseek_type(facts) == "deepseek_v3":
        return {**found, "rope_interleave": True}
    return {**found, "topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def mistral4(facts: Facts) -> Settings:
    check_scores(facts, SOFTMAX)
    found = _latent(facts)
    whole, beta = found["qk_nope_head_dim"] + found["qk_rope_head_dim"], "attention.temperature_scale"
    rope = {**found["rope_parameters"], **turning_share(facts, whole)}
    rope["llama_4_scaling_beta"] = facts.number(beta) if facts.said(beta) else 1.0  # has no effect on a pack's texts
    return {**found, "head_dim": whole, "rope_interleave": True, "rope_parameters": rope}


def _by_feature(facts: Facts, other: str = "full_attention") -> Settings:
    """Returns the settings of layers with delta rules by feature, and of others with latent attention, by its word."""
    found, latent = _latent(facts), facts.has("attn_kv_a_mqa.weight")
    return {
        **found, "mlp_layer_types": networks_of(facts),
        "layer_types": [other if each else "linear_attention" for each in latent],
        "linear_head_dim": facts.count("kda.head_dim"), "linear_num_heads": rows_of(facts, "ssm_beta.weight") or 1,
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
    }  # fmt: skip


def _renamed(found: Settings) -> Settings:
    """Returns settings by the names of some makers."""
    names = {
        "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "n_group": "num_expert_group",
    }  # fmt: skip
    return {names.get(name, name): value for name, value in found.items() if name != "first_k_dense_replace"}


def kimi_linear(facts: Facts) -> Settings:
    return {**_renamed(_by_feature(facts)), "rope_parameters": None, "moe_renormalize": True}


def glm5_next(facts: Facts) -> Settings:
    check_scores(facts, SIGMOID)
    bound, pool = "kda.gate_lower_bound", "attention.indexer.kpool"
    return {
        **_by_feature(facts, "indexed_attention"), **_streams(facts), "rope_parameters": None,
        "linear_lower_bound": facts.number(bound) if facts.said(bound) else None, "index_kpool": facts.count(pool),
        "index_kpool_always_select_tail": facts.flag(f"{pool}_select_tail", True),
        **{name: facts.count(f"attention.{key}") for name, key in _INDEXER.items()},
    }  # fmt: skip


def bailing3(facts: Facts) -> Settings:
    check_scores(facts, SIGMOID)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if any(facts.bounds(key) or ()):
            raise facts.container.metadata.wrong(f"{facts.arch}.{key}", "bounds gates, which transformers does not do")
    found = _renamed(_by_feature(facts))
    return {
        **found, "moe_renormalize": found.pop("norm_topk_prob"), "kda_safe_gate": facts.flag("kda.safe_gate", True),
        "kda_lower_bound": facts.number("kda.gate_lower_bound"),
    }  # fmt: skip


def step(facts: Facts) -> Settings:
    windows = windows_of(facts)
    full = [kind == "full_attention" for kind in windows["layer_types"]]
    heads, kv = (by_kind(facts.each(f"attention.head_count{end}"), full) for end in ("", "_kv"))
    of_full, of_rest = (max(each or other) for each, other in (heads, heads[::-1]))
    rope, half = positions(facts), {"partial_rotary_factor": 0.5}  # of layers without a window, in all that there are
    if ROPE in facts.container.tensors:
        rope = positions_of_llama3(facts, facts.head_dim // 4)
    return {
        **experts_of(facts, "n_routed_experts"), **widths_of(facts), **windows, "mlp_layer_types": networks_of(facts),
        "num_attention_heads": of_full, "num_sliding_attention_heads": of_rest,
        "num_key_value_heads": max(kv[0] or kv[1]), "head_dim": facts.head_dim,
        "share_expert_dim": facts.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_expert_weight": facts.flag("expert_weights_norm", True),
        "swiglu_limits": facts.bounds("swiglu_clamp_exp"), "swiglu_limits_shared": facts.bounds("swiglu_clamp_shexp"),
        "rope_parameters": {"full_attention": {**rope, **half}, "sliding_attention": plain_positions(facts)},
    }  # fmt: skip


def indexed(facts: Facts) -> Settings:
    """Returns the settings of DeepSeek-V3.2's layers and indexers."""
    return {
        **_latent(facts), "mlp_layer_types": networks_of(facts), "scoring_func": scores_of(facts),
        **{name: facts.count(f"attention.{key}") for name, key in _INDEXER.items()},
    }  # fmt: skip


_INDEXER = {
    f"index_{name}": f"indexer.{key}"
    for name, key in (("n_heads", "head_count"), ("head_dim", "key_length"), ("topk", "top_k"))
}


def deepseek4(facts: Facts) -> Settings:
    key, metadata = f"{facts.arch}.attention.compress_ratios", facts.container.metadata
    ratios = metadata.listed(key, int) or ()
    if len(ratios) < facts.layers or not {*ratios} <= _POOLS.keys():
        raise metadata.wrong(key, f"should have one of {', '.join(map(str, _POOLS))} for each of {facts.layers} layers")
    share, hashed = turning_share(facts, facts.head_dim), facts.count("hash_layer_count", 0)
    main = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10000.0), **share}
    pooled = {**positions(facts), **share, "rope_theta": facts.number("attention.compress_rope_freq_base")}
    if pooled["rope_type"] == "yarn":
        pooled["attention_factor"] = 1.0
    counts = {
        "q_lora_rank": "q_lora_rank", "o_lora_rank": "output_lora_rank", "o_groups": "output_group_count",
        "sliding_window": "sliding_window", **_INDEXER,
    }  # fmt: skip
    return {
        **experts_of(facts, "n_routed_experts"), **widths_of(facts), **share,
        "rope_parameters": {"main": main, "compress": pooled},
        **{name: facts.count(f"attention.{said}") for name, said in counts.items()}, **_streams(facts),
        "n_shared_experts": facts.count("expert_shared_count"), "scoring_func": scores_of(facts, SQRT_SOFTPLUS),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "layer_types": [_POOLS[every] for every in ratios[: facts.layers]],
        "compress_rates": {kind: every for every, kind in _POOLS.items() if every},
        "mlp_layer_types": ["hash_moe" if at < hashed else "moe" for at in range(facts.layers)],
    }  # fmt: skip


def _streams(facts: Facts) -> Settings:
    """Returns the settings of streams, and of the bound on gates of networks between them."""
    limits = {*(facts.bounds(key := "swiglu_clamp_exp") or ()), *(facts.bounds("swiglu_clamp_shexp") or ())}
    if len(limits) != 1:
        raise facts.container.metadata.wrong(
            f"{facts.arch}.{key}", "should be the same number for all layers and experts"
        )
    return {
        "hc_mult": facts.count("hyper_connection.count"), "hc_eps": facts.number("hyper_connection.epsilon"),
        "hc_sinkhorn_iters": facts.count("hyper_connection.sinkhorn_iterations"), "swiglu_limit": limits.pop(),
    }  # fmt: skip


_POOLS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""Tokens of a pool → the attention that has such pools."""


def deepseek_type(facts: Facts) -> str:
    """Returns the model_type of llama.cpp's deepseek2."""
    sigmoid = facts.count("expert_gating_func", 0) == SIGMOID or facts.some("exp_probs_b.bias")
    return "deepseek_v3" if sigmoid else "deepseek_v2"


def glm4(facts: Facts) -> Settings:
    return {
        **shared_experts(facts), **first_dense(facts), **biases_of(facts), "rope_parameters": in_part(facts),
        "use_qk_norm": facts.some("attn_q_norm.weight"),
    }  # fmt: skip


def dots1(facts: Facts) -> Settings:
    return {**shared_experts(facts), **first_dense(facts), **biases_of(facts), **windows_of(facts)}


def exaone4(facts: Facts) -> Settings:
    windows = windows_of(facts, 4 if facts.count("attention.sliding_window", 0) else 1)
    return {**windows, **with_llama3(facts)}


def exaone(facts: Facts) -> Settings:
    return {
        **shared_experts(facts, "num_experts", "num_shared_experts"), **windows_of(facts), **with_llama3(facts),
        "mlp_layer_types": networks_of(facts),
    }  # fmt: skip


def afmoe(facts: Facts) -> Settings:
    return {
        **experts_of(facts), **widths_of(facts), **windows_of(facts, 4), **biases_of(facts), "mup_enabled": True,
        "num_shared_experts": facts.count("expert_shared_count"), "score_func": scores_of(facts),
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "route_scale": facts.number("expert_weights_scale", 1.0),
        "route_norm": facts.flag("expert_weights_norm", False), **groups_of(facts),
    }  # fmt: skip


def minimax(facts: Facts) -> Settings:
    return {
        **experts_of(facts, "num_local_experts"), "intermediate_size": facts.count("expert_feed_forward_length"),
        "rotary_dim": facts.count("rope.dimension_count"), "rope_parameters": in_part(facts),
    }  # fmt: skip


def minimax_m3(facts: Facts) -> Settings:
    check_scores(facts, SIGMOID)
    width, kinds = facts.count("expert_feed_forward_length"), ("full_attention", "minimax_m3_sparse")
    blocks = {"index_block_size": "block_size", "index_topk_blocks": "top_k", "index_local_blocks": "local_blocks"}
    return {
        **experts_of(facts, "num_local_experts"), "intermediate_size": width, "rope_parameters": in_part(facts),
        "dense_intermediate_size": facts.count("feed_forward_length"), "mlp_layer_types": networks_of(facts),
        "shared_intermediate_size": width * facts.count("expert_shared_count"),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0), "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        "layer_types": [kinds[has] for has in facts.has("indexer.q_proj.weight")],
        **{name: facts.count(f"attention.indexer.{key}") for name, key in blocks.items()},
    }  # fmt: skip


def ernie(facts: Facts) -> Settings:
    with_experts = [at for at, has in enumerate(facts.has("ffn_gate_inp.weight")) if has] or [0]
    return {
        **experts_of(facts, "moe_num_experts", "moe_k"), **widths_of(facts), **biases_of(facts, "use_bias"),
        "moe_num_shared_experts": facts.count("expert_shared_count", 0),
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0), "moe_layer_end_index": with_experts[-1],
    }  # fmt: skip


def ernie_dense(facts: Facts) -> Settings:
    return biases_of(facts, "use_bias")


def seed(facts: Facts) -> Settings:
    of_networks, of_o = (facts.some(f"{name}.bias") for name in ("ffn_up", "attn_output"))
    return {**biases_of(facts), "attention_out_bias": of_o, "mlp_bias": of_networks}


def starcoder2(facts: Facts) -> Settings:
    return {**biases_of(facts, "use_bias"), "norm_epsilon": norm_eps(facts), "rms_norm_eps": None}


def hunyuan_dense(facts: Facts) -> Settings:
    return {**biases_of(facts), "head_dim": facts.head_dim}


def hunyuan(facts: Facts) -> Settings:
    return {
        **experts_of(facts, top_k="moe_topk"), **biases_of(facts), "head_dim": facts.head_dim,
        "intermediate_size": facts.count("expert_feed_forward_length"),
    }  # fmt: skip


def hy(facts: Facts) -> Settings:
    width = facts.count("expert_feed_forward_length")
    if not facts.flag(key := "expert_weights_norm", False):
        raise facts.container.metadata.wrong(f"{facts.arch}.{key}", "is not true: such weights can't be packed")
    return {
        **experts_of(facts), "moe_intermediate_size": width, **biases_of(facts), "mlp_layer_types": networks_of(facts),
        "num_shared_experts": facts.count("expert_shared_feed_forward_length", width) // max(width, 1),
        "router_scaling_factor": facts.number("expert_weights_scale", 1.0), "scoring_func": scores_of(facts),
    }  # fmt: skip


def granite(facts: Facts) -> Settings:
    return {**experts_of(facts, "num_local_experts"), **_granite_factors(facts), **with_llama3(facts)}


def granite_dense(facts: Facts) -> Settings:
    return {**_granite_factors(facts), "mlp_bias": facts.some("ffn_up.bias"), **with_llama3(facts)}


def granite_swa(facts: Facts) -> Settings:
    many, base = facts.count("expert_count", 0) > 0, facts.number("rope.freq_base", 10000.0)
    turning = facts.of_layers(f"{facts.arch}.attention.rope_pattern", bool) or [True] * facts.layers
    return {
        **_granite_factors(facts), **windows_of(facts), "layer_rope_theta": [base * turns for turns in turning],
        **(experts_of(facts, "num_local_experts") if many else {"mlp_bias": facts.some("ffn_up.bias")}),
    }  # fmt: skip


def _granite_factors(facts: Facts) -> Settings:
    factors = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    found = {name: facts.number(key, 1.0) for name, key in factors.items()}
    shared = facts.count("expert_shared_feed_forward_length", 0)
    return {**found, **biases_of(facts), **({"shared_intermediate_size": shared} if shared else {})}


def granite_hybrid(facts: Facts) -> Settings:
    heads, inner = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size")
    kinds = ["attention" if attends else "mamba" for attends in facts.has("attn_q.weight")]
    return {
        **granite(facts), "layer_types": kinds, "mamba_n_heads": heads, "mamba_d_head": inner // max(heads, 1),
        "mamba_d_conv": facts.count("ssm.conv_kernel"), "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_n_groups": facts.count("ssm.group_count"),
        "mamba_expand": inner // max(facts.count("embedding_length"), 1),
        "mamba_conv_bias": facts.some("ssm_conv1d.bias"), "mamba_proj_bias": facts.some("ssm_in.bias"),
        "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned", False) else "nope",
    }  # fmt: skip


def phimoe(facts: Facts) -> Settings:
    found = {
        **experts_of(facts, "num_local_experts"), **biases_of(facts),
        "lm_head_bias": "output.bias" in facts.container.tensors,
        "sliding_window": facts.count("attention.sliding_window", 0) or None,
    }  # fmt: skip
    if SHORT in facts.container.tensors and LONG in facts.container.tensors:
        factor = facts.number("rope.scaling.attn_factor", 1.0)
        found["rope_parameters"] = {
            **positions(facts), **longrope(facts), "short_mscale": factor, "long_mscale": factor,
        }  # fmt: skip
    return found


def llama4(facts: Facts) -> Settings:
    experts = [at for at, has in enumerate(facts.has("ffn_gate_inp.weight")) if has]
    return {
        **experts_of(facts, "num_local_experts"), "moe_layers": experts,
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.count("feed_forward_length"),
        "use_qk_norm": facts.count("expert_count") != _MAVERICK, "rope_parameters": positions(facts),
        "attention_chunk_size": facts.count("attention.chunk_size", 8192), **with_llama3(facts),
    }  # fmt: skip


_MAVERICK = 128  # experts of the model whose heads are not normed


def gemma4(facts: Facts) -> Settings:
    windows = windows_of(facts)
    full = [kind == "full_attention" for kind in windows["layer_types"]]
    kv = facts.each("attention.head_count_kv")
    of_full, of_rest = by_kind(kv, full)
    factors = facts.numbers(ROPE) if ROPE in facts.container.tensors else np.ones(1, np.float32)
    own_values = [has for has, whole in zip(facts.has("attn_v.weight"), full, strict=True) if whole]
    softcap = "final_logit_softcapping"
    many = facts.count("expert_count", 0) > 0
    experts = {**experts_of(facts, top_k="top_k_experts"), **widths_of(facts)} if many else {}
    return {
        **windows, **experts, **biases_of(facts),
        "head_dim": facts.count("attention.key_length_swa"), "global_head_dim": facts.count("attention.key_length"),
        "num_key_value_heads": max(of_rest or kv), "num_global_key_value_heads": max(of_full or kv),
        "attention_k_eq_v": not all(own_values), "enable_moe_block": many,
        "hidden_size_per_layer_input": facts.count("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": facts.count("attention.shared_kv_layers", 0),
        "final_logit_softcapping": facts.number(softcap) if facts.said(softcap) else None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10000.0)},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": facts.number("rope.freq_base", 10000.0),
                "partial_rotary_factor": float((factors < 2).mean()),
            },
        },
    }  # fmt: skip


def mimo(facts: Facts) -> Settings:
    facts.container.metadata.need(f"{facts.arch}.attention.sliding_window_pattern", list)
    windows, scale = windows_of(facts), facts.number("attention.value_scale")  # older files lack it, and are refused
    of_full, of_rest = by_kind(
        facts.each("attention.head_count_kv"), [kind == "full_attention" for kind in windows["layer_types"]]
    )
    kv = max(of_full or [max(of_rest) // 2])
    share = turning_share(facts, facts.head_dim)
    return {
        **experts_of(facts, "n_routed_experts"), **widths_of(facts), **biases_of(facts), **windows, **groups_of(facts),
        "mlp_layer_types": networks_of(facts), "norm_topk_prob": True, "head_dim": facts.head_dim,
        "routed_scaling_factor": 1.0, "num_key_value_heads": kv, "swa_num_key_value_heads": max(of_rest or [2 * kv]),
        "v_head_dim": facts.count("attention.value_length", facts.head_dim),
        "attention_value_scale": scale,
        "rope_parameters": {
            "full_attention": {**positions(facts), **share}, "sliding_attention": {**plain_positions(facts), **share},
        },
    }  # fmt: skip


def lfm2_dense(facts: Facts) -> Settings:
    return {**_convolutions(facts), "block_auto_adjust_ff_dim": False}  # a file has the width as it is


def _convolutions(facts: Facts) -> Settings:
    kinds = ["full_attention" if attends else "conv" for attends in facts.has("attn_q.weight")]
    return {
        "layer_types": kinds, "rms_norm_eps": None, "norm_eps": norm_eps(facts),
        "conv_L_cache": facts.count("shortconv.l_cache"), "conv_bias": facts.some("shortconv.conv.bias"),
    }  # fmt: skip


def lfm2(facts: Facts) -> Settings:
    return {
        **experts_of(facts), **widths_of(facts), **_convolutions(facts),
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "use_expert_bias": facts.some("exp_probs_b.bias"), "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }  # fmt: skip


def jamba(facts: Facts) -> Settings:
    found = {
        **_every("attn", facts.has("attn_q.weight"), facts),
        **_every("expert", facts.has("ffn_gate_inp.weight"), facts),
    }
    return {
        **experts_of(facts), **found, "rope_parameters": None, "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_dt_rank": facts.count("ssm.time_step_rank"), "mamba_d_conv": facts.count("ssm.conv_kernel"),
        "mamba_expand": facts.count("ssm.inner_size") // max(facts.count("embedding_length"), 1),
        "mamba_conv_bias": facts.some("ssm_conv1d.bias"), "mamba_proj_bias": facts.some("ssm_in.bias"),
    }  # fmt: skip


def _every(what: str, layers: Sequence[bool], facts: Facts) -> Settings:
    """Returns the period and offset that give these layers."""
    places = [at for at, has in enumerate(layers) if has]
    if places:
        offset, period = places[0], places[1] - places[0] if len(places) > 1 else len(layers)
        if [at for at in range(len(layers)) if at % period == offset] == places:
            return {f"{what}_layer_period": period, f"{what}_layer_offset": offset}
    raise CheckpointError(f"{facts.container.files[0]}: its {what} layers do not come at regular distances")


def nemotron(facts: Facts) -> Settings:
    marks = {
        "moe": "ffn_gate_inp.weight", "mlp": "ffn_up.weight", "full_attention": "attn_q.weight",
        "linear_attention": "ssm_in.weight",
    }  # fmt: skip
    found = [(kind, facts.has(mark)) for kind, mark in marks.items()]
    kinds = [next((kind for kind, has in found if has[at]), "mlp") for at in range(facts.layers)]
    heads, inner, experts = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size"), Settings()
    if "moe" in kinds:
        experts = {
            **shared_experts(facts), "moe_latent_size": facts.count("moe_latent_size", 0) or None,
            "moe_shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        }  # fmt: skip
    return {
        **experts, "layers_block_type": kinds, "rms_norm_eps": None,
        "layer_norm_epsilon": norm_eps(facts), "head_dim": facts.head_dim,
        "intermediate_size": rows_of(facts, "ffn_up.weight") or 1, "mamba_num_heads": heads,
        "mamba_head_dim": inner // max(heads, 1), "n_groups": facts.count("ssm.group_count"),
        "ssm_state_size": facts.count("ssm.state_size"), "conv_kernel": facts.count("ssm.conv_kernel"),
        "use_conv_bias": facts.some("ssm_conv1d.bias"), "use_bias": facts.some("ssm_in.bias"),
        "mlp_hidden_act": "relu2",
        "attention_bias": False, "mlp_bias": False, "rope_parameters": None,
    }  # fmt: skip


def granite_type(facts: Facts) -> str:
    return "granitemoeshared" if facts.count("expert_shared_feed_forward_length", 0) else "granitemoe"


def granite_swa_type(facts: Facts) -> str:
    return "granitemoe_swa" if facts.count("expert_count", 0) else "granite_swa"


def llama_type(facts: Facts) -> str:
    return "mixtral" if facts.count("expert_count", 0) else "llama"
