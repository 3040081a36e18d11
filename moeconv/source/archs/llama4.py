"""Llama 4: windows in chunks, layers without positions, experts whose input the router weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel, text_settings
from moeconv.source.archs.description import Description, Inside, Names, Place, decoder, in_pairs, joined
from moeconv.source.archs.family import Family
from moert.pack.model_spec import ExpertKey, Layer, StackName, Tokens
from moert.pack.parts import Attention, Experts, Norm, Router, Stretch

if TYPE_CHECKING:
    from torch import Tensor, nn

_NETWORKS = {
    "router": "feed_forward.router",
    **{f"ffn.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    **{f"shared.{name}": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


class Llama4Text(Family):
    """See `Family`."""

    model_type = "llama4_text"
    model_class = "Llama4ForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.feed_forward.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(
            "interleave_moe_layer_step", "no_rope_layer_interval"
        )  # moe_layers, no_rope_layers say it
        config.without_effect("for_llm_compressor", "cache_implementation")
        top_k, with_experts = config.get("num_experts_per_tok"), config.get("moe_layers")
        norm, dense = Norm(config.get("rms_norm_eps")), config.network("intermediate_size_mlp")
        network = config.network("intermediate_size")
        router = Router(top_k, False, None, score="sigmoid_of_chosen", weigh="input")
        experts = Experts(config.get("num_local_experts"), network, router, network)
        attentions = _attentions(config)
        layers = [
            Layer(norm, attention, None, experts if at in with_experts else dense)
            for at, attention in enumerate(attentions)
        ]
        d_model = config.get("hidden_size")
        of_expert = joined("feed_forward.experts", network.d_ff, d_model, turned=True)
        inside: dict[str, str | Place] = {**_NETWORKS, **in_pairs(attentions[0], d_model)}
        names = self.named(inside, of_expert)
        return decoder(self.model_type, config, tokens, layers, names, [config.rope(attentions[0].dim)])

    def named(self, inside: Inside, of_expert: Any) -> Names:
        return Names(inside, {}, of_expert, ones=("attn.q_norm.weight", "attn.k_norm.weight"))

    def prepared(self, model: nn.Module) -> nn.Module:
        """Makes the model call experts as other families do: transformers gives every expert every token, most of them
        multiplied with 0."""
        for module in model.modules():
            if type(module).__name__ == "Llama4TextMoe":
                module.forward = partial(_mixture, module)
                module.get_submodule("experts").forward = partial(_experts, module.get_submodule("experts"))
        return model

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        experts = self.experts_module(model, key.at)
        if projection == "down":
            return experts.get_parameter("down_proj").detach()[key.expert].T
        gate, up = experts.get_parameter("gate_up_proj").detach()[key.expert].T.chunk(2)
        return gate if projection == "gate" else up


class Llama4(Llama4Text):
    """Llama 4 inside a model for text and images."""

    model_type = "llama4"
    config_type = "llama4_text"
    beside = frozenset(
        {"vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "tie_word_embeddings"}
    )

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        text = text_settings(config)
        return {**text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}

    def named(self, inside: Inside, of_expert: Any) -> Names:
        seen = "images are left out: the pack holds the text model alone"
        return replace(
            super().named(inside, of_expert),
            root="language_model.model.", head="language_model.lm_head",
            left_out={r"vision_model\.": seen, r"multi_modal_projector\.": seen},
        )  # fmt: skip


def _attentions(config: Config) -> list[Attention]:
    """Returns the attention of each layer. Raises UnsupportedModel."""
    turns, kinds = config.get("no_rope_layers"), config.get("layer_types")  # 1: positions are known
    chunk, norm = config.get("attention_chunk_size"), config.get("use_qk_norm")
    stretch = Stretch(config.count("floor_scale"), config.number("attn_scale"))
    tuned = config.get("attn_temperature_tuning")
    biases = config.biases("attention_bias", "qkvo")
    known = {"full_attention": None, "chunked_attention": chunk}
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise UnsupportedModel(f"config.json sets layer_types with {unknown!r}: only {', '.join(known)} can be packed")
    return [
        config.attention(biases=biases, qk_norm="head" if norm else None, norm_turned=True, chunk=known[kind])
        if turned
        else config.attention(biases=biases, rope=None, chunk=known[kind], stretch=stretch if tuned else None)
        for turned, kind in zip(turns, kinds, strict=True)
    ]  # fmt: skip


def _mixture(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the layer's output [tokens, d_model] for hidden [..., d_model], and the router's logits [tokens,
    experts], as Llama4TextMoe.forward does."""
    flat = hidden.reshape(-1, module.hidden_dim)
    logits = module.router(flat)[1]
    best, chosen = logits.topk(module.top_k, dim=1)
    return module.shared_expert(flat) + module.experts(flat, chosen, best.float().sigmoid()), logits


def _experts(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Returns the experts' output for x [tokens, d_model], token by token: an expert gets the token times its
    weight."""
    out = x.new_zeros(x.shape)
    for token, slot in enumerate(chosen[:, 0].tolist()):
        gate, up = (weights[token] * x[token] @ module.gate_up_proj[slot]).chunk(2)
        out[token] = (up * module.act_fn(gate)) @ module.down_proj[slot]
    return out
