"""Gemma 4: norms before and after everything, two ropes. Experts stand beside a network that all tokens pass; without
experts, this network is packed as the only one of its layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moeconv.source.archs.config import Config, UnsupportedModel, count_of, number_of, turns
from moeconv.source.archs.dense import NO_ROUTERS, alone, of_network, put_alone
from moeconv.source.archs.description import Description, Inside, Names, Place, decoder, joined, named
from moeconv.source.archs.family import Family
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, Head, Join, Layer, LayerKey, Tokens
from moert.pack.parts import Attention, Beside, Experts, Norm, Rope, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

_INSIDE = {
    "mixer_after": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_after": "post_feedforward_layernorm", "scale": "layer_scalar",
}  # fmt: skip
_WITH_EXPERTS = {
    "ffn_norm": "pre_feedforward_layernorm_2", "beside_norm": "pre_feedforward_layernorm",
    "beside_after": "post_feedforward_layernorm_1", "experts_after": "post_feedforward_layernorm_2",
    "router": "router.proj", "router.expert_scale": "router.per_expert_scale",
    **{f"beside.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_OF_NETWORK = named("mlp.{projection}_proj")
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma4Text(Family):
    """See `Family`."""

    model_type = "gemma4_text"
    model_class = "Gemma4ForCausalLM"
    root = "model."
    left_out: Mapping[str, str] = {}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("hidden_size_per_layer_input", 0, "inputs of each layer can't be packed")
        config.must_be("num_kv_shared_layers", 0, "layers that share keys can't be packed")
        if config.get("use_bidirectional_attention") not in (None, "vision"):
            config.must_be("use_bidirectional_attention", None, "text that sees what follows can't be packed")
        config.without_effect("use_double_wide_mlp", "vocab_size_per_layer_input", "num_experts_per_tok")
        config.without_effect("global_head_dim", "num_global_key_value_heads")  # per_layer_config says it
        norm, same = Norm(config.get("rms_norm_eps")), config.get("attention_k_eq_v")
        kinds, attentions = config.get("layer_types"), _attentions(config)
        d_model, dense = config.get("hidden_size"), config.network("intermediate_size", "hidden_activation")
        experts, names = alone(dense), Names(_INSIDE, expert=_OF_NETWORK, zeros=NO_ROUTERS)
        if config.get("enable_moe_block"):
            router = Router(config.get("top_k_experts"), True, None, own_norm=True, expert_scale=True)
            network = config.network("moe_intermediate_size", "hidden_activation")
            experts = Experts(config.get("num_experts"), network, router, beside=Beside(dense, norm, norm, norm))
            scale = Place("router.scale", factor=d_model**-0.5)
            inside: Inside = {**_INSIDE, **_WITH_EXPERTS, "router_norm.weight": scale}
            names = Names(inside, expert=joined("experts", network.d_ff, d_model))
        else:
            config.without_effect("top_k_experts", "num_experts", "moe_intermediate_size")
        layers = [Layer(norm, each, None, experts, Join(norm), Join(norm), scaled=True) for each in attentions]
        names = replace(names, left_out=self.left_out, root=self.root, ones=("attn.v_norm.weight",))
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, softcap=config.get("final_logit_softcapping"))
        described = decoder(
            self.model_type, config, tokens, layers, names, _ropes(config, kinds, attentions), head=head,
            embed_scale=d_model**0.5,
        )  # fmt: skip
        return _same_values(described, kinds) if same else described

    def prepared(self, model: nn.Module) -> nn.Module:
        """Puts each layer's network in the place of experts, in a model without."""
        layers = [*self.tower(model, "decoder").get_submodule(self.layer_list).children()]
        put_alone((layer for layer in layers if not hasattr(layer, "experts")), "mlp")
        return model

    def experts_module(self, model: nn.Module, at: LayerKey) -> nn.Module:
        layer = model.get_submodule(f"model.layers.{at.layer}")
        return layer.get_submodule("experts" if hasattr(layer, "experts") else "mlp.experts")

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        experts = self.experts_module(model, key.at)
        if hasattr(experts, "network"):
            return of_network(experts, f"{projection}_proj.weight")
        return super().expert_weight(model, key, projection)


