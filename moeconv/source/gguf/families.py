"""Families of models as llama.cpp knows them: the settings of config.json from a file's metadata, and the names of
tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeconv.source.archs.config import frequencies
from moeconv.source.archs.deepseek import INDEXERS_LEFT_OUT
from moeconv.source.gguf.facts import Facts
from moeconv.source.outline import CheckpointError

Settings = dict[str, Any]

OUTPUT, EMBED, ROPE = "output.weight", "token_embd.weight", "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func
_GATES = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}
_CLOSE = 1e-4


def usual(facts: Facts) -> Settings:
    """Returns the settings that most families have by the same names."""
    embed = facts.container.tensors.get(EMBED)
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{facts.container.files[0]} has no {EMBED}: it is incomplete, or not a language model")
    found: Settings = {
        "num_hidden_layers": facts.layers, "max_position_embeddings": facts.count("context_length"),
        "hidden_size": facts.count("embedding_length"), "vocab_size": embed.shape[0],
        "num_attention_heads": facts.heads, "num_key_value_heads": max(facts.each("attention.head_count_kv")),
        "tie_word_embeddings": OUTPUT not in facts.container.tensors,
    }  # fmt: skip
    for name, key in (("intermediate_size", "feed_forward_length"), ("head_dim", "attention.key_length")):
        if facts.said(key):
            found[name] = max(facts.each(key))
    return {**found, "rms_norm_eps": _eps(facts), "rope_parameters": _rope(facts)}


def _eps(facts: Facts) -> float:
    return facts.number(
        f"attention.layer_norm_{'rms_' if facts.said('attention.layer_norm_rms_epsilon') else ''}epsilon"
    )


def _rope(facts: Facts) -> Settings:
    """Returns the parameters of rotary positions."""
    found: Settings = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10000.0)}
    kind, metadata = f"{facts.arch}.rope.scaling.type", facts.container.metadata
    match metadata.get(kind, str, "none"):
        case "none" | "longrope":
            pass
        case "linear":
            found |= {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
        case "yarn":
            found |= {
                "rope_type": "yarn", "factor": facts.number("rope.scaling.factor"),
                "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
            }  # fmt: skip
            for name in ("beta_fast", "beta_slow"):
                if facts.said(key := f"rope.scaling.yarn_{name}"):
                    found[name] = facts.number(key)
            if facts.said(key := "rope.scaling.yarn_attn_factor") or facts.said(key := "rope.scaling.attn_factor"):
                found["attention_factor"] = facts.number(key)
        case other:
            raise metadata.wrong(kind, f"is {other!r}, only none, linear, yarn and longrope are known")
    return found


def _llama3(facts: Facts, pairs: int | None = None) -> Settings:
    """Returns the parameters of Llama 3's positions that give a file's factors of its turns, of the first `pairs`; the
    file has no others."""
    plain, factors = _rope(facts), facts.numbers(ROPE)[:pairs]
    if not np.isfinite(factors).all() or not (factors > 0).all():
        raise CheckpointError(f"{facts.container.files[0]}: {ROPE} holds values that are no factors")
    dims, longest = 2 * len(factors), facts.count("context_length")
    base = frequencies({**plain, "rope_type": "linear", "factor": 1.0}, dims, longest)[0]
    for low, high in ((1.0, 4.0), (1.0, 1.0)):
        for length in (8192, longest, *(1 << power for power in range(4, 21))):
            tried = {
                **plain, "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": length,
            }  # fmt: skip
            if np.allclose(frequencies(tried, dims, longest)[0] * factors, base, rtol=_CLOSE, atol=0):
                return tried
    raise CheckpointError(
        f"{facts.container.files[0]}: {ROPE} turns positions in a way that is not Llama 3's: it can't be converted"
    )


def _with_llama3(facts: Facts) -> Settings:
    return {"rope_parameters": _llama3(facts)} if ROPE in facts.container.tensors else {}


def _partial(facts: Facts) -> Settings:
    """Returns rope_parameters of which a share of each head turns."""
    return {**_rope(facts), **_share(facts, facts.head_dim)}


def _share(facts: Facts, dim: int) -> Settings:
    """Returns the share that turns of a head's `dim` features: a number that gives theirs again, rounded down."""
    turning = facts.count("rope.dimension_count")
    share = turning / dim
    return {"partial_rotary_factor": share if int(dim * share) == turning else math.nextafter(share, math.inf)}


def _experts(facts: Facts, n: str = "num_experts", top_k: str = "num_experts_per_tok") -> Settings:
    return {n: facts.count("expert_count"), top_k: facts.count("expert_used_count")}


