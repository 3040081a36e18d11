"""DeepSeek-V2 and V3, and the families that took their attention, routers or shared experts."""

from __future__ import annotations

import math
from collections.abc import Callable

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import (
    Description,
    Inside,
    Names,
    Place,
    View,
    decoder,
    halves,
    in_turn,
    of_heads,
    rows,
    transposed,
)
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Ffn, Groups, Latent, Norm, Router

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
MORE_PREDICTED = "the layers that predict several tokens at once are left out"
_EPS = 1e-6  # of the norms within latent attention, whatever config.json sets for the other norms


def latent(config: Config) -> Latent:
    """Returns latent attention: see moert.pack.parts.Latent. Raises UnsupportedModel."""
    heads = config.count("num_attention_heads")
    config.must_be("num_key_value_heads", heads, "latent attention has as many heads of keys as of queries")
    nope, turning = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    config.only(head_dim=(turning,), qk_head_dim=(nope + turning,))
    return Latent(
        heads, config.get("q_lora_rank"), config.count("kv_lora_rank"), nope, turning, config.count("v_head_dim"),
        (nope + turning) ** -0.5 * _stretch(config) ** 2, Norm(_EPS), rope=0, bias=bool(config.get("attention_bias")),
    )  # fmt: skip


def _stretch(config: Config) -> float:
    """Returns the factor with which YaRN multiplies queries and keys, beside the rope's own factor."""
    parameters = config.rope_parameters()
    wide, factor = parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    if parameters.get("rope_type", "default") == "default" or not wide or factor <= 1:
        return 1.0
    return float(0.1 * wide * math.log(factor) + 1.0)


