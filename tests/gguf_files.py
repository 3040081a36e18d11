"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them: with the package's own table of names,
and without anything of moeconv."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]

ARCHS = {
    "mixtral": "LLAMA", "olmoe": "OLMOE", "qwen2_moe": "QWEN2MOE", "qwen3_moe": "QWEN3MOE", "gpt_oss": "GPT_OSS",
    "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2", "glm4_moe": "GLM4_MOE", "minimax_m2": "MINIMAXM2",
    "ernie4_5_moe": "ERNIE4_5_MOE", "hunyuan_v1_moe": "HUNYUAN_MOE", "dots1": "DOTS1", "granitemoe": "GRANITE_MOE",
    "granitemoeshared": "GRANITE_MOE", "phimoe": "PHIMOE", "exaone_moe": "EXAONE_MOE", "llama4_text": "LLAMA4",
    "gemma4_text": "GEMMA4", "lfm2_moe": "LFM2MOE", "jamba": "JAMBA", "qwen3_next": "QWEN3NEXT",
    "llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "smollm3": "SMOLLM3", "phi3": "PHI3", "gemma3_text": "GEMMA3",
    "olmo2": "OLMO2", "olmo3": "OLMO2", "qwen3_vl_moe": "QWEN3VLMOE", "afmoe": "AFMOE", "mimo_v2_flash": "MIMO2",
    "qwen3_vl": "QWEN3VL", "qwen3_5_text": "QWEN35",
    "cohere2": "COHERE2", "mistral4": "MISTRAL4", "glm_moe_dsa": "GLM_DSA", "deepseek_v32": "GLM_DSA", "hy_v3": "DOTS1",
    "qwen3_5_moe_text": "QWEN35MOE", "granitemoehybrid": "GRANITE_HYBRID", "nemotron_h": "NEMOTRON_H_MOE",
    "kimi_linear": "KIMI_LINEAR", "step3p5": "STEP35", "deepseek_v4": "DEEPSEEK2",
    "cohere2_moe": "GLM4_MOE", "minimax_m3_vl": "MINIMAXM2", "bailing_hybrid": "KIMI_LINEAR",
    "glm5_next": "KIMI_LINEAR", "granite_swa": "GRANITE", "granitemoe_swa": "GRANITE_MOE",
    "qwen4_exp_text": "QWEN35MOE", "mellum": "QWEN3MOE", "ministral3": "MISTRAL3",
    "gemma": "GEMMA", "gemma2": "GEMMA2", "granite": "GRANITE", "exaone4": "EXAONE4", "ernie4_5": "ERNIE4_5",
    "seed_oss": "SEED_OSS", "hunyuan_v1_dense": "HUNYUAN_DENSE", "starcoder2": "STARCODER2",
    "lfm2": "LFM2", "cohere": "COMMAND_R", "phi": "PHI2", "stablelm": "STABLELM", "olmo": "OLMO",
    "nemotron": "NEMOTRON", "arcee": "ARCEE",
}  # fmt: skip
"""model_type → the architecture's name in the package."""
NEWER = {
    "deepseek_v32": "deepseek32", "hy_v3": "hy_v3", "deepseek_v4": "deepseek4", "cohere2_moe": "cohere2moe",
    "minimax_m3_vl": "minimax-m3", "bailing_hybrid": "bailingmoe3", "glm5_next": "glm5-next",
    "granite_swa": "granite_swa", "granitemoe_swa": "granite_swa",
    "qwen4_exp_text": "qwen4exp", "mellum": "mellum",
}  # fmt: skip
"""model_type → the name of an architecture that the package lacks: its tensors have the names of the one in ARCHS, or
those in OWN."""
_COMPRESSOR = {"wkv.weight": "kv", "wgate.weight": "gate", "ape": "ape", "norm.weight": "norm"}
_STREAMS = ("fn", "base", "scale")
OWN: Mapping[str, Mapping[str, str]] = {
    "deepseek_v4": {
        "model.embed_tokens.weight": "token_embd.weight", "head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight", "attn.attn_sink": "attn_sinks.weight",
        **{f"model.hc_head.hc_{each}": f"output_hc_{each}.weight" for each in _STREAMS},
        **{f"hc_{half}_{each}": f"hc_{half}_{each}.weight" for half in ("attn", "ffn") for each in _STREAMS},
        **{f"{half}_norm.weight": f"{half}_norm.weight" for half in ("attn", "ffn")},
        **{f"attn.{name}.weight": f"attn_{called}.weight" for name, called in (
            ("wq_a", "q_a"), ("q_norm", "q_a_norm"), ("wq_b", "q_b"), ("wkv", "kv"), ("norm", "kv_a_norm"),
            ("wo_a", "output_a"), ("wo_b", "output_b"))},
        **{f"attn.compressor.{name}": f"attn_compressor_{called}.weight" for name, called in _COMPRESSOR.items()},
        **{f"attn.indexer.compressor.{name}": f"indexer_compressor_{called}.weight"
           for name, called in _COMPRESSOR.items()},
        "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
        "attn.indexer.weights_proj.weight": "indexer.proj.weight",
        "ffn.gate.weight": "ffn_gate_inp.weight", "ffn.gate.bias": "exp_probs_b.bias",
        "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
        **{f"ffn.shared_experts.{w}.weight": f"ffn_{part}_shexp.weight"
           for w, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    },
    "glm5_next": {
        **{f"hc_{half}_{each}": f"hc_{half}_{each}.weight" for half in ("attn", "ffn") for each in _STREAMS},
        **{f"self_attn.indexer.{name}": f"indexer.{called}" for name, called in (
            ("k_norm.weight", "k_norm.weight"), ("k_norm.bias", "k_norm.bias"), ("wk.weight", "attn_k.weight"),
            ("weights_proj.weight", "proj.weight"), ("wq_b.weight", "attn_q_b.weight"))},
        **{f"self_attn.indexer.index_kpool_compress_{each}": f"indexer_compressor_{each}.weight"
           for each in ("ape", "gate")},
    },
    "qwen4_exp_text": {
        **{f"{module}.{name}.weight": f"{at}_{called}.weight"
           for module, at in (("attn_hyper_connection", "hc_attn"), ("mlp_hyper_connection", "hc_ffn"),
                              ("model.hyper_connection_mixer", "output_hc"))
           for name, called in (("hc_norm", "norm"), ("input_mix_weight_down", "down"), ("input_mix_weight_up", "up"),
                                ("block_inject_weight", "inject"))},
        **{f"ple.{name}.weight": f"ple_{called}.weight" for name, called in (
            ("key_proj", "key"), ("value_proj", "value"), ("conv1d", "conv1d"), ("norm_key", "norm_key"),
            ("norm_query", "norm_query"), ("norm_conv", "norm_conv"))},
        **{f"self_attn.indexer.{name}_layernorm.weight": f"indexer.{name}_norm.weight" for name in "qk"},
    },
    "granite_swa": {"self_attn.sinks": "attn_sinks.weight"},
    "granitemoe_swa": {
        "self_attn.sinks": "attn_sinks.weight", "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    },
    "bailing_hybrid": {
        **{f"attention.{name}_proj.weight": f"attn_{name}.weight" for name in "qkv"},
        **{f"attention.{name}_conv1d.weight": f"ssm_conv1d_{name}.weight" for name in "qkv"},
        "attention.A_log": "ssm_a", "attention.dt_bias": "ssm_dt.bias",
        "attention.b_proj.weight": "ssm_beta.weight", "attention.f_proj.weight": "ssm_f_a.weight",
        "attention.o_norm.weight": "ssm_norm.weight", "attention.dense.weight": "attn_output.weight",
        "attention.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
        "attention.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
        "mlp.gate.expert_bias": "exp_probs_b.bias",
    },
    "minimax_m3_vl": {
        **{f"self_attn.index_{name}.weight": f"indexer.{name}.weight"
           for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
        **{f"{module}.{part}_proj.weight": f"ffn_{part}{end}.weight" for part in ("gate", "up", "down")
           for module, end in (("mlp", ""), ("block_sparse_moe.shared_experts", "_shexp"))},
    },
}  # fmt: skip
"""model_type → the names of tensors, within a layer or outside → those in a file."""
RELATIVES = {
    "kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "glm4_moe_lite": "deepseek_v3", "solar_open": "glm4_moe",
    "mistral": "llama", "step3p7": "step3p5", "glm4v_moe": "glm4_moe",
}  # fmt: skip
"""model_type → the model_type of another family, as whose llama.cpp has its files."""
AS_LLAMA_CPP: Mapping[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True}, "dots1": {"sliding_window": None, "max_window_layers": 2},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
    "gemma3_text": {"sliding_window_pattern": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
    "cohere2": {"sliding_window_pattern": 4, "num_hidden_layers": 5}, "gemma2": {"query_pre_attn_scalar": 8},
    "glm5_next": {"linear_num_heads": 4}, "qwen4_exp_text": {"ple_layer_ids": [1], "output_gate_type": "sigmoid"},
    **{name: {"layer_rope_theta": [0, 500.0, 500.0]} for name in ("granite_swa", "granitemoe_swa")},
    "cohere2_moe": {"expert_selection_fn": "sigmoid", "num_shared_experts": 2},
    "minimax_m3_vl": {"swiglu_limit": 7.0, "shared_intermediate_size": 20},
    "afmoe": {"mup_enabled": True, "global_attn_every_n_layers": 4},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "deepseek_v4": {
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
    "lfm2_moe": {"routed_scaling_factor": 1.0}, "nemotron_h": {"head_dim": 8},
    "lfm2": {"block_auto_adjust_ff_dim": False},
}  # fmt: skip
"""Settings of tiny models that llama.cpp takes for granted, so that no file says them."""
_ALWAYS_F32 = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "ssm_conv1d_q.weight",
    "ssm_conv1d_k.weight", "ssm_conv1d_v.weight", "shortconv.conv.weight", "_norm.weight",
    "indexer.proj.weight",
)  # fmt: skip


def in_16_bits(folder: Path) -> None:
    """Stores a checkpoint as files of llama.cpp have it: matrices in float16, all else but whole numbers in float32."""
    config, tensors = _config(folder), load_file(folder / "model.safetensors")
    names = _names(config)
    wide = {
        name for name, tensor in tensors.items()
        if tensor.dim() < 2 or _mapped(names, name).endswith(_ALWAYS_F32) or _odd(name)
    }  # fmt: skip
    kept = {
        name: tensor if not tensor.is_floating_point() else tensor.float() if name in wide else tensor.half()
        for name, tensor in tensors.items()
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def _odd(name: str) -> bool:
    return not name.endswith(("weight", "_proj", "_blocks", "_scales")) or "norm" in name.rsplit(".", 2)[-2]


def write_gguf(
    folder: Path, file: Path, kind: str | None = None, more: Mapping[str, np.ndarray] | None = None, **metadata: Any
) -> Path:
    """Writes a checkpoint's GGUF file. `kind`: the type of matrices other than routers, as the package calls it (None:
    as they are); `more`: other tensors, or more of them, bytes as NVFP4; `metadata`: more keys, or other values (None:
    without the key)."""
    more = more or {}
    config = _config(folder)
    known = gguf.MODEL_ARCH_NAMES[_arch(config)]
    writer = gguf.GGUFWriter(file, NEWER.get(config["model_type"], known))
    tokens, tensors = json.loads((folder / "tokenizer.json").read_text()), load_file(folder / "model.safetensors")
    hashes = {f"ARCH.ple.{key}": tensors.pop(name).tolist() for name in [*tensors] if (key := _hash_of(name))}
    for key, value in {**_metadata(config), **hashes, **_tokenizer(tokens), **metadata}.items():
        _add(writer, key.replace("ARCH", writer.arch), value)
    for name, tensor in sorted(_stored(config, tensors)):
        if name in more:
            continue
        array, wanted = tensor.contiguous().numpy(), None if kind is None else gguf.GGMLQuantizationType[kind]
        if wanted is not None and tensor.dim() > 1 and tensor.dtype == torch.float16 and not name.endswith(_ALWAYS_F32):
            writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(name, array)
    for name, array in more.items():
        coded = array.dtype == np.uint8
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.NVFP4 if coded else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif ".ple." in key and ".layers" not in key:
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
    else:
        writer.add_array(key, value)


def _hash_of(name: str) -> str | None:
    """Returns the key of numbers that choose rows of tokens together; None for other tensors."""
    found = re.search(r"\.ple_embedding\.(\w+)$", name)
    return None if found is None else found[1].replace("ngram_heads", "head")


def _config(folder: Path) -> Config:
    """Returns the settings of a model, or those of the text model inside it with the larger one's kind and head. A
    model of RELATIVES has the kind of its relative."""
    found: Config = json.loads((folder / "config.json").read_text())
    inner = {**found.get("text_config", {}), **found}
    return {**inner, "model_type": RELATIVES.get(found["model_type"], found["model_type"])}


def _arch(config: Config) -> gguf.MODEL_ARCH:
    """Returns the architecture; Nemotron-H without experts has one of its own."""
    dense = "moe" not in config.get("layers_block_type", ["moe"])
    return gguf.MODEL_ARCH["NEMOTRON_H" if dense else ARCHS[config["model_type"]]]


def _layers(config: Config) -> int:
    return int(config.get("num_hidden_layers") or len(config["layers_block_type"]))


def _tokenizer(table: dict[str, Any]) -> dict[str, Any]:
    vocabulary = table["model"]["vocab"]
    special = {token["content"] for token in table["added_tokens"]}
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    key = "tokenizer.ggml."
    return {
        f"{key}model": "gpt2", f"{key}pre": "gpt-2", f"{key}tokens": ordered,
        f"{key}token_type": [3 if token in special else 1 for token in ordered],
        f"{key}eos_token_id": 1, f"{key}padding_token_id": 0,
    }  # fmt: skip


# Metadata: the converter's set_gguf_parameters.


def _metadata(config: Config) -> dict[str, Any]:
    get, kind = config.get, config["model_type"]
    rope = get("rope_parameters") or {}
    whole = rope.get("full_attention", rope.get("compress", rope))
    layers, heads, d_model = _layers(config), config["num_attention_heads"], config["hidden_size"]
    named = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    experts = next((config[name] for name in named if name in config), None)
    found: dict[str, Any] = {
        "block_count": layers, "context_length": get("max_position_embeddings"), "embedding_length": d_model,
        "feed_forward_length": get("intermediate_size"), "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads"), "attention.key_length": get("head_dim"),
        "rope.freq_base": whole.get("rope_theta"),
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps", get("norm_eps")),
        "expert_count": experts, "expert_used_count": get("num_experts_per_tok", get("top_k_experts", get("moe_k"))),
        "expert_group_count": get("n_group"), "expert_group_used_count": get("topk_group"),
    }  # fmt: skip
    if whole.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": whole["factor"]}
        if "original_max_position_embeddings" in whole:
            found["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
        found |= {f"rope.scaling.yarn_{n}": float(whole[n]) for n in ("beta_fast", "beta_slow") if whole.get(n)}
        found["rope.scaling.yarn_attn_factor"] = whole.get("attention_factor")
    found |= _OF_FAMILY[kind](config) if kind in _OF_FAMILY else {}
    return {f"ARCH.{key}": value for key, value in found.items()}


def _qwen(c: Config) -> Config:
    return {
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
    }


def _deepseek4(c: Config) -> Config:
    every = {"sliding_attention": 0, **c["compress_rates"]}
    limits, rope = [c["swiglu_limit"]] * c["num_hidden_layers"], c["rope_parameters"]
    return {
        "rope.dimension_count": c["qk_rope_head_dim"], "attention.q_lora_rank": c["q_lora_rank"],
        "attention.output_lora_rank": c["o_lora_rank"], "attention.output_group_count": c["o_groups"],
        "attention.compress_ratios": [*(every[kind] for kind in c["layer_types"]), 0],
        "attention.compress_rope_freq_base": rope["compress"]["rope_theta"],
        "rope.freq_base": rope["main"]["rope_theta"],
        "expert_feed_forward_length": c["moe_intermediate_size"], "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": c["routed_scaling_factor"], "expert_weights_norm": True, "expert_gating_func": 4,
        "hash_layer_count": c["mlp_layer_types"].count("hash_moe"), "nextn_predict_layers": 1,
        "swiglu_clamp_exp": limits, "attention.sliding_window": c["sliding_window"],
        "attention.indexer.head_count": c["index_n_heads"], "attention.indexer.key_length": c["index_head_dim"],
        "attention.indexer.top_k": c["index_topk"], "hyper_connection.count": c["hc_mult"],
        "hyper_connection.sinkhorn_iterations": c["hc_sinkhorn_iters"], "hyper_connection.epsilon": c["hc_eps"],
    }  # fmt: skip


def _windows(c: Config) -> Config:
    return {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
        "rope.freq_base_swa": c["rope_parameters"]["sliding_attention"]["rope_theta"],
    }  # fmt: skip


def _qwen4(c: Config) -> Config:
    heads = (c["ngram_size"] - 1) * c["heads_per_ngram"]
    ratios = [c["indexer_compress_ratio"] * (kind == "indexed_attention") for kind in c["layer_types"]]
    return {
        **_qwen(c), **_delta(c), "hyper_connection.count": c["hc_count"], "hyper_connection.low_rank": c["hc_lowrank"],
        "attention.indexer.head_count": c["indexer_n_heads"], "attention.indexer.key_length": c["indexer_head_dim"],
        "attention.indexer.top_k": c["indexer_budget"], "attention.compress_ratios": ratios,
        **({} if not c["ple_layer_ids"] else {
            "ple.layers": [at - 1 for at in c["ple_layer_ids"]], "ple.ngram_size": c["ngram_size"],
            "ple.heads_per_ngram": c["heads_per_ngram"], "ple.conv_kernel": c["ple_conv_kernel_size"],
            "ple.eos_token_id": c["eos_token_id"],
            "embedding_length_per_layer_input": (c["ple_embed_dim"] or c["hidden_size"]) // heads,
        }),
    }  # fmt: skip


def _cohere2_moe(c: Config) -> Config:
    norm = "norm_epsilon" if c["rms_norm_eps"] is None else "norm_rms_epsilon"
    return {
        "feed_forward_length": c["prefix_dense_intermediate_size"] or c["intermediate_size"],
        "attention.layer_norm_rms_epsilon": None,
        f"attention.layer_{norm}": c["rms_norm_eps"] or c["layer_norm_eps"], "logit_scale": c["logit_scale"],
        "attention.sliding_window": c["sliding_window"], "expert_feed_forward_length": c["intermediate_size"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
        "leading_dense_block_count": c["mlp_layer_types"].count("dense"), "expert_gating_func": 2,
        "expert_weights_norm": c["norm_topk_prob"], "expert_shared_count": c["num_shared_experts"] or None,
        "rope.dimension_count": c["head_dim"], "rope.scaling.type": "none",
    }  # fmt: skip


def _minimax_m3(c: Config) -> Config:
    indexer = {"head_count": "n_heads", "key_length": "head_dim", "top_k": "topk_blocks"}
    blocks = {name: name for name in ("block_size", "local_blocks")}
    return {
        **_turning(c), "feed_forward_length": c["dense_intermediate_size"], "expert_shared_count": 1,
        "expert_feed_forward_length": c["intermediate_size"], "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": True, "leading_dense_block_count": c["mlp_layer_types"].count("dense"),
        **{f"attention.indexer.{key}": c[f"index_{name}"] for key, name in {**indexer, **blocks}.items()},
        "expert_gating_func": 2,
    }  # fmt: skip


def _sees(c: Config) -> Config:
    return {"n_deepstack_layers": 1, "rope.dimension_sections": [*c["rope_parameters"]["mrope_section"], 0]}


def _deepseek(c: Config) -> Config:
    rope = c.get("rope_parameters") or {}
    wide, c_kv = rope.get("mscale_all_dim"), c["kv_lora_rank"]
    return {
        **_shared(c), "attention.head_count_kv": 1, "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": c_kv, "attention.key_length": c_kv + c["qk_rope_head_dim"],
        "attention.value_length": c_kv, "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"], "rope.dimension_count": c["qk_rope_head_dim"],
        "expert_gating_func": {"deepseek_v2": 1, "mistral4": None}.get(c["model_type"], 2),
        "rope.scaling.yarn_log_multiplier": None if wide is None else 0.1 * wide,
    }  # fmt: skip


def _kimi_linear(c: Config) -> Config:
    attends = [kind == "full_attention" for kind in c["layer_types"]]
    kept = ("expert_weights_norm", "expert_gating_func")  # which it does not write
    return {
        **_deepseek({**c, "first_k_dense_replace": c["mlp_layer_types"].index("sparse")}), **dict.fromkeys(kept),
        "attention.head_count_kv": [int(each) for each in attends], "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "kda.head_dim": c["linear_head_dim"], "context_length": c["model_max_length"],
        "expert_used_count": c["num_experts_per_token"], "expert_group_count": None, "rope.freq_base": None,
    }  # fmt: skip


def _bailing3(c: Config) -> Config:
    n = {"first_k_dense_replace": c["mlp_layer_types"].count("dense"), "norm_topk_prob": c["moe_renormalize"]}
    return {
        **_deepseek({**c, **n, "q_lora_rank": None}), "context_length": c["model_max_length"],
        "attention.head_count_kv": [int(kind == "full_attention") for kind in c["layer_types"]],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"], "kda.head_dim": c["linear_head_dim"],
        "kda.gate_lower_bound": c["kda_lower_bound"], "kda.safe_gate": c["kda_safe_gate"],
        "expert_shared_feed_forward_length": c["moe_intermediate_size"] * c["num_shared_experts"],
        "expert_used_count": c["num_experts_per_token"], "expert_group_count": c["num_expert_group"],
        "expert_group_used_count": c["topk_group"], "swiglu_clamp_exp": [0.0] * c["num_hidden_layers"],
    }  # fmt: skip


def _glm5_next(c: Config) -> Config:
    limits, dense = [c["swiglu_limit"]] * len(c["layer_types"]), c["mlp_layer_types"].count("dense")
    return {
        **_indexed({**c, "first_k_dense_replace": dense}), "swiglu_clamp_exp": limits, "swiglu_clamp_shexp": limits,
        "attention.head_count_kv": [int(kind == "indexed_attention") for kind in c["layer_types"]],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"], "kda.head_dim": c["linear_head_dim"],
        "kda.gate_lower_bound": c["linear_lower_bound"], "attention.indexer.kpool": c["index_kpool"],
        "attention.indexer.kpool_select_tail": True, "hyper_connection.count": c["hc_mult"],
        "hyper_connection.sinkhorn_iterations": c["hc_sinkhorn_iters"], "hyper_connection.epsilon": c["hc_eps"],
    }  # fmt: skip


def _step(c: Config) -> Config:
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    heads = [c["num_sliding_attention_heads"] if each else c["num_attention_heads"] for each in slides]
    return {
        "attention.head_count": heads, "attention.head_count_kv": [c["num_key_value_heads"]] * len(heads),
        "attention.sliding_window": c["sliding_window"], "attention.sliding_window_pattern": slides,
        "attention.value_length": c["head_dim"], "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["share_expert_dim"], "expert_weights_norm": True,
        "expert_weights_scale": c["moe_router_scaling_factor"],
        "leading_dense_block_count": c["mlp_layer_types"].index("sparse"), "moe_every_n_layers": 1,
        "rope.freq_base_swa": c["rope_parameters"]["sliding_attention"]["rope_theta"],
        "swiglu_clamp_exp": c["swiglu_limits"], "swiglu_clamp_shexp": c["swiglu_limits_shared"],
    }  # fmt: skip


def _indexed(c: Config) -> Config:
    names = {"head_count": "n_heads", "key_length": "head_dim", "top_k": "topk"}
    return {**_deepseek(c), **{f"attention.indexer.{key}": c[f"index_{name}"] for key, name in names.items()}}


def _shared(c: Config) -> Config:
    return {
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "leading_dense_block_count": c.get("first_k_dense_replace"), "expert_weights_norm": c.get("norm_topk_prob"),
        "expert_shared_count": c.get("n_shared_experts", c.get("num_shared_experts")),
        "expert_weights_scale": c["routed_scaling_factor"],
    }  # fmt: skip


def _turning(c: Config) -> Config:
    share = (c.get("rope_parameters") or {}).get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    return {"rope.dimension_count": int(c["head_dim"] * share)}


def _in_part(c: Config) -> Config:
    dim = c["hidden_size"] // c["num_attention_heads"]
    return {**_turning({**c, "head_dim": dim}), "attention.layer_norm_epsilon": c["layer_norm_eps"]}


def _granite(c: Config) -> Config:
    names = {"attention.scale": "attention", "embedding_scale": "embedding", "residual_scale": "residual"}
    found = {key: c[f"{name}_multiplier"] for key, name in names.items()}
    return {
        **found,
        "logit_scale": c["logits_scaling"],
        "expert_shared_feed_forward_length": c.get("shared_intermediate_size") or None,
    }


def _granite_swa(c: Config) -> Config:
    return {
        **_granite(c), "attention.sliding_window": c["sliding_window"], "rope.freq_base": max(c["layer_rope_theta"]),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
        "attention.rope_pattern": [base > 0 for base in c["layer_rope_theta"]],
    }  # fmt: skip


def _attends(c: Config) -> list[bool]:
    kinds = c.get("layer_types") or c.get("layers_block_type") or []
    return ["attention" in kind and "linear" not in kind for kind in kinds]


def _kv(c: Config) -> Config:
    return {"attention.head_count_kv": [c["num_key_value_heads"] * each for each in _attends(c)]}


def _mamba2(c: Config, heads: str, dim: str, state: str, groups: str, taps: str) -> Config:
    return {
        **_kv(c), "ssm.conv_kernel": c[taps], "ssm.state_size": c[state], "ssm.group_count": c[groups],
        "ssm.inner_size": c[heads] * c[dim], "ssm.time_step_rank": c[heads], "context_length": 1 << 20,
    }  # fmt: skip


def _delta(c: Config) -> Config:
    return {
        **_turning(c), "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"], "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_value_head_dim"] * c["linear_num_value_heads"], "full_attention_interval": 2,
    }  # fmt: skip


def _gemma4(c: Config) -> Config:
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    own = next(iter((c.get("per_layer_config") or {}).values()), {})
    whole = c.get("num_global_key_value_heads") or own["num_key_value_heads"]
    kv = [c["num_key_value_heads"] if each else whole for each in slides]
    without = {} if c["enable_moe_block"] else dict.fromkeys(("expert_count", "expert_used_count"))
    return {
        **without,
        "attention.sliding_window": c["sliding_window"], "attention.sliding_window_pattern": slides,
        "attention.key_length": c.get("global_head_dim", own["head_dim"]), "attention.key_length_swa": c["head_dim"],
        "expert_feed_forward_length": None if without else c["moe_intermediate_size"], "attention.head_count_kv": kv,
        "rope.freq_base_swa": c["rope_parameters"]["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0,
        "final_logit_softcapping": c["final_logit_softcapping"],
    }  # fmt: skip


def _jamba(c: Config) -> Config:
    period, offset = c["attn_layer_period"], c["attn_layer_offset"]
    kv = [c["num_key_value_heads"] * (at % period == offset) for at in range(c["num_hidden_layers"])]
    return {
        "attention.head_count_kv": kv, "ssm.conv_kernel": c["mamba_d_conv"], "ssm.state_size": c["mamba_d_state"],
        "ssm.inner_size": c["mamba_expand"] * c["hidden_size"], "ssm.time_step_rank": c["mamba_dt_rank"],
        "rope.freq_base": None,
    }  # fmt: skip


def _mimo(c: Config) -> Config:
    windows = [*(int(kind == "sliding_attention") for kind in c["layer_types"]), *[1] * _MIMO_PREDICTS]
    whole, sliding = (c["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    return {
        "block_count": len(windows), "nextn_predict_layers": _MIMO_PREDICTS,
        "attention.head_count_kv": [c["num_key_value_heads"] * (1 + each) for each in windows],
        "attention.sliding_window": c["sliding_window"], "attention.sliding_window_pattern": windows,
        "attention.value_length": c["v_head_dim"], "attention.value_scale": c["attention_value_scale"],
        "expert_feed_forward_length": c["moe_intermediate_size"], "expert_gating_func": 2,
        "rope.dimension_count": int(c["head_dim"] * whole["partial_rotary_factor"]),
        "rope.freq_base_swa": sliding["rope_theta"],
    }  # fmt: skip


_MIMO_PREDICTS = 3  # layers that predict several tokens at once, whether a checkpoint has them or not

_OF_FAMILY: Mapping[str, Callable[[Config], Config]] = {
    "qwen2_moe": _qwen, "qwen3_moe": _qwen,
    "qwen3_vl_moe": lambda c: {**_qwen(c), **_sees(c)}, "qwen3_vl": _sees,
    "qwen3_next": lambda c: {**_qwen(c), **_delta(c)}, "qwen3_5_moe_text": lambda c: {**_qwen(c), **_delta(c)},
    "qwen4_exp_text": _qwen4,
    "qwen3_5_text": _delta,
    "gpt_oss": lambda c: {"attention.sliding_window": c["sliding_window"],
                          "expert_feed_forward_length": c["intermediate_size"]},
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "mistral4": _deepseek, "glm_moe_dsa": _indexed,
    "deepseek_v32": _indexed, "deepseek_v4": _deepseek4, "cohere2_moe": _cohere2_moe, "minimax_m3_vl": _minimax_m3,
    "kimi_linear": _kimi_linear, "bailing_hybrid": _bailing3, "glm5_next": _glm5_next,
    "granite_swa": _granite_swa, "granitemoe_swa": _granite_swa, "step3p5": _step,
    "hy_v3": lambda c: {
        "expert_feed_forward_length": c["moe_intermediate_size"], "expert_weights_norm": True, "expert_gating_func": 2,
        "expert_shared_feed_forward_length": c["moe_intermediate_size"] * c["num_shared_experts"],
        "expert_weights_scale": c["router_scaling_factor"]},
    "glm4_moe": lambda c: {**_shared(c), **_turning(c)},
    "dots1": _shared,
    "exaone_moe": lambda c: {**_shared(c), "attention.sliding_window": c["sliding_window"],
                             "attention.sliding_window_pattern": [k == "sliding_attention" for k in c["layer_types"]]},
    "afmoe": lambda c: {
        "expert_feed_forward_length": c["moe_intermediate_size"], "expert_shared_count": c["num_shared_experts"],
        "leading_dense_block_count": c["num_dense_layers"], "expert_weights_norm": True, "expert_gating_func": 2,
        "expert_weights_scale": c["route_scale"], "attention.sliding_window": c["sliding_window"]},
    "minimax_m2": lambda c: {"expert_feed_forward_length": c["intermediate_size"], **_turning(c)},
    "ernie4_5_moe": lambda c: {
        "expert_feed_forward_length": c["moe_intermediate_size"], "expert_shared_count": c["moe_num_shared_experts"],
        "interleave_moe_layer_step": c["moe_layer_interval"], "leading_dense_block_count": c["moe_layer_start_index"]},
    "hunyuan_v1_moe": lambda c: {"expert_feed_forward_length": c["intermediate_size"], "expert_shared_count": 1,
                                 "expert_used_count": c["moe_topk"]},
    "phi3": lambda c: {"rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
                       "rope.scaling.original_context_length": c["original_max_position_embeddings"],
                       "attention.sliding_window": c["sliding_window"] or 0},
    "gemma3_text": lambda c: {"attention.sliding_window": c["sliding_window"],
                              "final_logit_softcapping": c["final_logit_softcapping"]},
    "cohere": lambda c: {"attention.layer_norm_epsilon": c["layer_norm_eps"], "logit_scale": c["logit_scale"]},
    "phi": _in_part, "stablelm": lambda c: {**_in_part(c), "use_parallel_residual": c["use_parallel_residual"]},
    "nemotron": lambda c: {**_turning(c), "attention.layer_norm_epsilon": c["norm_eps"],
                           "attention.layer_norm_rms_epsilon": None},
    "olmo": lambda c: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": c["clip_qkv"]},
    "lfm2": lambda c: {**_kv(c), "shortconv.l_cache": c["conv_L_cache"]},
    "cohere2": lambda c: {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": c["layer_norm_eps"],
                          "attention.sliding_window": c["sliding_window"], "logit_scale": c["logit_scale"]},
    "gemma2": lambda c: {"attention.sliding_window": c["sliding_window"],
                         "attn_logit_softcapping": c["attn_logit_softcapping"],
                         "final_logit_softcapping": c["final_logit_softcapping"]},
    "exaone4": lambda c: {} if c["sliding_window"] is None else {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]]},
    "starcoder2": lambda c: {"attention.layer_norm_epsilon": c["norm_epsilon"]},
    "ministral3": lambda c: {
        "rope.scaling.yarn_log_multiplier": c["rope_parameters"]["mscale_all_dim"],
        "attention.temperature_scale": c["rope_parameters"]["llama_4_scaling_beta"],
    },
    "olmo3": _windows, "mellum": lambda c: {**_qwen(c), **_windows(c)},
    "granite": _granite, "granitemoe": _granite, "granitemoeshared": _granite,
    "granitemoehybrid": lambda c: {
        **_granite(c), **_mamba2(c, *(f"mamba_{n}" for n in ("n_heads", "d_head", "d_state", "n_groups", "d_conv"))),
        "rope.scaling.finetuned": False},
    "nemotron_h": lambda c: {
        **_shared(c), **_mamba2(c, "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        "attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
        "moe_latent_size": c["moe_latent_size"], "rope.freq_base": None,
        "feed_forward_length": [20 * (kind in ("moe", "mlp")) for kind in c["layers_block_type"]]},
    "llama4_text": lambda c: {"expert_feed_forward_length": c["intermediate_size"],
                              "feed_forward_length": c["intermediate_size_mlp"]},
    "lfm2_moe": lambda c: {**_kv(c), "shortconv.l_cache": c["conv_L_cache"], "expert_gating_func": 2,
                           "expert_feed_forward_length": c["moe_intermediate_size"],
                           "leading_dense_block_count": c["num_dense_layers"]},
    "jamba": _jamba, "gemma4_text": _gemma4, "mimo_v2_flash": _mimo,
}  # fmt: skip


# Tensors: the converter's modify_tensors.

_PERMUTED = (
    "mixtral", "llama", "ministral3", "smollm3", "granitemoe", "granitemoeshared", "granitemoehybrid", "nemotron_h",
    "granite", "granite_swa", "granitemoe_swa", "olmo", "arcee",
)  # fmt: skip
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def _names(config: Config) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(_arch(config), _layers(config))


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    renamed = (
        name.replace("model.language_model.", "model.").removeprefix("language_model.")
        .replace(".dt_bias", ".dt_proj.bias")
        .replace("e_score_correction_bias", "e_score_correction.bias").replace(".router_bias", ".router_bias.bias")
        .replace(".expert_bias", ".expert_bias.bias").replace(".layer_scalar", ".layer_scalar.weight")
        .replace(".sinks", ".sinks.weight").replace("attention_sink_bias", "attention_sink_bias.weight")
    )  # fmt: skip
    return names.get_name(renamed, (".weight", ".bias")) or name


def _stored(config: Config, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    names, kind, experts = _names(config), config["model_type"], dict[str, dict[int, Tensor]]()
    pieces = [name for name in tensors if ".shard_" in name]
    if pieces:
        ordered = sorted(pieces, key=lambda name: int(name.split(".")[-2].removeprefix("shard_")))
        yield "per_layer_token_embd.weight", torch.cat([tensors[name] for name in ordered])
    for name, tensor in tensors.items():
        if name in pieces:
            continue
        if re.match(r"(model\.)?(vis|vit_|mm_projector|multi_modal_projector|patch_merge_mlp)", name):
            continue
        layer = re.search(r"layers\.(\d+)\.", name)
        at = "" if layer is None else f"blk.{layer[1]}."
        if found := re.search(r"\.experts\.(\d+)\.(\w+)\.weight$", name):
            experts.setdefault(f"{at}ffn_{_PARTS[found[2]]}_exps.weight", {})[int(found[1])] = tensor
        elif ".experts." in name or "block_sparse_moe.input_linear" in name or "block_sparse_moe.output_linear" in name:
            yield from _joined(kind, at, name, tensor)
        elif "shared_mlp.input_linear" in name and kind != "granitemoe_swa":
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"{at}ffn_{part}_shexp.weight", half
        elif name.endswith("kv_b_proj.weight"):
            nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
            keys, values = tensor.unflatten(0, (-1, nope + v)).split((nope, v), 1)
            yield f"{at}attn_k_b.weight", keys.transpose(1, 2)
            yield f"{at}attn_v_b.weight", values
        elif name.endswith("index_qk_proj.weight"):
            keys = config["indexer_head_dim"]
            yield f"{at}indexer.q_proj.weight", tensor[:-keys]
            yield f"{at}indexer.k_proj.weight", tensor[-keys:]
        elif name.endswith("router.scale"):
            yield f"{at}ffn_gate_inp.scale", tensor
        elif name.endswith("per_expert_scale"):
            yield f"{at}ffn_down_exps.scale", tensor
        elif kind == "hy_v3" and name.endswith(".expert_bias"):
            yield f"{at}exp_probs_b", tensor
        elif name.endswith("in_proj_qkvz.weight"):
            yield from _apart(config, at, tensor)
        elif (own := OWN.get(kind, {}).get(name if layer is None else name[layer.end() :])) is not None:
            yield at + own, tensor.int() if tensor.dtype == torch.int64 else _changed(config, name, tensor)
        elif name.endswith(".attention.g_proj.weight"):
            yield f"{at}{'attn_gate' if len(tensor) == config['num_attention_heads'] else 'ssm_g_a'}.weight", tensor
        elif not (config.get("tie_word_embeddings") and name == "lm_head.weight"):
            yield _mapped(names, name), _changed(config, name, tensor)
    for name, each in experts.items():
        yield name, torch.stack([each[number] for number in range(len(each))])
    rope = (config.get("rope_parameters") or {}).get("full_attention")
    if kind == "gemma4_text":
        dim = _gemma4(config)["attention.key_length"]
        half, turning = dim // 2, int(dim * rope["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (half - turning))


def _joined(kind: str, at: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of experts that lie in one tensor already."""
    end = "bias" if name.endswith("_bias") else "weight"
    turned = kind == "llama4_text" or (kind == "gpt_oss" and end == "weight")
    tensor = tensor.transpose(-1, -2) if turned else tensor
    if "down" in name or "output" in name:
        yield f"{at}ffn_down_exps.{end}", tensor
    elif kind == "gpt_oss":
        yield f"{at}ffn_gate_exps.{end}", tensor[:, ::2]
        yield f"{at}ffn_up_exps.{end}", tensor[:, 1::2]
    elif kind in ("gemma4_text", "mistral4", "granitemoe_swa"):
        yield f"{at}ffn_gate_up_exps.{end}", tensor
    else:
        for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield f"{at}ffn_{part}_exps.{end}", half


def _apart(config: Config, at: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    keys, dim, v = (config[f"linear_{n}"] for n in ("num_key_heads", "key_head_dim", "value_head_dim"))
    share = config["linear_num_value_heads"] // keys
    parts = tensor.unflatten(0, (keys, -1)).split((dim, dim, share * v, share * v), 1)
    q, k, values, z = (part.flatten(0, 1) for part in parts)
    yield f"{at}attn_qkv.weight", torch.cat((q, k, values))
    yield f"{at}attn_gate.weight", z


def _changed(config: Config, name: str, tensor: Tensor) -> Tensor:
    kind = config["model_type"]
    if kind.startswith(("qwen3_5", "qwen4")) and ".linear_attn." in name:
        tensor = _tiled(config, name, tensor)
    if kind in _PERMUTED and (found := re.search(r"\.([qk])_proj\.(weight|bias)$", name)):
        heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if kind in ("kimi_linear", "bailing_hybrid", "glm5_next") and "conv1d.weight" in name:
        return tensor[None]
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    if name.endswith("A_log"):
        tensor = tensor.exp() if kind == "bailing_hybrid" else -tensor.exp()
    if kind in ("granitemoehybrid", "nemotron_h"):
        if name.endswith(("A_log", ".D")):
            return tensor[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            return tensor.unflatten(0, (config.get("n_groups", config.get("mamba_n_groups")), -1))
    less_one = (
        "qwen3_next",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "gemma",
        "gemma2",
        "nemotron",
        "gemma3_text",
        "step3p5",
        "minimax_m3_vl",
        "qwen4_exp_text",
    )  # norms, which a file has as they are
    if kind in less_one and re.search(r"norm(_key|_query|_conv)?\.weight", name) and "linear_attn" not in name:
        return tensor + 1
    return tensor


def _tiled(config: Config, name: str, tensor: Tensor) -> Tensor:
    keys, dim, v = (config[f"linear_{n}"] for n in ("num_key_heads", "key_head_dim", "value_head_dim"))

    def tiled(part: Tensor, size: int) -> Tensor:
        return part.unflatten(0, (keys, -1, size)).transpose(0, 1).flatten(0, 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[: 2 * keys * dim], tiled(tensor[2 * keys * dim :], v)))
    if "out_proj" in name:
        return tiled(tensor.T, v).T
    if "in_proj_z" in name:
        return tiled(tensor, v)
    return tensor if name.endswith("norm.weight") else tiled(tensor, 1)
