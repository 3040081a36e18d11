"""Switch Transformers (`SwitchTransformersForConditionalGeneration`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description
from moeconv.source.archs.errors import UnsupportedModel
from moeconv.source.archs.family import Family
from moeconv.source.archs.source import Source
from moert.pack.model_spec import STACKS, ExpertKey, Head, ModelSpec, StackName, Tokens
from moert.pack.parts import Act, Attention, Buckets, Experts, Ffn, Layer, Norm, Router, Stack, stack_of

_PROJECTIONS = {"up": "wi", "down": "wo"}
_FFN_PLACE: Mapping[StackName, int] = {"encoder": 1, "decoder": 2}
_SAID_ELSEWHERE = (
    "feed_forward_proj", "is_gated_act", "num_sparse_encoder_layers", "num_sparse_decoder_layers", "add_router_probs",
    "router_ignore_padding_tokens", "is_decoder", "add_cross_attention",
)  # fmt: skip
_ATTENTION = {"attn": ("0", "SelfAttention"), "cross": ("1", "EncDecAttention")}


class SwitchTransformers(Family):
    """Layers are blocks of attention, in the decoder attention to the input, and feed-forward, each with its norm."""

    model_type = "switch_transformers"
    model_class = "SwitchTransformersForConditionalGeneration"
    towers: Mapping[StackName, str] = {"encoder": "encoder", "decoder": "decoder"}
    layer_list = "block"
    experts: Mapping[StackName, str] = {
        stack: f"{stack}.block.{{layer}}.layer.{place}.mlp.experts" for stack, place in _FFN_PLACE.items()
    }

    def describe(self, config: Config, tokens: Tokens) -> Description:
        _refuse(config, tokens)
        norm, tied = Norm(config.get("layer_norm_epsilon")), config.get("tie_word_embeddings")
        heads = config.count("num_heads")
        cross = Attention(
            heads, heads, config.count("d_kv"), scale=1.0, qk_norm=None, clip=None, rope=None, buckets=None
        )
        buckets = Buckets(config.get("relative_attention_num_buckets"), config.get("relative_attention_max_distance"))
        act: Any = config.one_of("dense_act_fn", ("relu", "silu", "gelu", "gelu_new"))
        attention, ffn = replace(cross, buckets=buckets), Ffn(config.count("d_ff"), Act(act), gated=False)
        router = Router(1, renormalise=False, capacity=config.get("expert_capacity"))
        experts = Experts(config.count("num_experts"), ffn, router)
        encoder, decoder = (
            [Layer(norm, attention, crossing, part) for part in (ffn, experts)] for crossing in (None, cross)
        )
        spec = ModelSpec(
            family=self.model_type,
            vocab_size=config.get("vocab_size"),
            d_model=config.count("d_model"),
            encoder=_stack(encoder, config.count("num_layers"), config.count("encoder_sparse_step", least=0), norm),
            decoder=_stack(
                decoder, config.count("num_decoder_layers"), config.count("decoder_sparse_step", least=0), norm
            ),
            ropes=(),
            head=Head(tied, config.count("d_model") ** -0.5 if tied else 1.0),
            tokens=tokens,
            max_positions=None,
        )
        names, others = _names(spec), ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        copies = tuple(("shared.weight", other) for other in (*others, *(["lm_head.weight"] if tied else [])))
        backbone = {canonical: Source(name) for canonical, name in names.items()}
        return Description(spec, backbone, self._expert, backbone, copies=copies, repeated=copies)

    def _expert(self, key: ExpertKey, projection: str) -> Source:
        experts = self.experts[key.stack].format(layer=key.layer)
        return Source(f"{experts}.expert_{key.expert}.{_PROJECTIONS[projection]}.weight")

    def prepared(self, model: nn.Module) -> nn.Module:
        """Only a tower's first layer makes the position bias that all its layers use. Here every layer can, so that a
        tower cut short to its last layers computes what it would have computed whole."""
        for stack in STACKS:
            blocks = model.get_submodule(f"{stack}.block")
            attentions = [block.get_submodule("layer.0.SelfAttention") for block in blocks.children()]
            bias = attentions[0].get_submodule("relative_attention_bias")
            for attention in attentions[1:]:
                # not registered as a part of the module, or the weights would be listed twice
                attention.__dict__ |= {"has_relative_attention_bias": True, "relative_attention_bias": bias}
        return model

    def resumed(self, layers: Sequence[nn.Module], start: int) -> list[nn.Module]:
        return list(layers[start:])

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        dispatch = selected[:, 0]  # [tokens, num_experts], one-hot, all zero where the expert was full
        chosen: Tensor = dispatch.argmax(-1).masked_fill(dispatch.sum(-1) == 0, -1)
        return chosen[:, None], weights

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return model.get_parameter(self._expert(key, projection).name).detach()


def _names(spec: ModelSpec) -> dict[str, str]:
    """Canonical names of the backbone → the family's own."""
    names = {"embed.weight": "shared.weight"}
    if not spec.head.tied:
        names["head.weight"] = "lm_head.weight"
    for name, stack in spec.stacks.items():
        names[f"{name}.norm.weight"] = f"{name}.final_layer_norm.weight"
        first = f"{name}.block.0.layer.0.SelfAttention"
        names[f"{name}.relative_bias.weight"] = f"{first}.relative_attention_bias.weight"
        for layer in range(len(stack)):
            names |= _layer_names(name, layer, isinstance(stack[layer].ffn, Experts))
    return names


