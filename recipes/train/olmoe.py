"""OLMoE: the decoder family of the reference models."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, OlmoeConfig, OlmoeForCausalLM

from recipes.train import attention, vocabulary
from recipes.train.cross import ChunkedCross
from recipes.train.grouped import GroupedExperts, balance_loss

PAD_ID, EOS_ID = 0, 1


@dataclass(frozen=True)
class OlmoeSettings:
    """Shape and losses of one model; lengths in tokens."""

    d_model: int
    d_expert: int
    layers: int
    heads: int
    experts: int
    top_k: int
    context: int
    batch: int  # windows a step
    balance: float = 0.02
    z_loss: float = 1e-3


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
    """Takes the place of ``OlmoeSparseMoeBlock``; same parameters under the same names."""

    def __init__(self, original: nn.Module, top_k: int):
        super().__init__()
        self.gate, self.experts, self.top_k = original.gate, original.experts, top_k
        self.balance: Tensor | None = None
        self.z_loss: Tensor | None = None
        self.share: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] → the same."""
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(flat.float(), self.gate.weight)
            probabilities = logits.softmax(-1)
            scores, index = probabilities.topk(self.top_k, dim=-1)
            scores = scores / scores.sum(-1, keepdim=True)
            if self.training:
                self.balance, self.share = balance_loss(probabilities, index, None)
                self.z_loss = logits.logsumexp(-1).square().mean()
            weights = self.experts.gate_up_proj, self.experts.down_proj
            out = GroupedExperts.apply(flat, scores, index, *weights, True)
        return out.view_as(x)


class Windows:
    """Windows of context + 1 tokens over the training stream, in an order fixed by seed and epoch.

    ``streams`` are (tokens, repeats) pairs: a stream is seen ``repeats`` times an epoch, each time cut at another
    offset.
    """

    def __init__(self, streams: list[tuple[Tensor, int]], settings: OlmoeSettings, seed: int):
        self.streams, self.context, self.batch, self.seed = streams, settings.context, settings.batch, seed
        self.epoch, self.order = -1, self._deal(0)

    def _deal(self, epoch: int) -> list[tuple[int, int]]:
        """(stream, start) of every window of one epoch."""
        chance = random.Random(self.seed * 1000 + epoch)
        order = []
        for number, (tokens, repeats) in enumerate(self.streams):
            for _ in range(repeats):
                offset = chance.randrange(self.context)
                order += [(number, s) for s in range(offset, len(tokens) - self.context - 1, self.context)]
        chance.shuffle(order)
        return order

    def at(self, step: int) -> Tensor:
        """int64 [batch, context + 1] of this step."""
        epoch, place = divmod(step, len(self.order) // self.batch)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self._deal(epoch)
        chosen = self.order[place * self.batch : (place + 1) * self.batch]
        return torch.stack([self.streams[n][0][s : s + self.context + 1] for n, s in chosen]).long()


class OlmoeTask:
    """An OLMoE model, its training streams and its held-out text."""

    def __init__(
        self,
        name: str,
        settings: OlmoeSettings,
        tokenizer: Tokenizer,
        streams: list[tuple[Tensor, int]],
        heldout: str,
        seed: int,
    ):
        self.name, self.settings, self.tokenizer = name, settings, tokenizer
        self.config = config_of(settings, tokenizer.get_vocab_size())
        self.model = OlmoeForCausalLM(self.config)
        self.model.set_attn_implementation(attention.register())
        self.blocks = []
        for layer in self.model.model.layers:
            nn.init.normal_(layer.mlp.gate.weight, std=0.02)
            layer.mlp = TrainingBlock(layer.mlp, settings.top_k)
            self.blocks.append(layer.mlp)
        self.windows = Windows(streams, settings, seed)
        self.heldout_words = len(heldout.split())
        self.heldout = torch.tensor(tokenizer.encode(heldout).ids)

    def _cross(self, window: Tensor) -> Tensor:
        """Mean cross-entropy (nats a token) of windows [batch, length + 1]."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=window[:, :-1], use_cache=False).last_hidden_state
        return ChunkedCross.apply(hidden.float().flatten(0, 1), self.model.lm_head.weight, window[:, 1:].flatten(), 0.0)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy plus balance and z losses; the log gets the plain parts and the busiest expert's share."""
        cross = self._cross(self.windows.at(step))
        balance = torch.stack([block.balance for block in self.blocks]).mean()
        z_loss = torch.stack([block.z_loss for block in self.blocks]).mean()
        total = cross + self.settings.balance * balance + self.settings.z_loss * z_loss
        share = max(float(block.share.max()) for block in self.blocks)
        return total, {"cross": float(cross.detach()), "balance": float(balance.detach()), "max_share": share}

    def evaluate(self, tokens: int = 65536) -> dict[str, float]:
        """Cross-entropy and word-level perplexity on the start of the held-out text, plain windows."""
        span = self.settings.context
        usable = min(tokens, len(self.heldout) - 1) // span
        total = 0.0
        for start in range(0, usable * span, 16 * span):
            ids = self.heldout[start : min(start + 16 * span, usable * span) + 1]
            window = torch.stack([ids[i : i + span + 1] for i in range(0, len(ids) - 1, span)])
            with torch.no_grad():
                total += float(self._cross(window)) * window.shape[0] * span
        cross = total / (usable * span)
        per_word = cross * len(self.heldout) / self.heldout_words
        return {"heldout_cross": cross, "heldout_word_perplexity": math.exp(per_word)}

    def export(self, folder: Path) -> None:
        """Write configuration, bf16 weights and tokenizer in the Hugging Face layout."""
        model = OlmoeForCausalLM(self.config)
        model.load_state_dict(self.model.state_dict())
        model.generation_config = GenerationConfig(
            pad_token_id=PAD_ID, eos_token_id=EOS_ID, max_new_tokens=64, num_beams=1, do_sample=False
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        vocabulary.save(self.tokenizer, folder, self.settings.context, truncate=False)