def latent_names(config: Config, pairs: bool) -> Inside:
    """Returns the places of `latent`'s matrices in transformers. `pairs`: rotary positions turn pairs, not halves."""
    heads, rank, c = config.count("num_attention_heads"), config.get("q_lora_rank"), config.count("kv_lora_rank")
    nope, turning, v = (config.get(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    d_model = config.count("hidden_size")
    turn: Callable[..., View] = halves if pairs else of_heads
    asked, q = (d_model, "self_attn.q_proj") if rank is None else (rank, "self_attn.q_b_proj")
    queries, both = (heads * (nope + turning), asked), (c + turning, d_model)
    made = (heads * (nope + v), c)
    return {
        "attn.q_a": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm",
        "attn.q": Place(q, of_heads(heads, 0, nope), queries),
        "attn.q_turn": Place(q, turn(heads, nope), queries),
        "attn.kv_a": Place("self_attn.kv_a_proj_with_mqa", rows(0, c), both),
        "attn.k_turn": Place("self_attn.kv_a_proj_with_mqa", turn(1, c), both),
        "attn.kv_norm": "self_attn.kv_a_layernorm",
        "attn.keys": Place("self_attn.kv_b_proj", in_turn(of_heads(heads, 0, nope), transposed), made),
        "attn.values": Place("self_attn.kv_b_proj", of_heads(heads, nope), made),
    }  # fmt: skip


def sigmoid_router(config: Config, scores: tuple[str, ...] = ("sigmoid",)) -> Router:
    """Returns DeepSeek-V3's router (arXiv 2412.19437, 2.1.2): groups by the sum of their two best, a bias for the
    choice. `scores`: the names of these scores in config.json. Raises UnsupportedModel."""
    config.only(scoring_func=scores, topk_method=("noaux_tc",), moe_layer_freq=(1,))
    groups, best = config.count("n_group"), config.count("topk_group")
    return Router(
        config.count("num_experts_per_tok"), bool(config.get("norm_topk_prob")), None, score="sigmoid",
        choice_bias=True, groups=Groups(groups, best, 2), factor=config.number("routed_scaling_factor"),
    )  # fmt: skip


def experts(config: Config, router: Router, bias: bool = False, shorter: bool = False) -> Experts:
    """Returns experts, with shared experts as one network. `bias`: whether the shared ones have biases; `shorter`:
    whether the settings of both counts have their shorter names."""
    shared = config.get("num_shared_experts" if shorter else "n_shared_experts")
    return Experts(
        config.count(*_COUNTS[shorter:]), config.network("moe_intermediate_size"),
        router, config.network("moe_intermediate_size", bias=bias, times=shared) if shared else None,
    )  # fmt: skip


def dense_first(config: Config, dense: Ffn, routed: Experts) -> list[Ffn | Experts]:
    """Returns the feed-forward part of each layer: the first ones have one network in place of experts."""
    first = config.count("first_k_dense_replace", least=0)
    return [dense if at < first else routed for at in range(config.count("num_hidden_layers"))]


def no_more_predicted(config: Config) -> dict[str, str]:
    """Returns the names to leave out of layers behind the last one, which predict tokens after the next, with a
    note."""
    last = config.count("num_hidden_layers")
    return {rf"model\.layers\.{last}\.": MORE_PREDICTED}


class DeepseekV2(Family):
    """DeepSeek-V2: latent attention, softmax routers with groups, shared experts, first layers without experts. Weights
    of experts are never made to sum to 1: transformers ignores norm_topk_prob."""

    model_type = "deepseek_v2"
    model_class = "DeepseekV2ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(scoring_func=("softmax",), moe_layer_freq=(1,))
        config.must_be("norm_topk_prob", False, "transformers computes this family without it")
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha", "head_dim")
        bias, norm = bool(config.get("mlp_bias")), Norm(config.get("rms_norm_eps"))
        routed, dense = experts(config, _router(config), bias=bias), config.network("intermediate_size", bias=bias)
        layers = [Layer(norm, latent(config), None, ffn) for ffn in dense_first(config, dense, routed)]
        names = Names(latent_names(config, pairs=True), left_out=no_more_predicted(config))
        return decoder(self.model_type, config, tokens, layers, names)


def _router(config: Config) -> Router:
    """Raises UnsupportedModel."""
    method = config.one_of("topk_method", ("greedy", "group_limited_greedy"))
    groups, best = config.get("n_group"), config.get("topk_group")
    return Router(
        config.count("num_experts_per_tok"), False, None, factor=config.number("routed_scaling_factor"),
        groups=Groups(groups, best, 1) if method == "group_limited_greedy" else None,
    )  # fmt: skip


class DeepseekV3(Family):
    """DeepSeek-V3: latent attention, sigmoid routers with groups and a bias for the choice, a shared expert."""

    model_type = "deepseek_v3"
    model_class = "DeepseekV3ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        dense = config.network("intermediate_size")
        layers = [Layer(norm, latent(config), None, ffn) for ffn in dense_first(config, dense, routed)]
        inside = latent_names(config, pairs=bool(config.get("rope_interleave")))
        return decoder(self.model_type, config, tokens, layers, Names(inside, left_out=no_more_predicted(config)))


class KimiK2(DeepseekV3):
    """DeepSeek-V3's architecture by another name (Kimi K2), published with experts of four bits."""

    model_type = "kimi_k2"
    config_type = "deepseek_v3"
    loads_by_names = False


class Glm4Moe(Family):
    """GLM-4.5 and after: part of each head turns, DeepSeek-V3's routers, shared experts, first layers without
    experts."""

    model_type = "glm4_moe"
    model_class = "Glm4MoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        attention = config.attention(
            qk_norm="head" if config.get("use_qk_norm") else None,
            biases=config.biases("attention_bias", "qkv"),
        )
        dense = config.network("intermediate_size")
        layers = [Layer(norm, attention, None, ffn) for ffn in dense_first(config, dense, routed)]
        ropes = [config.rope(attention.dim, partial=True)]
        return decoder(
            self.model_type, config, tokens, layers, Names(left_out=no_more_predicted(config)), ropes
        )  # fmt: skip


class Glm4MoeLite(Family):
    """GLM-4.7-Flash: DeepSeek-V3's layers; mlp_layer_types names the ones with experts. Transformers ignores
    first_k_dense_replace: without mlp_layer_types, one layer has no experts."""

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


class Dots1(Family):
    """dots.llm1: windows by layer, heads normed one by one, DeepSeek-V3's routers, shared experts."""

    model_type = "dots1"
    model_class = "Dots1ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        norm, routed = (
            Norm(config.get("rms_norm_eps")),
            experts(config, sigmoid_router(config, ("sigmoid", "noaux_tc"))),
        )
        biases = config.biases("attention_bias", "qkvo")
        dense = config.network("intermediate_size")
        layers = [
            Layer(norm, config.attention(qk_norm="head", biases=biases, window=window), None, ffn)
            for window, ffn in zip(config.windows(), dense_first(config, dense, routed), strict=True)
        ]
        return decoder(self.model_type, config, tokens, layers)


_BIAS = "mlp.e_score_correction_bias"


class ExaoneMoe(Family):
    """K-EXAONE: layers with windows and rotary positions, and between them layers with neither."""

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
