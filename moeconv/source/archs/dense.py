"""Dense decoders: each layer's network is packed as the layer's only expert, so that each gets a width of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Names, decoder, named
from moeconv.source.archs.family import Family
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, Layer, StackName, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm, Rope, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

NO_ROUTERS = ("router.weight",)
"""The names of routers' matrices, all of whose numbers are 0 (see `alone`)."""


def alone(network: Ffn) -> Experts:
    """Returns a network as the only expert of its layer. It needs no routing: the softmax of one number is exactly 1,
    whatever the router's weights."""
    return Experts(1, network, Router(1, renormalise=False, capacity=None))


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

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        """Returns the ropes and their frequencies, for heads of `dim` features. Raises UnsupportedModel."""
        return [config.rope(dim)]

    def describe(self, config: Config, tokens: Tokens) -> Description:
        bias = self.biased and bool(config.get("mlp_bias"))
        norm, network = Norm(config.get("rms_norm_eps")), config.network("intermediate_size", bias=bias)
        attentions = self.attentions(config)
        layers = [Layer(norm, attention, None, alone(network)) for attention in attentions]
        expert, biases = (named("mlp.{projection}", self.projections, last) for last in ("weight", "bias"))
        names = Names(expert=expert, bias=biases if bias else None, zeros=NO_ROUTERS)
        return decoder(self.model_type, config, tokens, layers, names, self.ropes(config, attentions[0].dim))

    def prepared(self, model: nn.Module) -> nn.Module:
        """Puts the network of each layer behind a module that calls it as other families call their experts."""
        from moeconv.source.archs.modules import Alone

        for layer in self.layers(model):
            layer.mlp = Alone(layer.mlp)
        return model

    def layers(self, model: nn.Module) -> Sequence[Any]:
        return [*self.tower(model, "decoder").get_submodule(self.layer_list).children()]

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self._of_network(model, key, f"{self.projections[projection]}.weight")

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self._of_network(model, key, f"{self.projections[projection]}.bias")

    def _of_network(self, model: nn.Module, key: ExpertKey, name: str) -> Tensor:
        return self.experts_module(model, key.at).get_parameter(f"network.{name}").detach()


def _in_all_layers(config: Config, attention: Attention) -> Sequence[Attention]:
    return [attention] * config.count("num_hidden_layers")


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
