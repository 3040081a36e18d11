"""The scorers: of running text, of inputs with targets, of generated answers; and the choice of one for a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moeconv.calibration import Sample, Splits, runs
from moeconv.errors import CalibrationError, SettingsError
from moeconv.measure.metrics import Metric
from moeconv.measure.scorers import (
    I64,
    After,
    Head,
    Items,
    Layers,
    ReferenceRows,
    Routed,
    Scores,
    StackRunner,
    Subject,
    Tokenizer,
    documents_of,
    tally,
    texts_of,
)
from moeconv.source.experts import Substitute
from moeconv.tuned import said
from moert.pack.model_spec import ModelSpec, StackName

# Likelihood of running text, in windows, or of a text's possible continuations: for decoder-only models.

BATCH_TOKENS = 4096
REST = 0.25  # of a window: a document's rest beyond its whole windows is scored if it has at least this length
_UNSPACED = ("THAI", "LAO ", "KHMER", "MYANMAR", "TIBETAN", "JAVANESE", "BALINESE")  # scripts that are not wide
RUNS = 64  # of windows, in text without documents: twice as many as a promise takes


@dataclass(frozen=True)
class Texts:
    """Token rows of one width, padded on the right. `scored` marks the places whose next token counts."""

    ids: Tensor  # [rows, width]
    real: Tensor  # [rows, width]: there is a token
    scored: Tensor  # [rows, width]; never in the last column
    items: Items
    samples: tuple[Sample, ...]  # empty for running text, where a window is a sample
    groups: I64  # [samples]: the document of each, as a number

    def select(self, windows: Sequence[int]) -> Texts:
        """Returns these rows only, each of which is a sample."""
        rows = list(windows)
        items = Items(np.arange(len(rows)), self.items.right[rows], self.items.tokens[rows], self.items.words[rows])
        return Texts(self.ids[rows], self.real[rows], self.scored[rows], items, (), self.groups[rows])

    def targets(self) -> Tensor:
        """Returns the token that follows each place. [rows, width]"""
        return self.ids.roll(-1, dims=1)


def windows_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> Texts:
    """Returns the samples in their order, as one text, cut into windows of `context` tokens, no window across two
    documents.

    Documents shorter than a window are joined with the following one, and then are one. The first token of a document
    is context only, as is the first one of each window. The rest of a document after its last whole window is scored in
    a window that reaches back for its context if it is REST of a window at least; shorter rests are left out, and so is
    the rest of text without documents, whose windows are divided into RUNS runs, which count as its documents. Words
    are separated by white space and counted where they end, so that the figures of different tokenizers can be
    compared. Raises CalibrationError for text of fewer than two windows.
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
    """Returns the places where documents begin, the first left out, in characters of the joined rows."""
    at, found = 0, []
    for place, row in enumerate(rows):
        if place and samples[place].document != samples[place - 1].document:
            found.append(at)
        at += len(row)
    return found


def _stretches(borders: Sequence[int], tokens: int, context: int) -> list[tuple[int, int]]:
    """Returns the first and last token (exclusive) of each document, short ones joined to `context` tokens or more."""
    found, start = [], 0
    for border in borders:
        if border - start >= context:
            found.append((start, border))
            start = border
    if found and tokens - start < context:
        start = found.pop()[0]
    return [*found, (start, tokens)]


def _windows(stretches: Sequence[tuple[int, int]], context: int, *, rests: bool) -> tuple[I64, I64, I64]:
    """Returns for each window its first token, the number of its last tokens that are scored, and its stretch."""
    windows = []
    for owner, (start, stop) in enumerate(stretches):
        whole, rest = divmod(stop - start, context)
        windows += [(start + place * context, context - 1, owner) for place in range(whole)]
        if rests and whole and rest >= REST * context:
            windows.append((stop - context, rest, owner))
    first, fresh, owners = np.array(windows, dtype=np.int64).reshape(-1, 3).T
    return first, fresh, owners


def _spaced(letter: str) -> bool:
    """Returns whether the letter's script puts spaces between words."""
    name = unicodedata.name(letter, "")
    wide = unicodedata.east_asian_width(letter) in "WF" and unicodedata.category(letter)[0] in "LP"
    return not (letter.isspace() or name.startswith(_UNSPACED) or (wide and not name.startswith("HANGUL")))