def _refuse(config: Config, tokens: Tokens) -> None:
    """`is_gated_act` and `feed_forward_proj` repeat what dense_act_fn says; `num_sparse_…` the steps. What a stack is,
    `is_decoder` and `add_cross_attention`, the model says to each itself."""
    config.must_be("router_bias", False, "routers with a bias can't be packed")
    config.must_be("router_dtype", "float32", "only float32 routers can be packed")
    if (capacity := config.get("expert_capacity")) < 1:
        raise UnsupportedModel(f"config.json sets expert_capacity {capacity}: it should be at least 1")
    if tokens.start is None:
        raise UnsupportedModel("config.json has no decoder_start_token_id: an encoder–decoder model needs one")
    config.without_effect(*_SAID_ELSEWHERE)


def _stack(kinds: Sequence[Layer], n_layers: int, sparse_step: int, norm: Norm) -> Stack:
    """`kinds`: without experts and with. Every `sparse_step`-th layer has some, beginning with the second of each run;
    0 means none."""
    layers = [int(sparse_step > 0 and (sparse_step == 1 or i % sparse_step == 1)) for i in range(n_layers)]
    return stack_of([kinds[kind] for kind in layers], norm)


def _layer_names(stack: StackName, layer: int, has_experts: bool) -> dict[str, str]:
    at, block = f"{stack}.{layer}", f"{stack}.block.{layer}.layer"
    names: dict[str, str] = {}
    for part in ("attn", "cross") if stack == "decoder" else ("attn",):
        place, module = _ATTENTION[part]
        names[f"{at}.{'mixer' if part == 'attn' else part}_norm.weight"] = f"{block}.{place}.layer_norm.weight"
        for matrix in "qkvo":
            names[f"{at}.{part}.{matrix}.weight"] = f"{block}.{place}.{module}.{matrix}.weight"
    ffn = f"{block}.{_FFN_PLACE[stack]}"
    names[f"{at}.ffn_norm.weight"] = f"{ffn}.layer_norm.weight"
    if has_experts:
        names[f"{at}.router.weight"] = f"{ffn}.mlp.router.classifier.weight"
    else:
        for projection, module in _PROJECTIONS.items():
            names[f"{at}.ffn.{projection}.weight"] = f"{ffn}.mlp.{module}.weight"
    return names
