"""Parts that DeepSeek-V2, V3 and later families share: latent attention, sigmoid routers, first layers without
experts."""

from __future__ import annotations

import math
from collections.abc import Callable

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Inside, Place, View, halves, in_turn, of_heads, rows, transposed
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
