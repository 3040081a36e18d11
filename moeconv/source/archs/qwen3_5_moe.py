"""Qwen3.5 and 3.6 with experts: as Qwen3-Next, with experts in all layers, and the matrices of its delta rules in an
order of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from moeconv.source.archs.config import Config, text_settings
from moeconv.source.archs.description import Description, Inside, Place, rows
from moeconv.source.archs.qwen3_next import Qwen3Next, experts, taps_of
from moert.pack.model_spec import Tokens
from moert.pack.parts import Experts, Ffn, GatedDelta


class Qwen35MoeText(Qwen3Next):
    """See `Family`."""

    model_type = "qwen3_5_moe_text"
    model_class = "Qwen3_5MoeForCausalLM"
    other_root = "model.language_model."

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
        config.only(attn_output_gate=(True,), output_gate_type=("swish",), norm_topk_prob=(True,))
        config.without_effect_on_text("mrope_section", "mrope_interleaved")  # a word's place has one number, not three
        return super().describe(config, tokens)

    def networks(self, config: Config, layers: int) -> Sequence[Ffn | Experts]:
        return [experts(config, renormalise=True)] * layers

    def of_delta(self, part: GatedDelta, d_model: int) -> Inside:
        ends = accumulate((part.key_features, part.key_features, part.value_features), initial=0)
        wide = (part.channels, d_model)
        return {
            "mixer.conv": taps_of(part),
            **{
                f"mixer.{name}": Place("linear_attn.in_proj_qkv", rows(start, stop), wide)
                for name, (start, stop) in zip("qkv", pairwise(ends), strict=True)
            },
            **{f"mixer.{name}": f"linear_attn.in_proj_{name}" for name in "zba"},
        }


class Qwen35Moe(Qwen35MoeText):
    """Qwen3.5 or 3.6 inside a model for text and images."""

    model_type = "qwen3_5_moe"
    config_type = "qwen3_5_moe_text"
    beside = frozenset(
        {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
    )
    root, other_root = "model.language_model.", ""
    left_out: Mapping[str, str] = {
        **Qwen35MoeText.left_out, r"model\.visual\.": "images are left out: the pack holds the text model alone",
    }  # fmt: skip

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = text_settings(config)
        return {**text, "tie_word_embeddings": config.get("tie_word_embeddings", False)}
