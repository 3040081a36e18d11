"""The families of Qwen, from 1.5 to 3.6, and Mellum 2 and Flint, whose layers are those of Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from moeconv.source.archs.config import Config, text_settings
from moeconv.source.archs.deepseek import IMAGES_LEFT_OUT, MORE_PREDICTED
from moeconv.source.archs.dense import NO_ROUTERS, Dense, Qwen3, alone, by_kind, kinds_of
from moeconv.source.archs.description import (
    LAST_LESS_ONE,
    LESS_ONE,
    Description,
    Inside,
    Names,
    Place,
    decoder,
    joined,
    named,
    of_heads,
    rows,
)
from moeconv.source.archs.family import Family
from moert.pack.mixers import GatedDelta
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Act, Attention, Experts, Ffn, Norm

_SHARED: Inside = {f"shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
_QWEN2_INSIDE: Inside = {"shared_gate": "mlp.shared_expert_gate", **_SHARED}
SEES = frozenset({"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"})
"""Settings of models for text and images that do not touch the text."""
_VL_DEFAULTS = {"rope_theta": 500000.0, "head_dim": None, "norm_topk_prob": True}  # where Qwen3-MoE has others


def _every_step(config: Config, dense: Ffn, experts: Experts) -> list[Ffn | Experts]:
    """Returns the feed-forward part of each layer: every decoder_sparse_step-th has experts, unless it is named among
    those without. Raises UnsupportedModel."""
    step, without = config.count("decoder_sparse_step"), config.get("mlp_only_layers") or ()
    return [dense if at in without or (at + 1) % step else experts for at in range(config.count("num_hidden_layers"))]


class Qwen2Moe(Family):
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate; some layers may have one network in place of experts."""

    model_type = "qwen2_moe"
    model_class = "Qwen2MoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("use_sliding_window")  # layer_types says it
        norm, biases = Norm(config.get("rms_norm_eps")), config.biases("qkv_bias", "qkv")
        experts = Experts(
            config.count("num_experts"), config.network("moe_intermediate_size"),
            config.router(config.get("norm_topk_prob")),
            config.network("shared_expert_intermediate_size"), shared_gate=True,
        )  # fmt: skip
        ffns = _every_step(config, config.network("intermediate_size"), experts)
        layers = [
            Layer(norm, config.attention(biases=biases, window=window), None, ffn)
            for window, ffn in zip(config.windows(), ffns, strict=True)
        ]
        return decoder(self.model_type, config, tokens, layers, Names(_QWEN2_INSIDE))


class Qwen3Moe(Family):
    """Qwen3-MoE: heads of queries and keys are normed one by one; some layers may have one network in place of
    experts."""

    model_type = "qwen3_moe"
    model_class = "Qwen3MoeForCausalLM"

    def names(self, experts: Experts, d_model: int) -> Names:
        return Names()

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("attention_bias", False, "attention with biases can't be packed")
        config.only(use_qk_norm=(True,))
        norm = Norm(config.get("rms_norm_eps"))
        window = config.get("sliding_window", "max_window_layers")
        attention = config.attention(qk_norm="head", window=window if config.get("use_sliding_window") else None)
        act = config.activation("hidden_act")
        ffn, dense = (Ffn(config.get(name), act, gated=True) for name in ("moe_intermediate_size", "intermediate_size"))
        router = config.router(config.get("norm_topk_prob"))
        experts = Experts(config.count("num_experts", "num_local_experts"), ffn, router)
        layers = [Layer(norm, attention, None, ffn) for ffn in _every_step(config, dense, experts)]
        return decoder(self.model_type, config, tokens, layers, self.names(experts, config.count("hidden_size")))


class Qwen3VlMoe(Qwen3Moe):
    """Qwen3-VL with experts: Qwen3-MoE inside a model for text and images, with experts that always sum to 1."""

    model_type = "qwen3_vl_moe"
    config_type = "qwen3_moe"
    loads_by_names = False
    beside = SEES

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**_VL_DEFAULTS, **text_settings(config, tied=False)}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect_on_text("mrope_section", "mrope_interleaved")  # a word's place has one number, not three
        config.only(norm_topk_prob=(True,))
        return super().describe(config, tokens)

    def names(self, experts: Experts, d_model: int) -> Names:
        return Names(
            expert=joined("mlp.experts", experts.ffn.d_ff, d_model, either=True), root="model.language_model.",
            left_out={r"model\.visual\.": IMAGES_LEFT_OUT},
        )  # fmt: skip


