"""Granite 3 MoE: factors of embedding, attention, stream and logits; with a shared expert, GraniteMoeShared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Inside, Names, Place, Source, decoder, rows
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Head, Join, Layer, StackName, Tokens
from moert.pack.parts import Attention, Experts, Ffn, FixedState, Norm, Router

if TYPE_CHECKING:
    from torch import nn


class GraniteMoe(Family):
    """See `Family`."""

    model_type = "granitemoe"
    model_class = "GraniteMoeForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.block_sparse_moe.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        norm, join = Norm(config.get("rms_norm_eps")), Join(add=config.number("residual_multiplier"))
        mixers, of_mixers = self._mixers(config, norm)
        shared = self._shared(config)
        network = config.network("intermediate_size")
        router = Router(config.count("num_experts_per_tok"), True, None)
        experts = Experts(config.count("num_local_experts"), network, router, shared)
        layers = [Layer(norm, mixer, None, experts, join, join) for mixer in mixers]

        def of_expert(layer: int, expert: int, projection: str) -> Source:
            at, width, d_model = f"layers.{layer}.block_sparse_moe", network.d_ff, config.count("hidden_size")
            if projection == "down":
                return Source(f"{at}.output_linear.weight", expert)
            part = rows(0, width) if projection == "gate" else rows(width)
            return Source(f"{at}.input_linear.weight", expert, part, (2 * width, d_model))

        inside: dict[str, str | Place] = {"router": "block_sparse_moe.router.layer"}
        if shared is not None:
            both = (2 * shared.d_ff, config.count("hidden_size"))
            inside |= {
                "shared.gate": Place("shared_mlp.input_linear", rows(0, shared.d_ff), both),
                "shared.up": Place("shared_mlp.input_linear", rows(shared.d_ff), both),
                "shared.down": "shared_mlp.output_linear",
            }
        names = Names({**inside, **of_mixers}, {"router": "block_sparse_moe.router"}, of_expert)
        head = Head(bool(config.get("tie_word_embeddings")), 1 / config.number("logits_scaling"))
        turned = any(layer.attention is not None and layer.attention.rope is not None for layer in layers)
        return decoder(
            self.model_type, config, tokens, layers, names, None if turned else [], head=head,
            embed_scale=config.number("embedding_multiplier"),
        )  # fmt: skip

    def _mixers(self, config: Config, norm: Norm) -> tuple[Sequence[Attention | FixedState], Inside]:
        """Returns the mixer of each layer, and the places of the tensors of mixers other than attention."""
        return [self._attention(config)] * config.count("num_hidden_layers"), {}

    def _attention(self, config: Config, rope: int | None = 0) -> Attention:
        biases = config.biases("attention_bias", "qkvo")
        return config.attention(biases=biases, scale=config.number("attention_multiplier"), rope=rope)

    def _shared(self, config: Config) -> Ffn | None:
        return None

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """Keeps the tower from multiplying hidden states as it multiplies embeddings, inside a with block."""
        before = tower.embedding_multiplier
        tower.embedding_multiplier = 1.0  # type: ignore[assignment]
        try:
            yield
        finally:
            tower.embedding_multiplier = before


class GraniteMoeShared(GraniteMoe):
    """See `Family`."""

    model_type = "granitemoeshared"
    model_class = "GraniteMoeSharedForCausalLM"

    def _shared(self, config: Config) -> Ffn | None:
        return config.network("shared_intermediate_size") if config.get("shared_intermediate_size") else None