def _widths(facts: Facts) -> Settings:
    return {"moe_intermediate_size": facts.count("expert_feed_forward_length")}


def _dense(facts: Facts) -> Settings:
    without = [at for at, has in enumerate(facts.has("ffn_gate_inp.weight")) if not has]
    return {"mlp_only_layers": without, "decoder_sparse_step": 1}


def _biases(facts: Facts, setting: str = "attention_bias") -> Settings:
    return {setting: facts.some("attn_q.bias")}


def _llama(facts: Facts) -> Settings:
    if facts.count("expert_count", 0):
        return {**_experts(facts, "num_local_experts"), "sliding_window": None, **_with_llama3(facts)}
    return {**_biases(facts), "mlp_bias": facts.some("ffn_up.bias"), **_with_llama3(facts)}


def _qwen2_dense(facts: Facts) -> Settings:
    return {"layer_types": ["full_attention"] * facts.layers}


def _qwen3_dense(facts: Facts) -> Settings:
    return {**_qwen2_dense(facts), **_biases(facts)}


def _phi3(facts: Facts) -> Settings:
    rope, length = _partial(facts), "rope.scaling.original_context_length"
    if SHORT in facts.container.tensors and LONG in facts.container.tensors:
        rope |= {**_longrope(facts), "attention_factor": facts.number("rope.scaling.attn_factor", 1.0)}
    return {
        "sliding_window": facts.count("attention.sliding_window", 0) or None, "rope_parameters": rope,
        "original_max_position_embeddings": facts.count(length, facts.count("context_length")),
    }  # fmt: skip


def _longrope(facts: Facts) -> Settings:
    return {
        "rope_type": "longrope", "short_factor": facts.numbers(SHORT).tolist(),
        "long_factor": facts.numbers(LONG).tolist(),
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
    }  # fmt: skip


def _gemma3(facts: Facts) -> Settings:
    head, hidden, softcap = facts.head_dim, facts.count("embedding_length"), "final_logit_softcapping"
    window = "attention.sliding_window"
    return {
        "head_dim": head, "query_pre_attn_scalar": hidden // facts.heads if facts.layers == _LARGEST_GEMMA3 else head,
        "sliding_window": facts.count(window), **_biases(facts),
        "layer_types": ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(facts.layers)],
        "final_logit_softcapping": facts.number(softcap) if facts.said(softcap) else None,
        "rope_parameters": {
            "full_attention": _rope(facts),
            "sliding_attention": {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10000.0)},
        },
    }  # fmt: skip


_LARGEST_GEMMA3 = 62  # layers of the model whose scores have a scale of their own


def _cohere2(facts: Facts) -> Settings:
    return {
        **_windows(facts, 4), **_biases(facts), "rms_norm_eps": None, "layer_norm_eps": _eps(facts),
        "logit_scale": facts.number("logit_scale", 1.0),
    }  # fmt: skip


def _olmo2(facts: Facts) -> Settings:
    if _olmo_type(facts) == "olmo2":
        return _biases(facts)
    ropes = {"full_attention": _rope(facts), "sliding_attention": _plain_rope(facts)}
    return {**_biases(facts), **_windows(facts, 4), "rope_parameters": ropes}


def _olmo_type(facts: Facts) -> str:
    return "olmo3" if facts.count("attention.sliding_window", 0) else "olmo2"


def _olmoe(facts: Facts) -> Settings:
    clip = facts.number("attention.clamp_kqv") if facts.said("attention.clamp_kqv") else None
    return {**_experts(facts), "norm_topk_prob": False, "clip_qkv": clip}