def choices_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> Texts:
    """Returns each sample's text followed by each of its choices, with a space between if their scripts use spaces;
    only the choice's tokens count. A text too long for `context` tokens loses its beginning."""
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


KEPT_BYTES = 256 << 20
"""The most that the unquantized model's final states may take to be kept for another head; else they are computed
anew for each."""


def kept(original: Tensor) -> Tensor | None:
    return original if original.nbytes <= KEPT_BYTES else None


class TextScorer:
    """The scorer of every row of `texts`; a sample is a window, or a text with its choices."""

    def __init__(self, subject: Subject, texts: Texts, metric: Metric) -> None:
        self.subject = subject
        self.texts = texts
        self.metric = metric
        self.stack = StackRunner(subject.model, subject.family, "decoder")
        self.reference: ReferenceRows | None = None  # of the scored places, row by row
        self.original: Tensor | None = None  # the unquantized model's final states of these places

    @property
    def n_samples(self) -> int:
        return len(self.texts.samples) or len(self.texts.ids)

    @torch.inference_mode()
    def refer(self) -> None:
        original = self._states("unquantized") if self.original is None else self.original
        with self._present_head() as head:
            self._refer(head, original)

    def _refer(self, head: Head, original: Tensor) -> None:
        self.original = kept(original) if self.subject.layers is None else None  # layers keep their states on disk
        self.reference = head.reference(original, self.subject.stored_head)

    @torch.inference_mode()
    def score(self, *, as_reference: bool = False) -> Scores:
        hidden = self._states("unquantized" if as_reference else "a plan")
        with self._present_head() as head:
            if as_reference:
                self._refer(head, hidden)
            against = None if as_reference else self.reference
            nats, kls = head.judge(hidden, self.texts.targets()[self.texts.scored], against)
        return self.scores_of(self.per_row(nats), self.per_row(kls))

    def _states(self, what: str) -> Tensor:
        """Returns the final states of the scored places [places, d_model]."""
        if self.subject.layers is not None:
            return self.subject.layers.finals(self.texts.ids, self.texts.real, self.texts.scored, what)
        return torch.cat([self.run(batch)[self.texts.scored[batch]] for batch in self.batches()])

    def _present_head(self) -> AbstractContextManager[Head]:
        layers = self.subject.layers
        return nullcontext(self.head) if layers is None else layers.head()

    @cached_property
    def head(self) -> Head:
        """The head of a model in memory."""
        return Head(self.subject.model, self.subject.spec)

    def per_row(self, values: Tensor) -> Tensor:
        """Returns the sums [rows], in float64, of values of the scored places, row by row."""
        placed = torch.zeros(self.texts.scored.shape, dtype=torch.float64)
        placed[self.texts.scored] = values.double()
        return placed.sum(dim=1)

    def scores_of(self, nats: Tensor, kls: Tensor) -> Scores:
        """Returns the scores of each row's sums of nats and divergences [rows]."""
        return tally(self.metric, self.texts.items, self.texts.samples, nats.numpy(), kls.numpy())

    def batches(self) -> Iterator[Tensor]:
        """Yields the places of the rows of each batch."""
        return iter(torch.split(torch.arange(len(self.texts.ids)), max(1, BATCH_TOKENS // self.texts.ids.shape[1])))

    def run(self, rows: Tensor, after: After | None = None) -> Tensor:
        """Returns the final hidden states [rows, width, d_model] of these rows."""
        with self.subject.calls.during(active=self.texts.real[rows]):
            return self.stack.run({"input_ids": self.texts.ids[rows]}, after=after)

    @torch.inference_mode()
    def routes(self) -> Iterator[Routed]:
        """Yields the experts that every layer's router chooses, batch by batch; each row counts as a sample."""
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


# An encoder-decoder model in parts: encode inputs, decode given text, continue writing after any prefix.

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
        """Returns the encoder's final states [rows, tokens, d_model]. `inputs`: input_ids [rows, tokens], or
        inputs_embeds, the input of the layer `start`; `mask` [rows, tokens] is 1 for tokens, 0 for padding."""
        with self.calls.during(active=mask.bool()):
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
        """Returns the decoder's final states [rows, tokens, d_model], given `encoded` [rows, source tokens, d_model];
        experts run where `active`."""
        attended = {"encoder_hidden_states": encoded, "encoder_attention_mask": mask}
        with self.calls.during(active=active, substitute=substitute):
            return self.decoder.run({**inputs, **attended}, start, after)

    def chosen(self, best: Tensor, position: Tensor) -> Tensor:
        """Returns the tokens to write [rows] where `best` are the likeliest: at position 0 the token that the model
        begins with, if it has one."""
        first = self.spec.tokens.first
        return best if first is None else best.where(position > 0, first)

    def fed(self, outputs: Tensor) -> Tensor:
        """Returns the decoder's input for the prediction of `outputs` [rows, tokens] (below 0: padding)."""
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
        """Returns the greedy output of each row, including its prefix and the end mark."""
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
        """Returns whether one pass over a whole output gives the same as writing it: a pass drops tokens beyond an
        expert's capacity, writing token by token does not."""
        capacity = self.spec.moe.router.capacity
        return capacity is None or capacity >= max_new_tokens


def padded(rows: Sequence[Sequence[int]], fill: int, width: int | None = None) -> Tensor:
    """Returns token lists as one tensor [rows, width], padded on the right with `fill`."""
    wide = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[fill] * (wide - len(row))] for row in rows], dtype=torch.long)


