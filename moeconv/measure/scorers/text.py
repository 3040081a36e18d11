"""Likelihood of running text, in windows, or of the choices that may follow a text: for decoder-only models."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moeconv.calibration import Sample, runs
from moeconv.errors import CalibrationError
from moeconv.measure.metrics import Metric
from moeconv.measure.scorers import Layers, Routed, Scores, Subject
from moeconv.measure.scorers.head import Head, ReferenceRows
from moeconv.measure.scorers.items import I64, Items, documents_of, tally, texts_of
from moeconv.measure.scorers.stacks import After, StackRunner
from moeconv.measure.tokenizer import Tokenizer

BATCH_TOKENS = 4096
REST = 0.25  # of a window; what a document has beyond its whole windows is scored from here on
_UNSPACED = ("THAI", "LAO ", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE")  # scripts that are not wide
RUNS = 64  # of windows, where no documents are told: twice as many as a promise takes


@dataclass(frozen=True)
class Texts:
    """Token rows of one width, filled up on the right. `scored` says at which places the next token counts."""

    ids: Tensor  # [rows, width]
    real: Tensor  # [rows, width]: there is a token
    scored: Tensor  # [rows, width]; never in the last column
    items: Items
    samples: tuple[Sample, ...]  # empty for running text, where a window is a sample
    groups: I64  # [samples]: the document of each, as a number

    def select(self, windows: Sequence[int]) -> Texts:
        """Only these rows, each of which is a sample."""
        rows = list(windows)
        items = Items(np.arange(len(rows)), self.items.right[rows], self.items.tokens[rows], self.items.words[rows])
        return Texts(self.ids[rows], self.real[rows], self.scored[rows], items, (), self.groups[rows])

    def targets(self) -> Tensor:
        """The token that follows each place. [rows, width]"""
        return self.ids.roll(-1, dims=1)


def windows_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> Texts:
    """Samples in their order, as one text, cut into windows of `context` tokens, no window across two documents.

    Documents of less than a window are joined with what follows, and then are one. The first token of a document is
    context only, as is that of each window. What a document has after its last whole window is scored in a window that
    reaches back for its context, where it is REST of a window at least; shorter rests are left out, as is that of text
    that tells no documents. The windows of such text are taken in RUNS runs, which count as its documents. Words
    are what white space separates, counted where they end, so that the figures of different tokenizers can be compared.
    """
    rows = [sample.source if sample.source.endswith("\n") else sample.source + "\n" for sample in samples]
    text = "".join(rows)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids, offsets = np.array(encoding.ids), np.array(encoding.offsets).reshape(-1, 2)
    ends = np.array([match.end() for match in re.finditer(r"\S+", text)])
    stretches = _stretches(np.searchsorted(offsets[:, 0], _borders(samples, rows)).tolist(), len(ids), context)
    told = samples[0].document != ""
    windows, fresh, owner = _windows(stretches, context, rests=told)
    if len(windows) < 2:
        raise CalibrationError(
            f"the text has {len(ids)} tokens, too few for two windows of {context}: give more, or a smaller --context"
        )
    starts_at, stops_at = offsets[windows + context - fresh, 0], offsets[windows + context - 1, 1]
    words = np.searchsorted(ends, stops_at, side="right") - np.searchsorted(ends, starts_at, side="right")
    places = np.arange(context)
    found = torch.from_numpy(ids[windows[:, None] + places])
    scored = torch.from_numpy((places >= context - 1 - fresh[:, None]) & (places < context - 1))
    count = len(windows)
    items = Items(np.arange(count), np.ones(count, dtype=bool), fresh.astype(np.float64), words.astype(np.float64))
    groups = owner if told else np.array(runs(count, RUNS))
    return Texts(found, torch.ones_like(scored), scored, items, (), groups)


def _borders(samples: Sequence[Sample], rows: Sequence[str]) -> list[int]:
    """Where documents begin, the first left out, in characters of the joined rows."""
    at, found = 0, []
    for place, row in enumerate(rows):
        if place and samples[place].document != samples[place - 1].document:
            found.append(at)
        at += len(row)
    return found


def _stretches(borders: Sequence[int], tokens: int, context: int) -> list[tuple[int, int]]:
    """First and last token (exclusive) of each document, short ones joined to `context` tokens or more."""
    found, start = [], 0
    for border in borders:
        if border - start >= context:
            found.append((start, border))
            start = border
    if found and tokens - start < context:
        start = found.pop()[0]
    return [*found, (start, tokens)]


def _windows(stretches: Sequence[tuple[int, int]], context: int, *, rests: bool) -> tuple[I64, I64, I64]:
    """For each window its first token, how many of its last tokens are scored, and the stretch that it lies in."""
    windows = []
    for owner, (start, stop) in enumerate(stretches):
        whole, rest = divmod(stop - start, context)
        windows += [(start + place * context, context - 1, owner) for place in range(whole)]
        if rests and whole and rest >= REST * context:
            windows.append((stop - context, rest, owner))
    first, fresh, owners = np.array(windows, dtype=np.int64).reshape(-1, 3).T
    return first, fresh, owners


def _spaced(letter: str) -> bool:
    """Whether a space goes between this letter and another word."""
    name = unicodedata.name(letter, "")
    wide = unicodedata.east_asian_width(letter) in "WF" and unicodedata.category(letter)[0] in "LP"
    return not (letter.isspace() or name.startswith(_UNSPACED) or (wide and not name.startswith("HANGUL")))


def choices_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> Texts:
    """Each sample's text followed by each of its choices, with a space between where their scripts have some; only the
    choice's tokens count. A text too long for `context` tokens loses its beginning."""
    texts, owner, right = texts_of(samples)
    rows, starts = [], []
    for text, at in zip(texts, owner, strict=True):
        source = samples[at].source
        joined = f"{source} {text}" if all(map(_spaced, source[-1:] + text[:1])) else source + text
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
    return Texts(ids, real.bool(), scored.bool(), items, tuple(samples), documents_of(samples))


