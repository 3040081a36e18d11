"""Probes on encoder-decoder models: likelihood of targets, and generated text.

What the base writes is decoded once more in a single pass beside the targets. With a changed expert, the same pass
over these known tokens finds the first that is no longer the likeliest; text is written anew from there on only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moeconv.artifacts import Probe
from moeconv.measure.scorers import Scores
from moeconv.measure.scorers.generated import Bucket, GeneratedScorer
from moeconv.measure.scorers.seq2seq import padded
from moeconv.measure.trial import Trial
from moeconv.source.experts import Call, Substitute
from moeconv.sweep.probes import Found
from moeconv.sweep.probes.changes import Pairs, changed_rows, changes, entering, pairs_of
from moeconv.sweep.probes.rewrites import Rewrite, batches
from moert.pack.model_spec import LayerKey

BATCH_TOKENS = 8192
WAITING_TOKENS = 32768  # encoded tokens that may wait until there are enough rows for full batches
NEAR_TIE = 1e-4  # in logits


@dataclass
class Base:
    """A bucket's base run. Sequences are all items of the bucket, and what it wrote where that is no item."""

    bucket: Bucket
    written: list[list[int]]  # [rows]
    tokens: Tensor  # [sequences, tokens], -1 where there is none
    of_row: Tensor  # [sequences]: which row of the bucket each belongs to
    item: Tensor  # [sequences]: its place in the scorer's items, -1 for none
    output_of: Tensor  # [sequences]: whether it is what the row's base wrote
    encoded: Tensor  # [rows, source tokens, d_model]
    calls: dict[LayerKey, Call]
    after: dict[str, list[Tensor]]  # by stack: what left each layer, over rows or over sequences
    nats: Tensor  # [sequences, tokens], float64
    kls: Tensor
    best: Tensor  # [sequences, tokens]: the likeliest token

    @property
    def real(self) -> Tensor:
        return self.tokens >= 0


@dataclass
class Answers:
    """What is collected for a list of probes; text to write anew is written when all passes are done."""

    nats: Tensor  # [probes, items]
    kls: Tensor
    rewritten: list[dict[int, list[int]]]  # by probe: place in the order of the buckets → token ids
    near_ties: list[int]


class Rerun(NamedTuple):
    """Row r is `sequence[r]` under `probe[r]`, computed anew at `where` [rows, tokens]: its last hidden states `final`
    [rows, tokens, d_model], and `encoded` [rows, ...] where what was read is not the base's."""

    probe: Tensor
    sequence: Tensor
    where: Tensor
    final: Tensor
    encoded: Tensor | None = None