class Mellum(Family):
    """Mellum 2: as Qwen3-MoE, with windows by layer; a rope for layers with a window, another for those without;
    mlp_layer_types names the layers with experts."""

    model_type = "mellum"
    model_class = "MellumForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        norm, biases = Norm(config.get("rms_norm_eps")), config.biases("attention_bias", "qkvo")
        attentions = by_kind(config, config.attention(qk_norm="head", biases=biases))
        experts = Experts(
            config.count("num_experts", "num_local_experts"), config.network("moe_intermediate_size"),
            config.router(config.get("norm_topk_prob")),
        )  # fmt: skip
        known: Mapping[str, Ffn | Experts] = {"dense": config.network("intermediate_size"), "sparse": experts}
        ffns = config.of_layers("mlp_layer_types", known)
        layers = [Layer(norm, attention, None, ffn) for attention, ffn in zip(attentions, ffns, strict=True)]
        ropes = [config.rope(attentions[0].dim, of=kind) for kind in kinds_of(config)]
        return decoder(self.model_type, config, tokens, layers, Names(left_out={r"mtp\.": MORE_PREDICTED}), ropes)


class Flint(Family):
    """Flint: as Qwen3-MoE, with sinks; layers with windows and rotary positions, and between them layers with neither;
    sigmoid routers, and a shared expert without a gate."""

    model_type = "flint"
    model_class = "FlintForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, biases = Norm(config.get("rms_norm_eps")), config.biases("attention_bias", "qkvo")
        experts = Experts(
            config.count("num_experts"), config.network("moe_intermediate_size"),
            config.router(bool(config.get("norm_topk_prob")), score="sigmoid"),
            config.network("shared_expert_intermediate_size"),
        )  # fmt: skip
        usual = config.attention(qk_norm="head", biases=biases, sinks=True)
        attentions = [replace(usual, window=window, rope=None if window is None else 0) for window in config.windows()]
        ffns = _every_step(config, config.network("intermediate_size"), experts)
        layers = [Layer(norm, attention, None, ffn) for attention, ffn in zip(attentions, ffns, strict=True)]
        names = Names({**_SHARED, "attn.sinks": "self_attn.softmax_offset"}, {"attn.sinks": "self_attn.sinks"})
        return decoder(self.model_type, config, tokens, layers, names, [config.rope(usual.dim)])


_NEXT_INSIDE: Inside = {
    **_QWEN2_INSIDE,
    **{f"mixer.{name}": f"linear_attn.{name}" for name in ("norm", "dt_bias")},
    "mixer.a_log": "linear_attn.A_log", "mixer.out": "linear_attn.out_proj",
    **LESS_ONE,
}  # fmt: skip


