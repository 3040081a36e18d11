"""Jamba: Mamba in most layers, attention without positions in the others, experts in every second."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Names, Place, decoder, named
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, StackName, Tokens
from moert.pack.parts import Act, Experts, Ffn, Mamba, Norm, Router

_INSIDE: dict[str, str | Place] = {
    "ffn_norm": "pre_ff_layernorm", "router": "feed_forward.router", "mixer.in": "mamba.in_proj",
    "mixer.inner": "mamba.x_proj", "mixer.dt_norm": "mamba.dt_layernorm", "mixer.b_norm": "mamba.b_layernorm",
    "mixer.c_norm": "mamba.c_layernorm", "mixer.steps": "mamba.dt_proj", "mixer.dt_bias": "mamba.dt_proj.bias",
    "mixer.a_log": "mamba.A_log", "mixer.d": "mamba.D", "mixer.out": "mamba.out_proj",
    **{f"ffn.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_EXPERT = named("feed_forward.experts.{expert}.{projection}_proj")


class Jamba(Family):
    """See `Family`."""

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
        router = Router(config.count("num_experts_per_tok"), False, None)
        experts = Experts(config.count("num_experts", "num_local_experts"), network, router)
        attention = config.attention(rope=None)
        layers = [
            Layer(norm, attention if attends else mamba, None, experts if many and experts.n > 1 else network)
            for attends, many in zip(_every(config, "attn"), _every(config, "expert"), strict=True)
        ]
        taps = Place("mamba.conv1d", shape=(mamba.features, 1, mamba.taps))
        names = Names({**_INSIDE, "mixer.conv": taps}, expert=_EXPERT, outside={"decoder.norm": "final_layernorm"})
        return decoder(self.model_type, config, tokens, layers, names, ropes=[])


def _every(config: Config, what: str) -> list[bool]:
    """Returns for each layer whether it belongs to the layers `what`, whose period and offset are settings."""
    period = config.count(f"{what}_layer_period")
    offset = config.count(f"{what}_layer_offset", least=0)
    return [layer % period == offset for layer in range(config.count("num_hidden_layers"))]