class Seq2SeqProber:
    def __init__(self, trial: Trial, scorer: GeneratedScorer) -> None:
        self.trial = trial
        self.scorer = scorer
        self.model = scorer.model
        self.writes = scorer.metric.generates
        # a pass over all tokens drops what writing them one by one does not: it does not tell what is written
        self.starts_over = self.writes and not self.model.resumable(scorer.max_new_tokens)
        lengths = torch.from_numpy(scorer.items.tokens).long()
        self._reference_start = lengths.cumsum(0) - lengths  # of each item, in the scorer's reference

    @torch.inference_mode()
    def prepare(self) -> Scores:
        self.bases = [self._run(bucket) for bucket in self.scorer.buckets]
        self.item_nats, self.item_kls = torch.zeros((2, len(self.scorer.items.tokens)), dtype=torch.float64)
        for base in self.bases:
            known = base.item >= 0
            self.item_nats[base.item[known]] = base.nats[known].sum(dim=1)
            self.item_kls[base.item[known]] = base.kls[known].sum(dim=1)
        self.written = [ids for base in self.bases for ids in base.written]
        return self.scorer.scores_of(self.item_nats, self.item_kls, self.written)

    def rows_of(self) -> dict[LayerKey, list[int]]:
        """Encoder rows of the inputs, decoder rows of the targets and of what was written."""
        count = self.trial.spec.moe.n
        return {
            place: torch.stack([base.calls[place].rows(count) for base in self.bases]).sum(dim=0).tolist()
            for place in self.trial.spec.moe_layers()
        }

    @torch.inference_mode()
    def probe(self, probes: Sequence[Probe]) -> list[Found]:
        rows_before = self.trial.calls.rows
        answers = Answers(
            self.item_nats.repeat(len(probes), 1), self.item_kls.repeat(len(probes), 1),
            [{} for _ in probes], [0] * len(probes),
        )  # fmt: skip
        place = probes[0].key.at
        substitute = self._substitute(place, probes) if place[0] == "decoder" else None
        waiting: list[Rewrite] = []
        offset = 0
        for base in self.bases:
            measure = self._encoder if place[0] == "encoder" else self._decoder
            for rewrites in measure(base, place, probes, answers, offset):
                waiting += rewrites
                if sum(len(rewrite.encoded) for rewrite in waiting) > WAITING_TOKENS:
                    self._write(waiting, answers, substitute)
                    waiting = []
            offset += len(base.bucket.rows)
        self._write(waiting, answers, substitute)
        flops = self.trial.calls.flops(self.trial.calls.rows - rows_before) // len(probes)
        return [self._found(probe, number, answers, flops) for number, probe in enumerate(probes)]

    def _found(self, probe: Probe, number: int, answers: Answers, flops: int) -> Found:
        written = [answers.rewritten[number].get(place, ids) for place, ids in enumerate(self.written)]
        scores = self.scorer.scores_of(answers.nats[number], answers.kls[number], written)
        return Found(probe, scores, flops, answers.near_ties[number])

    # The base ---------------------------------------------------------------------------------------------------------

    def _run(self, bucket: Bucket) -> Base:
        after: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
        with self.trial.calls.recording() as calls:
            encoded = self.model.encode(
                {"input_ids": bucket.inputs}, bucket.mask, after=lambda _, hidden: after["encoder"].append(hidden)
            )
        written: list[list[int]] = []
        if self.writes:
            written = self.model.write(encoded, bucket.mask, [()] * len(bucket.rows), self.scorer.max_new_tokens)
        tokens, of_row, item, output_of = _sequences(bucket, written)
        with self.trial.calls.recording() as decoder_calls:
            final = self.model.decode(
                {"input_ids": self.model.fed(tokens)}, tokens >= 0, encoded[of_row], bucket.mask[of_row],
                after=lambda _, hidden: after["decoder"].append(hidden),
            )  # fmt: skip
        nats, kls = torch.zeros((2, *tokens.shape), dtype=torch.float64)
        base = Base(bucket, written, tokens, of_row, item, output_of, encoded, {**calls, **decoder_calls}, after,
                    nats, kls, tokens.clone())  # fmt: skip
        sequence, position = base.real.nonzero(as_tuple=True)
        found = self._judge(base, final[base.real], sequence, position)
        base.nats[base.real], base.kls[base.real], base.best[base.real] = found[0], found[1], found[2]
        return base

    def _judge(self, base: Base, hidden: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Nats, divergences, likeliest tokens and their lead [rows], of final states [rows, d_model]."""
        reference = self.scorer.reference
        if reference is not None:
            # a text that is no item has no reference: what is compared there is not used
            last = len(reference.negentropy) - 1
            rows = self._reference_start[base.item[sequence].clamp(min=0)] + position
            reference = reference[rows.clamp(max=last)]
        nats, kls, best, lead = self.model.head.judge_with_best(hidden, base.tokens[sequence, position], reference)
        return nats.double(), kls.double(), self.model.chosen(best, position), lead

    # Probes -----------------------------------------------------------------------------------------------------------

    def _encoder(
        self, base: Base, place: LayerKey, probes: Sequence[Probe], answers: Answers, offset: int
    ) -> Iterator[list[Rewrite]]:
        mask = base.bucket.mask
        found = changes(self.trial, base.calls[place], mask.shape[1], probes)
        of_row = [[] for _ in base.bucket.rows]  # type: list[list[int]]
        for at, row in enumerate(base.of_row.tolist()):
            of_row[row].append(at)
        for pairs in pairs_of(found, BATCH_TOKENS // (mask.shape[1] + 2 * base.tokens.shape[1])):
            hidden = entering(base.after["encoder"][place[1]], pairs, found)
            encoded = self.model.encode({"inputs_embeds": hidden}, mask[pairs.sequence], place[1] + 1)
            sequences = [of_row[row] for row in pairs.sequence.tolist()]
            pair = torch.tensor([number for number, listed in enumerate(sequences) for _ in listed])
            sequence = torch.tensor([one for listed in sequences for one in listed])
            final = self.model.decode(
                {"input_ids": self.model.fed(base.tokens[sequence])}, base.real[sequence], encoded[pair],
                mask[base.of_row[sequence]],
            )  # fmt: skip
            where = base.real[sequence]
            rerun = Rerun(pairs.probe[pair], sequence, where, final, encoded[pair])
            yield self._compare(base, rerun, answers, offset)
            if self.starts_over:
                listed = enumerate(pairs.listed())
                yield [_from_start(base, probe, row, encoded[at].clone(), offset) for at, (probe, row) in listed]

    def _decoder(
        self, base: Base, place: LayerKey, probes: Sequence[Probe], answers: Answers, offset: int
    ) -> Iterator[list[Rewrite]]:
        layer, after = place[1], base.after["decoder"]
        found = changes(self.trial, base.calls[place], base.tokens.shape[1], probes)
        positions = torch.arange(base.tokens.shape[1])
        for pairs in pairs_of(found, BATCH_TOKENS // (base.bucket.mask.shape[1] + base.tokens.shape[1])):
            active = (positions >= pairs.first[:, None]) & base.real[pairs.sequence]
            rows = base.of_row[pairs.sequence]
            final = self.model.decode(
                {"inputs_embeds": entering(after[layer], pairs, found)}, active, base.encoded[rows],
                base.bucket.mask[rows], layer + 1, _keeping(after, active, pairs),
            )  # fmt: skip
            # nothing attends to what leaves the last layer: there, only the changed rows themselves differ
            where = changed_rows(pairs, found, len(positions)) if layer + 1 == len(after) else active
            rerun = Rerun(pairs.probe, pairs.sequence, where, final)
            yield self._compare(base, rerun, answers, offset)
        if self.starts_over:  # even a row that has none of the expert's tokens in the pass
            every = [(probe, row) for probe in range(len(probes)) for row in range(len(base.bucket.rows))]
            yield [_from_start(base, probe, row, base.encoded[row], offset) for probe, row in every]

    def _compare(self, base: Base, rerun: Rerun, answers: Answers, offset: int) -> list[Rewrite]:
        """Puts nats and divergences where they belong, and finds the outputs that change."""
        probe, sequence, where, final, encoded = rerun
        row, position = where.nonzero(as_tuple=True)
        new_nats, new_kls, best, lead = self._judge(base, final[where], sequence[row], position)
        items = base.item[sequence]
        for sums, of_base, new in ((answers.nats, base.nats, new_nats), (answers.kls, base.kls, new_kls)):
            values = of_base[sequence]
            values[where] = new
            sums[probe[items >= 0], items[items >= 0]] = values[items >= 0].sum(dim=1)
        if not self.writes or self.starts_over:
            return []
        differs = torch.zeros_like(where)
        differs[where] = best != base.best[sequence[row], position]
        leads = torch.zeros(where.shape)
        leads[where] = lead
        rewrites = []
        for at in (base.output_of[sequence] & differs.any(dim=1)).nonzero()[:, 0].tolist():
            first = int(differs[at].int().argmax())
            answers.near_ties[int(probe[at])] += bool(leads[at, first] < NEAR_TIE)
            source = int(base.of_row[sequence[at]])
            prefix, mask = base.written[source][:first], base.bucket.mask[source]
            states = base.encoded[source] if encoded is None else encoded[at].clone()
            rewrites.append(Rewrite(int(probe[at]), offset + source, prefix, states, mask))
        return rewrites

    def _write(self, rewrites: list[Rewrite], answers: Answers, substitute: Substitute | None) -> None:
        for part in batches(rewrites):
            encoded = torch.nn.utils.rnn.pad_sequence([rewrite.encoded for rewrite in part], batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([rewrite.mask for rewrite in part], batch_first=True)
            probe_of_row = torch.tensor([rewrite.probe for rewrite in part])
            here = None
            if substitute is not None:
                here = Substitute(substitute.place, probe_of_row, substitute.expert_of_probe, substitute.weights)
            prefixes = [rewrite.prefix for rewrite in part]
            written = self.model.write(encoded, mask, prefixes, self.scorer.max_new_tokens, here)
            for rewrite, ids in zip(part, written, strict=True):
                answers.rewritten[rewrite.probe][rewrite.place] = ids

    def _substitute(self, place: LayerKey, probes: Sequence[Probe]) -> Substitute:
        experts = torch.tensor([probe.key.expert for probe in probes])
        weights = [self.trial.weights(probe.key, probe.bits) for probe in probes]
        return Substitute(place, torch.zeros(0, dtype=torch.long), experts, weights)


def _from_start(base: Base, probe: int, row: int, encoded: Tensor, offset: int) -> Rewrite:
    return Rewrite(probe, offset + row, [], encoded, base.bucket.mask[row])


def _sequences(bucket: Bucket, written: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that is decoded in one pass: the items, and of each row what was written where that is none of its items."""
    items = [[token for token in row if token >= 0] for row in bucket.targets.tolist()]
    known = {
        (row, tuple(ids)): place for place, (row, ids) in enumerate(zip(bucket.of_row.tolist(), items, strict=True))
    }
    rows, texts = bucket.of_row.tolist(), list(items)
    item = list(range(bucket.items.start, bucket.items.stop))
    output_of = [False] * len(items)
    for row, ids in enumerate(written):
        place = known.get((row, tuple(ids)))
        if place is None:
            rows.append(row)
            texts.append(ids)
            item.append(-1)
            output_of.append(True)
        else:
            output_of[place] = True
    return padded(texts, -1), torch.tensor(rows), torch.tensor(item), torch.tensor(output_of)


def _keeping(after: list[Tensor], active: Tensor, pairs: Pairs):  # type: ignore[no-untyped-def]
    def keep(at: int, hidden: Tensor) -> Tensor:
        return torch.where(active[:, :, None], hidden, after[at][pairs.sequence])

    return keep
