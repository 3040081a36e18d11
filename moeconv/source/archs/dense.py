"""Dense decoders: each layer's network is packed as the layer's only expert, so that each gets a width of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import SHARPER, before_sharper
from moeconv.source.archs.description import (
    LAST_LESS_ONE,
    Description,
    Names,
    Place,
    Source,
    decoder,
    in_one,
    in_pairs,
    less_one,
    limited,
    named,
    rows,
)
from moeconv.source.archs.family import Family
from moeconv.source.archs.plain import HUNYUAN_IDLE, HUNYUAN_NORMS, NORMS_BEHIND, hunyuan_rope
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, Head, Join, Layer, StackName, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm, Rope, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

NO_ROUTERS = ("router.weight",)
"""The names of routers' matrices, all of whose numbers are 0 (see `alone`)."""


def alone(network: Ffn) -> Experts:
    """Returns a network as the only expert of its layer. It needs no routing: the softmax of one number is exactly 1,
    whatever the router's weights."""
    return Experts(1, network, Router(1, renormalise=False, capacity=None))


def put_alone(layers: Iterable[nn.Module], name: str) -> None:
    """Puts the network of each layer, its attribute `name`, behind a module that calls it as other families call their
    experts."""
    from moeconv.source.archs.modules import Alone

    for layer in layers:
        setattr(layer, name, Alone(layer.get_submodule(name)))


def of_network(experts: nn.Module, name: str) -> Tensor:
    """Returns a view of a parameter of the only expert in a module that `put_alone` has put there."""
    return experts.get_parameter(f"network.{name}").detach()


class Dense(Family):
    """A decoder without experts, whose layers have a gated network each; subclasses state their attention.
    `projections`: the names of the matrices in the module of a network; `biased`: whether the setting mlp_bias gives
    them biases."""

    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.mlp.experts"}
    projections: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    biased = False

    def attentions(self, config: Config) -> Sequence[Attention]:
        """Returns the attention of each layer. Raises UnsupportedModel."""
        raise NotImplementedError

    def layer(self, norm: Norm, attention: Attention, network: Ffn) -> Layer:
        """Returns a layer with its norms, which are all of one kind."""
        return Layer(norm, attention, None, alone(network))

    def norm(self, config: Config) -> Norm:
        """Returns the norm of all layers. Raises UnsupportedModel."""
        return Norm(config.get("rms_norm_eps"))

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        """Returns the ropes and their frequencies, for heads of `dim` features. Raises UnsupportedModel."""
        return [config.rope(dim)]

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        """Returns the names of the tensors, of which none is a router's."""
        expert, biases = (named("mlp.{projection}", self.projections, last) for last in ("weight", "bias"))
        return Names(expert=expert, bias=biases if network.bias else None, zeros=NO_ROUTERS)

    def has_biases(self, config: Config) -> bool:
        """Returns whether the matrices of networks have biases."""
        return self.biased and bool(config.get("mlp_bias"))

    def network(self, config: Config) -> Ffn:
        """Returns the network of each layer. Raises UnsupportedModel."""
        return config.network("intermediate_size", bias=self.has_biases(config))

    def describe(self, config: Config, tokens: Tokens) -> Description:
        network = self.network(config)
        norm, attentions = self.norm(config), self.attentions(config)
        layers = [self.layer(norm, attention, network) for attention in attentions]
        names, ropes = self.names(config, attentions[0], network), self.ropes(config, attentions[0].dim)
        return decoder(self.model_type, config, tokens, layers, names, ropes)

    def prepared(self, model: nn.Module) -> nn.Module:
        put_alone(self.layers(model), "mlp")
        return model

    def layers(self, model: nn.Module) -> Sequence[Any]:
        return [*self.tower(model, "decoder").get_submodule(self.layer_list).children()]

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self._of_network(model, key, f"{self.projections[projection]}.weight")

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self._of_network(model, key, f"{self.projections[projection]}.bias")

    def _of_network(self, model: nn.Module, key: ExpertKey, name: str) -> Tensor:
        return of_network(self.experts_module(model, key.at), name)


