"""Published models by their config.json alone: each opens, has as many parameters as its makers say, and is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from published import PARAMETERS, PUBLISHED, SWITCH_C_2048_AS_IT_IS, Config
from transformers import CONFIG_MAPPING

from moeconv.dense import dense_of
from moeconv.plan.outlook import Host, outlooks, parameters, table_numbers
from moeconv.plan.problem import Storage
from moeconv.source.archs import FAMILIES, REFUSED
from moeconv.source.outline import CheckpointError, Outline, features

HOST = Host(held_bytes=45_000_000, thread_bytes=1 << 20, widened=False)
FEATURES = {
    "switch-base-8": ["an encoder", "positions by buckets of distances", "at most 64 tokens an expert"],
    "switch-xxl-128": ["gelu_new experts", "24 of 48 layers without experts"],
    "switch-c-2048": ["30 heads", "relu experts without gates"],
    "nllb-moe-54b": [
        "a table of 1024 positions",
        "36 of 48 layers without experts",
        "relu experts without gates with biases",
        "biases of q, k, v, o",
        "LayerNorms",
    ],
    "GPTSAN-japanese": [
        "a table of 1280 positions",
        "at most 128 tokens an expert, of which others keep what they are",
        "a projection beside the experts",
        "LayerNorms",
        "no norms before attention and experts",
        "a prompt's beginning, up to token 35998, that sees itself whole",
    ],
    "gpt-oss-20b": ["attention sinks", "windows of 128 tokens in 12 of 24 layers", "silu experts with biases"],
    "DeepSeek-V3": [
        "latent attention of 512 + 64 features a token",
        "experts of 4 of 8 groups",
        "3 of 61 layers without experts",
    ],
    "K-EXAONE-236B-A23B": ["windows of 128 tokens in 36 of 48 layers", "no positions in 12 of 48 layers"],
    "GLM-4.5": ["rotary positions of 64 of 128 features", "biases of q, k, v", "queries and keys normed by head"],
    "Hunyuan-A13B": ["queries and keys normed by head, after they turn", "a shared expert of width 3072"],
    "Phi-3.5-MoE": ["a sparsemixer in place of routers", "LayerNorms", "a head with a bias"],
    "granite-3.1-1b-a400m": ["factors of the stream", "a factor of the embedding", "a tied head"],
    "granite-4.0-h-tiny": [
        "Mamba-2 of 48 heads with 128 numbers a feature in place of attention in 36 of 40 layers",
        "12 heads, 4 of keys",
        "no positions in 4 of 40 layers",
        "a shared expert of width 1024",
        "factors of the stream",
    ],
    "LFM2-8B-A1B": [
        "convolutions over 3 tokens in place of attention in 18 of 24 layers",
        "2 of 24 layers without experts",
        "32 heads, 8 of keys",
        "a bias for the choice of experts",
    ],
    "Jamba-1.5-Mini": [
        "Mamba of 8192 channels with 16 numbers each in place of attention in 28 of 32 layers",
        "16 of 32 layers without experts",
        "no positions in 4 of 32 layers",
        "softmax routers",
    ],
    "Nemotron-3-Nano-30B-A3B": [
        "Mamba-2 of 64 heads with 128 numbers a feature in place of attention in 23 of 52 layers",
        "29 of 52 layers without experts",
        "no positions in 6 of 52 layers",
        "relu2 experts without gates",
        "a shared expert of width 3712",
    ],
    "Nemotron-3-Super-120B-A12B": ["experts that see 1024 features in place of 4096"],
    "Qwen3-Next-80B-A3B": [
        "gated delta rules of 32 heads in place of attention in 36 of 48 layers",
        "16 heads, 2 of keys",
        "a gate on what heads give",
        "rotary positions of 64 of 256 features",
        "a shared expert of width 512 with a gate",
    ],
    "Qwen3.5-35B-A3B": ["gated delta rules of 32 heads in place of attention in 30 of 40 layers"],
    "Kimi-Linear-48B-A3B": [
        "gated delta rules of 32 heads, by feature, in place of attention in 20 of 27 layers",
        "latent attention of 512 + 64 features a token",
        "no positions in 7 of 27 layers",
        "1 of 27 layers without experts",
    ],
    "Ling-3.0-Flash": [
        "gated delta rules of 32 heads, by feature, in place of attention in 35 of 42 layers",
        "latent attention of 512 + 64 features a token with gates",
        "2 of 42 layers without experts",
        "experts of 4 of 8 groups",
    ],
    "GLM-5.3-Flash": [
        "gated delta rules of 64 heads, by feature, in place of attention in 34 of 45 layers",
        "latent attention of 512 + 2 features a token",
        "no positions in 11 of 45 layers",
        "3 of 45 layers without experts",
        "gates within 10",
        "4 streams in place of one",
    ],
    "DeepSeek-V4-Flash": [
        "64 heads of 8 groups, one key of 512 features a token",
        "keys of 128 tokens",
        "keys of 4 tokens, of which an indexer chooses 512",
        "√softplus routers",
        "a table of each token's experts in some layers",
    ],
    "Qwen3.8-Flash-Next": [
        "gated delta rules of 48 heads in place of attention in 36 of 48 layers",
        "rotary positions of 64 of 256 features",
        "4 streams in place of one that gates mix",
        "embeddings of up to 3 tokens together in 1 of 48 layers, 320001536 rows on the drive",
    ],
    "OPT-1.3B": [
        "biases of q, k, v, o",
        "a table of 2048 positions",
        "one network a layer, which is its only expert",
        "relu experts without gates with biases",
        "LayerNorms",
        "a tied head",
    ],
    "North-Mini-Code-1.0": [
        "windows of 4096 tokens in 36 of 49 layers",
        "no positions in 12 of 49 layers",
        "1 of 49 layers without experts",
        "attention and feed-forward side by side",
    ],
    "Step-3.7-Flash": [
        "96 heads, 8 of keys",
        "a gate on what each head gives",
        "rotary positions of 64 of 128 features",
        "gates within 7 behind their activation in some layers",
    ],
    "SmolLM3-3B": ["no positions in 9 of 36 layers", "one network a layer, which is its only expert", "a tied head"],
    "Phi-4-mini": ["rotary positions of 96 of 128 features", "windows of 262144 tokens in 32 of 32 layers"],
    "LFM2-1.2B": ["convolutions over 3 tokens in place of attention in 10 of 16 layers", "a tied head"],
    "Command-R": ["LayerNorms", "attention and feed-forward side by side"],
    "Phi-2": [
        "rotary positions of 32 of 80 features",
        "gelu_new experts without gates with biases",
        "a head with a bias",
    ],
    "StableLM-2-1.6B": ["rotary positions of 16 of 64 features", "biases of q, k, v", "LayerNorms"],
    "Minitron-4B": ["rotary positions of 64 of 128 features", "relu2 experts without gates", "LayerNorms"],
    "AFM-4.5B": ["relu2 experts without gates"],
    "Gemma-2-9b": ["windows of 4096 tokens in 21 of 42 layers", "norms after attention and experts"],
    "granite-3.3-8b": ["factors of the stream", "a factor of the embedding", "a tied head"],
    "EXAONE-4.0-32B": ["windows of 4096 tokens in 48 of 64 layers", "no positions in 16 of 64 layers"],
    "Hunyuan-7B": ["queries and keys normed by head, after they turn"],
    "starcoder2-7b": ["LayerNorms", "gelu_new experts without gates with biases"],
    "Flint": ["attention sinks", "no positions in 14 of 49 layers", "a shared expert of width 1024"],
    "A.X-K1": ["latent attention of 512 + 64 features a token", "norms after experts"],
    "Gemma-3-4b": ["windows of 1024 tokens in 29 of 34 layers", "norms after attention and experts", "a tied head"],
    "Qwen1.5-MoE-A2.7B": ["a shared expert of width 5632 with a gate"],
}


def _in_text(name: str, **changes: object) -> Config:
    """Returns a change of a published model's text model."""
    return {"text_config": {**PUBLISHED[name]["text_config"], **changes}}


