"""OPT: dense layers of ReLU neurons, learnt positions, one matrix for embeddings and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from recipes.train.decoder import EOS_ID, PAD_ID, DecoderTask, Reading, Text
from recipes.train.restraint import Restraint, Watch, WatchedReLU


@dataclass(frozen=True, kw_only=True)
class OptSettings(Reading):
    """Shape of one model, and how few of its neurons are to fire."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    restraint: Restraint | None = None


def config_of(settings: OptSettings, vocab: int) -> OPTConfig:
    """Hugging Face configuration: norms before layers, biases everywhere, no dropout."""
    return OPTConfig(
        vocab_size=vocab,
        hidden_size=settings.d_model,
        word_embed_proj_dim=settings.d_model,
        ffn_dim=settings.d_ff,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.context,
        activation_function="relu",
        do_layer_norm_before=True,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        tie_word_embeddings=True,
    )


class OptTask(DecoderTask):
    """A decoder without experts, whose loss has a penalty on neurons that fire."""

    def __init__(self, name: str, settings: OptSettings, text: Text, seed: int):
        model = OPTForCausalLM(config_of(settings, text.tokenizer.get_vocab_size()))
        super().__init__(name, model, lambda _: [], settings, text, seed)
        layers = [WatchedReLU() for _ in model.model.decoder.layers]
        for layer, watched in zip(model.model.decoder.layers, layers, strict=True):
            layer.activation_fn = watched
        self.watch = Watch(settings.restraint, layers, self.kept)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy plus the penalty; the log gets the plain parts and the share of neurons that fire."""
        self.watch.begin(step)
        cross = self._cross(self.windows.at(step))
        extra, figures = self.watch.end()
        return cross + extra, {"cross": float(cross.detach()), **figures}