def _in_all_layers(config: Config, attention: Attention) -> Sequence[Attention]:
    return [attention] * config.count("num_hidden_layers")


def by_kind(config: Config, attention: Attention) -> list[Attention]:
    """Returns the attention of each layer with its window, turned by the rope of its kind (see `kinds_of`). Raises
    UnsupportedModel."""
    kinds, windows = kinds_of(config), config.windows()
    return [
        replace(attention, window=window, rope=kinds.index(kind))
        for window, kind in zip(windows, config.get("layer_types"), strict=True)
    ]


def kinds_of(config: Config) -> list[str]:
    """Returns the kinds of layers in layer_types, each of which has a rope of its own, in that order."""
    return list(dict.fromkeys(config.get("layer_types")))


class Llama(Dense):
    """Llama 1 to 3, SmolLM2, and most other dense models."""

    model_type = "llama"
    model_class = "LlamaForCausalLM"
    biased = True

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.without_effect("is_llama_config")
        config.only(rope_interleaved=(False,))
        return _in_all_layers(config, config.attention(biases=config.biases("attention_bias", "qkvo")))


class Mistral(Dense):
    """Mistral 7B, Nemo and Small: as Llama, with a window in all layers or in none."""

    model_type = "mistral"
    model_class = "MistralForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        return _in_all_layers(config, config.attention(window=config.get("sliding_window")))


class Ministral3(Mistral):
    """Ministral 3: as Mistral, with yarn. Queries look more sharply from the positions on that a first training had, so
    that the texts of a pack end there."""

    model_type = "ministral3"
    model_class = "Ministral3ForCausalLM"

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return [config.rope(dim, kinds=("yarn",))]  # others fail in transformers

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect_on_text(*SHARPER)
        return before_sharper(config, super().describe(config, tokens))


class Qwen2(Dense):
    """Qwen2 and 2.5: queries, keys and values with biases, windows by layer."""

    model_type = "qwen2"
    model_class = "Qwen2ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.without_effect("use_sliding_window")  # sliding_window and layer_types say it
        return [config.attention(biases="qkv", window=window) for window in config.windows()]


class Qwen3(Dense):
    """Qwen3: heads of queries and keys are normed one by one, windows by layer."""

    model_type = "qwen3"
    model_class = "Qwen3ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.without_effect("use_sliding_window")
        biases = config.biases("attention_bias", "qkvo")
        return [config.attention(qk_norm="head", biases=biases, window=window) for window in config.windows()]


class SmolLM3(Dense):
    """SmolLM3: some layers have no rotary positions."""

    model_type = "smollm3"
    model_class = "SmolLM3ForCausalLM"
    biased = True

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.without_effect("use_sliding_window", "no_rope_layer_interval")  # layer_types, no_rope_layers say it
        biases, turned = config.biases("attention_bias", "qkvo"), config.get("no_rope_layers")
        return [
            config.attention(biases=biases, window=window, rope=0 if turns else None)
            for window, turns in zip(config.windows(), turned, strict=True)
        ]


class Olmo(Dense):
    """OLMo 1: LayerNorms without weights, bounded queries, keys and values."""

    model_type = "olmo"
    model_class = "OlmoForCausalLM"

    def norm(self, config: Config) -> Norm:
        return Norm(1e-5, "layer")  # transformers has no setting for it

    def attentions(self, config: Config) -> Sequence[Attention]:
        biases = config.biases("attention_bias", "qkvo")
        return _in_all_layers(config, config.attention(biases=biases, clip=config.get("clip_qkv")))

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        found = super().names(config, attention, network)
        return replace(found, ones=("norm.weight",), zeros=(*found.zeros, "norm.bias"))


