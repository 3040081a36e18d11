"""Step 3.5 and 3.7: layers with windows between layers without, each kind with heads and a rope of its own; a gate for
each head, and gates of networks that are bounded behind their activation in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import IMAGES_LEFT_OUT, no_more_predicted
from moeconv.source.archs.dense import scale_of
from moeconv.source.archs.description import (
    LAST_LESS_ONE,
    LESS_ONE,
    ROUTED,
    Description,
    Inside,
    Names,
    Source,
    decoder,
)
from moeconv.source.archs.family import Family
from moeconv.source.archs.plain import multiplied
from moert.pack.model_spec import Layer, StackName, Tokens
from moert.pack.parts import Act, Attention, Experts, Ffn, Norm, Router

if TYPE_CHECKING:
    from torch import nn

_SLIDING = "sliding_attention"
_INSIDE: Inside = {
    **LESS_ONE, "attn.gate": "self_attn.g_proj",
    "router": "moe.gate", "router.choice_bias": "moe.router_bias",
    **{f"shared.{name}": f"share_expert.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


class Step3p5(Family):
    """Step 3.5 Flash: see above. Transformers runs it inside Step 3.7 alone."""

    model_type = "step3p5"
    config_type = "step3p5"
    model_class = "Step3p7ForConditionalGeneration"
    loads_by_names = False
    sees: Mapping[str, Any] = {
        "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28, "mlp_ratio": 1.0,
    }  # fmt: skip
    towers: Mapping[StackName, str] = {"decoder": "model.language_model"}
    experts: Mapping[StackName, str] = {"decoder": "model.language_model.layers.{layer}.mlp.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(
            use_qk_norm=(True,), use_mfa=(False,), use_moe=(True,), moe_layer_offset=(0,), moe_every_n_layer=(1,),
            norm_expert_weight=(True,), moe_router_activation=("sigmoid",), att_impl_type=("GQA",), sink=(False,),
            use_head_wise_attn_gate=(True,), use_moe_router_bias=(True,), use_rope_layers=([],), zero_centered=(True,),
            gating=(True, "per-head"), use_bidirectional_attention=(False,), need_fp32_gate=(True,),
            yarn_only_types=(["full_attention"],),
        )  # fmt: skip
        config.without_effect("hidden_act", "mtp_layer_types", "mtp_mlp_layer_types", "max_seq_len")  # always silu
        config.get("rope_parameters", "partial_rotary_factors")
        config.parsed.per_layer_config = None  # else some settings can't be read; see `_attentions`
        kinds = config.get("layer_types")
        norm, turning = Norm(config.get("rms_norm_eps")), list(dict.fromkeys(kinds))
        router = Router(
            config.count("num_experts_per_tok", "moe_top_k"), True, None, score="sigmoid", choice_bias=True,
            factor=config.number("moe_router_scaling_factor"),
        )  # fmt: skip
        bias, n = bool(config.get("mlp_bias")), config.count("n_routed_experts", "moe_num_experts", "num_local_experts")
        wide, narrow, shared = (
            Ffn(config.count(*names), Act("silu"), gated=True, bias=bias and own)
            for own, *names in ((True, "intermediate_size"), (False, "moe_intermediate_size"),
                                (True, "share_expert_dim", "share_expert_dims"))
        )  # fmt: skip
        bounds, others = _bounds(config, "swiglu_limits"), _bounds(config, "swiglu_limits_shared")
        networks = [
            Experts(n, _bounded(narrow, bound), router, _bounded(shared, other)) if sparse else _bounded(wide, other)
            for sparse, bound, other in zip(_sparse(config), bounds, others, strict=True)
        ]
        attentions = self._attentions(config, kinds, turning)
        layers = [Layer(norm, mixer, None, ffn) for mixer, ffn in zip(attentions, networks, strict=True)]
        ropes = [config.rope(attentions[0].dim, partial=True, of=kind) for kind in turning]
        names = Names(
            _INSIDE, ROUTED, _of_expert, model="model.language_model.",
            left_out={r"(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\.": IMAGES_LEFT_OUT,
                      **no_more_predicted(config, more=config.count("num_nextn_predict_layers", least=0))},
            outside=LAST_LESS_ONE,
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, ropes)

    def _attentions(self, config: Config, kinds: list[str], turning: list[str]) -> list[Attention]:
        n = config.count("num_sliding_attention_heads")
        usual = config.attention(
            qk_norm="head", biases=config.biases("attention_bias", "qkvo"), gate=True, gate_by_head=True,
            scale=scale_of(config),
        )  # fmt: skip
        dim, kv = usual.dim, config.get("num_key_value_heads", "num_attention_groups")
        own = {str(at): {"num_attention_heads": n} for at, kind in enumerate(kinds) if kind == _SLIDING}
        config.only(
            per_layer_config=(own, *([{}] if n == usual.n else [])),
            attention_other_setting=({"attention_type": _SLIDING, "num_attention_heads": n, "num_attention_groups": kv,
                                      "head_dim": dim, "true_head_dim": dim},),
        )  # fmt: skip
        return [
            replace(usual, rope=turning.index(kind), window=window, n=usual.n if window is None else n)
            for kind, window in zip(kinds, config.windows(), strict=True)
        ]

    def prepared(self, model: nn.Module) -> nn.Module:
        """Puts the factor of the experts' output into the routers' weights, as other families have it."""
        parts: Any = model.modules()
        for module in parts:
            if type(module).__name__ == "Step3p7SparseMoeBlock":
                module.gate.register_forward_hook(partial(multiplied, module.routed_scaling_factor))
                module.routed_scaling_factor = 1.0
        return model


class Step3p7(Step3p5):
    """Step 3.7 Flash: Step 3.5 inside a model for text and images."""

    model_type = "step3p7"
    inside_tied = False
    beside = frozenset({"vision_config", "projector_bias", "image_token_id"})


def _sparse(config: Config) -> list[bool]:
    config.get("mlp_layer_types", "moe_layers_enum")
    return config.of_layers("mlp_layer_types", {"dense": False, "sparse": True})


def _of_expert(layer: int, expert: int, projection: str) -> Source:
    return Source(f"layers.{layer}.moe.{projection}_proj.weight", expert)


def _bounds(config: Config, name: str) -> list[float | None]:
    """Returns the bound of each layer, of which 0 stands for none. Raises UnsupportedModel."""
    found, n = config.get(name), config.count("num_hidden_layers")
    if not found:
        return [None] * n
    if len(found) < n:
        raise UnsupportedModel(f"config.json sets {name} for {len(found)} of {n} layers")
    return [bound or None for bound in found[:n]]


def _bounded(network: Ffn, bound: float | None) -> Ffn:
    return replace(network, act=replace(network.act, bound=bound))
