"""DeepSeek-V2 and V3, and the families that took their attention, routers or shared experts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, count_of, number_of, text_settings
from moeconv.source.archs.description import (
    Description,
    Inside,
    Names,
    Place,
    View,
    decoder,
    halves,
    in_turn,
    joined,
    limited,
    of_heads,
    rows,
    transposed,
)
from moeconv.source.archs.family import Family
from moert.pack.codec import F32
from moert.pack.model_spec import Join, Layer, Tokens
from moert.pack.parts import Experts, Ffn, Groups, Latent, Norm, Rope, Router

if TYPE_CHECKING:
    from torch import nn

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
MORE_PREDICTED = "the layers that predict several tokens at once are left out"
INDEXERS_LEFT_OUT = "the indexers, which choose among the tokens of longer texts, are left out"
IMAGES_LEFT_OUT = "images are left out: the pack holds the text model alone"
_EPS = 1e-6  # of the norms within latent attention, whatever config.json sets for the other norms


def latent(config: Config, whole: bool | None = False, rope: int | None = 0) -> Latent:
    """Returns latent attention: see moert.pack.parts.Latent. `whole`: head_dim counts all features of a head, not those
    alone that turn; None: it has no effect. Raises UnsupportedModel."""
    heads = config.count("num_attention_heads")
    config.must_be("num_key_value_heads", heads, "latent attention has as many heads of keys as of queries")
    nope, turning = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    if whole is not None:
        config.only(head_dim=(turning + whole * nope,))
    config.only(qk_head_dim=(nope + turning,))
    return Latent(
        heads, config.get("q_lora_rank"), config.count("kv_lora_rank"), nope, turning, config.count("v_head_dim"),
        (nope + turning) ** -0.5 * (1.0 if rope is None else _stretch(config) ** 2), Norm(_EPS), rope,
        bool(config.get("attention_bias")),
    )  # fmt: skip


def _stretch(config: Config) -> float:
    """Returns the factor with which YaRN multiplies queries and keys, beside the rope's own factor."""
    parameters = config.rope_parameters()
    wide, factor = parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    if parameters.get("rope_type", "default") == "default" or not wide or factor <= 1:
        return 1.0
    return float(0.1 * wide * math.log(factor) + 1.0)


