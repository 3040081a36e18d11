"""Switch Transformers: the encoder–decoder family of the reference models."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from recipes.train import attention, vocabulary
from recipes.train.cross import ChunkedCross
from recipes.train.grouped import GroupedExperts, RestrainedExperts, balance_loss
from recipes.train.precision import lowered
from recipes.train.restraint import Restraint, Watch

PAD_ID, EOS_ID = 0, 1
SHORT = 36  # tokens
Ids = array  # of token ids, 16 bits each
Pair = tuple[Ids, Ids]  # input and target


@dataclass(frozen=True)
class SwitchSettings:
    """Shape and losses of one model; lengths in tokens."""

    d_model: int
    d_ff: int
    d_kv: int
    layers: int  # of the encoder and of the decoder
    heads: int
    experts: int
    batch: int  # examples a step
    max_input: int
    max_target: int
    sparse_every: int = 1  # 2: every second layer has experts, the others one network
    short_steps: int = 0  # at first, whose examples have at most SHORT tokens: copying is learnt sooner on them
    dropout: float = 0.0
    balance: float = 0.05
    z_loss: float = 1e-4
    smoothing: float = 0.05
    restraint: Restraint | None = None  # how few of the experts' neurons are to fire


def config_of(settings: SwitchSettings, vocab: int) -> SwitchTransformersConfig:
    """Hugging Face configuration without router noise and with room for all tokens."""
    return SwitchTransformersConfig(
        vocab_size=vocab,
        d_model=settings.d_model,
        d_ff=settings.d_ff,
        d_kv=settings.d_kv,
        num_layers=settings.layers,
        num_decoder_layers=settings.layers,
        num_sparse_encoder_layers=settings.layers // settings.sparse_every,
        num_sparse_decoder_layers=settings.layers // settings.sparse_every,
        num_heads=settings.heads,
        num_experts=settings.experts,
        expert_capacity=512,
        router_jitter_noise=0.0,
        dropout_rate=settings.dropout,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=PAD_ID,
        tie_word_embeddings=True,
    )


class TrainingBlock(nn.Module):
    """A sparse Switch layer with stacked expert weights; takes the place of ``SwitchTransformersSparseMLP``."""

    def __init__(self, original: nn.Module):
        super().__init__()
        experts = list(original.experts.values())
        width = original.router.classifier.weight.shape[1]
        router = torch.randn_like(original.router.classifier.weight) * width**-0.5
        self.router = nn.Parameter(router)  # [experts, d_model]
        self.up = nn.Parameter(torch.stack([expert.wi.weight.detach() for expert in experts]))
        self.down = nn.Parameter(torch.stack([expert.wo.weight.detach() for expert in experts]))
        self.mask: Tensor | None = None  # [tokens], true where a token counts for the balance
        self.balance: Tensor | None = None
        self.z_loss: Tensor | None = None
        self.share: Tensor | None = None
        self.restrained = False
        self.spread: Tensor | None = None
        self.firing: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, d_model] → the same."""
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(flat.float(), self.router)
            probabilities = logits.softmax(-1)
            score, index = probabilities.max(-1, keepdim=True)
            if self.training:
                self.balance, self.share = balance_loss(probabilities, index, self.mask)
                self.z_loss = logits.logsumexp(-1).square().mean()
            inputs = flat, score, index, self.up, self.down
            if self.training and self.restrained:
                out, self.spread, self.firing = RestrainedExperts.apply(*inputs)
            else:
                out = GroupedExperts.apply(*inputs, False)
        return out.view_as(x)


def replace_blocks(
    model: SwitchTransformersForConditionalGeneration,
) -> tuple[list[TrainingBlock], list[TrainingBlock]]:
    """Put training blocks into the sparse layers; returns those of the encoder and of the decoder."""
    stacks: list[list[TrainingBlock]] = []
    for stack in (model.encoder, model.decoder):
        parts = [layer.layer[-1] for layer in stack.block if layer.is_sparse]
        for part in parts:
            part.mlp = TrainingBlock(part.mlp)
        stacks.append([part.mlp for part in parts])
    return stacks[0], stacks[1]


