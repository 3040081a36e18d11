"""Families with convolutions or Mamba in most layers, and attention in the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel, count_of
from moeconv.source.archs.deepseek import MORE_PREDICTED, sigmoid_router
from moeconv.source.archs.dense import NO_ROUTERS, Dense, alone, of_network, put_alone
from moeconv.source.archs.description import Description, Inside, Names, OfExpert, Place, decoder, named, rows
from moeconv.source.archs.family import Family
from moeconv.source.archs.granite import GraniteMoe, granite_attention
from moert.pack.mixers import FixedState, Mamba, Mamba2, ShortConv
from moert.pack.model_spec import ExpertKey, Layer, StackName, Tokens
from moert.pack.parts import Act, Attention, Experts, Ffn, Narrow, Norm

if TYPE_CHECKING:
    from torch import Tensor, nn


UNBOUNDED = (0.0, math.inf)
_LARGEST = 2.0**128  # no step is: they are float32, and over 0


def unbounded_steps(config: Config, *names: str) -> None:
    """Raises UnsupportedModel if the setting, whose name in the class is the first of `names`, bounds steps."""
    limit, config.allowed[names[0]] = config.get(*names), (UNBOUNDED,)
    pair = isinstance(limit, (tuple, list)) and len(limit) == 2
    numbers = pair and all(isinstance(each, (int, float)) for each in limit)
    if not numbers or not (limit[0] <= 0 and limit[1] >= _LARGEST):
        raise UnsupportedModel(
            f"config.json sets {names[0]} {limit!r}: transformers bounds the steps of tokens that it reads together, "
            "but not of one that it reads alone, so that its answer depends on the pieces in which a text came"
        )


def places(part: Mamba2, d_model: int, at: str) -> dict[str, Place]:
    """Returns the places of Mamba-2's tensors: the matrices of `in` and of steps are one after the other in a tensor of
    the module `at`."""
    wide = part.features + part.channels
    both = (wide + part.n, d_model)
    return {
        "mixer.in": Place(f"{at}.in_proj", rows(0, wide), both),
        "mixer.dt": Place(f"{at}.in_proj", rows(wide), both),
        "mixer.conv": Place(f"{at}.conv1d", shape=(part.channels, 1, part.taps)),
    }


_LFM2_INSIDE: dict[str, str | Place] = {
    "mixer_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn.o": "self_attn.out_proj",
    "attn.q_norm": "self_attn.q_layernorm", "attn.k_norm": "self_attn.k_layernorm", "mixer.in": "conv.in_proj",
    "mixer.out": "conv.out_proj", "router": "feed_forward.gate", "router.choice_bias": "feed_forward.expert_bias",
    "ffn.gate": "feed_forward.w1", "ffn.up": "feed_forward.w3", "ffn.down": "feed_forward.w2",
}  # fmt: skip
_LFM2_EXPERT = named("feed_forward.experts.{expert}.{projection}", {"gate": "w1", "up": "w3", "down": "w2"})


class Lfm2Moe(Family):
    """LFM2 with experts: short convolutions in most layers, heads normed one by one in the others, sigmoid routers with
    a bias for the choice."""

    model_type = "lfm2_moe"
    model_class = "Lfm2MoeForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.feed_forward.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.get("tie_word_embeddings", "tie_embedding")
        norm, act = Norm(config.get("norm_eps")), Act("silu")
        router = config.router(
            bool(config.get("norm_topk_prob")), "sigmoid",
            choice_bias=bool(config.get("use_expert_bias")), factor=config.number("routed_scaling_factor"),
        )  # fmt: skip
        experts = Experts(config.count("num_experts"), Ffn(config.count("moe_intermediate_size"), act, True), router)
        dense, first = Ffn(config.count("intermediate_size"), act, True), config.count("num_dense_layers", least=0)
        layers = [
            Layer(norm, mixer, None, dense if at < first else experts) for at, mixer in enumerate(_lfm2_mixers(config))
        ]
        return decoder(self.model_type, config, tokens, layers, _lfm2_names(config, _LFM2_EXPERT))


def _lfm2_mixers(config: Config) -> list[ShortConv | Attention]:
    """Returns the mixer of each layer. Raises UnsupportedModel."""
    conv = ShortConv(config.count("conv_L_cache"), bool(config.get("conv_bias")))
    mixers: Mapping[str, ShortConv | Attention] = {
        "conv": conv, "full_attention": config.attention(qk_norm="head"),
    }  # fmt: skip
    return config.of_layers("layer_types", mixers)


def _lfm2_names(config: Config, of_expert: OfExpert, zeros: tuple[str, ...] = ()) -> Names:
    taps = Place("conv.conv", shape=(config.count("hidden_size"), 1, config.count("conv_L_cache")))
    inside = {**_LFM2_INSIDE, "mixer.conv": taps}
    return Names(inside, expert=of_expert, outside={"decoder.norm": "embedding_norm"}, zeros=zeros)


_LFM2_IDLE = (
    "full_attn_idxs", "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta", "use_pos_enc",
)  # fmt: skip
"""Of these, the first says no more than layer_types, and others repeat what transformers reads elsewhere."""


class Lfm2(Dense):
    """LFM2 without experts."""

    model_type = "lfm2"
    model_class = "Lfm2ForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.feed_forward.experts"}
    projections: Mapping[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.get("tie_word_embeddings", "tie_embedding")
        config.without_effect(*_LFM2_IDLE)
        config.only(block_use_swiglu=(True,))
        norm, network = Norm(config.get("norm_eps")), Ffn(self._width(config), Act("silu"), gated=True)
        layers = [Layer(norm, mixer, None, alone(network)) for mixer in _lfm2_mixers(config)]
        names = _lfm2_names(config, named("feed_forward.{projection}", self.projections), NO_ROUTERS)
        return decoder(self.model_type, config, tokens, layers, names)

    def _width(self, config: Config) -> int:
        """Returns the width of a network: two thirds of the stated one times a factor, rounded up, unless a setting
        says that it is the stated one. Raises UnsupportedModel."""
        width, part = config.count("intermediate_size", "block_ff_dim"), config.count("block_multiple_of")
        factor = config.number("block_ffn_dim_multiplier")
        if not config.get("block_auto_adjust_ff_dim"):
            return width
        found = part * ((int(factor * int(2 * width / 3)) + part - 1) // part)
        return count_of(f"intermediate_size {width} and block_ffn_dim_multiplier", found)

    def prepared(self, model: nn.Module) -> nn.Module:
        put_alone(self.layers(model), "feed_forward")
        return model


_JAMBA_INSIDE: dict[str, str | Place] = {
    "ffn_norm": "pre_ff_layernorm", "router": "feed_forward.router", "mixer.in": "mamba.in_proj",
    "mixer.inner": "mamba.x_proj", "mixer.dt_norm": "mamba.dt_layernorm", "mixer.b_norm": "mamba.b_layernorm",
    "mixer.c_norm": "mamba.c_layernorm", "mixer.steps": "mamba.dt_proj", "mixer.dt_bias": "mamba.dt_proj.bias",
    "mixer.a_log": "mamba.A_log", "mixer.d": "mamba.D", "mixer.out": "mamba.out_proj",
    **{f"ffn.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_JAMBA_EXPERT = named("feed_forward.experts.{expert}.{projection}_proj")


class Jamba(Family):
    """Jamba: Mamba in most layers, attention without positions in the others, experts in every second."""

    model_type = "jamba"
    model_class = "JambaForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.feed_forward.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "n_ctx")
        config.one_of("hidden_act", ("silu", "swish"))  # also of convolutions, which have no other
        config.only(mamba_inner_layernorms=(True,))
        norm, act = Norm(config.get("rms_norm_eps")), Act("silu")
        mamba = Mamba(
            config.count("hidden_size") * config.count("mamba_expand"), config.count("mamba_d_state"),
            config.count("mamba_dt_rank"), config.count("mamba_d_conv"), norm,
            bool(config.get("mamba_conv_bias")), bool(config.get("mamba_proj_bias")),
        )  # fmt: skip
        network = Ffn(config.count("intermediate_size"), act, gated=True)
        router = config.router(False)
        experts = Experts(config.count("num_experts", "num_local_experts"), network, router)
        attention = config.attention(rope=None)
        layers = [
            Layer(norm, attention if attends else mamba, None, experts if many and experts.n > 1 else network)
            for attends, many in zip(_every(config, "attn"), _every(config, "expert"), strict=True)
        ]
        taps = Place("mamba.conv1d", shape=(mamba.features, 1, mamba.taps))
        names = Names(
            {**_JAMBA_INSIDE, "mixer.conv": taps}, expert=_JAMBA_EXPERT, outside={"decoder.norm": "final_layernorm"}
        )
        return decoder(self.model_type, config, tokens, layers, names, ropes=[])


def _every(config: Config, what: str) -> list[bool]:
    """Returns for each layer whether it belongs to the layers `what`, whose period and offset are settings."""
    period = config.count(f"{what}_layer_period")
    offset = config.count(f"{what}_layer_offset", least=0)
    return [layer % period == offset for layer in range(config.count("num_hidden_layers"))]


_NEMOTRON_INSIDE: Inside = {
    "mixer_norm": "norm", "ffn_norm": "norm", "router": "mixer.gate",
    "router.choice_bias": "mixer.gate.e_score_correction_bias", "narrow": "mixer.fc1_latent_proj",
    "widen": "mixer.fc2_latent_proj", "mixer.norm": "mixer.norm", "mixer.a_log": "mixer.A_log", "mixer.d": "mixer.D",
    "mixer.dt_bias": "mixer.dt_bias", "mixer.out": "mixer.out_proj",
    **{f"attn.{name}": f"mixer.{name}_proj" for name in "qkvo"},
    **{f"ffn.{name}": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"shared.{name}": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
}  # fmt: skip
_IDLE = (
    "attention_bias", "expand", "mamba_expand", "chunk_size", "mamba_chunk_size", "mamba_proj_bias", "n_shared_experts",
    "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    "norm_eps", "rms_norm_eps", "num_hidden_layers", "num_logits_to_keep", "partial_rotary_factor",
    "rescale_prenorm_residual", "residual_in_fp32", "rope_theta", "sliding_window", "time_step_floor",
    "mamba_dt_init_floor", "time_step_max", "mamba_dt_max", "time_step_min", "mamba_dt_min", "use_mamba_kernels",
)  # fmt: skip


_OF_EXPERTS = (
    "n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip


class NemotronH(Family):
    """Nemotron-H: each layer is a norm and one part, which is Mamba-2, attention without positions, a network or
    experts; networks and experts have no gates, and experts may be narrower than the stream. Without experts, each
    network is packed as an only expert. It is compared with transformers without a bound on steps that the published
    model lacks."""

    model_type = "nemotron_h"
    model_class = "NemotronHForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.mixer.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*_IDLE)
        config.must_be("tie_word_embeddings", False, "transformers ties no head of this family")
        norm, d_model = Norm(config.number("layer_norm_epsilon")), config.count("hidden_size")
        mamba = _nemotron_mamba(config, norm)
        chooses = "moe" in config.get("layers_block_type", "layer_types", "hybrid_override_pattern")
        network = _network(config, "intermediate_size", bool(config.get("mlp_bias")))
        kinds: dict[str, Layer] = {
            "linear_attention": Layer(norm, mamba, None, None),
            "full_attention": Layer(norm, config.attention(rope=None), None, None),
            "mlp": Layer(norm, None, None, network if chooses else alone(network)),
        }
        if chooses:
            kinds["moe"] = Layer(norm, None, None, _experts(config))
        else:
            config.without_effect(*_OF_EXPERTS)
        layers = config.of_layers("layers_block_type", kinds)
        each, biases = (named("mixer.{projection}_proj", last=last) for last in ("weight", "bias"))
        names = Names(
            {**_NEMOTRON_INSIDE, **places(mamba, d_model, "mixer")},
            expert=named("mixer.experts.{expert}.{projection}_proj") if chooses else each,
            bias=biases if network.bias and not chooses else None, zeros=() if chooses else NO_ROUTERS,
            left_out={r"mtp\.": MORE_PREDICTED}, root="backbone.",
            outside={"embed": "embeddings", "decoder.norm": "norm_f"},
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, ropes=[])

    def prepared(self, model: nn.Module) -> nn.Module:
        """Removes all bounds of Mamba-2's steps, as in the published model and in its training. Transformers 5.23
        bounds the steps of a text from below by time_step_min, which is meant for untrained weights (its pull request
        48989), but not the steps of a token that it reads alone. Without experts, puts each network in their place."""
        layers: list[Any] = [*self.tower(model, "decoder").get_submodule(self.layer_list).children()]
        if all(layer.block_type != "moe" for layer in layers):
            put_alone((layer for layer in layers if layer.block_type == "mlp"), "mixer")
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = UNBOUNDED  # type: ignore[assignment]
        return model

    def resumed(self, layers: Sequence[nn.Module], start: int, stop: int | None = None) -> list[nn.Module]:
        found = super().resumed(layers, start, stop)
        for stand_in, layer in zip(found, layers, strict=True):
            stand_in.block_type = layer.block_type  # by which the model chooses a mask
        return found

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        experts, name = self.experts_module(model, key.at), f"{projection}_proj"
        if hasattr(experts, "network"):
            return of_network(experts, f"{name}.weight")
        return experts.get_parameter(name).detach()[key.expert]

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return of_network(self.experts_module(model, key.at), f"{projection}_proj.bias")


def _nemotron_mamba(config: Config, norm: Norm) -> Mamba2:
    """Returns the Mamba-2 of all layers that have it. Raises UnsupportedModel."""
    config.one_of("mamba_hidden_act", ("silu", "swish"))
    unbounded_steps(config, "time_step_limit", "mamba_dt_limit")
    return Mamba2(
        config.count("mamba_num_heads"), config.count("mamba_head_dim"), config.count("n_groups", "mamba_n_groups"),
        config.count("ssm_state_size"), config.count("conv_kernel", "mamba_d_conv"), norm,
        bool(config.get("use_conv_bias", "mamba_conv_bias")), bool(config.get("use_bias")),
    )  # fmt: skip


def _experts(config: Config) -> Experts:
    """Returns the experts of a layer. Raises UnsupportedModel."""
    latent, bias = config.get("moe_latent_size"), bool(config.get("mlp_bias"))
    return Experts(
        config.count("n_routed_experts", "num_local_experts"), _network(config, "moe_intermediate_size"),
        sigmoid_router(config), _network(config, "moe_shared_expert_intermediate_size", bias),
        narrow=None if latent is None else Narrow(config.count("moe_latent_size"), bias),
    )  # fmt: skip


def _network(config: Config, d_ff: str, bias: bool = False) -> Ffn:
    return Ffn(config.count(d_ff), config.activation("mlp_hidden_act"), gated=False, bias=bias)


_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_GRANITE_INSIDE: Inside = {
    "mixer.dt_bias": "mamba.dt_bias", "mixer.a_log": "mamba.A_log", "mixer.d": "mamba.D", "mixer.norm": "mamba.norm",
    "mixer.out": "mamba.out_proj",
}  # fmt: skip


class GraniteMoeHybrid(GraniteMoe):
    """Granite 4 with experts: Mamba-2 in most layers, attention in the others, mostly without positions; the factors of
    Granite 3, and a shared expert."""

    model_type = "granitemoehybrid"
    model_class = "GraniteMoeHybridForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        if not (experts := config.get("num_local_experts")):
            raise UnsupportedModel(f"config.json sets num_local_experts {experts}: a pack needs layers with experts")
        config.without_effect("mamba_chunk_size", "init_method")
        config.only(normalization_function=("rmsnorm",))
        config.one_of("hidden_act", ("silu", "swish"))  # also of convolutions, which have no other
        unbounded_steps(config, "time_step_limit")
        return super().describe(config, tokens)

    def _mixers(self, config: Config, norm: Norm) -> tuple[Sequence[Attention | FixedState], Inside]:
        mamba, attention = _granite_mamba(config, norm), granite_attention(config, 0 if _turns(config) else None)
        kinds: Mapping[str, Mamba2 | Attention] = {
            "mamba": mamba, "attention": attention, "linear_attention": mamba, "full_attention": attention,
        }  # fmt: skip
        config.get("layer_types", "layers_block_type")
        inside = {**_GRANITE_INSIDE, **places(mamba, config.count("hidden_size"), "mamba")}
        return config.of_layers("layer_types", kinds), inside

    def _shared(self, config: Config) -> Ffn | None:
        return config.network("shared_intermediate_size")


def _granite_mamba(config: Config, norm: Norm) -> Mamba2:
    config.get("mamba_expand")  # transformers has compared it with the heads
    n, dim, groups, state, taps = (
        config.count(f"mamba_{name}") for name in ("n_heads", "d_head", "n_groups", "d_state", "d_conv")
    )
    biases = bool(config.get("mamba_conv_bias")), bool(config.get("mamba_proj_bias"))
    return Mamba2(n, dim, groups, state, taps, norm, *biases)


def _turns(config: Config) -> bool:
    """Returns whether attention has positions. Raises UnsupportedModel."""
    kind = config.get("position_embedding_type")
    turns = kind is not None and config.one_of("position_embedding_type", ("rope", "nope")) == "rope"
    if not turns:
        config.without_effect(*_ROPE)
    return turns
