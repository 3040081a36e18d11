"""Switch Transformers (`SwitchTransformersForConditionalGeneration`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeconv.archs.errors import UnsupportedModel, refuse_limit
from moeconv.archs.tokens import token_id, token_ids
from moert.pack.model_spec import STACKS, ExpertKey, ModelSpec, MoeSpec, Stack, StackSpec

_PROJECTIONS = {"up": "wi", "down": "wo"}
_ATTENTION = {"attn": ("0", "SelfAttention"), "cross": ("1", "EncDecAttention")}


class SwitchTransformers:
    """Layers are blocks of attention, in the decoder attention to the input, and feed-forward, each with its norm."""

    model_type = "switch_transformers"
    layer_list = "block"

    def spec(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelSpec:
        from transformers import SwitchTransformersConfig

        c: Any = SwitchTransformersConfig.from_dict(dict(config))
        _refuse(c)
        refuse_limit(config)
        start = token_id("decoder_start_token_id", config, generation_config)
        if start is None:
            raise UnsupportedModel("config.json has no decoder_start_token_id: an encoder–decoder model needs one")
        return ModelSpec(
            family=self.model_type,
            vocab_size=c.vocab_size,
            d_model=c.d_model,
            n_heads=c.num_heads,
            n_kv_heads=c.num_heads,
            head_dim=c.d_kv,
            encoder=_stack(c.num_layers, c.encoder_sparse_step),
            decoder=_stack(c.num_decoder_layers, c.decoder_sparse_step),
            moe=MoeSpec(
                num_experts=c.num_experts,
                top_k=1,
                d_ff=c.d_ff,
                activation=c.dense_act_fn,
                gated=False,
                norm_topk=False,
                capacity=c.expert_capacity,
            ),
            d_ff_dense=c.d_ff,
            norm_eps=c.layer_norm_epsilon,
            positions="relative",
            rope_theta=0.0,
            relative_buckets=c.relative_attention_num_buckets,
            relative_max_distance=c.relative_attention_max_distance,
            attention_scale=1.0,
            qk_norm=False,
            clip_qkv=None,
            tied_head=c.tie_word_embeddings,
            logit_scale=c.d_model**-0.5 if c.tie_word_embeddings else 1.0,
            max_positions=None,
            bos_token_id=token_id("bos_token_id", config, generation_config),
            eos_token_ids=token_ids("eos_token_id", config, generation_config),
            pad_token_id=token_id("pad_token_id", config, generation_config),
            decoder_start_token_id=start,
        )

    def backbone_names(self, spec: ModelSpec) -> dict[str, str]:
        names = {"embed.weight": "shared.weight"}
        if not spec.tied_head:
            names["head.weight"] = "lm_head.weight"
        for name in STACKS:
            stack = spec.stack(name)
            assert stack is not None
            names[f"{name}.norm.weight"] = f"{name}.final_layer_norm.weight"
            first = f"{name}.block.0.layer.0.SelfAttention"
            names[f"{name}.relative_bias.weight"] = f"{first}.relative_attention_bias.weight"
            for layer in range(stack.n_layers):
                names |= _layer_names(name, layer, layer in stack.moe_layers)
        return names

    def equal_tensors(self, spec: ModelSpec) -> list[tuple[str, str]]:
        others = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        return [("shared.weight", other) for other in (*others, *(["lm_head.weight"] if spec.tied_head else []))]

    def expert_name(self, key: ExpertKey, projection: str) -> str:
        ffn = f"{key.stack}.block.{key.layer}.layer.{_ffn_place(key.stack)}.mlp"
        return f"{ffn}.experts.expert_{key.expert}.{_PROJECTIONS[projection]}.weight"

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        from transformers import SwitchTransformersForConditionalGeneration

        model: nn.Module = SwitchTransformersForConditionalGeneration.from_pretrained(
            path, dtype=dtype, experts_implementation="eager", local_files_only=True
        )
        return _resumable(model.eval())

    def empty(self, config_dir: Path) -> nn.Module:
        from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

        config = SwitchTransformersConfig.from_pretrained(config_dir, local_files_only=True)
        make: Any = SwitchTransformersForConditionalGeneration._from_config
        model: nn.Module = make(config, dtype=torch.float32, experts_implementation="eager")
        return _resumable(model.requires_grad_(False).eval())

    def stack_module(self, model: nn.Module, stack: Stack) -> nn.Module:
        return model.get_submodule(stack)

    def experts_module(self, model: nn.Module, stack: Stack, layer: int) -> nn.Module:
        return model.get_submodule(f"{stack}.block.{layer}.layer.{_ffn_place(stack)}.mlp.experts")

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        dispatch = selected[:, 0]  # [tokens, num_experts], one-hot, all zero where the expert was full
        chosen: Tensor = dispatch.argmax(-1).masked_fill(dispatch.sum(-1) == 0, -1)
        return chosen[:, None], weights

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return model.get_parameter(self.expert_name(key, projection)).detach()


def _resumable(model: nn.Module) -> nn.Module:
    """Only a tower's first layer makes the position bias that all its layers use. Here every layer can, so that a tower
    cut short to its last layers computes what it would have computed whole."""
    for stack in STACKS:
        blocks = model.get_submodule(f"{stack}.block")
        attentions = [block.get_submodule("layer.0.SelfAttention") for block in blocks.children()]
        bias = attentions[0].get_submodule("relative_attention_bias")
        for attention in attentions[1:]:
            # not registered as a part of the module, or the weights would be listed twice
            attention.__dict__ |= {"has_relative_attention_bias": True, "relative_attention_bias": bias}
    return model


def _refuse(c: Any) -> None:
    if c.router_bias:
        raise UnsupportedModel("config.json sets router_bias: routers with a bias can't be packed")
    if c.router_dtype != "float32":
        raise UnsupportedModel(f"config.json sets router_dtype {c.router_dtype!r}: only float32 routers can be packed")
    if c.dense_act_fn not in ("relu", "silu", "gelu", "gelu_new"):
        raise UnsupportedModel(
            f"config.json sets dense_act_fn {c.dense_act_fn!r}: only relu, silu, gelu and gelu_new can be packed"
        )
    if c.expert_capacity < 1:
        raise UnsupportedModel(f"config.json sets expert_capacity {c.expert_capacity}: it should be at least 1")


def _stack(n_layers: int, sparse_step: int) -> StackSpec:
    """Every `sparse_step`-th layer has experts, beginning with the second of each run; 0 means none."""
    moe = tuple(i for i in range(n_layers) if sparse_step > 0 and (sparse_step == 1 or i % sparse_step == 1))
    return StackSpec(n_layers, moe)


def _ffn_place(stack: Stack) -> int:
    return 2 if stack == "decoder" else 1


def _layer_names(stack: Stack, layer: int, has_experts: bool) -> dict[str, str]:
    at, block = f"{stack}.{layer}", f"{stack}.block.{layer}.layer"
    names: dict[str, str] = {}
    for part in ("attn", "cross") if stack == "decoder" else ("attn",):
        place, module = _ATTENTION[part]
        names[f"{at}.{part}_norm.weight"] = f"{block}.{place}.layer_norm.weight"
        for matrix in "qkvo":
            names[f"{at}.{part}.{matrix}.weight"] = f"{block}.{place}.{module}.{matrix}.weight"
    ffn = f"{block}.{_ffn_place(stack)}"
    names[f"{at}.ffn_norm.weight"] = f"{ffn}.layer_norm.weight"
    if has_experts:
        names[f"{at}.router.weight"] = f"{ffn}.mlp.router.classifier.weight"
    else:
        for projection, module in _PROJECTIONS.items():
            names[f"{at}.ffn.{projection}.weight"] = f"{ffn}.mlp.{module}.weight"
    return names