def latent_names(config: Config, pairs: bool) -> Inside:
    """Returns the places of `latent`'s matrices in transformers. `pairs`: rotary positions turn pairs, not halves."""
    heads, rank, c = config.count("num_attention_heads"), config.get("q_lora_rank"), config.count("kv_lora_rank")
    nope, turning, v = (config.get(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
    d_model = config.count("hidden_size")
    turn: Callable[..., View] = halves if pairs else of_heads
    asked, q = (d_model, "self_attn.q_proj") if rank is None else (rank, "self_attn.q_b_proj")
    queries, both = (heads * (nope + turning), asked), (c + turning, d_model)
    made = (heads * (nope + v), c)
    return {
        "attn.q_a": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm",
        "attn.q": Place(q, of_heads(heads, 0, nope), queries),
        "attn.q_turn": Place(q, turn(heads, nope), queries),
        "attn.kv_a": Place("self_attn.kv_a_proj_with_mqa", rows(0, c), both),
        "attn.k_turn": Place("self_attn.kv_a_proj_with_mqa", turn(1, c), both),
        "attn.kv_norm": "self_attn.kv_a_layernorm",
        "attn.keys": Place("self_attn.kv_b_proj", in_turn(of_heads(heads, 0, nope), transposed), made),
        "attn.values": Place("self_attn.kv_b_proj", of_heads(heads, nope), made),
    }  # fmt: skip


def sigmoid_router(
    config: Config, scores: tuple[str, ...] = ("sigmoid",), every: tuple[Any, ...] = (1,)
) -> Router:  # fmt: skip
    """Returns DeepSeek-V3's router (arXiv 2412.19437, 2.1.2): groups by the sum of their two best, a bias for the
    choice. `scores`: the names of these scores in config.json; `every`: the values of moe_layer_freq. Raises
    UnsupportedModel."""
    config.only(scoring_func=scores, topk_method=("noaux_tc",), moe_layer_freq=every)
    groups, best = config.count("n_group"), config.count("topk_group")
    return config.router(
        bool(config.get("norm_topk_prob")), score="sigmoid",
        choice_bias=True, groups=Groups(groups, best, 2), factor=config.number("routed_scaling_factor"),
    )  # fmt: skip


def experts(config: Config, router: Router, bias: bool = False, shorter: bool = False) -> Experts:
    """Returns experts, with shared experts as one network. `bias`: whether the shared ones have biases; `shorter`:
    whether the settings of both counts have their shorter names."""
    shared = config.get("num_shared_experts" if shorter else "n_shared_experts")
    return Experts(
        config.count(*_COUNTS[shorter:]), config.network("moe_intermediate_size"),
        router, config.network("moe_intermediate_size", bias=bias, times=shared) if shared else None,
    )  # fmt: skip


def dense_first(config: Config, dense: Ffn, routed: Experts) -> list[Ffn | Experts]:
    """Returns the feed-forward part of each layer: the first ones have one network in place of experts."""
    first = config.count("first_k_dense_replace", least=0)
    return [dense if at < first else routed for at in range(config.count("num_hidden_layers"))]


def no_more_predicted(config: Config, root: str = "model.", more: int = 1) -> dict[str, str]:
    """Returns the names to leave out of `more` layers behind the last one, which predict tokens after the next, with a
    note. `root`: the beginning of all names."""
    last = config.count("num_hidden_layers")
    return {rf"{re.escape(root)}layers\.{at}\.": MORE_PREDICTED for at in range(last, last + more)}


class DeepseekV2(Family):
    """DeepSeek-V2: latent attention, softmax routers with groups, shared experts, first layers without experts. Weights
    of experts are never made to sum to 1: transformers ignores norm_topk_prob."""

    model_type = "deepseek_v2"
    model_class = "DeepseekV2ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(scoring_func=("softmax",), moe_layer_freq=(1,))
        config.must_be("norm_topk_prob", False, "transformers computes this family without it")
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha", "head_dim")
        bias, norm = bool(config.get("mlp_bias")), Norm(config.get("rms_norm_eps"))
        routed, dense = experts(config, _router(config), bias=bias), config.network("intermediate_size", bias=bias)
        layers = [Layer(norm, latent(config), None, ffn) for ffn in dense_first(config, dense, routed)]
        names = Names(latent_names(config, pairs=True), left_out=no_more_predicted(config))
        return decoder(self.model_type, config, tokens, layers, names)


def _router(config: Config) -> Router:
    """Raises UnsupportedModel."""
    method = config.one_of("topk_method", ("greedy", "group_limited_greedy"))
    groups, best = config.get("n_group"), config.get("topk_group")
    return config.router(
        False, factor=config.number("routed_scaling_factor"),
        groups=Groups(groups, best, 1) if method == "group_limited_greedy" else None,
    )  # fmt: skip


class DeepseekV3(Family):
    """DeepSeek-V3: latent attention, sigmoid routers with groups and a bias for the choice, a shared expert."""

    model_type = "deepseek_v3"
    model_class = "DeepseekV3ForCausalLM"
    root, head = "model.", "lm_head"
    left_out: Mapping[str, str] = {}
    inside: Mapping[str, str | Place] = {}
    """More names of tensors in a layer."""
    in_memory: Mapping[str, str | Place] = {}
    in_one = False
    """True if checkpoints have all experts of a layer in one tensor."""

    def router(self, config: Config) -> Router:
        """Raises UnsupportedModel."""
        return sigmoid_router(config)

    def ropes(self, config: Config) -> list[tuple[Rope, F32]]:
        """Raises UnsupportedModel."""
        return [config.rope(config.count("qk_rope_head_dim"))]

    def pairs(self, config: Config) -> bool:
        """Returns whether rotary positions turn pairs, not halves. Raises UnsupportedModel."""
        return bool(config.get("rope_interleave"))

    def attention(self, config: Config) -> Latent:
        """Raises UnsupportedModel."""
        return latent(config)

    def networks(self, config: Config, dense: Ffn, routed: Experts) -> list[Ffn | Experts]:
        """Returns the feed-forward part of each layer. Raises UnsupportedModel."""
        return dense_first(config, dense, routed)

    def layer(self, norm: Norm, attention: Latent, ffn: Ffn | Experts) -> Layer:
        """Returns a layer with its norms."""
        return Layer(norm, attention, None, ffn)

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        routed, dense = experts(config, self.router(config)), config.network("intermediate_size")
        norm, attention = Norm(config.get("rms_norm_eps")), self.attention(config)
        layers = [self.layer(norm, attention, ffn) for ffn in self.networks(config, dense, routed)]
        inside = {**latent_names(config, self.pairs(config)), **self.inside}
        left_out = {**no_more_predicted(config, self.root), **self.left_out}
        of_expert = joined("mlp.experts", routed.ffn.d_ff, config.count("hidden_size")) if self.in_one else None
        names = Names(inside, self.in_memory, of_expert, left_out=left_out, root=self.root, head=self.head)
        return decoder(self.model_type, config, tokens, layers, names, self.ropes(config))


class Axk1(DeepseekV3):
    """A.X K1: DeepSeek-V3 with a norm behind the experts, whose layers mlp_layer_types names."""

    model_type = "axk1"
    model_class = "AXK1ForCausalLM"
    inside: Mapping[str, str | Place] = {"ffn_after": "post_mlp_layernorm"}
    in_memory: Mapping[str, str | Place] = {"ffn_after": "mlp.post_mlp_layernorm"}

    def networks(self, config: Config, dense: Ffn, routed: Experts) -> list[Ffn | Experts]:
        config.only(first_k_dense_replace=(config.get("mlp_layer_types").count("dense"),))
        return config.of_layers("mlp_layer_types", {"dense": dense, "sparse": routed})

    def layer(self, norm: Norm, attention: Latent, ffn: Ffn | Experts) -> Layer:
        return Layer(norm, attention, None, ffn, ffn_join=Join(norm) if isinstance(ffn, Experts) else Join())


class KimiK2(DeepseekV3):
    """DeepSeek-V3's architecture by another name (Kimi K2), published with experts of four bits."""

    model_type = "kimi_k2"
    config_type = "deepseek_v3"
    loads_by_names = False


class KimiK25(KimiK2):
    """Kimi K2.5 and after: Kimi K2 inside a model for text and images."""

    model_type = "kimi_k25"
    inside_tied = True
    beside = frozenset({
        "vision_config", "projection_hidden_size", "projection_layer_norm_eps", "image_token_id", "video_token_id",
        "vision_start_token_id", "vision_end_token_id", "ignore_index", "media_placeholder_token_id",
        "use_unified_vision_chunk", "video_placeholder",
    })  # fmt: skip
    root, head = "language_model.model.", "language_model.lm_head"
    left_out: Mapping[str, str] = {r"(model\.)?(vision_tower|mm_projector)\.": IMAGES_LEFT_OUT}


class Mistral4(DeepseekV3):
    """Mistral Small 4: DeepSeek-V3's layers with softmax routers. Queries look more sharply from the positions on that
    a first training had, so that the texts of a pack end there."""

    model_type = "mistral4"
    model_class = "Mistral4ForCausalLM"
    in_one = True

    def router(self, config: Config) -> Router:
        groups = Groups(config.count("n_group"), config.count("topk_group"), 2)
        return config.router(
            bool(config.get("norm_topk_prob")), groups=groups, factor=config.number("routed_scaling_factor")
        )

    def attention(self, config: Config) -> Latent:
        return latent(config, whole=True)

    def ropes(self, config: Config) -> list[tuple[Rope, F32]]:
        return [config.rope(config.parsed.head_dim, partial=True, kinds=("yarn",))]  # others fail in transformers

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect_on_text(*SHARPER)
        return before_sharper(config, super().describe(config, tokens))


SHARPER = ("llama_4_scaling_beta", "max_position_embeddings")
"""Parameters of positions that only queries behind the positions of a first training follow."""


def before_sharper(config: Config, described: Description) -> Description:
    """Returns the description for texts that end where queries begin to look more sharply. Raises UnsupportedModel."""
    said = config.rope_parameters()
    number_of("llama_4_scaling_beta", config.get("rope_parameters").get("llama_4_scaling_beta"))
    short = count_of("original_max_position_embeddings", said.get("original_max_position_embeddings"))
    note = f"texts are at most {short} tokens long: queries further on look more sharply, which a pack can't say"
    return limited(described, short, note)


OF_INDEXERS = (
    "index_head_dim", "index_n_heads", "indexer_types", "index_share_for_mtp_iteration", "index_skip_topk_offset",
    "index_topk_freq", "index_topk_pattern", "indexer_rope_interleave",
)  # fmt: skip


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2: DeepSeek-V3 with an indexer, by which each token attends to index_topk others at most. Texts with
    no more tokens need none, and a pack's texts are no longer."""

    model_type = "deepseek_v32"
    model_class = "DeepseekV32ForCausalLM"
    left_out: Mapping[str, str] = {r"model\.layers\.\d+\.self_attn\.indexer\.": INDEXERS_LEFT_OUT}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*OF_INDEXERS, "moe_router_dtype", "head_dim")  # routers have 32 bits in a pack
        config.must_be("mlp_bias", False, "networks with biases can't be packed for this family")
        config.of_layers("layer_types", {"indexed_attention": None})
        kept = config.count("index_topk")
        note = f"texts are at most {kept} tokens long: in longer ones an indexer chooses tokens, which a pack can't say"
        return limited(super().describe(config, tokens), kept, note)

    def pairs(self, config: Config) -> bool:
        config.only(rope_interleave=(True,))
        return True

    def attention(self, config: Config) -> Latent:
        return latent(config, None)

    def networks(self, config: Config, dense: Ffn, routed: Experts) -> list[Ffn | Experts]:
        config.without_effect("first_k_dense_replace")  # mlp_layer_types says it
        return config.of_layers("mlp_layer_types", {"dense": dense, "sparse": routed})

    def prepared(self, model: nn.Module) -> nn.Module:
        """Puts a module that chooses all tokens in place of each indexer."""
        from moeconv.source.archs.modules import AllTokens

        for layer in self.tower(model, "decoder").get_submodule(self.layer_list).children():
            attention: Any = layer.get_submodule("self_attn")
            attention.indexer = AllTokens()
        return model


class GlmMoeDsa(DeepseekV32):
    """GLM-5: as DeepSeek-V3.2; some layers share the choice of an indexer."""

    model_type = "glm_moe_dsa"
    model_class = "GlmMoeDsaForCausalLM"
    more_results = 1


class SolarOpen(Family):
    """Solar Open: Llama's attention, DeepSeek-V3's routers and a shared expert in all layers."""

    model_type = "solar_open"
    model_class = "SolarOpenForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("intermediate_size", "first_k_dense_replace")  # all layers have experts
        config.only(use_qk_norm=(False,))
        norm, attention = (
            Norm(config.get("rms_norm_eps")),
            config.attention(biases=config.biases("attention_bias", "qkv")),
        )
        layer = Layer(norm, attention, None, experts(config, sigmoid_router(config)))
        return decoder(self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"))


_HY_INSIDE = {
    "router": "mlp.router.gate", "router.choice_bias": "mlp.expert_bias",
    **{f"shared.{name}": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_HY_IN_MEMORY = {
    "router": "mlp.gate", "router.choice_bias": "mlp.e_score_correction_bias",
    **{f"shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


class HyV3(Family):
    """Hunyuan 3 (Hy3): heads normed one by one, DeepSeek-V3's routers without groups, a shared expert; mlp_layer_types
    names the layers with experts."""

    model_type = "hy_v3"
    model_class = "HYV3ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("mlp_bias", False, "networks with biases can't be packed for this family")
        config.without_effect("enable_moe_fp32_combine")  # a pack sums in float32
        config.only(qk_norm=(True,), use_qk_norm=(True,), scoring_func=("sigmoid",))
        norm, dense = Norm(config.get("rms_norm_eps")), config.network("intermediate_size")
        attention = config.attention(qk_norm="head", biases=config.biases("attention_bias", "qkvo"))
        router = config.router(True, score="sigmoid", choice_bias=True, factor=config.number("router_scaling_factor"))
        routed = experts(config, router, shorter=True)
        known: Mapping[str, Ffn | Experts] = {"dense": dense, "sparse": routed}
        layers = [Layer(norm, attention, None, ffn) for ffn in config.of_layers("mlp_layer_types", known)]
        names = Names(_HY_INSIDE, _HY_IN_MEMORY, left_out=no_more_predicted(config))
        return decoder(self.model_type, config, tokens, layers, names)


class Glm4Moe(Family):
    """GLM-4.5 and after: part of each head turns, DeepSeek-V3's routers, shared experts, first layers without
    experts."""

    model_type = "glm4_moe"
    model_class = "Glm4MoeForCausalLM"
    root = "model."
    left_out: Mapping[str, str] = {}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        attention = config.attention(
            qk_norm="head" if config.get("use_qk_norm") else None,
            biases=config.biases("attention_bias", "qkv"),
        )
        dense = config.network("intermediate_size")
        layers = [Layer(norm, attention, None, ffn) for ffn in dense_first(config, dense, routed)]
        ropes = [config.rope(attention.dim, partial=True)]
        names = Names(left_out={**no_more_predicted(config, self.root), **self.left_out}, root=self.root)
        return decoder(self.model_type, config, tokens, layers, names, ropes)


class Glm4vMoe(Glm4Moe):
    """GLM-4.5V and 4.6V: GLM-4.5 inside a model for text and images."""

    model_type = "glm4v_moe"
    config_type = "glm4_moe"
    loads_by_names = False
    beside = frozenset({
        "vision_config", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id",
        "video_start_token_id", "video_end_token_id",
    })  # fmt: skip
    root = "model.language_model."
    left_out: Mapping[str, str] = {r"model\.visual\.": IMAGES_LEFT_OUT}

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = {"vocab_size": 151424, "attention_bias": True, "max_position_embeddings": 65536, **text_settings(config)}
        tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
        return {**text, "head_dim": _head_dim(text), "tie_word_embeddings": tied}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect_on_text("mrope_section")  # a word's place has one number, not three
        config.only(use_qk_norm=(False,))
        return super().describe(config, tokens)


def _head_dim(text: Mapping[str, Any]) -> Any:
    """Returns the features of a head as transformers takes them in a model for images, whose default differs."""
    if text.get("head_dim") is not None:
        return text["head_dim"]
    sizes = (("hidden_size", 4096), ("num_attention_heads", 96))
    features, heads = (count_of(name, text.get(name, usual)) for name, usual in sizes)
    return features // heads


class Glm4MoeLite(Family):
    """GLM-4.7-Flash: DeepSeek-V3's layers; mlp_layer_types names the ones with experts. Transformers ignores
    first_k_dense_replace: without mlp_layer_types, one layer has no experts."""

    model_type = "glm4_moe_lite"
    model_class = "Glm4MoeLiteForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        kinds = config.get("mlp_layer_types")
        config.only(first_k_dense_replace=(kinds.count("dense"),))
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config))
        dense = config.network("intermediate_size")
        layers = [Layer(norm, latent(config), None, dense if kind == "dense" else routed) for kind in kinds]
        inside = latent_names(config, pairs=bool(config.get("rope_interleave")))
        return decoder(self.model_type, config, tokens, layers, Names(inside, left_out=no_more_predicted(config)))


class Dots1(Family):
    """dots.llm1: windows by layer, heads normed one by one, DeepSeek-V3's routers, shared experts."""

    model_type = "dots1"
    model_class = "Dots1ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha")
        norm, routed = (
            Norm(config.get("rms_norm_eps")),
            experts(config, sigmoid_router(config, ("sigmoid", "noaux_tc"))),
        )
        biases = config.biases("attention_bias", "qkvo")
        dense = config.network("intermediate_size")
        layers = [
            Layer(norm, config.attention(qk_norm="head", biases=biases, window=window), None, ffn)
            for window, ffn in zip(config.windows(), dense_first(config, dense, routed), strict=True)
        ]
        return decoder(self.model_type, config, tokens, layers)


_BIAS = "mlp.e_score_correction_bias"


class ExaoneMoe(Family):
    """K-EXAONE: layers with windows and rotary positions, and between them layers with neither."""

    model_type = "exaone_moe"
    model_class = "ExaoneMoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(
            "sliding_window_pattern", "first_k_dense_replace"
        )  # layer_types and mlp_layer_types say it
        kinds = config.get("mlp_layer_types")
        config.only(is_moe_layer=([kind == "sparse" for kind in kinds],))
        norm, routed = Norm(config.get("rms_norm_eps")), experts(config, sigmoid_router(config), shorter=True)
        dense = config.network("intermediate_size")
        layers = [
            Layer(
                norm, config.attention(qk_norm="head", window=window, rope=None if window is None else 0), None,
                dense if kind == "dense" else routed,
            )
            for window, kind in zip(config.windows(), kinds, strict=True)
        ]  # fmt: skip
        names = Names(
            {"router.choice_bias": _BIAS}, {"router.choice_bias": "mlp.gate.e_score_correction_bias"},
            left_out={r"mtp\.": MORE_PREDICTED},
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names)