# Encoder-decoder models: the likelihood of target texts given inputs, and greedily generated text.

BATCH_ROWS = 512
GENERATED_TOKENS = 16384
LENGTH_SPREAD = 1.2  # inputs of one bucket differ in length by no more than this, and two tokens
SPARE_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """Samples whose inputs are of like length, and the items (texts to score) that belong to them."""

    rows: list[int]  # places of the samples
    inputs: Tensor  # [rows, source tokens]
    mask: Tensor  # [rows, source tokens], 1 where there is a token
    items: slice  # of the scorer's list of items
    of_row: Tensor  # [items]: which row of the bucket an item belongs to
    targets: Tensor  # [items, tokens], -1 where there is none


class GeneratedScorer:
    """The scorer of an encoder-decoder model. `items` are in the order of the buckets; `reference` has a row for each
    of their tokens."""

    def __init__(
        self,
        subject: Subject,
        samples: Sequence[Sample],
        tokenizer: Tokenizer,
        metric: Metric,
        max_new_tokens: int,
    ) -> None:
        self.subject = subject
        self.samples = tuple(samples)
        self.tokenizer = tokenizer
        self.metric = metric
        self.model = Seq2Seq(subject)
        self._lay_out()
        self.max_new_tokens = max_new_tokens
        self.reference: ReferenceRows | None = None
        self.original: Tensor | None = None  # the unquantized model's final states of all targets

    @property
    def n_samples(self) -> int:
        return len(self.samples)

    @torch.inference_mode()
    def score(self, *, as_reference: bool = False) -> Scores:
        hidden, written = [], []
        for bucket in self.buckets:
            encoded = self.encode(bucket)
            hidden.append(self.target_states(bucket, encoded)[bucket.targets >= 0])
            if self.metric.generates:
                written += self.model.write(encoded, bucket.mask, [()] * len(bucket.rows), self.max_new_tokens)
        states, targets = torch.cat(hidden), torch.cat([bucket.targets[bucket.targets >= 0] for bucket in self.buckets])
        if as_reference:
            self._refer(states)
        nats, kls = self.model.head.judge(states, targets, None if as_reference else self.reference)
        return self.scores_of(self.per_item(nats), self.per_item(kls), written)

    @torch.inference_mode()
    def refer(self) -> None:
        if (states := self.original) is None:
            parts = [self.target_states(bucket, self.encode(bucket))[bucket.targets >= 0] for bucket in self.buckets]
            states = torch.cat(parts)
        self._refer(states)

    def _refer(self, original: Tensor) -> None:
        self.original = kept(original)
        self.reference = self.model.head.reference(original, self.subject.stored_head)

    def encode(self, bucket: Bucket) -> Tensor:
        return self.model.encode({"input_ids": bucket.inputs}, bucket.mask)

    def target_states(self, bucket: Bucket, encoded: Tensor) -> Tensor:
        """Returns the final hidden states [items, tokens, d_model] that predict the bucket's targets."""
        inputs = {"input_ids": self.model.fed(bucket.targets)}
        with self.subject.calls.during(attended=bucket.of_row):
            return self.model.decode(inputs, bucket.targets >= 0, encoded[bucket.of_row], bucket.mask[bucket.of_row])

    def per_item(self, values: Tensor) -> Tensor:
        """Returns the sums [items], in float64, of values of all items' tokens, one item after the other."""
        lengths = torch.from_numpy(self.items.tokens).long()
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, owner, values.double())

    def scores_of(self, nats: Tensor, kls: Tensor, written: Sequence[Sequence[int]]) -> Scores:
        """Returns scores in the samples' order. `nats`, `kls`: sums of each item [items]; they and the written token
        ids are in the order of the buckets."""
        outputs = [""] * len(self.samples)
        if written:
            places = [row for bucket in self.buckets for row in bucket.rows]
            for place, text in zip(places, self.texts(written), strict=True):
                outputs[place] = text
        back = self._sample_order
        items = self.items.at(back)
        return tally(self.metric, items, self.samples, nats.numpy()[back], kls.numpy()[back], outputs)

    def texts(self, written: Sequence[Sequence[int]]) -> list[str]:
        stops = self.subject.spec.tokens.eos
        ids = [[token for token in row if token not in stops] for row in written]
        return self.tokenizer.decode_batch(ids, skip_special_tokens=True)

    @torch.inference_mode()
    def routes(self) -> Iterator[Routed]:
        """Yields the experts that every layer's router chooses for inputs and their greedy outputs, bucket by
        bucket."""
        for bucket in self.buckets:
            with self.subject.calls.recording() as seen:
                encoded = self.encode(bucket)
            seen_encoder = dict(seen)
            written = padded(self.model.write(encoded, bucket.mask, [()] * len(bucket.rows), self.max_new_tokens), -1)
            with self.subject.calls.recording() as seen:
                inputs = {"input_ids": self.model.fed(written)}
                self.model.decode(inputs, written >= 0, encoded, bucket.mask)
            real: dict[StackName, Tensor] = {"encoder": bucket.mask.bool(), "decoder": written >= 0}
            calls = {**seen_encoder, **seen}
            experts = {place: call.chosen[real[place[0]].flatten()] for place, call in calls.items()}
            yield Routed(experts, bucket.rows, {stack: taken.sum(dim=1).tolist() for stack, taken in real.items()})

    def _lay_out(self) -> None:
        """Sorts the samples by length into buckets; the tokenizer adds its own end-of-text marks."""
        sources = [encoding.ids for encoding in self.tokenizer.encode_batch([sample.source for sample in self.samples])]
        texts, owner, right = texts_of(self.samples)
        targets = targets_of(texts, self.tokenizer, self.subject.spec)
        of_sample: list[list[int]] = [[] for _ in self.samples]
        for item, sample in enumerate(owner.tolist()):
            of_sample[sample].append(item)
        longest = [max(len(targets[item]) for item in items) for items in of_sample]
        order = sorted(range(len(self.samples)), key=lambda row: (len(sources[row]), longest[row], row))
        self.buckets: list[Bucket] = []
        in_order: list[int] = []
        for rows in _like_lengths(order, [len(ids) for ids in sources]):
            items = [item for row in rows for item in of_sample[row]]
            of_row = [place for place, row in enumerate(rows) for _ in of_sample[row]]
            inputs = padded([sources[row] for row in rows], _pad(self.subject.spec))
            mask = padded([[1] * len(sources[row]) for row in rows], 0)
            part = slice(len(in_order), len(in_order) + len(items))
            ids = padded([targets[item] for item in items], -1)
            self.buckets.append(Bucket(rows, inputs, mask, part, torch.tensor(of_row), ids))
            in_order += items
        words = np.array([max(1, len(texts[item].split())) for item in in_order], dtype=np.float64)
        tokens = np.array([len(targets[item]) for item in in_order], dtype=np.float64)
        self.items = Items(owner[in_order], right[in_order], tokens, words)
        self._sample_order = np.argsort(np.array(in_order))


