"""Families whose layers are attention and experts, without relatives here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import FIXED_ROPES, Config, UnsupportedModel, count_of, text_settings, turns
from moeconv.source.archs.deepseek import IMAGES_LEFT_OUT, INDEXERS_LEFT_OUT, MORE_PREDICTED
from moeconv.source.archs.description import (
    EXPERTS_W123,
    LAST_LESS_ONE,
    Description,
    Inside,
    Names,
    Place,
    decoder,
    in_pairs,
    less_one,
    limited,
    rows,
    transposed,
)
from moeconv.source.archs.family import Family, changed
from moert.pack.codec import F32
from moert.pack.model_spec import Head, Join, Layer, StackName, Tokens
from moert.pack.parts import Act, Experts, Ffn, Norm, Rope, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

_NAMES = Names({"router": "block_sparse_moe.gate"}, {"router": "mlp.gate"}, EXPERTS_W123)


class Mixtral(Family):
    """Mixtral: all layers have a few large experts; the weights of the chosen ones sum to 1."""

    model_type = "mixtral"
    model_class = "MixtralForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, attention = Norm(config.get("rms_norm_eps")), config.attention(window=config.get("sliding_window"))
        ffn = config.network("intermediate_size")
        router = config.router(True)
        layer = Layer(norm, attention, None, Experts(config.count("num_local_experts"), ffn, router))
        return decoder(self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), _NAMES)


class Olmoe(Family):
    """OLMoE: all layers have experts; keys and queries are normed before they are split into heads."""

    model_type = "olmoe"
    model_class = "OlmoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("attention_bias", False, "attention with biases can't be packed")
        config.must_be("sliding_window", None, "this family's attention has no windows in transformers")
        norm = Norm(config.get("rms_norm_eps"))
        attention = config.attention(qk_norm="whole", clip=config.get("clip_qkv"))
        if attention.q_features != config.count("hidden_size"):
            config.must_be("head_dim", None, "heads must fill the hidden size exactly")
        ffn = config.network("intermediate_size")
        router = config.router(config.get("norm_topk_prob"))
        layer = Layer(norm, attention, None, Experts(config.count("num_experts"), ffn, router))
        return decoder(self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"))


NORMS_BEHIND = {"mixer_after": "post_attention_layernorm", "ffn_after": "post_feedforward_layernorm"}


class FlexOlmo(Family):
    """FlexOlmo: as OLMoE, with norms behind attention and experts in place of those before."""

    model_type = "flex_olmo"
    model_class = "FlexOlmoForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        attention = config.attention(qk_norm="whole", biases=config.biases("attention_bias", "qkvo"))
        router = config.router(config.get("norm_topk_prob"))
        experts = Experts(config.count("num_experts"), config.network("intermediate_size"), router)
        behind = Join(Norm(config.get("rms_norm_eps")))
        layer = Layer(None, attention, None, experts, behind, behind)
        layers = [layer] * config.count("num_hidden_layers")
        return decoder(self.model_type, config, tokens, layers, Names(NORMS_BEHIND))


_CHOSEN = 2  # whatever num_experts_per_tok is


class Phimoe(Family):
    """Phi-3.5-MoE: LayerNorms and biases everywhere, a sparsemixer in place of a router, long positions."""

    model_type = "phimoe"
    model_class = "PhimoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("num_experts_per_tok", _CHOSEN, "the sparsemixer chooses two experts")
        config.without_effect("input_jitter_noise")
        attention = config.attention(
            biases=config.biases("attention_bias", "qkvo"), window=config.get("sliding_window")
        )
        router = Router(
            _CHOSEN, False, None, score="sparsemixer", jitter=float(config.get("router_jitter_noise"))
        )  # fmt: skip
        experts = Experts(config.count("num_local_experts"), config.network("intermediate_size"), router)
        layer = Layer(Norm(config.get("rms_norm_eps"), "layer"), attention, None, experts)
        names = Names({"router": "block_sparse_moe.gate"}, {"router": "mlp.router"}, EXPERTS_W123)
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, bias=bool(config.get("lm_head_bias")))
        return decoder(
            self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), names,
            [_phimoe_rope(config, attention.dim)], head=head,
        )  # fmt: skip


def _phimoe_rope(config: Config, dim: int) -> tuple[Rope, F32]:
    """Returns the rope and its frequencies. Of longrope, transformers uses the short factors for texts of any length;
    short_mscale and long_mscale must be equal. Raises UnsupportedModel."""
    parameters = config.rope_parameters()
    config.get("original_max_position_embeddings")
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return config.rope(dim)
    config.allowed["rope_type"] = ("default", "longrope")
    short, long = parameters.get("short_mscale"), parameters.get("long_mscale")
    if kind != "longrope" or short != long or short is None:
        raise UnsupportedModel(
            f"config.json sets the rope type {kind!r} with short_mscale {short!r} and long_mscale {long!r}: only "
            "default, and longrope with both alike, can be packed"
        )
    frequencies, _ = config.frequencies()
    return Rope(2 * len(frequencies), float(short)), frequencies


_MINIMAX_INSIDE = {
    "router": "block_sparse_moe.gate", "router.choice_bias": "block_sparse_moe.e_score_correction_bias",
}  # fmt: skip
_IN_MEMORY = {"router": "mlp.gate", "router.choice_bias": "mlp.e_score_correction_bias"}


class MiniMaxM2(Family):
    """MiniMax-M2: queries and keys normed as a whole, part of each head turns, sigmoid routers without groups."""

    model_type = "minimax_m2"
    model_class = "MiniMaxM2ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        layers = config.count("num_hidden_layers")
        config.only(
            scoring_func=("sigmoid",), use_routing_bias=(True,), use_qk_norm=(True,), qk_norm_type=("per_layer",),
            shared_intermediate_size=(0,), attn_type_list=([1] * layers,),
        )  # fmt: skip
        config.without_effect(
            "rotary_dim", "mlp_intermediate_size", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"
        )  # the first is in rope_parameters
        attention = config.attention(qk_norm="whole")
        router = config.router(True, score="sigmoid", choice_bias=True)
        n = config.count("num_local_experts", "num_experts")
        experts = Experts(n, config.network("intermediate_size"), router)
        layer = Layer(Norm(config.get("rms_norm_eps")), attention, None, experts)
        ropes = [config.rope(attention.dim, partial=True)]
        return decoder(
            self.model_type, config, tokens, [layer] * layers, Names(_MINIMAX_INSIDE, _IN_MEMORY, EXPERTS_W123), ropes
        )


_M3_CHOICE = "mlp.gate.e_score_correction_bias"
_M3_NORMS = {
    "mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
}  # fmt: skip
_M3_INSIDE: Inside = {
    **_MINIMAX_INSIDE, **less_one(_M3_NORMS),
    **{f"shared.{name}": f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_OF_BLOCKS = ("index_n_heads", "index_head_dim", "index_local_blocks", "sparse_attention_config")


class MiniMaxM3Vl(Family):
    """MiniMax-M3 inside a model for text and images: MiniMax-M2 with heads normed one by one, norms stored less 1,
    bounded gates, a shared expert, first layers without experts. Most layers have an indexer, by which each token
    attends to some blocks of others; texts of no more blocks need none, and a pack's texts are no longer."""

    model_type = "minimax_m3_vl"
    config_type = "minimax_m3_vl_text"
    model_class = "MiniMaxM3VLForCausalLM"
    loads_by_names = False
    beside = frozenset({
        "vision_config", "image_token_index", "video_token_index", "image_token_id", "video_token_id",
        "projector_hidden_size", "merged_hidden_size",
    })  # fmt: skip

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = text_settings(config)
        tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
        return {**text, "tie_word_embeddings": tied}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        kinds, d_model = config.get("mlp_layer_types", "moe_layer_freq"), config.count("hidden_size")
        config.only(
            scoring_func=("sigmoid",), use_routing_bias=(True,), use_qk_norm=(True,), qk_norm_type=("per_head",),
            use_gemma_norm=(True,), attention_output_gate=(False,), n_shared_experts=(1,),
            moe_intermediate_size=(config.get("intermediate_size"),), first_k_dense_replace=(kinds.count("dense"),),
        )  # fmt: skip
        config.without_effect("hidden_act", "rotary_dim", "num_mtp_modules", *_OF_BLOCKS)  # see Act, rope_parameters
        act = Act("silu", config.number("swiglu_limit"), slope=config.number("swiglu_alpha"), plus=1.0)
        routed, shared, dense = (
            Ffn(config.count(name), act, gated=True)
            for name in ("intermediate_size", "shared_intermediate_size", "dense_intermediate_size")
        )
        router = config.router(True, score="sigmoid", choice_bias=True, factor=config.number("routed_scaling_factor"))
        experts = Experts(config.count("num_local_experts", "num_experts"), routed, router, shared)
        norm, attention = Norm(config.get("rms_norm_eps")), config.attention(qk_norm="head")
        known: Mapping[str, Ffn | Experts] = {"dense": dense, "sparse": experts}
        layers = [Layer(norm, attention, None, ffn) for ffn in config.of_layers("mlp_layer_types", known)]
        in_memory: dict[str, str | Place] = {"router": "mlp.gate", "router.choice_bias": _M3_CHOICE}
        for at, module, network in (("shared", "mlp.shared_experts", shared), ("ffn", "mlp", dense)):
            wide, half = (2 * network.d_ff, d_model), network.d_ff
            in_memory[f"{at}.gate"] = Place(f"{module}.gate_up_proj", rows(0, half), wide)
            in_memory[f"{at}.up"] = Place(f"{module}.gate_up_proj", rows(half), wide)
            in_memory[f"{at}.down"] = f"{module}.down_proj"
        names = Names(
            _M3_INSIDE, in_memory, EXPERTS_W123, root="language_model.model.", head="language_model.lm_head",
            left_out={
                r"(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\.": IMAGES_LEFT_OUT,
                r"language_model\.model\.layers\.\d+\.self_attn\.index(er\.|_)": INDEXERS_LEFT_OUT,
                r"language_model\.model\.mtp": MORE_PREDICTED,
            },
            outside=LAST_LESS_ONE,
        )  # fmt: skip
        ropes = [config.rope(attention.dim, partial=True)]
        described = decoder(self.model_type, config, tokens, layers, names, ropes)
        kept = config.count("index_topk_blocks") * config.count("index_block_size")
        indexed = config.of_layers("layer_types", {"full_attention": False, "minimax_m3_sparse": True})
        note = f"texts are at most {kept} tokens long: in longer ones an indexer chooses blocks, which a pack can't say"
        return limited(described, kept, note) if any(indexed) else described

    def prepared(self, model: nn.Module) -> nn.Module:
        """Takes the indexers out, so that each token attends to all before it, and puts the factor of the experts'
        output into the routers' weights, as other families have it."""
        parts: Any = model.modules()
        for module in parts:
            if type(module).__name__ == "MiniMaxM3VLAttention":
                module.indexer = None
            elif type(module).__name__ == "MiniMaxM3VLSparseMoeBlock":
                module.gate.register_forward_hook(partial(multiplied, module.routed_scaling_factor))
                module.routed_scaling_factor = 1.0
        return model


