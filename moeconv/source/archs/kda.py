"""Families with Kimi Delta Attention in most layers: gated delta rules in which each feature of a key decays by itself;
and latent attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import experts, latent, latent_names, no_more_predicted, sigmoid_router
from moeconv.source.archs.description import EXPERTS_W123, ROUTED, Description, Inside, Names, Place, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Ffn, GatedDelta, Latent, Norm

_SAID_OF_LINEAR = {"head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}


def _in_memory(part: GatedDelta, shape: tuple[int, ...]) -> Inside:
    """Returns the places of the delta rule's tensors in transformers' model; `shape`: of a_log."""
    gates = {"z": "g", "a": "forget_gate.f"}
    if part.rank is not None:
        gates = {"z_narrow": "g_a", "z": "g_b", "a_narrow": "forget_gate.f_a", "a": "forget_gate.f_b"}
    return {
        **{f"mixer.{name}": f"self_attn.{name}_proj" for name in "qkvb"},
        **{f"mixer.{name}": f"self_attn.{called}_proj" for name, called in gates.items()},
        "mixer.dt_bias": "self_attn.forget_gate.dt_bias", "mixer.norm": "self_attn.o_norm",
        "mixer.a_log": Place("self_attn.forget_gate.A_log", shape=shape), "mixer.out": "self_attn.o_proj",
        "mixer.conv": Place("self_attn.conv1d", shape=(part.channels, 1, part.taps)),
    }  # fmt: skip


def _stored(part: GatedDelta, in_memory: Inside, at: str, **others: str) -> Inside:
    """Returns the places in checkpoints, where attention is called `at`, and its taps are in three tensors; `others`:
    further words of names in memory → in checkpoints."""

    def renamed(name: str) -> str:
        for before, after in {"self_attn": at, **others}.items():
            name = name.replace(before, after)
        return name.replace(".forget_gate.", ".")

    first, *behind = (f"{at}.{name}_conv1d" for name in "qkv")
    return {
        **{
            name: place._replace(name=renamed(place.name)) if isinstance(place, Place) else renamed(place)
            for name, place in in_memory.items()
        },
        "mixer.conv": Place(first, shape=(part.key_features, 1, part.taps), behind=tuple(behind)),
    }


def _layers(config: Config, delta: GatedDelta, attention: Latent, norm: Norm) -> list[Layer]:
    """Raises UnsupportedModel."""
    mixers: Mapping[str, GatedDelta | Latent] = {"linear_attention": delta, "full_attention": attention}
    networks: Mapping[str, Ffn | Experts] = {
        "dense": config.network("intermediate_size"),
        "sparse": experts(config, sigmoid_router(config), shorter=True),
    }
    config.get("mlp_layer_types", "first_k_dense_replace")  # transformers makes the first of the second
    kinds = config.of_layers("layer_types", mixers), config.of_layers("mlp_layer_types", networks)
    return [Layer(norm, mixer, None, ffn) for mixer, ffn in zip(*kinds, strict=True)]


def _delta(config: Config) -> GatedDelta:
    """Returns the delta rule by feature, with gates of the layer's input. Raises UnsupportedModel."""
    for name, published in config.parsed.attribute_map.items():
        config.get(name, published)
    config.count("num_shared_experts")
    config.must_be("tie_word_embeddings", False, "transformers ties no head of this family")
    config.one_of("hidden_act", ("silu", "swish"))  # also of the convolutions
    heads, dim, taps = (config.count(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
    return GatedDelta(
        heads, heads, dim, dim, taps, Norm(config.get("rms_norm_eps")), by_feature=True, gate="sigmoid"
    )  # fmt: skip


class KimiLinear(Family):
    """Kimi Linear: delta rules by feature, and between them latent attention without positions; DeepSeek-V3's routers
    and a shared expert, the first layer without experts."""

    model_type = "kimi_linear"
    model_class = "KimiLinearForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("head_dim", "rope_theta", "rope_scaling")
        config.only(mla_use_nope=(True,), use_grouped_topk=(True,), moe_router_activation_func=("sigmoid",))
        if strange := sorted(set(config.get("linear_attn_config") or {}) - _SAID_OF_LINEAR):
            raise UnsupportedModel(
                f"config.json sets {strange[0]} in linear_attn_config, which is not known for this family: it may "
                "change what the model computes, and a pack could not say so"
            )
        delta = _delta(config)
        delta = replace(delta, rank=delta.dim)
        layers = _layers(config, delta, latent(config, None, rope=None), delta.norm)
        in_memory = {**latent_names(config, pairs=False), **_in_memory(delta, (1, 1, delta.n, 1)), **ROUTED}
        names = Names(_stored(delta, in_memory, "self_attn", mlp="block_sparse_moe"), in_memory, expert=EXPERTS_W123)
        return decoder(self.model_type, config, tokens, layers, names, ropes=[])


class BailingHybrid(Family):
    """Ling 3.0: delta rules by feature whose decays have a bound, and between them latent attention with a gate for
    each head; DeepSeek-V3's routers and a shared expert, first layers without experts."""

    model_type = "bailing_hybrid"
    model_class = "BailingHybridForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.get("linear_head_dim", "head_dim")
        config.get("linear_conv_kernel_dim", "short_conv_kernel_size")
        config.get("layer_types", "layer_group_size")
        config.without_effect("mtp_loss_scaling_factor")
        config.must_be("q_lora_rank", None, "transformers makes queries of this family without it")
        config.only(rope_interleave=(True,))
        delta, attention = _delta(config), replace(latent(config, None), gate=True)
        lowest = config.number("kda_lower_bound")
        if config.get("kda_safe_gate"):
            if lowest > 0:
                raise UnsupportedModel(f"config.json sets kda_lower_bound {lowest!r}: it should be below 0")
            delta = replace(delta, bound=-lowest)
        in_memory = {
            **latent_names(config, pairs=True), "attn.o": "self_attn.o_proj", "attn.gate": "self_attn.g_proj",
            **_in_memory(delta, (delta.n,)), **ROUTED, "embed": "embed_tokens",
        }  # fmt: skip
        others = {"o_proj": "dense", "e_score_correction_bias": "expert_bias", "embed_tokens": "word_embeddings"}
        names = Names(
            _stored(delta, in_memory, "attention", **others), in_memory, left_out=no_more_predicted(config)
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, _layers(config, delta, attention, delta.norm), names)
