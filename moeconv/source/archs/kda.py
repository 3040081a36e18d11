"""Families with Kimi Delta Attention in most layers: gated delta rules in which each feature of a key decays by itself;
and latent attention in the others, in one family between several streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import (
    IMAGES_LEFT_OUT,
    INDEXERS_LEFT_OUT,
    OF_INDEXERS,
    experts,
    latent,
    latent_names,
    no_more_predicted,
    sigmoid_router,
)
from moeconv.source.archs.description import (
    EXPERTS_W123,
    ROUTED,
    Description,
    Inside,
    Names,
    Place,
    decoder,
    limited,
)
from moeconv.source.archs.family import Family, changed
from moert.pack.mixers import GatedDelta
from moert.pack.model_spec import Layer, StackName, Tokens
from moert.pack.parts import Experts, Ffn, Latent, Norm, Streams

if TYPE_CHECKING:
    from torch import nn

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


def _check_said_of_linear(config: Config, known: Set[str]) -> None:
    """Raises UnsupportedModel if linear_attn_config has a setting that is not known."""
    if strange := sorted(set(config.get("linear_attn_config") or {}) - known):
        raise UnsupportedModel(
            f"config.json sets {strange[0]} in linear_attn_config, which is not known for this family: it may "
            "change what the model computes, and a pack could not say so"
        )


def _bound(config: Config, name: str) -> float:
    """Returns the bound on decays that a setting gives as the lowest of their logarithms. Raises UnsupportedModel."""
    lowest = config.number(name)
    if lowest > 0:
        raise UnsupportedModel(f"config.json sets {name} {lowest!r}: it should be below 0")
    return -lowest


class KimiLinear(Family):
    """Kimi Linear: delta rules by feature, and between them latent attention without positions; DeepSeek-V3's routers
    and a shared expert, the first layer without experts."""

    model_type = "kimi_linear"
    model_class = "KimiLinearForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("head_dim", "rope_theta", "rope_scaling")
        config.only(mla_use_nope=(True,), use_grouped_topk=(True,), moe_router_activation_func=("sigmoid",))
        _check_said_of_linear(config, _SAID_OF_LINEAR)
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
        config.number("kda_lower_bound")
        if config.get("kda_safe_gate"):
            delta = replace(delta, bound=_bound(config, "kda_lower_bound"))
        in_memory = {
            **latent_names(config, pairs=True), "attn.o": "self_attn.o_proj", "attn.gate": "self_attn.g_proj",
            **_in_memory(delta, (delta.n,)), **ROUTED, "embed": "embed_tokens",
        }  # fmt: skip
        others = {"o_proj": "dense", "e_score_correction_bias": "expert_bias", "embed_tokens": "word_embeddings"}
        names = Names(
            _stored(delta, in_memory, "attention", **others), in_memory, left_out=no_more_predicted(config)
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, _layers(config, delta, attention, delta.norm), names)


_SAID_OF_NEXT = {"head_dim", "num_heads", "short_conv_kernel_size", "gate_lower_bound", "safe_gate"}
_UNTURNED = 2
"""Features of queries and keys that turn, of which a pack has some: zeros stand for them where a model has none."""
_ZEROS = ("attn.q_turn.weight", "attn.k_turn.weight", "attn.k_turn.bias")


def places_of_streams(pattern: str) -> Inside:
    """Returns the places of the streams' tensors, whose names have the words for a half and a tensor in `pattern`."""
    return {
        f"{half}_streams.{name}": pattern.format(at, called)
        for half, at in (("mixer", "attn"), ("ffn", "ffn"))
        for name, called in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
    }


def _unturned(config: Config, norm: Norm) -> Latent:
    """Returns latent attention without positions, all of whose features meet those of `keys`. Raises
    UnsupportedModel."""
    heads, nope = config.count("num_attention_heads"), config.count("qk_nope_head_dim")
    config.must_be("num_key_value_heads", heads, "latent attention has as many heads of keys as of queries")
    config.must_be("qk_rope_head_dim", None, "transformers turns no features of this family")
    config.only(qk_head_dim=(nope,))
    return Latent(
        heads, config.count("q_lora_rank"), config.count("kv_lora_rank"), nope, _UNTURNED, config.count("v_head_dim"),
        nope**-0.5, norm, None, bool(config.get("attention_bias")),
    )  # fmt: skip


def streams_of(config: Config) -> Streams:
    """Raises UnsupportedModel."""
    return Streams(config.count("hc_mult", least=2), config.count("hc_sinkhorn_iters"), config.number("hc_eps"))


