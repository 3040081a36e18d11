"""MiMo-V2-Flash: layers with windows and sinks between layers without, each kind with a rope and heads of keys of its
own; values have fewer features than keys, which a pack fills up with zeros."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import MORE_PREDICTED, sigmoid_router
from moeconv.source.archs.description import Description, Names, Source, decoder, of_columns, of_heads
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm

_SLIDING = "sliding_attention"
_THETA = {"full_attention": "rope_theta", _SLIDING: "swa_rope_theta"}
_VALUES = re.compile(r"decoder\.(\d+)\.attn\.([vo])\.(weight|bias)")


class MiMoV2Flash(Family):
    """See `Family`. Transformers takes window, ropes and heads from settings of its own names alone; those of the
    published ones must say the same."""

    model_type = "mimo_v2_flash"
    model_class = "MiMoV2FlashForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        kinds, networks = config.get("layer_types"), config.get("mlp_layer_types")
        heads, kv = config.count("num_attention_heads"), config.count("num_key_value_heads")
        dim, v = config.head_dim(), config.count("v_head_dim")
        if v > dim:
            raise UnsupportedModel(f"config.json sets v_head_dim {v}, above head_dim {dim}: values can't be packed")
        config.only(
            hybrid_layer_pattern=([int(kind == _SLIDING) for kind in kinds],), swa_num_attention_heads=(heads,),
            swa_num_key_value_heads=(2 * kv,), swa_head_dim=(dim,), swa_v_head_dim=(v,), n_shared_experts=(0,),
            layernorm_epsilon=(config.get("rms_norm_eps"),), add_swa_attention_sink_bias=(True,),
            add_full_attention_sink_bias=(False,),
        )  # fmt: skip
        config.without_effect("attention_chunk_size", "sliding_window_size")  # the second is in sliding_window
        router = sigmoid_router(config, every=([int(kind == "sparse") for kind in networks], 1))
        experts = Experts(
            config.count("n_routed_experts", "num_local_experts"), config.network("moe_intermediate_size"), router
        )
        known: Mapping[str, Ffn | Experts] = {"dense": config.network("intermediate_size"), "sparse": experts}
        norm, turning = Norm(config.get("rms_norm_eps")), list(dict.fromkeys(kinds))
        usual = config.attention(biases=config.biases("attention_bias", "qkv"))
        layers = [
            Layer(norm, _attention(usual, window, turning.index(kind)), None, ffn)
            for window, kind, ffn in zip(
                config.windows(), kinds, config.of_layers("mlp_layer_types", known), strict=True
            )
        ]  # fmt: skip
        names = Names({"attn.sinks": "self_attn.attention_sink_bias"}, {"attn.sinks": "self_attn.sinks"},
                      left_out={r"model\.mtp\.": MORE_PREDICTED})  # fmt: skip
        ropes = [config.rope(dim, partial=True, of=kind) for kind in turning]
        for kind in turning:
            said = config.rope_parameters_of(kind)
            if said.get("partial_rotary_factor") is None:
                raise UnsupportedModel(f"config.json sets rope_parameters without partial_rotary_factor for {kind}")
            config.only(
                **{_THETA[kind]: (said["rope_theta"],), "partial_rotary_factor": (said["partial_rotary_factor"],)}
            )
        factor = 1.0 if config.get("attention_value_scale") is None else config.number("attention_value_scale")
        return _filled_up(decoder(self.model_type, config, tokens, layers, names, ropes), v, factor)


def _attention(usual: Attention, window: int | None, rope: int) -> Attention:
    if window is None:
        return replace(usual, rope=rope)
    return replace(usual, rope=rope, window=window, kv=2 * usual.kv, sinks=True)


def _filled_up(described: Description, v: int, factor: float) -> Description:
    """Returns the description with values of `v` features, times `factor`, before zeros where keys have more."""
    return replace(described, **{
        field: {name: _of_values(source, name, described, v, factor) for name, source in sources.items()}
        for field, sources in (("backbone", described.backbone), ("parameters", described.parameters))
    })  # type: ignore[arg-type]  # fmt: skip


def _of_values(source: Source, name: str, described: Description, v: int, factor: float) -> Source:
    found = _VALUES.fullmatch(name)
    if found is None:
        return source
    part, wide = described.spec.decoder[int(found[1])].attention, (described.spec.d_model,)
    assert isinstance(part, Attention)
    if found[2] == "o":
        return replace(source, view=of_columns(part.n), shape=(*wide, part.n * v), room=(2, part.dim))
    shape = (part.kv * v, *wide)[: 1 if found[3] == "bias" else 2]
    return replace(source, view=of_heads(part.kv), shape=shape, room=(1, part.dim), factor=factor)
