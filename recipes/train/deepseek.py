"""DeepSeek-V3: latent attention, dense first layers, a shared expert, sigmoid routers with a bias for the choice.

The bias of an expert rises after each step in which it had less than an even load, and falls after one in which it had
more (Wang et al., 2024, arXiv 2408.15664): no auxiliary loss pulls at the routers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from recipes.train.decoder import EOS_ID, PAD_ID, DecoderTask, Reading, Text
from recipes.train.grouped import GroupedExperts, balance_loss


@dataclass(frozen=True, kw_only=True)
class DeepseekSettings(Reading):
    """Shape of one model, and how far biases move in a step."""

    d_model: int
    d_expert: int  # also of the shared expert
    d_dense: int
    layers: int
    dense_layers: int  # the first
    heads: int
    query_rank: int
    latent: int  # features that keys and values are made of
    d_head: int  # of values, and of the part of keys and queries that does not turn
    d_turn: int  # the part that does
    experts: int
    top_k: int
    factor: float = 2.5  # what the routed experts' sum is multiplied with
    bias_step: float = 1e-3


def config_of(settings: DeepseekSettings, vocab: int) -> DeepseekV3Config:
    """Hugging Face configuration: one group, one shared expert."""
    return DeepseekV3Config(
        vocab_size=vocab,
        hidden_size=settings.d_model,
        intermediate_size=settings.d_dense,
        moe_intermediate_size=settings.d_expert,
        num_hidden_layers=settings.layers,
        first_k_dense_replace=settings.dense_layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        q_lora_rank=settings.query_rank,
        kv_lora_rank=settings.latent,
        qk_nope_head_dim=settings.d_head,
        qk_rope_head_dim=settings.d_turn,
        v_head_dim=settings.d_head,
        n_routed_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=settings.factor,
        max_position_embeddings=settings.context,
        num_mtp_layers=0,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        tie_word_embeddings=False,
    )


class TrainingBlock(nn.Module):
    """Takes the place of ``DeepseekV3MoE`` with one group; same parameters and buffers under the same names."""

    def __init__(self, original: nn.Module, settings: DeepseekSettings):
        super().__init__()
        self.gate, self.experts, self.shared_experts = original.gate, original.experts, original.shared_experts
        self.settings = settings
        self.penalty: Tensor | None = None
        self.balance: Tensor | None = None
        self.share: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] → the same. In training, biases move for the next call."""
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(flat.float(), self.gate.weight).sigmoid()
            bias = self.gate.e_score_correction_bias
            index = (scores.detach() + bias).topk(self.settings.top_k, dim=-1).indices
            chosen = scores.gather(1, index)
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.settings.factor
            if self.training:
                self._even_out(scores.detach(), index)
            weights = self.experts.gate_up_proj, self.experts.down_proj
            out = GroupedExperts.apply(flat, chosen, index, *weights, True)
        return out.view_as(x) + self.shared_experts(x)

    def _even_out(self, scores: Tensor, index: Tensor) -> None:
        """Keep what the log needs of scores [tokens, experts] and choices [tokens, k], and move the biases."""
        self.balance, self.share = balance_loss(scores / scores.sum(-1, keepdim=True), index, None)
        self.penalty = scores.new_zeros(())
        self.gate.e_score_correction_bias += self.settings.bias_step * (self.share.mean() - self.share).sign()


def task(name: str, settings: DeepseekSettings, text: Text, seed: int) -> DecoderTask:
    """A fresh model with training blocks in its sparse layers, and what it is trained on."""

    def replace(model: nn.Module) -> list[TrainingBlock]:
        sparse = model.model.layers[settings.dense_layers :]
        for layer in sparse:
            layer.mlp = TrainingBlock(layer.mlp, settings)
        return [layer.mlp for layer in sparse]

    model = DeepseekV3ForCausalLM(config_of(settings, text.tokenizer.get_vocab_size()))
    return DecoderTask(name, model, replace, settings, text, seed)