class Gemma4(Gemma4Text):
    """Gemma 4 inside a model for text, images and sounds."""

    model_type = "gemma4"
    config_type = "gemma4_text"
    loads_by_names = False
    inside_tied = True
    beside = frozenset({
        "vision_config", "audio_config", "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id",
        "boa_token_id", "eoa_token_id", "eoa_token_index", "audio_token_id",
    })  # fmt: skip
    root = "model.language_model."
    left_out: Mapping[str, str] = {
        r"model\.(vision_tower|embed_vision)\.": "images are left out: the pack holds the text model alone",
        r"model\.(audio_tower|embed_audio)\.": "sounds are left out: the pack holds the text model alone",
    }


def _attentions(config: Config) -> list[Attention]:
    """Returns the attention of each layer: layers without a window have heads of another size. Raises
    UnsupportedModel."""
    window, biases = config.get("sliding_window"), config.biases("attention_bias", "qkvo")
    heads, found = config.get("num_attention_heads"), []
    config.without_effect("head_dim", "num_key_value_heads", "per_layer_config")
    for at, kind in enumerate(config.get("layer_types")):
        own, sees_all = config.parsed.per_layer_config[at], kind == _FULL
        if kind not in (_FULL, _SLIDING):
            raise UnsupportedModel(f"config.json sets layer_types with {kind!r}: only {_FULL} and {_SLIDING} are known")
        kv, dim = count_of("num_key_value_heads", own.num_key_value_heads), count_of("head_dim", own.head_dim)
        seen = None if sees_all else window
        found.append(
            Attention(heads, kv, dim, 1.0, "head", None, int(sees_all), None, window=seen, biases=biases, v_norm=True)
        )
    return found


def _ropes(config: Config, kinds: Sequence[str], attentions: Sequence[Attention]) -> list[tuple[Rope, F32]]:
    """Returns the ropes of layers with a window, and of layers without, whose last pairs do not turn. Raises
    UnsupportedModel."""
    ropes = []
    for kind, expected in ((_SLIDING, "default"), (_FULL, "proportional")):
        own = config.rope_parameters_of(kind)
        if own.get("rope_type", "default") != expected:
            raise UnsupportedModel(
                f"config.json sets the rope type {own.get('rope_type')!r} for {kind}: only {expected} can be packed"
            )
        dims = [attention.dim for attention, each in zip(attentions, kinds, strict=True) if each == kind]
        dim = dims[0] if dims else 2
        share = own.get("partial_rotary_factor", 1.0) if expected == "proportional" else 1.0
        theta, factor = number_of("rope_theta", own.get("rope_theta")), number_of("factor", own.get("factor", 1.0))
        if not 0 < share <= 1 or theta < 0:
            raise UnsupportedModel(f"config.json sets rope_theta {theta!r} and turns {share!r} of each head for {kind}")
        turning = int(share * dim // 2)
        frequencies = np.zeros(dim // 2, np.float32)
        with np.errstate(all="ignore"):  # angles that are not finite are refused later
            frequencies[:turning] = turns(theta, 2 * turning, dim) / factor
        ropes.append((Rope(dim), frequencies))
    return ropes


def _same_values(described: Description, kinds: Sequence[str]) -> Description:
    """Returns the description with the keys' matrix also as the values' in layers without a window."""
    values = {f"decoder.{at}.attn.v": f"decoder.{at}.attn.k" for at, kind in enumerate(kinds) if kind == _FULL}
    places = [
        {name: sources.get(f"{values[stem]}{name[len(stem):]}", source) if (stem := name[: name.rindex(".")]) in values
         else source for name, source in sources.items()}
        for sources in (described.backbone, described.parameters)
    ]  # fmt: skip
    return replace(described, backbone=places[0], parameters=places[1])
