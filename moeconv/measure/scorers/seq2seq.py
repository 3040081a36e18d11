"""An encoder-decoder model run in parts: encode, decode given text, go on writing from any point of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.head import Head
from moeconv.measure.scorers.stacks import After, StackRunner
from moeconv.source.experts import Substitute

CROWDED = 0.7  # finished rows leave the batch when no more than this share of it is still being written


class Seq2Seq:
    def __init__(self, subject: Subject) -> None:
        self.spec = subject.spec
        self.calls = subject.calls
        self.head = Head(subject.model, subject.spec)
        self.encoder = StackRunner(subject.model, subject.family, "encoder")
        self.decoder = StackRunner(subject.model, subject.family, "decoder")
        self.start_token = subject.spec.tokens.start or 0

    def encode(self, inputs: dict[str, Tensor], mask: Tensor, start: int = 0, after: After | None = None) -> Tensor:
        """`inputs`: input_ids [rows, tokens], or inputs_embeds for what enters the layer `start`; `mask` [rows, tokens]
        is 1 where there is a token. → [rows, tokens, d_model]"""
        with self.calls.only(mask.bool()):
            return self.encoder.run({**inputs, "attention_mask": mask}, start, after)

    def decode(
        self,
        inputs: dict[str, Any],
        active: Tensor,
        encoded: Tensor,
        mask: Tensor,
        start: int = 0,
        after: After | None = None,
        substitute: Substitute | None = None,
    ) -> Tensor:
        """The same for the decoder, given `encoded` [rows, source tokens, d_model]; experts run where `active`."""
        attended = {"encoder_hidden_states": encoded, "encoder_attention_mask": mask}
        with self.calls.only(active, substitute):
            return self.decoder.run({**inputs, **attended}, start, after)

    def chosen(self, best: Tensor, position: Tensor) -> Tensor:
        """What is written where these tokens [rows] are the likeliest: at position 0 what the model begins with."""
        first = self.spec.tokens.first
        return best if first is None else best.where(position > 0, first)

    def fed(self, outputs: Tensor) -> Tensor:
        """What the decoder reads in order to predict `outputs` [rows, tokens] (below 0: nothing)."""
        start = torch.full((len(outputs), 1), self.start_token)
        return torch.cat([start, outputs[:, :-1].clamp(min=0)], dim=1)

    def write(
        self,
        encoded: Tensor,
        mask: Tensor,
        prefixes: Sequence[Sequence[int]],
        max_new_tokens: int,
        substitute: Substitute | None = None,
    ) -> list[list[int]]:
        """Greedy output of each row after its prefix, which is part of what is returned; the end mark too."""
        with self.calls.writing(len(prefixes)) as keep:
            return self._write(encoded, mask, prefixes, max_new_tokens, substitute, keep)

    def _write(
        self, encoded: Tensor, mask: Tensor, prefixes: Sequence[Sequence[int]], max_new_tokens: int,
        substitute: Substitute | None, keep: Callable[[Tensor], None],
    ) -> list[list[int]]:  # fmt: skip
        from transformers import DynamicCache, EncoderDecoderCache

        count, begin = len(prefixes), min(map(len, prefixes))
        written = padded(prefixes, -1, max_new_tokens)
        stops = torch.tensor(self.spec.tokens.eos)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        rows, busy = torch.arange(count), torch.ones(count, dtype=torch.bool)
        tokens = self.fed(written[:, : begin + 1])
        for step in range(begin, max_new_tokens):
            hidden = self.decode(
                {"input_ids": tokens, "past_key_values": cache, "use_cache": True},
                busy[:, None].expand_as(tokens), encoded, mask, substitute=substitute,
            )  # fmt: skip
            known = written[rows, step]
            token = torch.where(known >= 0, known, self.chosen(self.head.best(hidden[:, -1]), torch.tensor(step)))
            written[rows, step] = token.masked_fill(~busy, -1)
            busy = busy & ~torch.isin(token, stops)
            if not busy.any():
                break
            if busy.float().mean() <= CROWDED:
                rows, token, encoded, mask = rows[busy], token[busy], encoded[busy], mask[busy]
                cache.batch_select_indices(busy.nonzero()[:, 0])
                keep(busy)
                if substitute is not None:
                    substitute = replace(substitute, probe_of_row=substitute.probe_of_row[busy])
                busy = busy[busy]
            tokens = token[:, None]
        return [[token for token in row if token >= 0] for row in written.tolist()]

    def resumable(self, max_new_tokens: int) -> bool:
        """A pass over a whole output drops tokens beyond an expert's capacity; writing token by token does not."""
        capacity = self.spec.moe.router.capacity
        return capacity is None or capacity >= max_new_tokens


def padded(rows: Sequence[Sequence[int]], fill: int, width: int | None = None) -> Tensor:
    """Token lists → [rows, width], filled up on the right."""
    wide = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[fill] * (wide - len(row))] for row in rows], dtype=torch.long)