def plain_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of the Hugging Face model from that of the training model."""
    plain: dict[str, Tensor] = {}
    for name, value in state.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".mlp"):
            plain[name] = value
        elif last == "router":
            plain[f"{stem}.router.classifier.weight"] = value
        else:
            part = {"up": "wi", "down": "wo"}[last]
            for expert, weight in enumerate(value):
                plain[f"{stem}.experts.expert_{expert}.{part}.weight"] = weight
    return plain


def stacked_state(plain: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The other way: what the training model calls ``names``, from the state dict of the Hugging Face model."""
    stacked: dict[str, Tensor] = {}
    for name in names:
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".mlp"):
            stacked[name] = plain[name]
        elif last == "router":
            stacked[name] = plain[f"{stem}.router.classifier.weight"]
        else:
            part, found = {"up": "wi", "down": "wo"}[last], list[Tensor]()
            while (weight := plain.get(f"{stem}.experts.expert_{len(found)}.{part}.weight")) is not None:
                found.append(weight)
            stacked[name] = torch.stack(found)
    return stacked


class Buckets:
    """Batches of examples of like length, in an order that depends on the seed and the epoch only."""

    def __init__(self, pairs: list[Pair], batch: int, seed: int):
        self.pairs, self.batch, self.seed = pairs, batch, seed
        self.epoch, self.batches = -1, self._deal(0)

    def _deal(self, epoch: int) -> list[list[int]]:
        """Index lists of one epoch: sorted by length with noise among equals, cut, shuffled."""
        chance = random.Random(self.seed * 1000 + epoch)
        keys = [(len(source), len(target), chance.random()) for source, target in self.pairs]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        cut = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        chance.shuffle(cut)
        return cut

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Padded inputs [batch, in] and targets [batch, out] of this step."""
        epoch, place = divmod(step, len(self.batches))
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self._deal(epoch)
        chosen = [self.pairs[i] for i in self.batches[place]]
        return pad([pair[0] for pair in chosen]), pad([pair[1] for pair in chosen])


class ShortFirst:
    """For ``steps`` steps those pairs alone whose sides have at most SHORT tokens, then all: see Buckets."""

    def __init__(self, pairs: list[Pair], batch: int, seed: int, steps: int):
        self.steps, self.all = steps, Buckets(pairs, batch, seed)
        self.short = Buckets([pair for pair in pairs if max(map(len, pair)) <= SHORT], batch, seed) if steps else None

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Padded inputs [batch, in] and targets [batch, out] of this step."""
        if self.short is not None and step < self.steps:
            return self.short.at(step)
        return self.all.at(step - self.steps)


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of ids as one int64 tensor, filled with the pad id on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in rows])


