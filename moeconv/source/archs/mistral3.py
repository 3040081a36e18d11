"""Mistral 3: text models of Mistral's, with experts and without, inside models for text and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeconv.source.archs.config import Config, UnsupportedModel, text_settings
from moeconv.source.archs.deepseek import IMAGES_LEFT_OUT, Mistral4
from moeconv.source.archs.dense import Ministral3, Mistral
from moeconv.source.archs.description import Names
from moeconv.source.archs.family import Family
from moert.pack.parts import Attention, Ffn


class _Seeing(Family):
    """A text model of Mistral's inside a model for text and images."""

    model_type = "mistral3"
    loads_by_names = False
    beside = frozenset({
        "vision_config", "image_token_index", "image_token_id", "projector_hidden_act", "vision_feature_layer",
        "multimodal_projector_bias", "spatial_merge_size",
    })  # fmt: skip
    root, head = "language_model.model.", "language_model.lm_head"
    left_out: Mapping[str, str] = {r"(model\.)?(vision_tower|multi_modal_projector)\.": IMAGES_LEFT_OUT}

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = text_settings(config)
        tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
        return {**text, "tie_word_embeddings": tied}

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        """Returns the names of the tensors of a model without experts."""
        found: Names = super().names(config, attention, network)  # type: ignore[misc]
        return replace(found, root=self.root, head=self.head, left_out=self.left_out)


class _MistralSeeing(_Seeing, Mistral):
    config_type = "mistral"


class _Ministral3Seeing(_Seeing, Ministral3):
    config_type = "ministral3"


class Mistral3(_Seeing, Mistral4):
    """Mistral Small 3.1 and after, and Ministral 3: the text model inside is one of Mistral's without experts or, as
    here, Mistral Small 4's."""

    config_type = "mistral4"

    def of(self, config: Mapping[str, Any]) -> Family:
        kind = text_settings(config).get("model_type", "mistral")
        found = next((family for family in (_MistralSeeing, _Ministral3Seeing) if family.config_type == kind), None)
        if found is None and kind != self.config_type:
            raise UnsupportedModel(
                f"config.json sets model_type {kind!r} in text_config: only mistral, ministral3 and mistral4 can be "
                "packed"
            )
        return self if found is None else found()
