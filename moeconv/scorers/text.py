"""Likelihood of running text, in windows, or of the choices that may follow a text: for decoder-only models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from moeconv.calibration import Sample
from moeconv.errors import CalibrationError
from moeconv.metrics import Metric
from moeconv.scorers import Routed, Scores, Subject
from moeconv.scorers.head import Head, ReferenceRows
from moeconv.scorers.items import I64, Items, tally, texts_of
from moeconv.scorers.stacks import After, StackRunner

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Texts:
    """Token rows of one width, filled up on the right. `scored` says at which places the next token counts."""

    ids: Tensor  # [rows, width]
    real: Tensor  # [rows, width]: there is a token
    scored: Tensor  # [rows, width]; never in the last column
    items: Items
    samples: tuple[Sample, ...]  # empty for running text, where a window is a sample
    groups: I64  # [samples]: windows that begin in one row of the text belong together

    def select(self, windows: Sequence[int]) -> Texts:
        """Only these rows, each of which is a sample."""
        rows = list(windows)
        items = Items(np.arange(len(rows)), self.items.right[rows], self.items.tokens[rows], self.items.words[rows])
        return Texts(self.ids[rows], self.real[rows], self.scored[rows], items, (), self.groups[rows])

    def targets(self) -> Tensor:
        """The token that follows each place. [rows, width]"""
        return self.ids.roll(-1, dims=1)


def windows_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> Texts:
    """Samples in their order, as one text, cut into windows of `context` tokens.

    Windows don't overlap and the first token of each is context only. Words are what white space separates, counted
    where they end, so that the figures of different tokenizers can be compared.
    """
    rows = [sample.source if sample.source.endswith("\n") else sample.source + "\n" for sample in samples]
    text = "".join(rows)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids, offsets = encoding.ids, encoding.offsets  # each access makes the whole list anew
    count = len(ids) // context
    if count < 2:
        raise CalibrationError(
            f"the text has {len(ids)} tokens, too few for two windows of {context}: give more, or a smaller --context"
        )
    ends = np.array([match.end() for match in re.finditer(r"\S+", text)])
    starts_at = np.array([offsets[i * context + 1][0] for i in range(count)])
    stops_at = np.array([offsets[(i + 1) * context - 1][1] for i in range(count)])
    words = np.searchsorted(ends, stops_at, side="right") - np.searchsorted(ends, starts_at, side="right")
    windows = torch.tensor(ids[: count * context]).view(count, context)
    scored = torch.ones_like(windows, dtype=torch.bool)
    scored[:, -1] = False
    tokens = np.full(count, context - 1.0)
    items = Items(np.arange(count), np.ones(count, dtype=bool), tokens, words.astype(np.float64))
    groups = np.searchsorted(np.cumsum([len(row) for row in rows]), starts_at, side="right")
    return Texts(windows, torch.ones_like(scored), scored, items, (), groups)


def choices_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> Texts:
    """Each sample's text followed by each of its choices; only the choice's tokens count. A text too long for
    `context` tokens loses its beginning."""
    texts, owner, right = texts_of(samples)
    rows, starts = [], []
    for text, at in zip(texts, owner, strict=True):
        source = samples[at].source
        joined = source + text if source[-1:].isspace() or text[:1].isspace() else f"{source} {text}"
        encoding = tokenizer.encode(joined, add_special_tokens=False)
        first = next(place for place, (_, stop) in enumerate(encoding.offsets) if stop > len(source))
        cut = max(0, len(encoding.ids) - context)
        rows.append(encoding.ids[cut:])
        starts.append(max(1, first - cut))
    width = max(map(len, rows))
    ids, real, scored = torch.zeros((3, len(rows), width), dtype=torch.long)
    for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[place, : len(row)] = torch.tensor(row)
        real[place, : len(row)] = 1
        scored[place, start - 1 : len(row) - 1] = 1
    words = np.array([max(1, len(text.split())) for text in texts], dtype=np.float64)
    items = Items(owner, right, scored.sum(dim=1).double().numpy(), words)
    return Texts(ids, real.bool(), scored.bool(), items, tuple(samples), np.arange(len(samples)))


class TextScorer:
    """Scores every row of `texts`; a sample is a window, or a text with its choices."""

    def __init__(self, subject: Subject, texts: Texts, metric: Metric) -> None:
        self.subject = subject
        self.texts = texts
        self.metric = metric
        self.stack = StackRunner(subject.model, subject.arch, "decoder")
        self.head = Head(subject.model, subject.spec)
        self.reference: ReferenceRows | None = None  # of the scored places, row by row

    @property
    def n_samples(self) -> int:
        return len(self.texts.samples) or len(self.texts.ids)

    @torch.inference_mode()
    def score(self, *, as_reference: bool = False) -> Scores:
        hidden = torch.cat([self.run(batch)[self.texts.scored[batch]] for batch in self.batches()])
        if as_reference:
            self.reference = self.head.reference(hidden, self.subject.stored_head)
        against = None if as_reference else self.reference
        nats, kls = self.head.judge(hidden, self.texts.targets()[self.texts.scored], against)
        return self.scores_of(self.per_row(nats), self.per_row(kls))

    def per_row(self, values: Tensor) -> Tensor:
        """Values of the scored places, row by row → their sums [rows], in float64."""
        placed = torch.zeros(self.texts.scored.shape, dtype=torch.float64)
        placed[self.texts.scored] = values.double()
        return placed.sum(dim=1)

    def scores_of(self, nats: Tensor, kls: Tensor) -> Scores:
        """Sums of each row [rows] → Scores."""
        return tally(self.metric, self.texts.items, self.texts.samples, nats.numpy(), kls.numpy())

    def batches(self) -> Iterator[Tensor]:
        """Places of the rows of each batch."""
        return iter(torch.split(torch.arange(len(self.texts.ids)), max(1, BATCH_TOKENS // self.texts.ids.shape[1])))

    def run(self, rows: Tensor, after: After | None = None) -> Tensor:
        """Final hidden states [rows, width, d_model] of these rows."""
        with self.subject.calls.only(self.texts.real[rows]):
            return self.stack.run({"input_ids": self.texts.ids[rows]}, after=after)

    @torch.inference_mode()
    def routes(self) -> Iterator[Routed]:
        """What every layer's router chooses, batch by batch; each row counts as a sample."""
        for batch in self.batches():
            with self.subject.calls.recording() as seen:
                self.run(batch)
            real = self.texts.real[batch]
            experts = {place: call.chosen[real.flatten()] for place, call in seen.items()}
            yield Routed(experts, batch.tolist(), {"decoder": real.sum(dim=1).tolist()})