def rouge2(prediction: str, target: str) -> float:
    """ROUGE-2 (F1): of pairs of words, whatever their case and marks."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge2"]).score(target, prediction)["rouge2"].fmeasure


class SwitchTask:
    """A Switch model, its training pairs and its held-out rows, whose outputs are judged by ``metric``."""

    def __init__(
        self,
        name: str,
        settings: SwitchSettings,
        tokenizer: Tokenizer,
        train: list[dict[str, str]],
        heldout: list[dict[str, str]],
        seed: int,
        metric: Callable[[str, str], float] = rouge2,
    ):
        self.name, self.settings, self.tokenizer, self.heldout = name, settings, tokenizer, heldout
        self.metric = metric
        self.kept: dict[str, float] = {}
        self.config = config_of(settings, tokenizer.get_vocab_size())
        self.model = SwitchTransformersForConditionalGeneration(self.config)
        self.model.set_attn_implementation(attention.register())
        self.encoder_blocks, self.decoder_blocks = replace_blocks(self.model)
        self.watch = Watch(settings.restraint, self.encoder_blocks + self.decoder_blocks, self.kept)
        self.batches = ShortFirst(self._encode(train), settings.batch, seed, settings.short_steps)

    def begin_with(self, folder: Path) -> None:
        """Take the weights of an exported model of the same shape."""
        plain = SwitchTransformersForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).state_dict()
        self.model.load_state_dict(stacked_state(plain, self.model.state_dict()))

    def _encode(self, rows: list[dict[str, str]]) -> list[Pair]:
        """Token ids of all rows, cut to the longest lengths; the end token stays."""
        sources = self._ids([row["input"] for row in rows], self.settings.max_input)
        return list(zip(sources, self._ids([row["target"] for row in rows], self.settings.max_target), strict=True))

    def _ids(self, texts: list[str], limit: int) -> list[Ids]:
        """A thousand texts at a time: what the tokenizer says of them takes a hundred times the memory of the ids."""
        parts = (self.tokenizer.encode_batch(texts[start : start + 1000]) for start in range(0, len(texts), 1000))
        return [array("H", [*item.ids[:-1][: limit - 1], EOS_ID]) for part in parts for item in part]

    def _states(self, source: Tensor, target: Tensor) -> Tensor:
        """Scaled decoder states under teacher forcing at the positions that count: [tokens, d_model]."""
        source_mask, target_mask = source != PAD_ID, target != PAD_ID
        for blocks, mask in ((self.encoder_blocks, source_mask), (self.decoder_blocks, target_mask)):
            for block in blocks:
                block.mask = mask.reshape(-1)
        shifted = F.pad(target[:, :-1], (1, 0), value=PAD_ID)
        with lowered():
            encoded = self.model.encoder(input_ids=source, attention_mask=source_mask.long())
            decoded = self.model.decoder(
                input_ids=shifted,
                encoder_hidden_states=encoded.last_hidden_state,
                encoder_attention_mask=source_mask.long(),
                use_cache=False,
            )
        return decoded.last_hidden_state[target_mask].float() * self.settings.d_model**-0.5

    def _cross(self, source: Tensor, target: Tensor, smoothing: float) -> Tensor:
        """Mean cross-entropy (nats a target token)."""
        states = self._states(source, target)
        return ChunkedCross.apply(states, self.model.shared.weight, target[target != PAD_ID], smoothing)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Smoothed cross-entropy plus balance and z losses; the log gets the plain parts and the busiest share."""
        self.watch.begin(step)
        cross = self._cross(*self.batches.at(step), self.settings.smoothing)
        extra, figures = self.watch.end()
        blocks = self.encoder_blocks + self.decoder_blocks
        balance = torch.stack([block.balance for block in blocks]).mean()
        z_loss = torch.stack([block.z_loss for block in blocks]).mean()
        total = cross + self.settings.balance * balance + self.settings.z_loss * z_loss + extra
        shares = [float(block.share.max()) for block in blocks]
        return total, {
            "cross": float(cross.detach()),
            "balance": float(balance.detach()),
            "max_share": max(shares),
            **figures,
        }

    def generate(self, inputs: list[str], batch: int = 250) -> list[str]:
        """Greedy outputs for inputs, in their order."""
        rows = self._encode([{"input": text, "target": ""} for text in inputs])
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        outputs = [""] * len(rows)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            source = pad([rows[i][0] for i in chosen])
            with torch.no_grad(), lowered():
                ids = self.model.generate(
                    source, attention_mask=(source != PAD_ID).long(), max_new_tokens=self.settings.max_target
                )
            for i, text in zip(chosen, self.tokenizer.decode_batch(ids.tolist()), strict=True):
                outputs[i] = text
        return outputs

    def evaluate(self) -> dict[str, Any]:
        """Share of exact outputs, metric and cross-entropy per token on the held-out rows; three samples."""
        outputs = self.generate([row["input"] for row in self.heldout])
        targets = [row["target"] for row in self.heldout]
        scores = [self.metric(o, t) for t, o in zip(targets, outputs, strict=True)]
        exact = [t == o for t, o in zip(targets, outputs, strict=True)]
        return {
            "heldout_exact": sum(exact) / len(exact),
            f"heldout_{self.metric.__name__}": sum(scores) / len(scores),
            "heldout_cross": self._heldout_cross(),
            "samples": outputs[:3],
        }

    def _heldout_cross(self) -> float:
        """Cross-entropy per target token (nats) on the held-out rows."""
        pairs, total, count = self._encode(self.heldout), 0.0, 0
        for start in range(0, len(pairs), 250):
            part = pairs[start : start + 250]
            target = pad([pair[1] for pair in part])
            tokens = int((target != PAD_ID).sum())
            with torch.no_grad():
                total += float(self._cross(pad([pair[0] for pair in part]), target, 0.0)) * tokens
            count += tokens
        return total / count

    def export(self, folder: Path) -> None:
        """Write configuration, bf16 weights and tokenizer in the Hugging Face layout."""
        model = SwitchTransformersForConditionalGeneration(self.config)
        model.load_state_dict(plain_state(self.model.state_dict()))
        model.generation_config = GenerationConfig(
            decoder_start_token_id=PAD_ID,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
            max_new_tokens=self.settings.max_target,
            num_beams=1,
            do_sample=False,
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        vocabulary.save(self.tokenizer, folder, self.settings.max_input, truncate=True)
