"""OLMoE: softmax routers, balanced by an auxiliary loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

from recipes.train.decoder import EOS_ID, PAD_ID, DecoderTask, Reading, Text
from recipes.train.grouped import GroupedExperts, balance_loss


@dataclass(frozen=True, kw_only=True)
class Routed(Reading):
    """Experts of each layer, how many of them a token takes, and weights of their routers' losses."""

    experts: int
    top_k: int
    balance: float = 0.02
    z_loss: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class OlmoeSettings(Routed):
    """Shape and losses of one model."""

    d_model: int
    d_expert: int
    layers: int
    heads: int


def config_of(settings: OlmoeSettings, vocab: int) -> OlmoeConfig:
    """Hugging Face configuration."""
    return OlmoeConfig(
        vocab_size=vocab,
        hidden_size=settings.d_model,
        intermediate_size=settings.d_expert,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        max_position_embeddings=settings.context,
        router_aux_loss_coef=settings.balance,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        tie_word_embeddings=False,
    )


class TrainingBlock(nn.Module):
    """Takes the place of ``OlmoeSparseMoeBlock`` or Mixtral's; same parameters under the same names."""

    def __init__(self, original: nn.Module, settings: Routed):
        super().__init__()
        self.gate, self.experts, self.settings = original.gate, original.experts, settings
        self.penalty: Tensor | None = None
        self.balance: Tensor | None = None
        self.share: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] → the same."""
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(flat.float(), self.gate.weight)
            probabilities = logits.softmax(-1)
            scores, index = probabilities.topk(self.settings.top_k, dim=-1)
            scores = scores / scores.sum(-1, keepdim=True)
            if self.training:
                self.balance, self.share = balance_loss(probabilities, index, None)
                z_loss = logits.logsumexp(-1).square().mean()
                self.penalty = self.settings.balance * self.balance + self.settings.z_loss * z_loss
            weights = self.experts.gate_up_proj, self.experts.down_proj
            out = GroupedExperts.apply(flat, scores, index, *weights, True)
        return out.view_as(x)


def task(name: str, settings: OlmoeSettings, text: Text, seed: int) -> DecoderTask:
    """A fresh model with training blocks in all layers, and what it is trained on."""

    def replace(model: nn.Module) -> list[TrainingBlock]:
        for layer in model.model.layers:
            nn.init.normal_(layer.mlp.gate.weight, std=0.02)
            layer.mlp = TrainingBlock(layer.mlp, settings)
        return [layer.mlp for layer in model.model.layers]

    model = OlmoeForCausalLM(config_of(settings, text.tokenizer.get_vocab_size()))
    return DecoderTask(name, model, replace, settings, text, seed)
