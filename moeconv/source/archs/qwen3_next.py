"""Qwen3-Next: gated delta rules in most layers, heads with a gate in the others, a shared expert with a gate; norms
whose weights are stored less 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import MORE_PREDICTED
from moeconv.source.archs.description import Description, Inside, Names, Place, decoder, joined, of_heads
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Act, Attention, Experts, Ffn, GatedDelta, Norm, Router

_NORMS = {
    "mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
}  # fmt: skip
_INSIDE: Inside = {
    "shared_gate": "mlp.shared_expert_gate",
    **{f"shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    **{f"mixer.{name}": f"linear_attn.{name}" for name in ("norm", "dt_bias")},
    "mixer.a_log": "linear_attn.A_log", "mixer.out": "linear_attn.out_proj",
    **{name: Place(called, plus=1.0) for name, called in _NORMS.items()},
}  # fmt: skip


class Qwen3Next(Family):
    """See `Family`."""

    model_type = "qwen3_next"
    model_class = "Qwen3NextForCausalLM"
    root, other_root = "model.", ""
    left_out: Mapping[str, str] = {r"mtp\.": MORE_PREDICTED}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("full_attention_interval")  # layer_types says it
        config.one_of("hidden_act", ("silu", "swish"))  # also of the convolutions
        norm, d_model = Norm(config.get("rms_norm_eps")), config.count("hidden_size")
        attention = config.attention(qk_norm="head", biases=config.biases("attention_bias", "qkvog"), gate=True)
        heads, keys, dim, v, taps = (
            config.count(f"linear_{name}")
            for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        )
        delta = GatedDelta(heads, keys, dim, v, taps, norm)
        kinds: Mapping[str, GatedDelta | Attention] = {"linear_attention": delta, "full_attention": attention}
        mixers = config.of_layers("layer_types", kinds)
        ffns = self.networks(config, len(mixers))
        layers = [Layer(norm, mixer, None, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
        d_ff = config.count("moe_intermediate_size")
        names = Names(
            {**_INSIDE, **_of_heads(attention, d_model), **self.of_delta(delta, d_model)},
            joined=joined("mlp.experts", d_ff, d_model), root=self.root, left_out=self.left_out,
            other_root=self.other_root,
            outside={"decoder.norm": Place("norm", plus=1.0)},
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, [config.rope(attention.dim, partial=True)])

    def networks(self, config: Config, layers: int) -> Sequence[Ffn | Experts]:
        """Returns the feed-forward part of each of `layers` layers."""
        routed, dense = experts(config, bool(config.get("norm_topk_prob"))), _network(config, "intermediate_size")
        step, without = config.count("decoder_sparse_step"), config.get("mlp_only_layers")
        return [dense if at in without or (at + 1) % step else routed for at in range(layers)]

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


def experts(config: Config, renormalise: bool) -> Experts:
    """Returns experts with a shared one. Raises UnsupportedModel."""
    router = Router(config.count("num_experts_per_tok"), renormalise, None)
    return Experts(
        config.count("num_experts"), _network(config, "moe_intermediate_size"), router,
        _network(config, "shared_expert_intermediate_size"), shared_gate=True,
    )  # fmt: skip


def taps_of(part: GatedDelta) -> Place:
    """Returns the place of the taps of the delta rule's convolution, which works on each channel by itself."""
    return Place("linear_attn.conv1d", shape=(part.channels, 1, part.taps))


def _network(config: Config, d_ff: str) -> Ffn:
    return Ffn(config.count(d_ff), Act("silu"), gated=True)


def _of_heads(part: Attention, d_model: int) -> Inside:
    """Returns the places of queries and gates: each head's queries lie before its gate."""
    both = (2 * part.q_features, d_model)
    return {
        "attn.q": Place("self_attn.q_proj", of_heads(part.n, 0, part.dim), both),
        "attn.gate": Place("self_attn.q_proj", of_heads(part.n, part.dim), both),
    }