class Qwen3Next(Family):
    """Qwen3-Next: gated delta rules in most layers, heads with a gate in the others, a shared expert with a gate; norms
    whose weights are stored less 1."""

    model_type = "qwen3_next"
    model_class = "Qwen3NextForCausalLM"
    root, other_root = "model.", ""
    left_out: Mapping[str, str] = {r"mtp\.": MORE_PREDICTED}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("full_attention_interval")  # layer_types says it
        config.one_of("hidden_act", ("silu", "swish"))  # also of the convolutions
        norm, d_model = Norm(config.get("rms_norm_eps")), config.count("hidden_size")
        attention = config.attention(qk_norm="head", biases=config.biases("attention_bias", "qkvog"), gate=True)
        delta = delta_of(config, norm)
        kinds: Mapping[str, GatedDelta | Attention] = {"linear_attention": delta, "full_attention": attention}
        mixers = config.of_layers("layer_types", kinds)
        ffns = self.networks(config, len(mixers))
        layers = [Layer(norm, mixer, None, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
        names = replace(
            self.of_networks(config, d_model), root=self.root, left_out=self.left_out, other_root=self.other_root,
            inside={**attention_inside(attention, d_model), **self.of_delta(delta, d_model)},
            outside=LAST_LESS_ONE,
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, [config.rope(attention.dim, partial=True)])

    def networks(self, config: Config, layers: int) -> Sequence[Ffn | Experts]:
        """Returns the feed-forward part of each of `layers` layers."""
        routed, dense = gated_experts(config, bool(config.get("norm_topk_prob"))), _network(config, "intermediate_size")
        return _every_step(config, dense, routed)

    def of_networks(self, config: Config, d_model: int) -> Names:
        """Returns the names of the experts' tensors."""
        return Names(joined=joined("mlp.experts", config.count("moe_intermediate_size"), d_model))

    def of_delta(self, part: GatedDelta, d_model: int) -> Inside:
        """Returns the places of the delta rule's matrices and taps: all rows of one head of keys lie together."""
        share = part.n // part.keys
        ends = (0, part.dim, 2 * part.dim, 2 * part.dim + share * part.v, 2 * part.dim + 2 * share * part.v)
        wide, narrow = (part.channels + part.value_features, d_model), (2 * part.n, d_model)
        return {
            "mixer.conv": taps_of(part),
            **{
                f"mixer.{name}": Place("linear_attn.in_proj_qkvz", of_heads(part.keys, start, stop), wide)
                for name, (start, stop) in zip("qkvz", pairwise(ends), strict=True)
            },
            "mixer.b": Place("linear_attn.in_proj_ba", of_heads(part.keys, 0, share), narrow),
            "mixer.a": Place("linear_attn.in_proj_ba", of_heads(part.keys, share), narrow),
        }


def gated_experts(config: Config, renormalise: bool) -> Experts:
    """Returns experts with a shared one. Raises UnsupportedModel."""
    router = config.router(renormalise)
    return Experts(
        config.count("num_experts"), _network(config, "moe_intermediate_size"), router,
        _network(config, "shared_expert_intermediate_size"), shared_gate=True,
    )  # fmt: skip


def delta_of(config: Config, norm: Norm) -> GatedDelta:
    """Returns the gated delta rule. Raises UnsupportedModel."""
    heads, keys, dim, v, taps = (
        config.count(f"linear_{name}")
        for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    return GatedDelta(heads, keys, dim, v, taps, norm)


def taps_of(part: GatedDelta) -> Place:
    """Returns the place of the taps of the delta rule's convolution, which works on each channel by itself."""
    return Place("linear_attn.conv1d", shape=(part.channels, 1, part.taps))


def _network(config: Config, d_ff: str) -> Ffn:
    return Ffn(config.count(d_ff), Act("silu"), gated=True)


def attention_inside(part: Attention, d_model: int) -> Inside:
    """Returns the places of a layer's tensors but for the delta rule's matrices: each head's queries lie before its
    gate."""
    both = (2 * part.q_features, d_model)
    return {
        **_NEXT_INSIDE,
        "attn.q": Place("self_attn.q_proj", of_heads(part.n, 0, part.dim), both),
        "attn.gate": Place("self_attn.q_proj", of_heads(part.n, part.dim), both),
    }


class Qwen35MoeText(Qwen3Next):
    """Qwen3.5 and 3.6 with experts: as Qwen3-Next, with experts in all layers, and the matrices of its delta rules in
    an order of their own."""

    model_type = "qwen3_5_moe_text"
    model_class = "Qwen3_5MoeForCausalLM"
    other_root = "model.language_model."

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
        config.only(attn_output_gate=(True,), output_gate_type=("swish",), norm_topk_prob=(True,))
        config.without_effect_on_text("mrope_section", "mrope_interleaved")  # a word's place has one number, not three
        return super().describe(config, tokens)

    def networks(self, config: Config, layers: int) -> Sequence[Ffn | Experts]:
        return [gated_experts(config, renormalise=True)] * layers

    def of_delta(self, part: GatedDelta, d_model: int) -> Inside:
        ends = accumulate((part.key_features, part.key_features, part.value_features), initial=0)
        wide = (part.channels, d_model)
        return {
            "mixer.conv": taps_of(part),
            **{
                f"mixer.{name}": Place("linear_attn.in_proj_qkv", rows(start, stop), wide)
                for name, (start, stop) in zip("qkv", pairwise(ends), strict=True)
            },
            **{f"mixer.{name}": f"linear_attn.in_proj_{name}" for name in "zba"},
        }


class Qwen35Text(Qwen35MoeText, Dense):
    """Qwen3.5 and 3.6 without experts: each layer's network is its only expert."""

    model_type = "qwen3_5_text"
    model_class = "Qwen3_5ForCausalLM"

    def networks(self, config: Config, layers: int) -> Sequence[Ffn | Experts]:
        config.without_effect("mlp_only_layers")  # all are
        return [alone(_network(config, "intermediate_size"))] * layers

    def of_networks(self, config: Config, d_model: int) -> Names:
        return Names(expert=named("mlp.{projection}", self.projections), zeros=NO_ROUTERS)


class _Qwen35Sees(Qwen35MoeText):
    """The text model inside a model for text and images."""

    inside_tied = False
    beside = SEES
    root, other_root = "model.language_model.", ""
    left_out: Mapping[str, str] = {**Qwen35MoeText.left_out, r"model\.visual\.": IMAGES_LEFT_OUT}


class Qwen35Moe(_Qwen35Sees):
    """Qwen3.5 or 3.6 with experts, inside a model for text and images."""

    model_type = "qwen3_5_moe"
    config_type = "qwen3_5_moe_text"


class Qwen35(_Qwen35Sees, Qwen35Text):
    """Qwen3.5 or 3.6 without experts, inside a model for text and images."""

    model_type = "qwen3_5"
    config_type = "qwen3_5_text"


class Qwen3Vl(Qwen3):
    """Qwen3-VL without experts: Qwen3 inside a model for text and images."""

    model_type = "qwen3_vl"
    config_type = "qwen3"
    loads_by_names = False
    beside = SEES

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = {"rope_theta": _VL_DEFAULTS["rope_theta"], **text_settings(config, tied=False)}
        for rope in ("rope_parameters", "rope_scaling"):
            if isinstance(found := text.get(rope), dict):  # a word's place has one number, not three
                text[rope] = {name: value for name, value in found.items() if not name.startswith("mrope_")}
        return text

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        found, left_out = super().names(config, attention, network), {r"model\.visual\.": IMAGES_LEFT_OUT}
        return replace(found, root="model.language_model.", left_out=left_out)