class Olmo2(Dense):
    """OLMo 2: queries and keys normed as a whole, norms behind attention and network, and none before."""

    model_type = "olmo2"
    model_class = "Olmo2ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        biases = config.biases("attention_bias", "qkvo")
        return _in_all_layers(config, config.attention(qk_norm="whole", biases=biases))

    def layer(self, norm: Norm, attention: Attention, network: Ffn) -> Layer:
        return Layer(None, attention, None, alone(network), Join(norm), Join(norm))

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        return replace(super().names(config, attention, network), inside=NORMS_BEHIND)


class Olmo3(Olmo2):
    """OLMo 3: as OLMo 2, with windows by layer; a rope for layers with a window, another for those without."""

    model_type = "olmo3"
    model_class = "Olmo3ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        return by_kind(config, config.attention(qk_norm="whole", biases=config.biases("attention_bias", "qkvo")))

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return [config.rope(dim, of=kind) for kind in kinds_of(config)]


class Exaone4(Olmo2):
    """EXAONE 4: as OLMo 2, with heads of queries and keys normed one by one. Layers with a window turn, and those
    without one turn where no layer has one."""

    model_type = "exaone4"
    model_class = "Exaone4ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.without_effect("sliding_window_pattern")  # layer_types says it
        windows, all_turn = config.windows(), config.get("sliding_window") is None
        return [
            config.attention(qk_norm="head", window=window, rope=0 if all_turn or window is not None else None)
            for window in windows
        ]

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return [config.rope(dim)]


class SeedOss(Dense):
    """Seed-OSS: as Llama, with a setting of its own for the bias of what attention gives."""

    model_type = "seed_oss"
    model_class = "SeedOssForCausalLM"
    biased = True

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.without_effect("residual_dropout")
        biases = config.biases("attention_bias", "qkv")
        if config.get("attention_out_bias"):
            config.must_be("attention_bias", True, "a bias of o alone, without those of q, k and v, can't be packed")
            biases = "qkvo"
        return _in_all_layers(config, config.attention(biases=biases))


class Ernie45(Dense):
    """ERNIE 4.5 without experts: rotary positions of pairs, one setting for all biases."""

    model_type = "ernie4_5"
    model_class = "Ernie4_5ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        return _in_all_layers(config, config.attention(biases=config.biases("use_bias", "qkvo")))

    def has_biases(self, config: Config) -> bool:
        return bool(config.get("use_bias"))

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        inside = in_pairs(attention, config.count("hidden_size"))
        return replace(super().names(config, attention, network), inside=inside)


class HunyuanV1Dense(Dense):
    """Hunyuan 0.5B to 7B: heads of queries and keys are normed after they turn."""

    model_type = "hunyuan_v1_dense"
    model_class = "HunYuanDenseV1ForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        config.only(use_qk_norm=(True,), use_cla=(False,), mlp_bias=(False,), position_embedding_xdrope=(False,))
        config.without_effect("use_rotary_pos_emb", *HUNYUAN_IDLE)
        if config.get("head_dim") is None:
            raise UnsupportedModel("config.json has no head_dim, which transformers wants for this family")
        biases = config.biases("attention_bias", "qkvo")
        return _in_all_layers(config, config.attention(qk_norm="head", norm_turned=True, biases=biases))

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return [hunyuan_rope(config, dim)]

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        return replace(super().names(config, attention, network), inside=HUNYUAN_NORMS)


