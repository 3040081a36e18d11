"""What the decoders among the reference models share: windows of running text, losses, perplexity, export."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from recipes.train import attention, vocabulary
from recipes.train.cross import ChunkedCross
from recipes.train.precision import lowered

PAD_ID, EOS_ID = 0, 1
Streams = list[tuple[Tensor, int]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How text is read: windows of ``context`` tokens, ``batch`` of them a step."""

    context: int
    batch: int


class Block(Protocol):
    """What the task asks of an expert layer after a forward pass in training."""

    penalty: Tensor | None  # what its router adds to the loss
    balance: Tensor | None  # see balance_loss: 1 is even
    share: Tensor | None  # each expert's share of the choices


class Windows:
    """Windows of context + 1 tokens over the training stream, in an order fixed by seed and epoch.

    ``streams`` are (tokens, repeats) pairs: a stream is seen ``repeats`` times an epoch, each time cut at another
    offset.
    """

    def __init__(self, streams: Streams, reading: Reading, seed: int):
        self.streams, self.context, self.batch, self.seed = streams, reading.context, reading.batch, seed
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


@dataclass(frozen=True)
class Text:
    """What a decoder is trained on and judged by: a tokenizer, training streams (see Windows), held-out text."""

    tokenizer: Tokenizer
    streams: Streams
    heldout: str


class DecoderTask:
    """A decoder, its training streams and its held-out text.

    ``replace`` puts training blocks into a fresh model of the Hugging Face class ``model`` and returns them; names and
    shapes of all weights stay as they were.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        replace: Callable[[nn.Module], Sequence[Block]],
        reading: Reading,
        text: Text,
        seed: int,
    ):
        self.name, self.model, self.context, self.tokenizer = name, model, reading.context, text.tokenizer
        self.model.set_attn_implementation(attention.register())
        self.blocks = replace(self.model)
        self.kept: dict[str, float] = {}
        self.windows = Windows(text.streams, reading, seed)
        self.heldout_words = len(text.heldout.split())
        self.heldout = torch.tensor(text.tokenizer.encode(text.heldout).ids)

    def _cross(self, window: Tensor) -> Tensor:
        """Mean cross-entropy (nats a token) of windows [batch, length + 1]."""
        with lowered():
            hidden = self.model.model(input_ids=window[:, :-1], use_cache=False).last_hidden_state
        return ChunkedCross.apply(hidden.float().flatten(0, 1), self.model.lm_head.weight, window[:, 1:].flatten(), 0.0)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy plus what routers add; the log gets the plain parts and the busiest expert's share."""
        cross = self._cross(self.windows.at(step))
        total = cross + torch.stack([block.penalty for block in self.blocks]).mean()
        balance = torch.stack([block.balance for block in self.blocks]).mean()
        share = max(float(block.share.max()) for block in self.blocks)
        return total, {"cross": float(cross.detach()), "balance": float(balance.detach()), "max_share": share}

    def evaluate(self, tokens: int = 65536) -> dict[str, float]:
        """Cross-entropy and word-level perplexity on the start of the held-out text, plain windows."""
        span = self.context
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
        """Write configuration, bf16 weights (buffers in fp32) and tokenizer in the Hugging Face layout."""
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        model = type(self.model)(config)
        model.load_state_dict(self.model.state_dict())
        model.generation_config = GenerationConfig(
            pad_token_id=PAD_ID, eos_token_id=EOS_ID, max_new_tokens=64, num_beams=1, do_sample=False
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        model.config.dtype = torch.bfloat16
        model.save_pretrained(folder)
        vocabulary.save(self.tokenizer, folder, self.context, truncate=False)
