"""What a family says of one checkpoint: the model as a tree of parts, and where each of its tensors comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from moeconv.source.archs.config import Config
from moeconv.source.archs.source import Source
from moert.pack.model_spec import ExpertKey, Head, ModelSpec, Tokens
from moert.pack.parts import Layer, stack_of

_LAYER = re.compile(r"decoder\.(\d+)\.(.+)")
_OUTSIDE = {"embed": "model.embed_tokens", "head": "lm_head", "decoder.norm": "model.norm"}
_INSIDE = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "router": "mlp.gate",
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Description:
    """`backbone`: canonical names (ModelSpec.tensors) → sources; `experts`: those of one expert's matrices.

    `computed`: canonical name → tensors that no checkpoint has. `parameters`: canonical name → parameter of
    transformers' model. `copies`: tensors of the checkpoint that repeat one that is packed, which they must equal.
    """

    spec: ModelSpec
    backbone: Mapping[str, Source]
    experts: Callable[[ExpertKey, str], Source]
    parameters: Mapping[str, str]
    computed: Mapping[str, Tensor] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()


class Names(NamedTuple):
    """What a family calls otherwise in its checkpoints: `expert`, the place of an expert's matrices, with {layer},
    {expert} and {projection}; `projections`, these; `inside`, canonical names within a layer that stand elsewhere than
    in the model."""

    expert: str = "mlp.experts.{expert}.{projection}_proj"
    projections: Mapping[str, str] = {}
    inside: Mapping[str, str] = {}


USUAL = Names()


def decoder(family: str, config: Config, tokens: Tokens, layers: Sequence[Layer], names: Names = USUAL) -> Description:
    """The decoder that most families share, of these layers, with rotary positions. Raises UnsupportedModel."""
    norm, (rope, frequencies) = layers[0].norm, config.rope(layers[0].attention.dim)
    spec = ModelSpec(
        family=family,
        vocab_size=config.get("vocab_size"),
        d_model=config.get("hidden_size"),
        encoder=None,
        decoder=stack_of(layers, norm),
        ropes=(rope,),
        head=Head(config.get("tie_word_embeddings"), 1.0),
        tokens=tokens,
        max_positions=config.get("max_position_embeddings"),
    )
    computed = {"rope.0.frequencies": frequencies}
    parameters = {name: _usual(name, _INSIDE) for name in spec.tensors if name not in computed}
    backbone = {name: Source(_usual(name, {**_INSIDE, **names.inside})) for name in parameters}

    def of_expert(key: ExpertKey, projection: str) -> Source:
        called = names.projections.get(projection, projection)
        place = names.expert.format(expert=key.expert, projection=called)
        return Source(f"model.layers.{key.layer}.{place}.weight")

    copies = (("model.embed_tokens.weight", "lm_head.weight"),) if spec.head.tied else ()
    return Description(spec, backbone, of_expert, parameters, computed, copies)


def _usual(canonical: str, inside: Mapping[str, str]) -> str:
    part = canonical.removesuffix(".weight")
    if (found := _LAYER.fullmatch(part)) is None:
        return f"{_OUTSIDE[part]}.weight"
    return f"model.layers.{found[1]}.{inside[found[2]]}.weight"