def _qwen2(facts: Facts) -> Settings:
    return {
        **_experts(facts), **_widths(facts), **_dense(facts), **_biases(facts, "qkv_bias"), "norm_topk_prob": False,
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _qwen3(facts: Facts) -> Settings:
    return {**_experts(facts), **_widths(facts), **_dense(facts), "norm_topk_prob": True}


def _qwen_next(facts: Facts) -> Settings:
    return {
        **_experts(facts), **_widths(facts), "norm_topk_prob": True, **_deltas(facts),
        "shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _deltas(facts: Facts) -> Settings:
    values = facts.count("ssm.time_step_rank")
    kinds = ["full_attention" if attends else "linear_attention" for attends in facts.has("attn_k.weight")]
    return {
        "layer_types": kinds, **_biases(facts),
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"), "linear_key_head_dim": facts.count("ssm.state_size"),
        "linear_num_key_heads": facts.count("ssm.group_count"), "linear_num_value_heads": values,
        "linear_value_head_dim": facts.count("ssm.inner_size") // max(values, 1), "rope_parameters": _partial(facts),
    }  # fmt: skip


def _qwen3_next(facts: Facts) -> Settings:
    return {**_qwen_next(facts), **_dense(facts)}


def _gpt_oss(facts: Facts) -> Settings:
    rope = _rope(facts)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **_experts(facts, "num_local_experts"), **_biases(facts), "rope_parameters": rope,
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "sliding_window": facts.count("attention.sliding_window"),
        "layer_types": [("sliding_attention", "full_attention")[at % 2] for at in range(facts.layers)],
    }  # fmt: skip


def _shared_experts(facts: Facts, n: str = "n_routed_experts", shared: str = "n_shared_experts") -> Settings:
    """Returns the settings of DeepSeek's experts and routers."""
    return {
        **_experts(facts, n), **_widths(facts), shared: facts.count("expert_shared_count", 0) or None,
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", False), **_groups(facts),
    }  # fmt: skip


def _groups(facts: Facts) -> Settings:
    return {"n_group": facts.count("expert_group_count", 1), "topk_group": facts.count("expert_group_used_count", 1)}


def _scores(facts: Facts, usual: int = _SIGMOID) -> str:
    """Returns the name of the function that makes a router's scores; `usual`: its number where a file says none."""
    said = facts.count("expert_gating_func", 0) or usual
    return _GATES.get(said, f"number {said}")


def _first_dense(facts: Facts) -> Settings:
    return {"first_k_dense_replace": facts.count("leading_dense_block_count", 0)}


def _latent(facts: Facts) -> Settings:
    """Returns the settings of DeepSeek's layers."""
    rope, turning = _rope(facts), facts.count("rope.dimension_count")
    if facts.said(key := "rope.scaling.yarn_log_multiplier"):
        rope["mscale"] = rope["mscale_all_dim"] = round(10 * facts.number(key), 6)
    whole, value = (
        facts.count(f"attention.{name}_mla", facts.count(f"attention.{name}"))
        for name in ("key_length", "value_length")
    )
    rank = facts.count("attention.q_lora_rank") if facts.said("attention.q_lora_rank") else None
    return {
        **_shared_experts(facts), **_first_dense(facts), "rope_parameters": rope, "num_key_value_heads": facts.heads,
        "head_dim": turning, "q_lora_rank": rank, "kv_lora_rank": facts.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": whole - turning, "qk_rope_head_dim": turning, "v_head_dim": value,
    }  # fmt: skip


def _deepseek(facts: Facts) -> Settings:
    found = _latent(facts)
    if deepseek_type(facts) == "deepseek_v3":
        return {**found, "rope_interleave": True}
    return {**found, "topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _mistral4(facts: Facts) -> Settings:
    if (scores := _scores(facts, _SOFTMAX)) != "softmax":
        raise facts.container.metadata.wrong(f"{facts.arch}.expert_gating_func", f"says {scores}, expected softmax")
    found = _latent(facts)
    whole, beta = found["qk_nope_head_dim"] + found["qk_rope_head_dim"], "attention.temperature_scale"
    rope = {**found["rope_parameters"], **_share(facts, whole)}
    rope["llama_4_scaling_beta"] = facts.number(beta) if facts.said(beta) else 1.0  # has no effect on a pack's texts
    return {**found, "head_dim": whole, "rope_interleave": True, "rope_parameters": rope}


def _kimi_linear(facts: Facts) -> Settings:
    found, linear = _latent(facts), [not has for has in facts.has("attn_kv_a_mqa.weight")]
    groups = {"num_expert_group": found.pop("n_group"), "topk_group": found.pop("topk_group")}
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    found = {names.get(name, name): value for name, value in found.items() if name != "first_k_dense_replace"}
    return {
        **found, **groups, "rope_parameters": None, "moe_renormalize": True, "mlp_layer_types": _networks(facts),
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "linear_head_dim": facts.count("kda.head_dim"), "linear_num_heads": _rows(facts, "ssm_beta.weight") or 1,
        "linear_conv_kernel_dim": facts.count("ssm.conv_kernel"),
    }  # fmt: skip


def _step(facts: Facts) -> Settings:
    windows = _windows(facts)
    full = [kind == "full_attention" for kind in windows["layer_types"]]
    heads, kv = (_by_kind(facts.each(f"attention.head_count{end}"), full) for end in ("", "_kv"))
    of_full, of_rest = (max(each or other) for each, other in (heads, heads[::-1]))
    rope, half = _rope(facts), {"partial_rotary_factor": 0.5}  # of layers without a window, in all that there are
    if ROPE in facts.container.tensors:
        rope = _llama3(facts, facts.head_dim // 4)
    return {
        **_experts(facts, "n_routed_experts"), **_widths(facts), **windows, "mlp_layer_types": _networks(facts),
        "num_attention_heads": of_full, "num_sliding_attention_heads": of_rest,
        "num_key_value_heads": max(kv[0] or kv[1]), "head_dim": facts.head_dim,
        "share_expert_dim": facts.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_expert_weight": facts.flag("expert_weights_norm", True),
        "swiglu_limits": facts.bounds("swiglu_clamp_exp"), "swiglu_limits_shared": facts.bounds("swiglu_clamp_shexp"),
        "rope_parameters": {"full_attention": {**rope, **half}, "sliding_attention": _plain_rope(facts)},
    }  # fmt: skip


def _indexed(facts: Facts) -> Settings:
    """Returns the settings of DeepSeek-V3.2's layers and indexers."""
    indexers = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
    return {
        **_latent(facts), "mlp_layer_types": _networks(facts), "scoring_func": _scores(facts),
        **{name: facts.count(f"attention.indexer.{key}") for name, key in indexers.items()},
    }  # fmt: skip


def deepseek_type(facts: Facts) -> str:
    """Returns the model_type of llama.cpp's deepseek2."""
    sigmoid = facts.count("expert_gating_func", 0) == _SIGMOID or facts.some("exp_probs_b.bias")
    return "deepseek_v3" if sigmoid else "deepseek_v2"


def _glm4(facts: Facts) -> Settings:
    return {
        **_shared_experts(facts), **_first_dense(facts), **_biases(facts), "rope_parameters": _partial(facts),
        "use_qk_norm": facts.some("attn_q_norm.weight"),
    }  # fmt: skip


def _windows(facts: Facts, period: int = 1) -> Settings:
    """Returns the windows of layers. A file has a list of the layers with one, or a number N: each Nth layer has none;
    `period`: N if it says neither."""
    key, metadata = f"{facts.arch}.attention.sliding_window_pattern", facts.container.metadata
    if isinstance(said := metadata.values.get(key), list):
        kind = int if any(type(each) is int for each in said) else bool
        pattern = [bool(each) for each in metadata.listed(key, kind, facts.blocks) or ()][: facts.layers]
    else:
        period = facts.count("attention.sliding_window_pattern", period)
        pattern = [period == 0 or at % period < period - 1 for at in range(facts.layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern]
    window = facts.count("attention.sliding_window") if any(pattern) else None
    return {"layer_types": kinds, "sliding_window": window}


def _plain_rope(facts: Facts) -> Settings:
    """Returns the parameters of rotary positions in layers with a window, which are never scaled."""
    theta = facts.number("rope.freq_base_swa", facts.number("rope.freq_base", 10000.0))
    return {"rope_type": "default", "rope_theta": theta}


def _dots1(facts: Facts) -> Settings:
    return {**_shared_experts(facts), **_first_dense(facts), **_biases(facts), **_windows(facts)}


def _networks(facts: Facts) -> list[str]:
    """Returns for each layer whether it has experts, as words."""
    return ["sparse" if has else "dense" for has in facts.has("ffn_gate_inp.weight")]


def _exaone(facts: Facts) -> Settings:
    return {
        **_shared_experts(facts, "num_experts", "num_shared_experts"), **_windows(facts), **_with_llama3(facts),
        "mlp_layer_types": _networks(facts),
    }  # fmt: skip


def _afmoe(facts: Facts) -> Settings:
    return {
        **_experts(facts), **_widths(facts), **_windows(facts, 4), **_biases(facts), "mup_enabled": True,
        "num_shared_experts": facts.count("expert_shared_count"), "score_func": _scores(facts),
        "num_dense_layers": facts.count("leading_dense_block_count", 0),
        "route_scale": facts.number("expert_weights_scale", 1.0),
        "route_norm": facts.flag("expert_weights_norm", False), **_groups(facts),
    }  # fmt: skip


def _minimax(facts: Facts) -> Settings:
    return {
        **_experts(facts, "num_local_experts"), "intermediate_size": facts.count("expert_feed_forward_length"),
        "rotary_dim": facts.count("rope.dimension_count"), "rope_parameters": _partial(facts),
    }  # fmt: skip


def _ernie(facts: Facts) -> Settings:
    with_experts = [at for at, has in enumerate(facts.has("ffn_gate_inp.weight")) if has] or [0]
    return {
        **_experts(facts, "moe_num_experts", "moe_k"), **_widths(facts), **_biases(facts, "use_bias"),
        "moe_num_shared_experts": facts.count("expert_shared_count", 0),
        "moe_layer_interval": facts.count("interleave_moe_layer_step", 1),
        "moe_layer_start_index": facts.count("leading_dense_block_count", 0), "moe_layer_end_index": with_experts[-1],
    }  # fmt: skip


def _hunyuan(facts: Facts) -> Settings:
    return {
        **_experts(facts, top_k="moe_topk"), **_biases(facts), "head_dim": facts.head_dim,
        "intermediate_size": facts.count("expert_feed_forward_length"),
    }  # fmt: skip


def _hy(facts: Facts) -> Settings:
    width = facts.count("expert_feed_forward_length")
    if not facts.flag(key := "expert_weights_norm", False):
        raise facts.container.metadata.wrong(f"{facts.arch}.{key}", "is not true: such weights can't be packed")
    return {
        **_experts(facts), "moe_intermediate_size": width, **_biases(facts), "mlp_layer_types": _networks(facts),
        "num_shared_experts": facts.count("expert_shared_feed_forward_length", width) // max(width, 1),
        "router_scaling_factor": facts.number("expert_weights_scale", 1.0), "scoring_func": _scores(facts),
    }  # fmt: skip


def _granite(facts: Facts) -> Settings:
    factors = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    found = {name: facts.number(key, 1.0) for name, key in factors.items()}
    shared = facts.count("expert_shared_feed_forward_length", 0)
    return {
        **_experts(facts, "num_local_experts"), **found, **_biases(facts), **_with_llama3(facts),
        **({"shared_intermediate_size": shared} if shared else {}),
    }  # fmt: skip


def _granite_hybrid(facts: Facts) -> Settings:
    heads, inner = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size")
    kinds = ["attention" if attends else "mamba" for attends in facts.has("attn_q.weight")]
    return {
        **_granite(facts), "layer_types": kinds, "mamba_n_heads": heads, "mamba_d_head": inner // max(heads, 1),
        "mamba_d_conv": facts.count("ssm.conv_kernel"), "mamba_d_state": facts.count("ssm.state_size"),
        "mamba_n_groups": facts.count("ssm.group_count"),
        "mamba_expand": inner // max(facts.count("embedding_length"), 1),
        "mamba_conv_bias": facts.some("ssm_conv1d.bias"), "mamba_proj_bias": facts.some("ssm_in.bias"),
        "position_embedding_type": "rope" if facts.flag("rope.scaling.finetuned", False) else "nope",
    }  # fmt: skip


def _phimoe(facts: Facts) -> Settings:
    found = {
        **_experts(facts, "num_local_experts"), **_biases(facts),
        "lm_head_bias": "output.bias" in facts.container.tensors,
        "sliding_window": facts.count("attention.sliding_window", 0) or None,
    }  # fmt: skip
    if SHORT in facts.container.tensors and LONG in facts.container.tensors:
        factor = facts.number("rope.scaling.attn_factor", 1.0)
        found["rope_parameters"] = {
            **_rope(facts), **_longrope(facts), "short_mscale": factor, "long_mscale": factor,
        }  # fmt: skip
    return found


def _llama4(facts: Facts) -> Settings:
    experts = [at for at, has in enumerate(facts.has("ffn_gate_inp.weight")) if has]
    return {
        **_experts(facts, "num_local_experts"), "moe_layers": experts,
        "intermediate_size": facts.count("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.count("feed_forward_length"),
        "use_qk_norm": facts.count("expert_count") != _MAVERICK, "rope_parameters": _rope(facts),
        "attention_chunk_size": facts.count("attention.chunk_size", 8192), **_with_llama3(facts),
    }  # fmt: skip


_MAVERICK = 128  # experts of the model whose heads are not normed


def _gemma4(facts: Facts) -> Settings:
    windows = _windows(facts)
    full = [kind == "full_attention" for kind in windows["layer_types"]]
    kv = facts.each("attention.head_count_kv")
    of_full, of_rest = _by_kind(kv, full)
    factors = facts.numbers(ROPE) if ROPE in facts.container.tensors else np.ones(1, np.float32)
    own_values = [has for has, whole in zip(facts.has("attn_v.weight"), full, strict=True) if whole]
    softcap = "final_logit_softcapping"
    many = facts.count("expert_count", 0) > 0
    experts = {**_experts(facts, top_k="top_k_experts"), **_widths(facts)} if many else {}
    return {
        **windows, **experts, **_biases(facts),
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


def _by_kind(numbers: Sequence[int], full: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Returns the numbers of layers without a window, and of those with one."""
    both = [*zip(numbers, full, strict=True)]
    return [each for each, whole in both if whole], [each for each, whole in both if not whole]


def _mimo(facts: Facts) -> Settings:
    facts.container.metadata.need(f"{facts.arch}.attention.sliding_window_pattern", list)
    windows, scale = _windows(facts), facts.number("attention.value_scale")  # older files lack it, and are refused
    of_full, of_rest = _by_kind(
        facts.each("attention.head_count_kv"), [kind == "full_attention" for kind in windows["layer_types"]]
    )
    kv = max(of_full or [max(of_rest) // 2])
    share = _share(facts, facts.head_dim)
    return {
        **_experts(facts, "n_routed_experts"), **_widths(facts), **_biases(facts), **windows, **_groups(facts),
        "mlp_layer_types": _networks(facts), "norm_topk_prob": True, "head_dim": facts.head_dim,
        "routed_scaling_factor": 1.0, "num_key_value_heads": kv, "swa_num_key_value_heads": max(of_rest or [2 * kv]),
        "v_head_dim": facts.count("attention.value_length", facts.head_dim),
        "attention_value_scale": scale,
        "rope_parameters": {
            "full_attention": {**_rope(facts), **share}, "sliding_attention": {**_plain_rope(facts), **share},
        },
    }  # fmt: skip


def _lfm2(facts: Facts) -> Settings:
    kinds = ["full_attention" if attends else "conv" for attends in facts.has("attn_q.weight")]
    return {
        **_experts(facts), **_widths(facts), "layer_types": kinds, "rms_norm_eps": None,
        "norm_eps": _eps(facts), "conv_L_cache": facts.count("shortconv.l_cache"),
        "num_dense_layers": facts.count("leading_dense_block_count", 0), "conv_bias": facts.some("shortconv.conv.bias"),
        "use_expert_bias": facts.some("exp_probs_b.bias"), "norm_topk_prob": facts.flag("expert_weights_norm", True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }  # fmt: skip


def _jamba(facts: Facts) -> Settings:
    found = {
        **_every("attn", facts.has("attn_q.weight"), facts),
        **_every("expert", facts.has("ffn_gate_inp.weight"), facts),
    }
    return {
        **_experts(facts), **found, "rope_parameters": None, "mamba_d_state": facts.count("ssm.state_size"),
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


def _nemotron(facts: Facts) -> Settings:
    marks = {
        "moe": "ffn_gate_inp.weight", "mlp": "ffn_up.weight", "full_attention": "attn_q.weight",
        "linear_attention": "ssm_in.weight",
    }  # fmt: skip
    found = [(kind, facts.has(mark)) for kind, mark in marks.items()]
    kinds = [next((kind for kind, has in found if has[at]), "mlp") for at in range(facts.layers)]
    heads, inner, experts = facts.count("ssm.time_step_rank"), facts.count("ssm.inner_size"), Settings()
    if "moe" in kinds:
        experts = {
            **_shared_experts(facts), "moe_latent_size": facts.count("moe_latent_size", 0) or None,
            "moe_shared_expert_intermediate_size": facts.count("expert_shared_feed_forward_length"),
        }  # fmt: skip
    return {
        **experts, "layers_block_type": kinds, "rms_norm_eps": None,
        "layer_norm_epsilon": _eps(facts), "head_dim": facts.head_dim,
        "intermediate_size": _rows(facts, "ffn_up.weight") or 1, "mamba_num_heads": heads,
        "mamba_head_dim": inner // max(heads, 1), "n_groups": facts.count("ssm.group_count"),
        "ssm_state_size": facts.count("ssm.state_size"), "conv_kernel": facts.count("ssm.conv_kernel"),
        "use_conv_bias": facts.some("ssm_conv1d.bias"), "use_bias": facts.some("ssm_in.bias"),
        "mlp_hidden_act": "relu2",
        "attention_bias": False, "mlp_bias": False, "rope_parameters": None,
    }  # fmt: skip


def _rows(facts: Facts, tensor: str) -> int | None:
    names = (f"blk.{layer}.{tensor}" for layer in range(facts.layers))
    return next((facts.container.tensors[name].shape[0] for name in names if name in facts.container.tensors), None)


# Names of tensors: those of a pack, within a layer or outside, → a file's.

OUTSIDE = {"embed": "token_embd", "head": "output", "decoder.norm": "output_norm"}
INSIDE: Mapping[str, str] = {
    "mixer_norm": "attn_norm", "ffn_norm": "ffn_norm", "router": "ffn_gate_inp",
    "router.choice_bias": "exp_probs_b.bias",
    "attn.o": "attn_output", "attn.sinks": "attn_sinks.weight", "shared_gate": "ffn_gate_inp_shexp",
    **{f"attn.{name}": f"attn_{name}" for name in ("q", "k", "v", "q_norm", "k_norm")},
    **{f"{part}.{name}": f"ffn_{name}{end}" for part, end in (("ffn", ""), ("shared", "_shexp"))
       for name in ("gate", "up", "down")},
    "attn.gate": "attn_q", "attn.q_turn": "attn_q", "attn.q_a": "attn_q_a", "attn.kv_a": "attn_kv_a_mqa",
    "attn.k_turn": "attn_kv_a_mqa",
    "attn.kv_norm": "attn_kv_a_norm", "attn.keys": "attn_k_b", "attn.values": "attn_v_b",
    "mixer.in": "ssm_in", "mixer.dt": "ssm_in", "mixer.conv": "ssm_conv1d", "mixer.dt_bias": "ssm_dt.bias",
    "mixer.a_log": "ssm_a.log", "mixer.d": "ssm_d", "mixer.norm": "ssm_norm", "mixer.out": "ssm_out",
    "mixer.inner": "ssm_x", "mixer.steps": "ssm_dt", "mixer.dt_norm": "ssm_dt_norm", "mixer.b_norm": "ssm_b_norm",
    "mixer.c_norm": "ssm_c_norm", "narrow": "ffn_latent_down", "widen": "ffn_latent_up",
}  # fmt: skip
_DELTA = {
    **{f"mixer.{name}": "attn_qkv" for name in "qkv"}, "mixer.z": "attn_gate", "ffn_norm": "post_attention_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    """An architecture of llama.cpp. `model_type`: of config.json; `settings`: those that not all families have;
    `names`: names that differ from INSIDE and OUTSIDE; `whole`: names of tensors that lie as the family's own do, with
    all parts of a pack in them; `turned`: rows of queries and keys are reordered, so that positions turn pairs;
    `inside`: config.json has the settings under text_config; `left_out`: patterns of names that a pack leaves out → a
    note on them; `alone`: names that differ in a model without experts."""

    model_type: str | Callable[[Facts], str]
    settings: Callable[[Facts], Settings]
    names: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    turned: bool = False
    inside: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    alone: Mapping[str, str] = field(default_factory=dict)

    def config(self, facts: Facts) -> Settings:
        """Returns the settings of config.json. Raises CheckpointError."""
        found = {**usual(facts), **self.settings(facts)}
        model_type = self.model_type if isinstance(self.model_type, str) else self.model_type(facts)
        if not self.inside:
            return {**found, "model_type": model_type}
        return {"model_type": model_type, "tie_word_embeddings": found["tie_word_embeddings"], "text_config": found}


def _granite_type(facts: Facts) -> str:
    return "granitemoeshared" if facts.count("expert_shared_feed_forward_length", 0) else "granitemoe"


def _llama_type(facts: Facts) -> str:
    return "mixtral" if facts.count("expert_count", 0) else "llama"


_BEHIND = {"mixer_after": "post_attention_norm", "ffn_after": "post_ffw_norm"}
_Q = frozenset({"attn_q", "attn_k"})
_IN = frozenset({"ssm_in"})
_LATENT = frozenset({"attn_q", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b"})
_INDEXERS = {r"blk\.\d+\.indexer\.": INDEXERS_LEFT_OUT}
ARCHS: Mapping[str, Arch] = {
    "llama": Arch(_llama_type, _llama, turned=True),
    "qwen2": Arch("qwen2", _qwen2_dense),
    "qwen3": Arch("qwen3", _qwen3_dense),
    "smollm3": Arch("smollm3", _qwen3_dense, turned=True),
    "phi3": Arch("phi3", _phi3),
    "gemma3": Arch("gemma3_text", _gemma3, _BEHIND),
    "cohere2": Arch("cohere2", _cohere2, {"ffn_norm": "attn_norm"}, whole=_Q),
    "olmo2": Arch(_olmo_type, _olmo2, _BEHIND),
    "olmoe": Arch("olmoe", _olmoe),
    "qwen2moe": Arch("qwen2_moe", _qwen2),
    "qwen3moe": Arch("qwen3_moe", _qwen3),
    "qwen3vl": Arch("qwen3_vl", _qwen3_dense, inside=True),
    "qwen3vlmoe": Arch("qwen3_vl_moe", _qwen3, inside=True),
    "gpt-oss": Arch("gpt_oss", _gpt_oss, {"ffn_norm": "post_attention_norm"}),
    "deepseek2": Arch(deepseek_type, _deepseek, whole=_LATENT),
    "mistral4": Arch("mistral4", _mistral4, whole=_LATENT),
    "kimi-linear": Arch("kimi_linear", _kimi_linear, {
        **{f"mixer.{name}": f"attn_{name}" for name in "qkv"}, "mixer.conv": "ssm_conv1d_q", "mixer.b": "ssm_beta",
        "mixer.a_narrow": "ssm_f_a", "mixer.a": "ssm_f_b", "mixer.z_narrow": "ssm_g_a", "mixer.z": "ssm_g_b",
        "mixer.out": "attn_output",
    }, whole=_LATENT),
    "step35": Arch("step3p5", _step, {"attn.gate": "attn_gate"}),
    "glm-dsa": Arch("glm_moe_dsa", _indexed, whole=_LATENT, left_out=_INDEXERS),
    "deepseek32": Arch("deepseek_v32", _indexed, whole=_LATENT, left_out=_INDEXERS),
    "glm4moe": Arch("glm4_moe", _glm4, {"ffn_norm": "post_attention_norm"}),
    "minimax-m2": Arch("minimax_m2", _minimax),
    "ernie4_5-moe": Arch("ernie4_5_moe", _ernie, whole=_Q),
    "hunyuan-moe": Arch("hunyuan_v1_moe", _hunyuan),
    "hy_v3": Arch("hy_v3", _hy, {"router.choice_bias": "exp_probs_b"}),
    "dots1": Arch("dots1", _dots1),
    "granitemoe": Arch(_granite_type, _granite, turned=True),
    "granitehybrid": Arch("granitemoehybrid", _granite_hybrid, whole=_IN, turned=True),
    "phimoe": Arch("phimoe", _phimoe),
    "afmoe": Arch("afmoe", _afmoe, {**_BEHIND, "attn.gate": "attn_gate"}),
    "exaone-moe": Arch("exaone_moe", _exaone),
    "mimo2": Arch("mimo_v2_flash", _mimo, whole=frozenset({"attn_v", "attn_output"})),
    "llama4": Arch("llama4_text", _llama4, whole=_Q),
    "lfm2moe": Arch("lfm2_moe", _lfm2, {
        "mixer.in": "shortconv.in_proj", "mixer.conv": "shortconv.conv", "mixer.out": "shortconv.out_proj",
        "decoder.norm": "token_embd_norm",
    }),
    "jamba": Arch("jamba", _jamba),
    "qwen3next": Arch("qwen3_next", _qwen3_next, {**_DELTA, "mixer.a": "ssm_ba", "mixer.b": "ssm_ba"},
                      frozenset({"attn_q", "ssm_ba"})),
    "qwen35": Arch("qwen3_5_text", _deltas, {**_DELTA, "mixer.a": "ssm_alpha", "mixer.b": "ssm_beta"},
                   frozenset({"attn_q"})),
    "qwen35moe": Arch("qwen3_5_moe_text", _qwen_next, {**_DELTA, "mixer.a": "ssm_alpha", "mixer.b": "ssm_beta"},
                      frozenset({"attn_q"})),
    **{name: Arch("nemotron_h", _nemotron, {"ffn_norm": "attn_norm"}, _IN, turned=True)
       for name in ("nemotron_h", "nemotron_h_moe")},
    "gemma4": Arch("gemma4_text", _gemma4, {
        "mixer_after": "post_attention_norm", "ffn_norm": "pre_ffw_norm_2", "ffn_after": "post_ffw_norm",
        "beside_norm": "ffn_norm", "beside_after": "post_ffw_norm_1", "experts_after": "post_ffw_norm_2",
        "router.expert_scale": "ffn_down_exps.scale", "router_norm.weight": "ffn_gate_inp.scale",
        "scale": "layer_output_scale.weight", "beside.gate": "ffn_gate", "beside.up": "ffn_up",
        "beside.down": "ffn_down",
    }, frozenset({"ffn_gate_inp.scale"}), alone={"ffn_norm": "ffn_norm"}),
}  # fmt: skip
"""llama.cpp's name → its family here."""