class TextScorer:
    """Scores every row of `texts`; a sample is a window, or a text with its choices."""

    def __init__(self, subject: Subject, texts: Texts, metric: Metric) -> None:
        self.subject = subject
        self.texts = texts
        self.metric = metric
        self.stack = StackRunner(subject.model, subject.family, "decoder")
        self.reference: ReferenceRows | None = None  # of the scored places, row by row

    @property
    def n_samples(self) -> int:
        return len(self.texts.samples) or len(self.texts.ids)

    @torch.inference_mode()
    def score(self, *, as_reference: bool = False) -> Scores:
        layers, what = self.subject.layers, "unquantised" if as_reference else "a plan"
        if layers is None:
            hidden = torch.cat([self.run(batch)[self.texts.scored[batch]] for batch in self.batches()])
        else:
            hidden = layers.finals(self.texts.ids, self.texts.real, self.texts.scored, what)
        with nullcontext(self.head) if layers is None else layers.head() as head:
            if as_reference:
                self.reference = head.reference(hidden, self.subject.stored_head)
            against = None if as_reference else self.reference
            nats, kls = head.judge(hidden, self.texts.targets()[self.texts.scored], against)
        return self.scores_of(self.per_row(nats), self.per_row(kls))

    @cached_property
    def head(self) -> Head:
        """That of a model in memory."""
        return Head(self.subject.model, self.subject.spec)

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
        if self.subject.layers is not None:
            yield self._layer_by_layer(self.subject.layers)
            return
        for batch in self.batches():
            with self.subject.calls.recording() as seen:
                self.run(batch)
            real = self.texts.real[batch]
            experts = {place: call.chosen[real.flatten()] for place, call in seen.items()}
            yield Routed(experts, batch.tolist(), {"decoder": real.sum(dim=1).tolist()})

    def _layer_by_layer(self, layers: Layers) -> Routed:
        ids, real = self.texts.ids, self.texts.real
        there = real.flatten()
        experts = {at: call.chosen[there] for at, call in layers.calls_of(ids, real, "routing")}
        return Routed(experts, list(range(len(ids))), {"decoder": real.sum(dim=1).tolist()})
