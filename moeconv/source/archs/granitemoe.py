"""Granite 3 MoE: factors of embedding, attention, stream and logits; with a shared expert, GraniteMoeShared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Names, Place, decoder
from moeconv.source.archs.family import Family
from moeconv.source.archs.source import Source
from moeconv.source.archs.views import rows
from moert.pack.model_spec import Head, StackName, Tokens
from moert.pack.parts import Experts, Ffn, Join, Layer, Norm, Router


class GraniteMoe(Family):
    """See `Family`."""

    model_type = "granitemoe"
    model_class = "GraniteMoeForCausalLM"
    experts: Mapping[StackName, str] = {"decoder": "model.layers.{layer}.block_sparse_moe.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        attention = config.attention(
            biases=config.biases("attention_bias", "qkvo"), scale=config.number("attention_multiplier")
        )
        join, shared = Join(add=config.number("residual_multiplier")), self._shared(config)
        network = config.network("intermediate_size")
        router = Router(config.count("num_experts_per_tok"), True, None)
        experts = Experts(config.count("num_local_experts"), network, router, shared)
        layer = Layer(Norm(config.get("rms_norm_eps")), attention, None, experts, join, join)

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
        names = Names(inside, {"router": "block_sparse_moe.router"}, of_expert)
        head = Head(bool(config.get("tie_word_embeddings")), 1 / config.number("logits_scaling"))
        return decoder(
            self.model_type, config, tokens, [layer] * config.count("num_hidden_layers"), names, head=head,
            embed_scale=config.number("embedding_multiplier"),
        )  # fmt: skip

    def _shared(self, config: Config) -> Ffn | None:
        return None

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """What enters a layer is not multiplied as an embedding is."""
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
