"""Nemotron-H with experts: each layer is a norm and one part, which is Mamba-2, attention without positions, a network
or experts; networks and experts have no gates, and experts may be narrower than the stream. It is compared with
transformers without a bound on steps that the published model lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import MORE_PREDICTED, sigmoid_router
from moeconv.source.archs.description import Description, Inside, Names, decoder, named
from moeconv.source.archs.family import Family
from moeconv.source.archs.mamba2 import UNBOUNDED, places, unbounded_steps
from moert.pack.model_spec import ExpertKey, Layer, StackName, Tokens
from moert.pack.parts import Experts, Ffn, Mamba2, Narrow, Norm

if TYPE_CHECKING:
    from torch import Tensor, nn

_INSIDE: Inside = {
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
    "norm_eps", "num_hidden_layers", "num_logits_to_keep", "partial_rotary_factor", "rescale_prenorm_residual",
    "residual_in_fp32", "rope_theta", "sliding_window", "time_step_floor", "mamba_dt_init_floor", "time_step_max",
    "mamba_dt_max", "time_step_min", "mamba_dt_min", "use_mamba_kernels",
)  # fmt: skip


class NemotronH(Family):
    """See `Family`."""

    model_type = "nemotron_h"
    model_class = "NemotronHForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.mixer.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*_IDLE)
        config.must_be("tie_word_embeddings", False, "transformers ties no head of this family")
        norm, d_model = Norm(config.number("layer_norm_epsilon")), config.count("hidden_size")
        mamba = _mamba(config, norm)
        config.get("layers_block_type", "layer_types", "hybrid_override_pattern")
        kinds: Mapping[str, Layer] = {
            "linear_attention": Layer(norm, mamba, None, None),
            "full_attention": Layer(norm, config.attention(rope=None), None, None),
            "mlp": Layer(norm, None, None, _network(config, "intermediate_size", bool(config.get("mlp_bias")))),
            "moe": Layer(norm, None, None, _experts(config)),
        }
        layers = config.of_layers("layers_block_type", kinds)
        names = Names(
            {**_INSIDE, **places(mamba, d_model, "mixer")}, expert=named("mixer.experts.{expert}.{projection}_proj"),
            left_out={r"mtp\.": MORE_PREDICTED}, root="backbone.",
            outside={"embed": "embeddings", "decoder.norm": "norm_f"},
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, ropes=[])

    def prepared(self, model: nn.Module) -> nn.Module:
        """Removes all bounds of Mamba-2's steps, as in the published model and in its training. Transformers 5.23
        bounds the steps of a text from below by time_step_min, which is meant for untrained weights (its pull request
        48989), but not the steps of a token that it reads alone."""
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
        return self.experts_module(model, key.at).get_parameter(f"{projection}_proj").detach()[key.expert]


def _mamba(config: Config, norm: Norm) -> Mamba2:
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
