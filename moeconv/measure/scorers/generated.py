"""Encoder-decoder models: the likelihood of target texts given inputs, and the text that is generated, greedily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeconv.calibration import Sample
from moeconv.measure.metrics import Metric
from moeconv.measure.scorers import Routed, Scores, Subject
from moeconv.measure.scorers.head import ReferenceRows
from moeconv.measure.scorers.items import Items, tally, texts_of
from moeconv.measure.scorers.seq2seq import Seq2Seq, padded
from moeconv.measure.tokenizer import Tokenizer
from moert.pack.model_spec import ModelSpec, StackName

BATCH_ROWS = 512
BATCH_TOKENS = 16384
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
    """`items` are in the order of the buckets; `reference` has a row for each of their tokens."""

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
            self.reference = self.model.head.reference(states, self.subject.stored_head)
        nats, kls = self.model.head.judge(states, targets, None if as_reference else self.reference)
        return self.scores_of(self.per_item(nats), self.per_item(kls), written)

    def encode(self, bucket: Bucket) -> Tensor:
        return self.model.encode({"input_ids": bucket.inputs}, bucket.mask)

    def target_states(self, bucket: Bucket, encoded: Tensor) -> Tensor:
        """Final hidden states [items, tokens, d_model] that predict the bucket's targets."""
        inputs = {"input_ids": self.model.fed(bucket.targets)}
        with self.subject.calls.attending(bucket.of_row):
            return self.model.decode(inputs, bucket.targets >= 0, encoded[bucket.of_row], bucket.mask[bucket.of_row])

    def per_item(self, values: Tensor) -> Tensor:
        """Values of all items' tokens, one item after the other → sums [items], in float64."""
        lengths = torch.from_numpy(self.items.tokens).long()
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, owner, values.double())

    def scores_of(self, nats: Tensor, kls: Tensor, written: Sequence[Sequence[int]]) -> Scores:
        """Sums of each item, in the order of the buckets like the written token ids → Scores in the samples' order."""
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
        """What every layer's router chooses for inputs and the greedy outputs to them, bucket by bucket."""
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
        """Samples by length into buckets; the tokenizer adds its own end-of-text marks."""
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
    """Places in order of length, cut where the length differs too much or a batch would be too large."""
    start = 0
    while start < len(order):
        shortest = lengths[order[start]]
        stop = start + 1
        while stop < len(order) and stop - start < BATCH_ROWS:
            length = lengths[order[stop]]
            if length > shortest * LENGTH_SPREAD + 2 or length * (stop + 1 - start) > BATCH_TOKENS:
                break
            stop += 1
        yield order[start:stop]
        start = stop


def targets_of(texts: Sequence[str], tokenizer: Tokenizer, spec: ModelSpec) -> list[list[int]]:
    """Token ids of texts as the model is to write them. One that begins with a token of its own does so in place of the
    special tokens that the tokenizer puts before an input."""
    found, first = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))], spec.tokens.first
    if first is None:
        return found
    added = tokenizer.encode("a").special_tokens_mask
    before = added.index(0) if 0 in added else 0
    return [[first, *ids[before:]] for ids in found]


def _pad(spec: ModelSpec) -> int:
    """Any token will do, since padding is masked; some models name one that they have no embedding for."""
    pad = spec.tokens.pad
    return pad if pad is not None and pad < spec.vocab_size else 0