def outline_of(config: Config) -> Outline:
    return Outline.of(config, {}, Path("hf/config.json"))


def test_every_family_is_published() -> None:
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)
    assert set(PARAMETERS) | set(FEATURES) <= set(PUBLISHED)


def test_what_is_refused_by_name_is_no_family_and_what_transformers_lacks_it_lacks() -> None:
    assert not REFUSED.keys() & FAMILIES.keys()
    lacked = {name for name, reason in REFUSED.items() if reason.startswith("transformers ")}
    assert lacked == {name for name in REFUSED if name not in CONFIG_MAPPING}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_what_its_makers_say_and_is_planned(name: str) -> None:
    outline = outline_of(PUBLISHED[name])
    check_plan(name, outline)
    if name in PARAMETERS:
        check_parameters(outline, *PARAMETERS[name])
    assert set(FEATURES.get(name, ())) <= set(features(outline.spec))
    check_notes(name, outline)


def check_plan(name: str, outline: Outline) -> None:
    spec, computed = outline.spec, outline.description.computed
    storage = Storage(0, outline.description.mxfp4, codes="trellis")
    found = outlooks(spec, storage, [None, dense_of(spec, 8)], computed, HOST)
    assert storage.mxfp4 == name.startswith("gpt-oss")
    widths = (1, 1.5, 2, 2.5, 3, 4, 16 if storage.mxfp4 else 8)
    assert [(each.dense_bits, each.bits) for each in found] == [(dense, bits) for dense in (16, 8) for bits in widths]
    numbers = parameters(spec, computed)
    assert (numbers.active < numbers.total) == spec.moe.chooses
    assert numbers.active <= numbers.total
    tables = 2 * table_numbers(spec)
    for each in found:
        experts, held = numbers.total * (4.25 if each.bits == 16 else each.bits) / 8, each.pack_bytes - tables
        assert HOST.held_bytes < each.smallest_memory < each.whole_memory
        assert each.backbone_bytes < each.smallest_memory
        assert held < each.whole_memory < 1.02 * held + 2e9
        assert held - each.backbone_bytes < 1.2 * experts + 1e8
        assert each.expert_bytes <= each.token_bytes < each.pack_bytes
    for rest in (found[: len(widths)], found[len(widths) :]):
        assert [each.pack_bytes for each in rest] == sorted(each.pack_bytes for each in rest)