class Phi3(Dense):
    """Phi-3 and 4: queries, keys and values in one matrix, gate and up in another. Of longrope a pack has the short
    factors, so that its texts are no longer than those are for."""

    model_type = "phi3"
    model_class = "Phi3ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("attention_bias", False, "this family's attention has no biases in transformers")
        config.without_effect("resid_pdrop", "embd_pdrop")
        described, short = super().describe(config, tokens), config.count("original_max_position_embeddings")
        if config.rope_parameters()["rope_type"] != "longrope":
            return described
        note = f"texts are at most {short} tokens long: for longer ones longrope turns all tokens by other factors"
        return limited(described, short, note)

    def attentions(self, config: Config) -> Sequence[Attention]:
        return _in_all_layers(config, config.attention(window=config.get("sliding_window")))

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return [config.rope(dim, partial=True, kinds=("default", "longrope"))]

    def names(self, config: Config, attention: Attention, network: Ffn) -> Names:
        d_model, q, kv = config.count("hidden_size"), attention.q_features, attention.kv_features
        parts = {"q": rows(0, q), "k": rows(q, q + kv), "v": rows(q + kv)}

        def of_expert(layer: int, _: int, projection: str) -> Source:
            return in_one(f"layers.{layer}.mlp.{{}}_proj.weight", projection, network.d_ff, d_model)

        inside = {
            f"attn.{name}": Place("self_attn.qkv_proj", view, (q + 2 * kv, d_model)) for name, view in parts.items()
        }
        return Names(inside, expert=of_expert, zeros=NO_ROUTERS)

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        if projection == "down":
            return super().expert_weight(model, key, projection)
        gate, up = self._of_network(model, key, "gate_up_proj.weight").chunk(2)
        return gate if projection == "gate" else up


NORMS_AROUND = {
    "mixer_norm": "input_layernorm", "mixer_after": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_after": "post_feedforward_layernorm",
}  # fmt: skip
_NORMS_OF_HEADS = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}


def scale_of(config: Config) -> float:
    """Returns the factor of attention's scores, from the features that a setting states. Raises UnsupportedModel."""
    if (stated := config.number("query_pre_attn_scalar")) < 0:
        raise UnsupportedModel(f"config.json sets query_pre_attn_scalar {stated!r}: it should be above 0")
    return float(stated**-0.5)


class Gemma3Text(Dense):
    """Gemma 3: norms before and behind attention and network, whose weights are stored less 1; a rope for layers with a
    window, another for those without."""

    model_type = "gemma3_text"
    model_class = "Gemma3ForCausalLM"
    root, other_root, head = "model.", "", "lm_head"
    left_out: Mapping[str, str] = {}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.must_be("attn_logit_softcapping", None, "transformers computes this family's scores without bounds")
        config.must_be("use_bidirectional_attention", False, "text that sees what follows can't be packed")
        config.without_effect("sliding_window_pattern", "_sliding_window_pattern")  # layer_types says it
        config.without_effect("rope_local_base_freq", "cache_implementation")  # the first is in rope_parameters
        norm, network = Norm(config.get("rms_norm_eps")), config.network("intermediate_size", "hidden_activation")
        biases = config.biases("attention_bias", "qkvo")
        usual = config.attention(qk_norm="head", biases=biases, scale=scale_of(config))
        layers = [Layer(norm, each, None, alone(network), Join(norm), Join(norm)) for each in by_kind(config, usual)]
        plus = less_one({**NORMS_AROUND, **_NORMS_OF_HEADS})
        names = Names(
            plus, expert=named("mlp.{projection}", self.projections), zeros=NO_ROUTERS, left_out=self.left_out,
            root=self.root, other_root=self.other_root, head=self.head,
            outside=LAST_LESS_ONE,
        )  # fmt: skip
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, softcap=config.get("final_logit_softcapping"))
        ropes = [config.rope(config.head_dim(), of=kind) for kind in kinds_of(config)]
        return decoder(
            self.model_type, config, tokens, layers, names, ropes, head=head,
            embed_scale=config.count("hidden_size") ** 0.5,
        )  # fmt: skip


class Gemma3(Gemma3Text):
    """Gemma 3 inside a model for text and images."""

    model_type = "gemma3"
    config_type = "gemma3_text"
    loads_by_names = False
    inside_tied = True
    beside = frozenset({
        "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
        "boi_token_id", "eoi_token_id", "image_token_id",
    })  # fmt: skip
    root, other_root, head = "language_model.model.", "model.language_model.", "language_model.lm_head"
    left_out: Mapping[str, str] = {
        r"(model\.)?(vision_tower|multi_modal_projector)\.": "images are left out: the pack holds the text model alone",
    }
