"""Granite 3 MoE: factors of embedding, attention, stream and logits; with a shared expert, GraniteMoeShared; with sinks
and windows, and a base of positions for each layer, GraniteMoeSWA; and Granite and GraniteSWA without experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from moeconv.source.archs.config import Config, UnsupportedModel, turns
from moeconv.source.archs.dense import Dense, alone
from moeconv.source.archs.description import (
    Description,
    Inside,
    Names,
    OfExpert,
    Place,
    Source,
    decoder,
    joined,
    rows,
)
from moeconv.source.archs.family import Family, changed
from moert.pack.codec import F32
from moert.pack.mixers import FixedState
from moert.pack.model_spec import Head, Join, Layer, StackName, Tokens
from moert.pack.parts import Attention, Experts, Ffn, Norm, Rope

if TYPE_CHECKING:
    from torch import nn


_ROUTER = "block_sparse_moe.router"


class _Multiplied(Family):
    """A family that multiplies embeddings by a factor."""

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """Keeps the tower from multiplying hidden states as it multiplies embeddings, inside a with block."""
        with changed(tower, "embedding_multiplier", 1.0):
            yield


class GraniteMoe(_Multiplied):
    """See `Family`."""

    model_type = "granitemoe"
    model_class = "GraniteMoeForCausalLM"
    router_in_checkpoints = f"{_ROUTER}.layer"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.block_sparse_moe.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, join = Norm(config.get("rms_norm_eps")), Join(add=config.number("residual_multiplier"))
        mixers, of_mixers = self._mixers(config, norm)
        shared = self._shared(config)
        network = config.network("intermediate_size")
        router = config.router(True)
        experts = Experts(config.count("num_local_experts"), network, router, shared)
        layers = [Layer(norm, mixer, None, experts, join, join) for mixer in mixers]

        inside: dict[str, str | Place] = {"router": self.router_in_checkpoints}
        if shared is not None:
            both = (2 * shared.d_ff, config.count("hidden_size"))
            inside |= {
                "shared.gate": Place("shared_mlp.input_linear", rows(0, shared.d_ff), both),
                "shared.up": Place("shared_mlp.input_linear", rows(shared.d_ff), both),
                "shared.down": "shared_mlp.output_linear",
            }
        of_expert = self._of_expert(network.d_ff, config.count("hidden_size"))
        names = Names({**inside, **of_mixers}, {"router": _ROUTER}, of_expert)
        return decoder(
            self.model_type, config, tokens, layers, names, self._ropes(config, layers), head=_head(config),
            embed_scale=config.number("embedding_multiplier"),
        )  # fmt: skip

    def _of_expert(self, d_ff: int, d_model: int) -> OfExpert:
        def of_expert(layer: int, expert: int, projection: str) -> Source:
            at = f"layers.{layer}.block_sparse_moe"
            if projection == "down":
                return Source(f"{at}.output_linear.weight", expert)
            part = rows(0, d_ff) if projection == "gate" else rows(d_ff)
            return Source(f"{at}.input_linear.weight", expert, part, (2 * d_ff, d_model))

        return of_expert

    def _ropes(self, config: Config, layers: Sequence[Layer]) -> list[tuple[Rope, F32]] | None:
        """Returns the ropes, None for the usual one. Raises UnsupportedModel."""
        turned = any(layer.attention is not None and layer.attention.rope is not None for layer in layers)
        return None if turned else []

    def _mixers(self, config: Config, norm: Norm) -> tuple[Sequence[Attention | FixedState], Inside]:
        """Returns the mixer of each layer, and the places of the tensors of mixers other than attention."""
        return [granite_attention(config)] * config.count("num_hidden_layers"), {}

    def _shared(self, config: Config) -> Ffn | None:
        return None


class GraniteMoeShared(GraniteMoe):
    """See `Family`."""

    model_type = "granitemoeshared"
    model_class = "GraniteMoeSharedForCausalLM"

    def _shared(self, config: Config) -> Ffn | None:
        return config.network("shared_intermediate_size") if config.get("shared_intermediate_size") else None


class GraniteMoeSwa(GraniteMoeShared):
    """Granite with sinks: layers with windows, and for each layer the base of its rotary positions, 0 for none."""

    model_type = "granitemoe_swa"
    model_class = "GraniteMoeSWAForCausalLM"
    router_in_checkpoints = _ROUTER

    def _of_expert(self, d_ff: int, d_model: int) -> OfExpert:
        return joined("block_sparse_moe.experts", d_ff, d_model)

    def _mixers(self, config: Config, norm: Norm) -> tuple[Sequence[Attention | FixedState], Inside]:
        return _with_windows(config), {}

    def _ropes(self, config: Config, layers: Sequence[Layer]) -> list[tuple[Rope, F32]]:
        return _of_bases(config)


class Granite(_Multiplied, Dense):
    """Granite 3 without experts."""

    model_type = "granite"
    model_class = "GraniteForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        return [granite_attention(config)] * config.count("num_hidden_layers")

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, join = Norm(config.get("rms_norm_eps")), Join(add=config.number("residual_multiplier"))
        network = config.network("intermediate_size", bias=bool(config.get("mlp_bias")))
        attentions = self.attentions(config)
        layers = [Layer(norm, attention, None, alone(network), join, join) for attention in attentions]
        names, ropes = self.names(config, attentions[0], network), self.ropes(config, attentions[0].dim)
        return decoder(
            self.model_type, config, tokens, layers, names, ropes, head=_head(config),
            embed_scale=config.number("embedding_multiplier"),
        )  # fmt: skip


class GraniteSwa(Granite):
    """Granite with sinks, windows and bases of positions by layer, without experts."""

    model_type = "granite_swa"
    model_class = "GraniteSWAForCausalLM"

    def attentions(self, config: Config) -> Sequence[Attention]:
        return _with_windows(config)

    def ropes(self, config: Config, dim: int) -> list[tuple[Rope, F32]]:
        return _of_bases(config)


def granite_attention(config: Config, rope: int | None = 0) -> Attention:
    """Raises UnsupportedModel."""
    biases = config.biases("attention_bias", "qkvo")
    return config.attention(biases=biases, scale=config.number("attention_multiplier"), rope=rope)


def _head(config: Config) -> Head:
    return Head(bool(config.get("tie_word_embeddings")), 1 / config.number("logits_scaling"))


def _with_windows(config: Config) -> list[Attention]:
    """Returns the attention of each layer, with sinks. Raises UnsupportedModel."""
    bases = _bases(config)
    turning = [*dict.fromkeys(base for base in bases if base)]
    return [
        replace(granite_attention(config, turning.index(base) if base else None), window=window, sinks=True)
        for base, window in zip(bases, config.windows(), strict=True)
    ]


def _of_bases(config: Config) -> list[tuple[Rope, F32]]:
    """Returns the ropes. Raises UnsupportedModel."""
    config.rope(dim := config.head_dim(), kinds=("default",))  # others would turn by each layer's base as well
    return [(Rope(dim), turns(base, dim)) for base in dict.fromkeys(_bases(config)) if base]


def _bases(config: Config) -> list[float]:
    """Returns the base of each layer's rotary positions, 0 for none. Raises UnsupportedModel."""
    found, n = config.get("layer_rope_theta"), config.count("num_hidden_layers")
    if len(found) != n or not all(base == 0 or base >= 1 for base in found):
        raise UnsupportedModel(
            f"config.json sets layer_rope_theta {found!r}: it should have {n} numbers, each 0 or from 1 on"
        )
    return [float(base) for base in found]
