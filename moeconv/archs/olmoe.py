"""OLMoE (`OlmoeForCausalLM`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeconv.archs.errors import UnsupportedModel, refuse_limit
from moeconv.archs.tokens import token_id, token_ids
from moert.pack.model_spec import ExpertKey, ModelSpec, MoeSpec, Stack, StackSpec

_ACTIVATIONS = {"relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new"}


class Olmoe:
    """A decoder whose layers all have experts; keys and queries are normed before they are split into heads."""

    model_type = "olmoe"
    layer_list = "layers"

    def spec(self, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> ModelSpec:
        from transformers import OlmoeConfig

        c: Any = OlmoeConfig.from_dict(dict(config))
        _refuse(c)
        refuse_limit(config)
        head_dim = c.hidden_size // c.num_attention_heads
        return ModelSpec(
            family=self.model_type,
            vocab_size=c.vocab_size,
            d_model=c.hidden_size,
            n_heads=c.num_attention_heads,
            n_kv_heads=c.num_key_value_heads,
            head_dim=head_dim,
            encoder=None,
            decoder=StackSpec(c.num_hidden_layers, tuple(range(c.num_hidden_layers))),
            moe=MoeSpec(
                num_experts=c.num_experts,
                top_k=c.num_experts_per_tok,
                d_ff=c.intermediate_size,
                activation=_ACTIVATIONS[c.hidden_act],  # type: ignore[arg-type]
                gated=True,
                norm_topk=c.norm_topk_prob,
                capacity=None,
            ),
            d_ff_dense=0,
            norm_eps=c.rms_norm_eps,
            positions="rope",
            rope_theta=float(c.rope_parameters["rope_theta"]),
            relative_buckets=0,
            relative_max_distance=0,
            attention_scale=head_dim**-0.5,
            qk_norm=True,
            clip_qkv=c.clip_qkv,
            tied_head=c.tie_word_embeddings,
            logit_scale=1.0,
            max_positions=c.max_position_embeddings,
            bos_token_id=token_id("bos_token_id", config, generation_config),
            eos_token_ids=token_ids("eos_token_id", config, generation_config),
            pad_token_id=token_id("pad_token_id", config, generation_config),
            decoder_start_token_id=None,
        )

    def backbone_names(self, spec: ModelSpec) -> dict[str, str]:
        names = {"embed.weight": "model.embed_tokens.weight", "decoder.norm.weight": "model.norm.weight"}
        if not spec.tied_head:
            names["head.weight"] = "lm_head.weight"
        for layer in range(spec.decoder.n_layers):
            at, block = f"decoder.{layer}", f"model.layers.{layer}"
            names[f"{at}.attn_norm.weight"] = f"{block}.input_layernorm.weight"
            names[f"{at}.ffn_norm.weight"] = f"{block}.post_attention_layernorm.weight"
            names[f"{at}.router.weight"] = f"{block}.mlp.gate.weight"
            for matrix in "qkvo":
                names[f"{at}.attn.{matrix}.weight"] = f"{block}.self_attn.{matrix}_proj.weight"
            for norm in ("q_norm", "k_norm"):
                names[f"{at}.attn.{norm}.weight"] = f"{block}.self_attn.{norm}.weight"
        return names

    def equal_tensors(self, spec: ModelSpec) -> list[tuple[str, str]]:
        return [("model.embed_tokens.weight", "lm_head.weight")] if spec.tied_head else []

    def expert_name(self, key: ExpertKey, projection: str) -> str:
        return f"model.layers.{key.layer}.mlp.experts.{key.expert}.{projection}_proj.weight"

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        from transformers import OlmoeForCausalLM

        model: nn.Module = OlmoeForCausalLM.from_pretrained(
            path, dtype=dtype, experts_implementation="eager", local_files_only=True
        )
        return model.eval()

    def empty(self, config_dir: Path) -> nn.Module:
        from transformers import OlmoeConfig, OlmoeForCausalLM

        config = OlmoeConfig.from_pretrained(config_dir, local_files_only=True)
        make: Any = OlmoeForCausalLM._from_config
        model: nn.Module = make(config, dtype=torch.float32, experts_implementation="eager")
        return model.requires_grad_(False).eval()

    def stack_module(self, model: nn.Module, stack: Stack) -> nn.Module:
        return model.get_submodule("model")

    def experts_module(self, model: nn.Module, stack: Stack, layer: int) -> nn.Module:
        return model.get_submodule(f"model.layers.{layer}.mlp.experts")

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return selected, weights

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        experts = f"model.layers.{key.layer}.mlp.experts"
        if projection == "down":
            return model.get_parameter(f"{experts}.down_proj").detach()[key.expert]
        gate, up = model.get_parameter(f"{experts}.gate_up_proj").detach()[key.expert].chunk(2)
        return gate if projection == "gate" else up


def _refuse(c: Any) -> None:
    if c.attention_bias:
        raise UnsupportedModel("config.json sets attention_bias: attention with biases can't be packed")
    if c.hidden_act not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json sets hidden_act {c.hidden_act!r}: only {', '.join(_ACTIVATIONS)} can be packed"
        )
    rope_type = c.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise UnsupportedModel(
            f"config.json sets the rope type {rope_type!r}: only plain rotary positions can be packed"
        )
    head_dim = getattr(c, "head_dim", None)
    if c.hidden_size % c.num_attention_heads or head_dim not in (None, c.hidden_size // c.num_attention_heads):
        raise UnsupportedModel(
            f"config.json sets {c.num_attention_heads} heads (head_dim {head_dim}) for hidden_size {c.hidden_size}: "
            "heads must fill the hidden size exactly"
        )
    if c.hidden_size // c.num_attention_heads % 2:
        raise UnsupportedModel(
            f"config.json sets num_attention_heads {c.num_attention_heads} for hidden_size {c.hidden_size}, so that a "
            f"head has {c.hidden_size // c.num_attention_heads} features: rotary positions turn pairs of them, the "
            "number should be even"
        )
    if getattr(c, "sliding_window", None):
        raise UnsupportedModel("config.json sets sliding_window: windowed attention can't be packed")