def _like_lengths(order: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Yields places in order of length, cut where the length differs too much or a batch would be too large."""
    start = 0
    while start < len(order):
        shortest = lengths[order[start]]
        stop = start + 1
        while stop < len(order) and stop - start < BATCH_ROWS:
            length = lengths[order[stop]]
            if length > shortest * LENGTH_SPREAD + 2 or length * (stop + 1 - start) > GENERATED_TOKENS:
                break
            stop += 1
        yield order[start:stop]
        start = stop


def targets_of(texts: Sequence[str], tokenizer: Tokenizer, spec: ModelSpec) -> list[list[int]]:
    """Returns the token ids of texts as the model should write them. A model that begins with a token of its own writes
    it in place of the special tokens that the tokenizer puts before an input."""
    found, first = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))], spec.tokens.first
    if first is None:
        return found
    added = tokenizer.encode("a").special_tokens_mask
    before = added.index(0) if 0 in added else 0
    return [[first, *ids[before:]] for ids in found]


def _pad(spec: ModelSpec) -> int:
    """Returns a token for padding. Any token will do, since padding is masked; some models name one without an
    embedding."""
    pad = spec.tokens.pad
    return pad if pad is not None and pad < spec.vocab_size else 0


# The scorer that fits a model, its text and a metric; or an error of one line that says why they don't fit.

T = TypeVar("T")


@dataclass(frozen=True)
class Extent:
    """The part of a text that is scored: at most `limit` samples or windows (None: all), spread evenly over the text;
    `context` tokens in a window of running text; outputs of `max_new_tokens` (None: a little more than the longest
    target has)."""

    limit: int | None
    context: int
    max_new_tokens: int | None

    def window(self, spec: ModelSpec) -> int:
        """Returns the tokens in a window: no more than the model's positions."""
        return min(self.context, spec.max_positions or self.context)


def build_scorers(
    subject: Subject,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    metric: Metric,
    extent: Extent,
    blocks: int = 1,
) -> list[TextScorer] | list[GeneratedScorer]:
    """Returns one scorer for each of `blocks` parts of the samples, or of the windows of running text. Raises
    CalibrationError for too little text."""
    spec, limit = subject.spec, extent.limit
    if spec.encoder is not None:
        chosen = [samples[at] for at in spread(len(samples), limit)]
        most = extent.max_new_tokens or _longest_target(chosen, tokenizer, spec) + SPARE_TOKENS
        most = min(most, spec.room(1) or most)
        return [GeneratedScorer(subject, part, tokenizer, metric, most) for part in dealt(chosen, blocks)]
    context = extent.window(spec)
    if samples[0].choices:
        parts = dealt([samples[at] for at in spread(len(samples), limit)], blocks)
        return [TextScorer(subject, choices_of(part, tokenizer, context), metric) for part in parts]
    texts = windows_of(samples, tokenizer, context)
    return [TextScorer(subject, texts.select(part), metric) for part in dealt(spread(len(texts.ids), limit), blocks)]


def build_scorer(
    subject: Subject,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    metric: Metric,
    extent: Extent,
) -> TextScorer | GeneratedScorer:
    return build_scorers(subject, tokenizer, samples, metric, extent)[0]


@dataclass(frozen=True)
class Volume:
    """The amount of text that a scorer works on: samples (or windows), and upper bounds of the tokens that pass through
    the encoder and through the decoder, padding included. `documents` [samples] is the number of each sample's
    document. `entropy` is the entropy of the tokens' frequencies in the scored text, in nats a token: the loss of a
    guess by frequency alone."""

    samples: int
    encoder_tokens: int
    decoder_tokens: int
    documents: I64
    entropy: float

    @property
    def tokens(self) -> int:
        """Of the encoder and the decoder together."""
        return self.encoder_tokens + self.decoder_tokens


def volume(
    spec: ModelSpec,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    extent: Extent,
) -> Volume:
    """Returns the amount of text that `build_scorers` would lay out. An encoder-decoder model decodes every text to
    score, and its own outputs.

    Raises CalibrationError, or SettingsError for a tokenizer that is not the model's.
    """
    chosen = [samples[at] for at in spread(len(samples), extent.limit)]
    context = extent.window(spec)
    if spec.encoder is not None or samples[0].choices:
        (texts, owner, _), documents = texts_of(chosen), documents_of(chosen)
        read = [encoding.ids for encoding in tokenizer.encode_batch([sample.source for sample in chosen])]
        scored = targets_of(texts, tokenizer, spec)
        sources, targets = (np.array([_length(ids, spec) for ids in part]) for part in (read, scored))
        entropy = entropy_of([token for ids in scored for token in ids])
        if spec.encoder is not None:
            _check_lengths(int(max(sources.max(), targets.max())), spec)
            widest = max(targets.max(), extent.max_new_tokens or targets.max() + SPARE_TOKENS)
            filled_up = (sources * LENGTH_SPREAD).astype(int) + 2
            return Volume(
                len(chosen), int(filled_up.sum()), int(widest) * (len(targets) + len(chosen)), documents, entropy
            )
        widest = min(context, int((sources[owner] + targets).max()) + 1)
        return Volume(len(chosen), 0, len(targets) * widest, documents, entropy)
    running = windows_of(samples, tokenizer, context)
    _check_ids(int(running.ids.max()), spec)
    windows = spread(len(running.ids), extent.limit)
    entropy = entropy_of(running.ids[windows].flatten().tolist())
    return Volume(len(windows), 0, len(windows) * context, running.groups[windows], entropy)


def entropy_of(tokens: Sequence[int]) -> float:
    """Returns the entropy of the tokens' frequencies, in nats, corrected for the tokens that a short text lacks (Miller
    1955)."""
    _, counts = np.unique(np.array(tokens), return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum() + (len(counts) - 1) / (2 * counts.sum()))


def _length(ids: list[int], spec: ModelSpec) -> int:
    _check_ids(max(ids, default=0), spec)
    return len(ids)


def _check_ids(largest: int, spec: ModelSpec) -> None:
    if largest >= spec.vocab_size:
        raise SettingsError(
            f"tokenizer.json makes token {largest:,} of the text, the model's vocabulary (vocab_size in config.json) "
            f"has {spec.vocab_size:,}: save the model's own tokenizer beside it"
        )


def _check_lengths(longest: int, spec: ModelSpec) -> None:
    if spec.max_positions is not None and longest > spec.max_positions:
        raise CalibrationError(
            f"a text has {longest:,} tokens, the model takes at most {spec.max_positions:,} (its config.json): give "
            "shorter ones"
        )


def load_tokenizer(path: Path, spelled: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a file, or of the text `spelled` in its place. Raises SettingsError."""
    return Tokenizer.read(path, spelled)


def spread(count: int, limit: int | None) -> list[int]:
    """Returns `limit` places spread evenly over `count`; all places if the limit is None or not below `count`."""
    if limit is None or limit >= count:
        return list(range(count))
    return [place * count // limit for place in range(limit)]


def dealt(items: Sequence[T], blocks: int) -> list[list[T]]:
    """Returns the items in `blocks` parts of about equal size, each spread over all items. Raises CalibrationError if a
    part would be empty."""
    if blocks > len(items):
        raise CalibrationError(f"{len(items)} samples can't be divided into {blocks} blocks: give more text")
    return [list(items[block::blocks]) for block in range(blocks)]


def check_fit(spec: ModelSpec, splits: Splits, metric: Metric, max_new_tokens: int | None = None) -> None:
    """Raises SettingsError if the text, the metric or `max_new_tokens` is not for this kind of model."""
    encoder_decoder = spec.encoder is not None
    if splits.seq2seq != encoder_decoder and not splits.choices:
        wanted = "the fields 'input' and 'target'" if encoder_decoder else "the field 'text'"
        raise SettingsError(f"--calib {splits.name} does not fit this {spec.family} model, which needs {wanted}")
    if max_new_tokens is not None and not encoder_decoder:
        raise SettingsError(f"{said('max_new_tokens')} has no effect on a model that continues text: leave it out")
    if metric.generates and not encoder_decoder:
        raise SettingsError(f"--metric {metric.name} needs an encoder-decoder model: use perplexity here")
    if (metric.reads == "choice") != splits.choices:
        needs = "samples with 'choices' and a 'label'" if metric.reads == "choice" else "samples without choices"
        raise SettingsError(f"--metric {metric.name} needs {needs}: {splits.name} has other ones")


def _longest_target(samples: Sequence[Sample], tokenizer: Tokenizer, spec: ModelSpec) -> int:
    texts = [text for sample in samples for text in (sample.choices or (sample.target,))]
    return max(len(ids) for ids in targets_of(texts, tokenizer, spec))
