"""Hunyuan-A13B: heads of queries and keys are normed after they turn; a shared expert; all layers have experts."""

from __future__ import annotations

from moeconv.source.archs.config import FIXED_ROPES, Config, UnsupportedModel, turns
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.codec import F32
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Norm, Rope, Router

_INSIDE = {
    "attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm", "router": "mlp.gate.wg",
    **{f"shared.{name}": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_NEVER_LOOKED_AT = (
    "attention_head_dim", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor", "norm_type",
    "org_vocab_size", "add_classification_head", "class_num", "pool_type", "eod_token_id", "cla_share_factor",
    "anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "dense_list", "pad_id", "im_start_id",
    "im_end_id", "im_newline_id", "mask_init_id", "text_start_id", "text_end_id", "skip_cls_token",
)  # fmt: skip


class HunyuanV1Moe(Family):
    """See `Family`."""

    model_type = "hunyuan_v1_moe"
    model_class = "HunYuanMoEV1ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        layers, width = config.count("num_hidden_layers"), config.count("intermediate_size")
        config.only(
            use_qk_norm=(True,), use_cla=(False,), mlp_bias=(False,), moe_layer_num_skipped=(0,),
            use_mixed_mlp_moe=(True,), num_shared_expert=(1, [1] * layers), position_embedding_xdrope=(False,),
            moe_intermediate_size=(width, [width] * layers), group_limited_greedy=(False,),
            routed_scaling_factor=(1, False), norm_topk_prob=(True,),
        )  # fmt: skip
        config.without_effect(*_NEVER_LOOKED_AT)
        if config.get("head_dim") is None:
            raise UnsupportedModel("config.json has no head_dim, which transformers wants for this family")
        attention = config.attention(qk_norm="head", norm_turned=True, biases=config.biases("attention_bias", "qkvo"))
        network = config.network("intermediate_size")
        experts = Experts(
            config.count("num_experts", "num_local_experts"), network, Router(_top_k(config), True, None), network
        )  # fmt: skip
        layer = Layer(Norm(config.get("rms_norm_eps")), attention, None, experts)
        ropes = [_rope(config, attention.dim)]
        return decoder(self.model_type, config, tokens, [layer] * layers, Names(_INSIDE), ropes)


def _top_k(config: Config) -> int:
    found = config.get("moe_topk", "num_experts_per_tok")
    each = set(found) if isinstance(found, list) else {found}
    if len(each) != 1:
        raise UnsupportedModel(f"config.json sets moe_topk {found!r}: a pack has one for all layers")
    return int(each.pop())


def _rope(config: Config, dim: int) -> tuple[Rope, F32]:
    """Returns the rope and its frequencies; with `alpha`, a larger base that does not depend on the text stretches
    positions."""
    parameters = config.rope_parameters()
    if parameters.get("rope_type") != "dynamic" or not parameters.get("alpha"):
        return config.rope(dim)
    config.allowed["rope_type"] = (*FIXED_ROPES, "dynamic with alpha")
    base = parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2))
    return Rope(dim), turns(base, dim)
