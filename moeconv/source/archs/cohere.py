"""Cohere's decoders: attention and feed-forward side by side, both of the same norm of the layer's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from moeconv.source.archs.config import Config, UnsupportedModel, text_settings
from moeconv.source.archs.deepseek import IMAGES_LEFT_OUT
from moeconv.source.archs.dense import NO_ROUTERS, Dense, alone
from moeconv.source.archs.description import Description, Names, Place, decoder, in_pairs, named
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Head, Join, Layer, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm

_NO_BIASES = ("norm.bias",)
"""The ends of the names of LayerNorms' biases, which these models lack."""


def _check_hard_wired(config: Config) -> None:
    """Raises UnsupportedModel for a setting of Cohere's own that transformers would compute otherwise."""
    config.only(
        use_parallel_block=(True,), use_qk_norm=(False,), use_gated_activation=(True,), rotary_pct=(1,),
        position_embedding_type=("rope_gptj",), order_of_interleaved_layers=("local_attn_first",),
        use_embedding_sharing=(bool(config.get("tie_word_embeddings")),),
    )  # fmt: skip


def _attention(config: Config, window: int | None, turned: bool) -> Attention:
    biases = config.biases("attention_bias", "qkvo")
    return config.attention(biases=biases, window=window, rope=0 if turned else None)


def _head(config: Config) -> Head:
    return Head(bool(config.get("tie_word_embeddings")), config.number("logit_scale"))


def _inside(config: Config, attention: Attention) -> dict[str, str | Place]:
    """Returns the names of tensors in a layer, whose norm stands before both halves."""
    return {**in_pairs(attention, config.count("hidden_size")), "ffn_norm": "input_layernorm"}


class Cohere2Moe(Family):
    """North Mini Code: as Cohere2, with experts in all but the first layers, and maybe shared ones beside them."""

    model_type = "cohere2_moe"
    model_class = "Cohere2MoeForCausalLM"
    root = "model."
    left_out: Mapping[str, str] = {}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        _check_hard_wired(config)
        config.without_effect("sliding_window_pattern", "first_k_dense_replace")  # the lists of layers say it
        config.must_be("rope_scaling", None, "transformers turns this family's heads by rope_parameters alone")
        rms, layer = config.get("rms_norm_eps"), config.get("layer_norm_eps")
        norm = Norm(layer, "layer") if rms is None else Norm(rms)
        shared = config.count("num_shared_experts", least=0)
        of_shared = config.one_of("shared_expert_combination_strategy", ("average", "sum"))
        softmax = config.one_of("expert_selection_fn", ("softmax", "sigmoid")) == "softmax"
        normed = bool(config.get("norm_topk_prob")) or softmax
        score: Literal["softmax", "sigmoid_of_chosen"] = "softmax" if softmax else "sigmoid_of_chosen"
        router = config.router(normed, score)
        experts = Experts(
            config.count("num_experts"), config.network("intermediate_size"), router,
            config.network("intermediate_size", times=shared) if shared else None,
        )  # fmt: skip
        own = config.get("prefix_dense_intermediate_size") is not None
        dense = config.network("prefix_dense_intermediate_size" if own else "intermediate_size")
        known: Mapping[str, Ffn | Experts] = {"dense": dense, "sparse": experts}
        all_turn = config.get("prefix_dense_sliding_window_pattern") == 1
        average = Join(add=0.5) if shared and of_shared == "average" else Join()
        layers = [
            Layer(
                norm, _attention(config, window, window is not None or (ffn is dense and all_turn)), None, ffn,
                ffn_join=average if ffn is experts else Join(), parallel=True,
            )
            for window, ffn in zip(config.windows(), config.of_layers("mlp_layer_types", known), strict=True)
        ]  # fmt: skip
        inside = _inside(config, _attention(config, None, False))
        names = Names(inside, zeros=_NO_BIASES, root=self.root, left_out=self.left_out)
        return decoder(
            self.model_type, config, tokens, layers, names, [config.rope(config.head_dim())], head=_head(config)
        )


class Cohere(Dense):
    """Command R and Aya: rotary positions in all layers."""

    model_type = "cohere"
    model_class = "CohereForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("use_qk_norm", False, "LayerNorms with weights for each head (Command R+) can't be packed")
        config.without_effect("model_max_length")
        norm, network = Norm(config.get("layer_norm_eps"), "layer"), config.network("intermediate_size")
        attention = _attention(config, None, True)
        layer = Layer(norm, attention, None, alone(network), parallel=True)
        names = Names(
            _inside(config, attention), expert=named("mlp.{projection}", self.projections),
            zeros=(*NO_ROUTERS, *_NO_BIASES),
        )  # fmt: skip
        return decoder(
            self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), names,
            [config.rope(attention.dim)], head=_head(config),
        )  # fmt: skip


class Cohere2(Dense):
    """Command R7B and Command A: layers with windows and rotary positions, and between them layers with neither."""

    model_type = "cohere2"
    model_class = "Cohere2ForCausalLM"
    root = "model."
    left_out: Mapping[str, str] = {}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        _check_hard_wired(config)
        config.without_effect("sliding_window_pattern", "_sliding_window_pattern", "layer_switch")  # see layer_types
        config.without_effect("cache_implementation")
        norm, network = Norm(config.get("layer_norm_eps"), "layer"), config.network("intermediate_size")
        attentions = [_attention(config, window, window is not None) for window in config.windows()]
        layers = [Layer(norm, attention, None, alone(network), parallel=True) for attention in attentions]
        names = Names(
            _inside(config, attentions[0]), expert=named("mlp.{projection}", self.projections),
            zeros=(*NO_ROUTERS, *_NO_BIASES), root=self.root, left_out=self.left_out,
        )  # fmt: skip
        return decoder(
            self.model_type, config, tokens, layers, names, [config.rope(config.head_dim())], head=_head(config)
        )


class _Seeing(Family):
    """A text model of Cohere's inside a model for text and images."""

    model_type = "cohere2_vision"
    loads_by_names = False
    beside = frozenset({"vision_config", "downsample_factor", "image_token_id", "alignment_intermediate_size"})
    root = "model.language_model."
    left_out: Mapping[str, str] = {r"model\.(vision_tower|multi_modal_projector)\.": IMAGES_LEFT_OUT}

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**text_settings(config, tied=True), "logit_scale": 1.0}

    def description(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Description:
        found = super().description(config, generation_config)
        if (scale := text_settings(config).get("logit_scale")) in (None, 1):
            return found
        note = f"logits are not multiplied by logit_scale {scale!r}: transformers ignores it in this family"
        return replace(found, limits=(*found.limits, note))


class _Cohere2Seeing(_Seeing, Cohere2):
    config_type = "cohere2"


class Cohere2Vision(_Seeing, Cohere2Moe):
    """Command A Vision: Cohere2 or, as here, Cohere2-MoE inside a model for text and images."""

    config_type = "cohere2_moe"

    def of(self, config: Mapping[str, Any]) -> Family:
        kind = text_settings(config).get("model_type", "cohere2")
        if kind not in ("cohere2", self.config_type):
            raise UnsupportedModel(
                f"config.json sets model_type {kind!r} in text_config: only cohere2 and cohere2_moe can be packed"
            )
        return self if kind == self.config_type else _Cohere2Seeing()
