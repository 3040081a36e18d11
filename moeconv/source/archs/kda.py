"""Families with Kimi Delta Attention in most layers: gated delta rules in which each feature of a key decays by itself;
and latent attention in the others."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import experts, latent, latent_names, sigmoid_router
from moeconv.source.archs.description import EXPERTS_W123, USUAL, Description, Inside, Names, Place, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Ffn, GatedDelta, Latent, Norm

_ROUTED = {name: place for name, place in USUAL.items() if name.partition(".")[0] in ("router", "shared")}
_GATES = {"mixer.a": "f_b_proj", "mixer.a_narrow": "f_a_proj", "mixer.dt_bias": "dt_bias"}
_OF_LINEAR = {"head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}


def _inside(part: GatedDelta, shape: tuple[int, ...]) -> Inside:
    """Returns the places of the delta rule's tensors in checkpoints; `shape`: of a_log."""
    convs = [f"self_attn.{name}_conv1d" for name in "qkv"]
    return {
        **{f"mixer.{name}": f"self_attn.{name}_proj" for name in "qkvb"},
        **{name: f"self_attn.{called}" for name, called in _GATES.items()},
        "mixer.a_log": Place("self_attn.A_log", shape=shape), "mixer.z": "self_attn.g_b_proj",
        "mixer.z_narrow": "self_attn.g_a_proj", "mixer.norm": "self_attn.o_norm", "mixer.out": "self_attn.o_proj",
        "mixer.conv": Place(convs[0], shape=(part.channels // 3, 1, part.taps), behind=tuple(convs[1:])),
    }  # fmt: skip


def _in_memory(part: GatedDelta, shape: tuple[int, ...]) -> Inside:
    """Returns the places of the tensors that lie elsewhere in transformers' model."""
    return {
        **{name: f"self_attn.forget_gate.{called}" for name, called in _GATES.items()},
        "mixer.a_log": Place("self_attn.forget_gate.A_log", shape=shape),
        "mixer.conv": Place("self_attn.conv1d", shape=(part.channels, 1, part.taps)),
    }


class KimiLinear(Family):
    """Kimi Linear: delta rules by feature, and between them latent attention without positions; DeepSeek-V3's routers
    and a shared expert, the first layer without experts."""

    model_type = "kimi_linear"
    model_class = "KimiLinearForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        for name, published in config.parsed.attribute_map.items():
            config.get(name, published)
        config.count("num_shared_experts")
        config.without_effect("head_dim", "rope_theta", "rope_scaling")
        config.only(mla_use_nope=(True,), use_grouped_topk=(True,), moe_router_activation_func=("sigmoid",))
        config.must_be("tie_word_embeddings", False, "transformers ties no head of this family")
        config.one_of("hidden_act", ("silu", "swish"))  # also of the convolutions
        norm = Norm(config.get("rms_norm_eps"))
        heads, dim, taps = _of_linear(config)
        delta = GatedDelta(heads, heads, dim, dim, taps, norm, by_feature=True, rank=dim, gate="sigmoid")
        mixers: Mapping[str, GatedDelta | Latent] = {
            "linear_attention": delta, "full_attention": latent(config, None, rope=None),
        }  # fmt: skip
        networks: Mapping[str, Ffn | Experts] = {
            "dense": config.network("intermediate_size"),
            "sparse": experts(config, sigmoid_router(config), shorter=True),
        }
        config.get("mlp_layer_types", "first_k_dense_replace")  # transformers makes the first of the second
        layers = [
            Layer(norm, mixer, None, ffn)
            for mixer, ffn in zip(
                config.of_layers("layer_types", mixers), config.of_layers("mlp_layer_types", networks), strict=True
            )
        ]
        routed = {name: str(place).replace("mlp.", "block_sparse_moe.") for name, place in _ROUTED.items()}
        shape = (1, 1, heads, 1)
        names = Names(
            {**latent_names(config, pairs=False), **_inside(delta, shape), **routed},
            {**_in_memory(delta, shape), **_ROUTED}, expert=EXPERTS_W123,
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, ropes=[])


def _of_linear(config: Config) -> list[int]:
    """Returns the heads, the features and the taps of the delta rules. Raises UnsupportedModel."""
    said = config.get("linear_attn_config")
    if strange := sorted(set(said or {}) - _OF_LINEAR):
        raise UnsupportedModel(
            f"config.json sets {strange[0]} in linear_attn_config, which is not known for this family: it may change "
            "what the model computes, and a pack could not say so"
        )
    return [config.count(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim")]