def check_parameters(outline: Outline, total: float, active: float | None) -> None:
    numbers = parameters(outline.spec, outline.description.computed)
    assert numbers.total / 1e9 == pytest.approx(total, rel=0.03)
    assert active is None or numbers.active / 1e9 == pytest.approx(active, rel=0.12)  # some count the embedding


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("DeepSeek-V3", {"num_key_value_heads": 64}, "num_key_value_heads 64"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("DeepSeek-V2-Lite", {"head_dim": 64, "moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("GLM-4.5-Air", {"n_group": None}, "n_group"),
        ("LFM2-8B-A1B", {"layer_types": ["conv"] * 24}, "no layer with attention"),
        ("LFM2-8B-A1B", {"layer_types": ["conv", "sliding_attention"] * 12}, "layer_types with 'sliding_attention'"),
        ("LFM2-8B-A1B", {"conv_L_cache": 0}, "conv_L_cache 0"),
        ("Jamba-1.5-Mini", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("Jamba-1.5-Mini", {"num_experts": 1}, "no layer with experts"),
        ("Jamba-1.5-Mini", {"num_hidden_layers": 4}, "no layer with attention"),
        ("Jamba-1.5-Mini", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms False"),
        ("Jamba-1.5-Mini", {"sliding_window": 512}, "sliding_window 512"),
        ("granite-4.0-h-tiny", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("granite-4.0-h-tiny", {"num_local_experts": 0, "num_experts_per_tok": 0}, "num_local_experts 0"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 40}, "no layer with attention"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba", "sliding_attention"] * 20}, "with 'sliding_attention'"),
        ("granite-4.0-h-tiny", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        ("granite-4.0-h-tiny", {"time_step_limit": [0.0, 10.0]}, "time_step_limit"),
        ("granite-4.0-h-tiny", {"time_step_limit": [0.01, float("inf")]}, "time_step_limit"),
        ("granite-4.0-h-tiny", {"mamba_n_groups": 5}, "48 heads are in 5 groups"),
        ("granite-4.0-h-tiny", {"normalization_function": "layernorm"}, "normalization_function 'layernorm'"),
        ("granite-4.0-h-tiny", {"shared_intermediate_size": 0}, "shared_intermediate_size 0"),
        ("Nemotron-3-Nano-30B-A3B", {"hybrid_override_pattern": "M*MM"}, "no layer with experts"),
        ("Nemotron-3-Nano-30B-A3B", {"hybrid_override_pattern": "MEME"}, "no layer with attention"),
        ("Nemotron-3-Nano-30B-A3B", {"hybrid_override_pattern": "ME?E"}, "is not a valid nemotron_h config"),
        ("Nemotron-3-Nano-30B-A3B", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ("Nemotron-3-Nano-30B-A3B", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("Nemotron-3-Nano-30B-A3B", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("Nemotron-3-Super-120B-A12B", {"moe_latent_size": 0}, "moe_latent_size 0"),
        ("Qwen3-Next-80B-A3B", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("Qwen3-Next-80B-A3B", {"layer_types": ["sliding_attention"] * 48}, "layer_types with 'sliding_attention'"),
        ("Qwen3-Next-80B-A3B", {"layer_types": ["full_attention"] * 47}, "layer"),
        ("Qwen3-Next-80B-A3B", {"full_attention_interval": 64}, "no layer with attention"),
        ("Qwen3-Next-80B-A3B", {"rope_scaling": {"rope_type": "default", "mrope_section": [11]}}, "mrope_section"),
        ("Qwen3.5-35B-A3B, text", {"attn_output_gate": False}, "attn_output_gate False"),
        ("Qwen3.5-35B-A3B, text", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ("Qwen3.5-35B-A3B, text", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("Qwen3.5-35B-A3B", {"text_config": None}, "no text_config"),
        ("gpt-oss-20b", {"experts_per_token": 8}, "experts_per_token 8"),
        ("gpt-oss-20b", {"sliding_window": 0}, "sliding_window"),
        ("Hunyuan-A13B", {"use_cla": True}, "use_cla True"),
        ("Kimi-K2.5", {"eos_token_id": float("inf")}, "eos_token_id is inf"),
        ("Kimi-K2.5", {"bos_token_id": [1]}, "bos_token_id is [1]"),
        ("Hunyuan-A13B", {"head_dim": 2, "attention_head_dim": 2}, "heads of 2 features"),
        ("Hunyuan-A13B", {"moe_topk": [8] * 31 + [4]}, "moe_topk"),
        ("MiniMax-M2", {"use_routing_bias": False}, "use_routing_bias False"),
        ("ERNIE-4.5-21B-A3B", {"moe_norm_min": 0.5}, "moe_norm_min 0.5"),
        ("Phi-3.5-MoE", {"num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        ("OPT-6.7B", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        ("switch-c-2048", SWITCH_C_2048_AS_IT_IS, "is_full_sparse True, and only 15 of 27 layers would have experts"),
        ("nllb-moe-54b", {"moe_eval_capacity_token_fraction": 0.25}, "moe_eval_capacity_token_fraction 0.25"),
        ("Phi-4", {"attention_bias": True}, "attention_bias True: this family"),
        ("Gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True: text that sees"),
        ("Gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("Gemma-3-1b", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar -1.0: it should be above 0"),
        ("Gemma-2-9b", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar -1.0: it should be above 0"),
        ("Gemma-2-9b", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("Command-R", {"use_qk_norm": True}, "use_qk_norm True: LayerNorms with weights for each head"),
        ("Phi-2", {"qk_layernorm": True}, "qk_layernorm True: heads with LayerNorms"),
        ("StableLM-2-1.6B", {"qk_layernorm": True}, "qk_layernorm True: heads with LayerNorms"),
        ("StableLM-2-1.6B", {"head_dim": 32}, "head_dim 32: heads fill the hidden size"),
        ("LFM2-1.2B", {"block_use_swiglu": False}, "block_use_swiglu False"),
        ("LFM2-1.2B", {"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier -8192"),
        ("Gemma-7b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True: text that sees"),
        ("Seed-OSS-36B", {"attention_bias": False, "attention_out_bias": True}, "a bias of o alone"),
        ("Hunyuan-7B", {"use_qk_norm": False}, "use_qk_norm False"),
        ("Hunyuan-7B", {"head_dim": None}, "no head_dim"),
        ("starcoder2-7b", {"mlp_type": "gated"}, "mlp_type 'gated'"),
        (
            "A.X-K1",
            {"first_k_dense_replace": 3, "mlp_layer_types": ["dense"] + ["sparse"] * 60},
            "first_k_dense_replace",
        ),
        ("SmolLM2-135M", {"rope_interleaved": True}, "rope_interleaved True"),
        ("Command-R7B", {"use_parallel_block": False}, "use_parallel_block False"),
        ("Command-R7B", {"logit_scale": 0.0}, "logit_scale 0.0"),
        ("North-Mini-Code-1.0", {"expert_selection_fn": "tanh"}, "expert_selection_fn 'tanh'"),
        ("North-Mini-Code-1.0", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("Step-3.7-Flash", _in_text("Step-3.7-Flash", use_head_wise_attn_gate=False), "use_head_wise_attn_gate False"),
        ("Step-3.7-Flash", _in_text("Step-3.7-Flash", swiglu_limits=[7.0]), "swiglu_limits for 1 of 45 layers"),
        ("Step-3.7-Flash", _in_text("Step-3.7-Flash", attention_other_setting={"head_dim": 64}), "attention_other"),
        ("Step-3.7-Flash", _in_text("Step-3.7-Flash", swiglu_limits=[-7.0] * 45), "bound should be between 0.001"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", index_kpool_always_select_tail=False), "always_select_tail False"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", qk_rope_head_dim=64), "Expecting NoPE"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", linear_lower_bound=5.0), "linear_lower_bound 5.0: it should be"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", hc_mult=1), "hc_mult 1: it should be a whole number from 2 on"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", hc_mult=100), "n should be between 2 and 64, found 100"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", hc_eps=0.0), "hc_eps 0.0: it should be a number other than 0"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", q_lora_rank=None), "q_lora_rank"),
        ("GLM-5.3-Flash", _in_text("GLM-5.3-Flash", first_k_dense_replace=1), "first_k_dense_replace 1"),
        (
            "GLM-5.3-Flash",
            _in_text("GLM-5.3-Flash", linear_attn_config={"kda_layers": [1]}),
            "kda_layers in linear_attn",
        ),
        ("GLM-5.3-Flash", {"text_config": None}, "no text_config: a glm5_next model needs one"),
        ("Qwen3.8-Flash-Next, text", {"hc_count": 100}, "n should be between 2 and 64, found 100"),
        ("Qwen3.8-Flash-Next, text", {"hidden_act": "sigmoid"}, "hidden_act 'sigmoid'"),
        ("Qwen3.8-Flash-Next, text", {"ple_conv_kernel_size": 1}, "ple_conv_kernel_size 1"),
        ("Qwen3.8-Flash-Next, text", {"ngram_vocab_size_base": 1 << 40}, "ngram_vocab_size_base 1099511627776"),
        ("Qwen3.8-Flash-Next, text", {"ngram_vocab_size_base": -1}, "ngram_vocab_size_base -1"),
        ("Qwen3.8-Flash-Next, text", {"ple_layer_ids": [4]}, "only supported on linear_attention"),
        ("Qwen3.8-Flash-Next, text", {"vocab_size": 1 << 25}, "vocab_size 33554432"),
        ("Qwen3.8-Flash-Next, text", {"eos_token_id": 248320}, "are for fewer than 248320 tokens"),
        ("Command-A-Vision", _in_text("Command-A-Vision", model_type="llama"), "model_type 'llama' in text_config"),
        ("ERNIE-4.5-VL-28B-A3B", _in_text("ERNIE-4.5-VL-28B-A3B", use_bias=True), "use_bias True"),
        ("Mixtral-8x7B", {"is_causal": False}, "is_causal False"),
        ("Mixtral-8x7B", {"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776, it should be 1 to 4096"),
        ("Mixtral-8x7B", {"num_attention_heads": 0}, "num_attention_heads 0: it should be a whole number from 1 on"),
        ("Mixtral-8x7B", {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ("OLMoE-1B-7B", {"per_layer_config": {"3": {"head_dim": 64}}}, "per_layer_config"),
        ("Qwen3-30B-A3B", {"use_qk_norm": False, "qk_layernorm": False}, "use_qk_norm False"),
        ("Qwen3-30B-A3B", {"attention_chunk_size": 512}, "attention_chunk_size 512"),  # read by what builds masks
        ("Gemma-4-26B-A4B", {"sliding_window": 512}, "sliding_window 512 beside text_config"),
        ("Nemotron-3-Nano-30B-A3B", {"time_step_limit": [0.0, 3e38]}, "time_step_limit"),
        ("Qwen3-30B-A3B", {"hidden_size": "wide"}, "is not a valid qwen3_moe config"),
        ("Qwen3-30B-A3B", {"model_type": "qwen4_moe"}, "'qwen4_moe' is not supported"),
    ],
)
def test_a_setting_that_matters_is_refused_by_name(name: str, change: Config, named: str) -> None:
    with pytest.raises(CheckpointError, match=named.replace("[", r"\[")) as caught:
        outline_of({**PUBLISHED[name], **change})
    assert "\n" not in str(caught.value)


# As they stand in files of others: left by a trainer, by an older version that wrote down how texts are made, or by the
# code that a model was published with.
LEFT_BEHIND: Config = {
    "unsloth_fixed": True, "unsloth_version": "2025.9.1", "_attn_implementation_autoset": True,
    "_attn_implementation": "flash_attention_2", "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_length": 4096,
    "num_beams": 1, "length_penalty": 1.0, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "do_sample": True,
}  # fmt: skip


def check_notes(name: str, published: Outline) -> None:
    """What transformers never looks at is a note."""
    found = outline_of({**LEFT_BEHIND, **PUBLISHED[name]})
    assert found.spec == published.spec
    (note,) = [note for note in found.description.notes if note not in published.description.notes]
    assert note.startswith("transformers gives these settings of config.json no effect on the model: ")
    assert {"unsloth_version", "repetition_penalty"} <= set(note.partition(": ")[2].split(", ")) <= set(LEFT_BEHIND)
    assert "_attn_implementation" not in note


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("Qwen3-30B-A3B", {"use_qk_norm": True, "qkv_bias": False}, None),
        ("Gemma-4-26B-A4B", {"vision_soft_tokens_per_image": 280}, "vision_soft_tokens_per_image"),
        ("nllb-moe-54b", {"scale_attention": True}, "scale_attention"),
        ("Nemotron-3-Nano-30B-A3B", {"time_step_limit": [0.0, 1e308]}, None),
        ("granite-4.0-h-tiny", {"time_step_limit": [0.0, 1e308]}, None),
    ],
)
def test_settings_of_published_models_that_change_nothing(name: str, change: Config, named: str | None) -> None:
    found = outline_of({**PUBLISHED[name], **change})
    assert found.spec == outline_of(PUBLISHED[name]).spec
    assert [note.rpartition(": ")[2] for note in found.description.notes] == ([] if named is None else [named])


def test_texts_are_no_longer_than_short_factors_are_for() -> None:
    found = outline_of(PUBLISHED["Phi-4-mini"])
    assert found.spec.max_positions == 4096
    assert [*found.description.limits] == found.description.notes[:1]
    assert "texts are at most 4096 tokens long" in found.description.notes[0]
    assert outline_of(PUBLISHED["Phi-4"]).description.limits == ()


@pytest.mark.parametrize("infinite", [float("inf"), {"__float__": "Infinity"}])
def test_numbers_that_json_has_not_are_read_however_they_are_written(infinite: object) -> None:
    published = PUBLISHED["granite-4.0-h-tiny"]
    assert outline_of({**published, "time_step_limit": [0.0, infinite]}).spec == outline_of(published).spec


def test_layers_may_be_listed_by_an_older_name() -> None:
    published = PUBLISHED["granite-4.0-h-tiny"]
    older = {name: value for name, value in published.items() if name != "layer_types"}
    assert outline_of({**older, "layers_block_type": published["layer_types"]}).spec == outline_of(published).spec