def within(limit: float, network: Ffn) -> Ffn:
    """Returns the network with gates within `limit`."""
    return replace(network, act=replace(network.act, limit=limit))


def _networks(limit: float, config: Config) -> Mapping[str, Ffn | Experts]:
    """Returns the networks of a layer, whose gates are within `limit`, by the words for them. Raises
    UnsupportedModel."""
    routed = experts(config, sigmoid_router(config))
    shared = None if routed.shared is None else within(limit, routed.shared)
    dense = within(limit, config.network("intermediate_size"))
    return {"dense": dense, "sparse": replace(routed, ffn=within(limit, routed.ffn), shared=shared)}


@contextmanager
def one_stream(tower: nn.Module, streams: str = "hc_mult") -> Iterator[None]:
    """Keeps a tower from repeating hidden states as it repeats embeddings, inside a with block. `streams`: the setting
    that has their number."""
    with changed(tower.config, streams, 1):
        yield


class Glm5Next(Family):
    """GLM-5.3: several streams; delta rules by feature whose decays have a bound, and between them latent attention
    without positions to the tokens that an indexer chooses; DeepSeek-V3's routers and a shared expert. Texts of a pack
    are no longer than an indexer chooses tokens."""

    model_type = "glm5_next"
    config_type = "glm5_next_text"
    model_class = "Glm5NextForConditionalGeneration"
    loads_by_names = False
    more_results = 1
    inside_tied = False
    beside = frozenset({
        "vision_config", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id",
        "video_start_token_id", "video_end_token_id",
    })  # fmt: skip
    sees: Mapping[str, Any] = {
        "depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 4, "out_hidden_size": 4,
        "projection_intermediate_size": 4,
    }  # fmt: skip
    towers: Mapping[StackName, str] = {"decoder": "model.language_model"}
    experts: Mapping[StackName, str] = {"decoder": "model.language_model.layers.{layer}.mlp.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*OF_INDEXERS, "head_dim")
        config.only(first_k_dense_replace=(config.get("mlp_layer_types").count("dense"),))
        _check_said_of_linear(config, _SAID_OF_NEXT)
        config.must_be("index_kpool_always_select_tail", True, "tokens of a group that is not full would see nothing")
        heads, dim, taps = (config.count(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
        config.one_of("hidden_act", ("silu", "swish"))  # also of the convolutions
        norm = Norm(config.get("rms_norm_eps"))
        bound = None if config.get("linear_lower_bound") is None else _bound(config, "linear_lower_bound")
        delta = GatedDelta(
            heads, heads, dim, dim, taps, norm, by_feature=True, rank=dim, gate="sigmoid", bound=bound
        )  # fmt: skip
        streams = streams_of(config)
        mixers: Mapping[str, GatedDelta | Latent] = {
            "linear_attention": delta, "indexed_attention": _unturned(config, norm),
        }  # fmt: skip
        networks = _networks(config.number("swiglu_limit"), config)
        kinds = config.of_layers("layer_types", mixers), config.of_layers("mlp_layer_types", networks)
        layers = [Layer(norm, mixer, None, ffn, streams=streams) for mixer, ffn in zip(*kinds, strict=True)]
        root = "model.language_model."
        halves = places_of_streams("{}_hc.{}")
        in_memory = {**latent_names(config, pairs=False), **_in_memory(delta, (heads,)), **halves}
        left_out = {
            r"model\.visual\.": IMAGES_LEFT_OUT, r".*\.self_attn\.indexer\.": INDEXERS_LEFT_OUT,
            **no_more_predicted(config, root),
        }  # fmt: skip
        inside = {**_stored(delta, in_memory, "self_attn"), **places_of_streams("hc_{}_{}")}
        names = Names(inside, in_memory, left_out=left_out, root=root, model=root, zeros=_ZEROS)
        kept = config.count("index_topk", "index_kpool")
        note = f"texts are at most {kept} tokens long: in longer ones an indexer chooses tokens, which a pack can't say"
        return limited(decoder(self.model_type, config, tokens, layers, names, ropes=[]), kept, note)

    def prepared(self, model: nn.Module) -> nn.Module:
        """Puts a module that chooses all tokens in place of each indexer, and all streams of a token into one vector
        between layers."""
        from moeconv.source.archs.modules import TokensBefore, join_streams

        tower = self.tower(model, "decoder")
        for layer in tower.get_submodule(self.layer_list).children():
            attention: Any = layer.get_submodule("self_attn")
            if hasattr(attention, "indexer"):
                attention.indexer = TokensBefore(attention.layer_idx)
        join_streams(tower.get_submodule(self.layer_list).children(), tower.get_submodule("hc_head"))
        return model

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        with one_stream(tower):
            yield
