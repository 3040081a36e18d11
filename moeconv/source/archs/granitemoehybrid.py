"""Granite 4 with experts: Mamba-2 in most layers, attention in the others, mostly without positions; the factors of
Granite 3, and a shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import Description, Inside
from moeconv.source.archs.granitemoe import GraniteMoe
from moeconv.source.archs.mamba2 import places, unbounded_steps
from moert.pack.model_spec import Tokens
from moert.pack.parts import Attention, Ffn, FixedState, Mamba2, Norm

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_INSIDE: Inside = {
    "mixer.dt_bias": "mamba.dt_bias", "mixer.a_log": "mamba.A_log", "mixer.d": "mamba.D", "mixer.norm": "mamba.norm",
    "mixer.out": "mamba.out_proj",
}  # fmt: skip


class GraniteMoeHybrid(GraniteMoe):
    """See `Family`."""

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
        mamba, attention = _mamba(config, norm), self._attention(config, 0 if _turns(config) else None)
        kinds: Mapping[str, Mamba2 | Attention] = {
            "mamba": mamba, "attention": attention, "linear_attention": mamba, "full_attention": attention,
        }  # fmt: skip
        config.get("layer_types", "layers_block_type")
        inside = {**_INSIDE, **places(mamba, config.count("hidden_size"), "mamba")}
        return config.of_layers("layer_types", kinds), inside

    def _shared(self, config: Config) -> Ffn | None:
        return config.network("shared_intermediate_size")


def _mamba(config: Config, norm: Norm) -> Mamba2:
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