def multiplied(factor: float, _module: Any, _given: Any, routed: tuple[Tensor, Tensor, Tensor]) -> Any:
    """Returns a router's results with weights times a factor, as a hook of its module."""
    numbers, weights, chosen = routed
    return numbers, weights * factor, chosen


HUNYUAN_NORMS = {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
_HUNYUAN_INSIDE = {
    **HUNYUAN_NORMS, "router": "mlp.gate.wg",
    **{f"shared.{name}": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
HUNYUAN_IDLE = (
    "attention_head_dim", "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor", "norm_type",
    "org_vocab_size", "add_classification_head", "class_num", "pool_type", "eod_token_id", "cla_share_factor",
    "anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "dense_list", "pad_id", "im_start_id",
    "im_end_id", "im_newline_id", "mask_init_id", "text_start_id", "text_end_id", "skip_cls_token",
)  # fmt: skip


class HunyuanV1Moe(Family):
    """Hunyuan-A13B: heads of queries and keys are normed after they turn; a shared expert; all layers have experts."""

    model_type = "hunyuan_v1_moe"
    model_class = "HunYuanMoEV1ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        layers, width = config.count("num_hidden_layers"), config.count("intermediate_size")
        config.only(
            use_qk_norm=(True,), use_cla=(False,), mlp_bias=(False,), moe_layer_num_skipped=(0,),
            use_mixed_mlp_moe=(True,), num_shared_expert=(1, [1] * layers), position_embedding_xdrope=(False,),
            moe_intermediate_size=(width, [width] * layers), group_limited_greedy=(False,),
            routed_scaling_factor=(1, False), norm_topk_prob=(True,),
        )  # fmt: skip
        config.without_effect(*HUNYUAN_IDLE)
        if config.get("head_dim") is None:
            raise UnsupportedModel("config.json has no head_dim, which transformers wants for this family")
        attention = config.attention(qk_norm="head", norm_turned=True, biases=config.biases("attention_bias", "qkvo"))
        network = config.network("intermediate_size")
        experts = Experts(
            config.count("num_experts", "num_local_experts"), network, Router(_top_k(config), True, None), network
        )  # fmt: skip
        layer = Layer(Norm(config.get("rms_norm_eps")), attention, None, experts)
        ropes = [hunyuan_rope(config, attention.dim)]
        return decoder(self.model_type, config, tokens, [layer] * layers, Names(_HUNYUAN_INSIDE), ropes)


def _top_k(config: Config) -> int:
    found = config.get("moe_topk", "num_experts_per_tok")
    each = set(found) if isinstance(found, list) else {found}
    if len(each) != 1:
        raise UnsupportedModel(f"config.json sets moe_topk {found!r}: a pack has one for all layers")
    return int(each.pop())


def hunyuan_rope(config: Config, dim: int) -> tuple[Rope, F32]:
    """Returns the rope and its frequencies; with `alpha`, a larger base that does not depend on the text stretches
    positions."""
    parameters = config.rope_parameters()
    if parameters.get("rope_type") != "dynamic" or not parameters.get("alpha"):
        return config.rope(dim)
    config.allowed["rope_type"] = (*FIXED_ROPES, "dynamic with alpha")
    if dim <= 2:
        raise UnsupportedModel(f"config.json sets heads of {dim} features: alpha of its rope needs more than 2")
    base = parameters["rope_theta"] * parameters["alpha"] ** (dim / (dim - 2))
    return Rope(dim), turns(base, dim)


_NEVER_REACHED = 1e-6  # by the sum of the chosen experts' weights


class Ernie45Moe(Family):
    """ERNIE 4.5: rotary positions of pairs, softmax routers with a bias for the choice, shared experts, a run of layers
    that have experts."""

    model_type = "ernie4_5_moe"
    model_class = "Ernie4_5_MoeForCausalLM"

    def width(self, config: Config) -> int:
        """Returns the width of an expert. Raises UnsupportedModel."""
        return config.count("moe_intermediate_size")

    def networks(self, config: Config, dense: Ffn, experts: Experts) -> list[Ffn | Experts]:
        """Returns the feed-forward part of each layer. Raises UnsupportedModel."""
        n = config.count("num_hidden_layers")
        first, last = config.count("moe_layer_start_index", least=0), config.count("moe_layer_end_index", least=-1)
        run, step = range(first, (n - 1 if last == -1 else last) + 1), config.count("moe_layer_interval")
        return [experts if at in run and (at + 1) % step == 0 else dense for at in range(n)]

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        """Raises UnsupportedModel."""
        return [config.rope(dim)]

    def names(self, inside: Inside, n: int, d_model: int) -> Names:
        """Returns the names of tensors: `inside` and the routers' own, in a layer of `n` experts."""
        bias = "e_score_correction_bias"
        return Names(
            {**inside, "router.choice_bias": Place(f"mlp.moe_statics.{bias}", None, (1, n))},
            {"router.choice_bias": Place(f"mlp.gate.moe_statics.{bias}", None, (1, n))},
            left_out={r".*mtp": "the layers that predict several tokens are left out"},
        )  # fmt: skip

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(moe_use_aux_free=(True,), moe_gate=("topk",))
        config.without_effect("moe_capacity", "compression_ratio")
        if (least := config.number("moe_norm_min")) > _NEVER_REACHED:
            raise UnsupportedModel(
                f"config.json sets moe_norm_min {least!r}: a pack divides by the sum of weights however small that is"
            )
        bias, norm = bool(config.get("use_bias")), Norm(config.get("rms_norm_eps"))
        attention = config.attention(biases=config.biases("use_bias", "qkvo"))
        router = Router(config.count("moe_k", "num_experts_per_tok"), True, None, choice_bias=True)
        width, act, shared = self.width(config), config.activation("hidden_act"), config.get("moe_num_shared_experts")
        experts = Experts(
            config.count("moe_num_experts", "num_experts"), Ffn(width, act, gated=True), router,
            Ffn(width * shared, act, gated=True, bias=bias) if shared else None,
        )  # fmt: skip
        dense, d_model = config.network("intermediate_size", bias=bias), config.count("hidden_size")
        layers = [Layer(norm, attention, None, ffn) for ffn in self.networks(config, dense, experts)]
        names = self.names(in_pairs(attention, d_model), experts.n, d_model)
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, bias=bias)
        return decoder(
            self.model_type, config, tokens, layers, names, self.ropes(config, attention.dim), head=head
        )  # fmt: skip


class Ernie45VlMoe(Ernie45Moe):
    """ERNIE 4.5 inside a model for text and images, with experts and routers for text and others for images; positions
    of text are those of ERNIE 4.5 without images."""

    model_type = "ernie4_5_vl_moe"
    config_type = "ernie4_5_vl_moe_text"
    model_class = "Ernie4_5_VLMoeForConditionalGeneration"
    loads_by_names = False
    sees: Mapping[str, Any] = {"depth": 1, "hidden_size": 4, "num_heads": 1, "intermediate_size": 4}
    towers: Mapping[StackName, str] = {"decoder": "model.language_model"}
    experts: Mapping[StackName, str] = {"decoder": "model.language_model.layers.{layer}.mlp.text_moe.experts"}
    inside_tied = True
    beside = frozenset({
        "vision_config", "image_start_token_id", "image_end_token_id", "image_token_id", "video_start_token_id",
        "video_end_token_id", "video_token_id",
    })  # fmt: skip

    def width(self, config: Config) -> int:
        return count_of("the first of moe_intermediate_size", config.get("moe_intermediate_size")[0])

    def networks(self, config: Config, dense: Ffn, experts: Experts) -> list[Ffn | Experts]:
        return config.of_layers("mlp_layer_types", {"dense": dense, "sparse": experts})

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        config.without_effect_on_text("mrope_section")  # a word's place has one number, not three
        return [config.rope(dim, kinds=("default",))]

    def names(self, inside: Inside, n: int, d_model: int) -> Names:
        of_text, bias = "mlp.text_moe.gate", "e_score_correction_bias"
        of_images = "|".join(map(str, range(n, 2 * n)))
        return Names(
            {**inside, "router": Place("mlp.gate", transposed, (d_model, n)),
             "router.choice_bias": Place(f"mlp.moe_statics.{bias}", rows(0, 1), (2, n))},
            {"router": of_text, "router.choice_bias": Place(f"{of_text}.moe_statics.{bias}", None, (1, n))},
            left_out={
                r"(model\.)?(vision_model|vision_tower|resampler_model)\.": IMAGES_LEFT_OUT,
                rf"model\.layers\.\d+\.mlp\.(gate\.weight_1|experts\.({of_images})\.)": IMAGES_LEFT_OUT,
            },
            model="model.language_model.",
        )  # fmt: skip

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("use_bias", False, "networks with biases can't be packed for this family")
        return super().describe(config, tokens)


_AFMOE_INSIDE = {
    "mixer_after": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm", "ffn_after": "post_mlp_layernorm",
    "attn.gate": "self_attn.gate_proj", "router": "mlp.router.gate",
    "router.choice_bias": "mlp.expert_bias",
}  # fmt: skip


class Afmoe(Family):
    """AFMoE (Trinity): heads with a gate, normed one by one; layers with windows and rotary positions, and between them
    layers with neither; norms before and behind each half, DeepSeek-V3's routers without groups, shared experts."""

    model_type = "afmoe"
    model_class = "AfmoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("global_attn_every_n_layers")  # layer_types says it
        config.only(score_func=("sigmoid",), route_norm=(True,), n_group=(1,), topk_group=(1,))
        config.without_effect("use_grouped_mm", "load_balance_coeff", "num_expert_groups", "num_limited_groups")
        norm, dense = Norm(config.get("rms_norm_eps")), config.network("intermediate_size")
        router = config.router(True, score="sigmoid", choice_bias=True, factor=config.number("route_scale"))
        shared = config.network("moe_intermediate_size", times=config.count("num_shared_experts"))
        experts = Experts(config.count("num_experts"), config.network("moe_intermediate_size"), router, shared)
        biases, first = config.biases("attention_bias", "qkvo"), config.count("num_dense_layers", least=0)
        layers = [
            Layer(
                norm, config.attention(qk_norm="head", biases=biases, window=window, gate=True, rope=_turns(window)),
                None, dense if at < first else experts, Join(norm), Join(norm),
            )
            for at, window in enumerate(config.windows())
        ]  # fmt: skip
        scale = config.count("hidden_size") ** 0.5 if config.get("mup_enabled") else 1.0
        ropes = [config.rope(config.head_dim())]
        names = Names(_AFMOE_INSIDE)
        return decoder(self.model_type, config, tokens, layers, names, ropes, embed_scale=scale)

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """Keeps the tower from multiplying hidden states as it multiplies embeddings, inside a with block."""
        with changed(tower.config, "mup_enabled", False):
            yield


def _turns(window: int | None) -> int | None:
    return None if window is None else 0
