"""Probes: one expert is changed, and only the states that it affects are computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moeconv.artifacts import Probe
from moeconv.errors import SettingsError
from moeconv.measure.scorers import LOGIT_BYTES, After, Scores
from moeconv.measure.scoring import Bucket, GeneratedScorer, TextScorer, Volume, padded
from moeconv.measure.trial import Trial
from moeconv.source.experts import Call, Substitute
from moert.pack.model_spec import LayerKey, ModelSpec

# Probes measure the cost of one changed expert: as exact as a full evaluation, from the few rows that can differ.
# All experts but one are as in the base, which keeps its states between layers. A changed expert moves only the rows
# routed to it: w · (FFN_q(x) − FFN(x)) is added to them where the layer ends. The layers above are computed again
# only for samples with moved rows, and, where attention is causal, from the first moved row on. An expert without
# rows is free.


@dataclass(frozen=True)
class Found:
    """The scores with one expert changed, the operations in expert rows that they took, and the number of samples with
    a text that depended on a tie that the order of summation decides."""

    probe: Probe
    scores: Scores
    flops: int
    near_ties: int


class Prober(Protocol):
    """A measurer of probes on the samples of one scorer."""

    def prepare(self) -> Scores:
        """Runs the model in full, as it stands, and keeps the states that probes start from; returns its scores. This
        run is the base."""
        ...

    def probe(self, probes: Sequence[Probe]) -> list[Found]:
        """Returns the scores of probes of one layer, in their order."""
        ...

    def rows_of(self) -> dict[LayerKey, list[int]]:
        """Returns, for each layer with experts, the number of rows that the base gave to each expert."""
        ...


# The rows of a layer that a changed expert moves, and their changes.


@dataclass(frozen=True)
class Change:
    """The change of a layer's output by probe number `probe`, which adds `delta` [rows, d_model] at (sequence,
    position) of each row; rows are sorted by sequence. `sequences` are those with a changed row, `first` the first
    changed position in each."""

    probe: int
    sequence: Tensor  # [rows]
    position: Tensor  # [rows]
    delta: Tensor  # [rows, d_model]
    sequences: Tensor  # [changed]
    first: Tensor  # [changed]

    def rows_in(self, sequence: int) -> slice:
        start, stop = torch.searchsorted(self.sequence, torch.tensor([sequence, sequence + 1])).tolist()
        return slice(start, stop)


def changes(trial: Trial, call: Call, width: int, probes: Sequence[Probe]) -> list[Change]:
    """Returns the change by each probe; `call` is the base's call of the layer's experts, over sequences of `width`
    tokens each."""
    base_outputs: dict[int, Tensor] = {}
    add = trial.spec.stacks[probes[0].key.stack][probes[0].key.layer].ffn_join.add
    found = []
    for number, probe in enumerate(probes):
        rows, slot = (call.chosen == probe.key.expert).nonzero(as_tuple=True)
        x = call.x[rows]
        if probe.key.expert not in base_outputs:
            base_outputs[probe.key.expert] = trial.calls.ffn(probe.key, x, trial.calls.weights(probe.key))
        delta = trial.calls.ffn(probe.key, x, trial.weights(probe.key, probe.bits)) - base_outputs[probe.key.expert]
        sequence, position = rows // width, rows % width
        sequences, counts = torch.unique_consecutive(sequence, return_counts=True)
        first = position[counts.cumsum(0) - counts]
        found.append(
            Change(number, sequence, position, delta * (add * call.weights[rows, slot, None]), sequences, first)
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Pairs:
    """A batch of (probe, sequence) pairs and the first changed position of each. All [pairs]."""

    probe: Tensor
    sequence: Tensor
    first: Tensor

    def __len__(self) -> int:
        return len(self.probe)

    def listed(self) -> Iterator[tuple[int, int]]:
        """Returns the (probe, sequence) of each pair."""
        return zip(self.probe.tolist(), self.sequence.tolist(), strict=True)


def pairs_of(found: Sequence[Change], most: int) -> list[Pairs]:
    """Returns every (probe, sequence) pair in batches of at most `most`, pairs of one sequence beside each other."""
    if not any(len(change.sequences) for change in found):
        return []
    probe = torch.cat([torch.full_like(change.sequences, change.probe) for change in found])
    sequence = torch.cat([change.sequences for change in found])
    first = torch.cat([change.first for change in found])
    order = sequence.argsort(stable=True)
    return [Pairs(probe[part], sequence[part], first[part]) for part in torch.split(order, max(1, most))]


def entering(after: Tensor, pairs: Pairs, found: Sequence[Change]) -> Tensor:
    """Returns the hidden states that leave the changed layer [pairs, tokens, d_model]; `after` [sequences, tokens,
    d_model]: those of the base."""
    hidden = after[pairs.sequence]
    for row, (probe, sequence) in enumerate(pairs.listed()):
        rows = found[probe].rows_in(sequence)
        hidden[row].index_add_(0, found[probe].position[rows], found[probe].delta[rows])
    return hidden


def changed_rows(pairs: Pairs, found: Sequence[Change], width: int) -> Tensor:
    """Returns which rows the changed expert itself moves [pairs, tokens]."""
    changed = torch.zeros((len(pairs), width), dtype=torch.bool)
    for row, (probe, sequence) in enumerate(pairs.listed()):
        changed[row, found[probe].position[found[probe].rows_in(sequence)]] = True
    return changed


# Texts that must be written anew from some token on, and their batches.

WRITTEN_ROWS = 256  # rows that are written anew in one batch,
WRITTEN_TOKENS = 16384  # and tokens of their inputs


@dataclass(frozen=True)
class Rewrite:
    """A row with a text that changes from the end of `prefix` on."""

    probe: int
    place: int
    prefix: list[int]
    encoded: Tensor  # [source tokens, d_model]
    mask: Tensor  # [source tokens]


def batches(rewrites: Sequence[Rewrite]) -> Iterator[list[Rewrite]]:
    """Yields batches of rows with prefixes of about the same length."""
    part: list[Rewrite] = []
    widest = 0
    for rewrite in sorted(rewrites, key=lambda rewrite: len(rewrite.prefix)):
        widest = max(widest, len(rewrite.encoded))
        if part and (len(part) == WRITTEN_ROWS or widest * (len(part) + 1) > WRITTEN_TOKENS):
            yield part
            part, widest = [], len(rewrite.encoded)
        part.append(rewrite)
    if part:
        yield part


# Probes on running text and on choices, for decoder-only models.

BATCH_TOKENS = 4096
Leaving = Callable[[Tensor, Pairs], Tensor]
"""(states that leave the changed layer in the base, pairs) → states that leave it in each pair [pairs, tokens,
d_model]."""


class TextProber:
    """A prober on running text and choices. Positions are compared with `first`: no state before the first changed row
    of a window can differ."""

    def __init__(self, trial: Trial, scorer: TextScorer) -> None:
        self.trial = trial
        self.scorer = scorer
        self.texts = scorer.texts
        self.n_layers = scorer.stack.n_layers
        flat = torch.cumsum(self.texts.scored.flatten(), 0).view(self.texts.scored.shape) - 1
        self._reference_row = flat  # where a scored place's row is in the scorer's reference

    @torch.inference_mode()
    def prepare(self) -> Scores:
        self.after: list[Tensor] = []
        self.calls: dict[LayerKey, Call] = {}
        outputs: list[list[Tensor]] = [[] for _ in range(self.n_layers)]
        parts, finals = [], []
        for batch in self.scorer.batches():
            with self.trial.calls.recording() as seen:
                final = self.scorer.run(batch, lambda layer, hidden: outputs[layer].append(hidden))
            finals.append(final[self.texts.scored[batch]])
            parts.append(seen)
        # parts are freed layer by layer as they are joined: both together would take twice `kept_bytes`
        while outputs:
            self.after.append(torch.cat(outputs.pop(0)))
        for place in list(parts[0]):
            self.calls[place] = _joined([part.pop(place) for part in parts])
        scored = self.texts.scored
        nats, kls = self._judge(torch.cat(finals), *scored.nonzero(as_tuple=True))
        self.nats, self.kls = torch.zeros((2, *scored.shape), dtype=torch.float64)
        self.nats[scored], self.kls[scored] = nats, kls
        return self.scorer.scores_of(self.nats.sum(dim=1), self.kls.sum(dim=1))

    def rows_of(self) -> dict[LayerKey, list[int]]:
        return {place: call.rows(self.trial.spec.moe.n).tolist() for place, call in self.calls.items()}

    @torch.inference_mode()
    def probe(self, probes: Sequence[Probe]) -> list[Found]:
        rows_before = self.trial.calls.rows
        key = probes[0].key
        adds = self.trial.spec.decoder[key.layer].adds_experts
        found = changes(self.trial, self.calls[key.at], self.texts.ids.shape[1], probes)
        nats = self.nats.sum(dim=1).repeat(len(probes), 1)  # [probes, windows]
        kls = self.kls.sum(dim=1).repeat(len(probes), 1)
        for pairs in pairs_of(found, BATCH_TOKENS // self.texts.ids.shape[1]):
            leaving = partial(entering, found=found) if adds else partial(self._leaving, key.at, probes)
            self._measure(self.scorer.stack.family.place(key.layer), pairs, found, leaving, nats, kls)
        flops = self.trial.calls.flops(self.trial.calls.rows - rows_before) // len(probes)
        return [
            Found(probe, self.scorer.scores_of(nats[number], kls[number]), flops, 0)
            for number, probe in enumerate(probes)
        ]

    def _leaving(self, at: LayerKey, probes: Sequence[Probe], after: Tensor, pairs: Pairs) -> Tensor:
        """Returns the states that leave a layer which does more with its experts' outputs than to add them: it is run
        again."""
        weights = [self.trial.weights(probe.key, probe.bits) for probe in probes]
        experts = torch.tensor([probe.key.expert for probe in probes])
        left: list[Tensor] = []
        place = self.scorer.stack.family.place(at.layer)

        def stop(layer: int, hidden: Tensor) -> None:
            if layer == place:
                left.append(hidden)

        inputs = {"input_ids": self.texts.ids[pairs.sequence]}
        if place:
            inputs = {"inputs_embeds": self.after[place - 1][pairs.sequence]}
        with self.trial.calls.during(substitute=Substitute(at, pairs.probe, experts, weights)):
            self.scorer.stack.run(inputs, place, stop)
        changed = torch.arange(left[0].shape[1]) >= pairs.first[:, None]
        return torch.where(changed[:, :, None], left[0], after[pairs.sequence])

    def _measure(
        self, layer: int, pairs: Pairs, found: list[Change], leaving: Leaving, nats: Tensor, kls: Tensor
    ) -> None:
        positions = torch.arange(self.texts.ids.shape[1])
        active = (positions >= pairs.first[:, None]) & self.texts.real[pairs.sequence]
        hidden = leaving(self.after[layer], pairs)
        with self.trial.calls.during(active=active):
            final = self.scorer.stack.run({"inputs_embeds": hidden}, layer + 1, _keeping(self.after, active, pairs))
        # nothing attends to the states that leave the last layer: there, only the changed rows themselves differ
        where = changed_rows(pairs, found, active.shape[1]) if layer == self.n_layers - 1 else active
        self._replace(pairs, where & self.texts.scored[pairs.sequence], final, nats, kls)

    def _replace(self, pairs: Pairs, where: Tensor, final: Tensor, nats: Tensor, kls: Tensor) -> None:
        """Puts the scores of states computed again at `where` [pairs, tokens] in the place of the base's, in sums over
        windows."""
        row, position = where.nonzero(as_tuple=True)
        new_nats, new_kls = self._judge(final[where], pairs.sequence[row], position)
        for sums, base, new in ((nats, self.nats, new_nats), (kls, self.kls, new_kls)):
            values = base[pairs.sequence]
            values[where] = new
            sums[pairs.probe, pairs.sequence] = values.sum(dim=1)

    def _judge(self, hidden: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Returns nats and divergences [rows] of final states [rows, d_model] at these places."""
        reference = self.scorer.reference
        here = None if reference is None else reference[self._reference_row[sequence, position]]
        nats, kls = self.scorer.head.judge(hidden, self.texts.ids[sequence, position + 1], here)
        return nats.double(), kls.double()


def _joined(calls: list[Call]) -> Call:
    """Returns the calls of all batches as one."""
    return Call(*(torch.cat([getattr(call, name) for call in calls]) for name in Call.__annotations__))


# Probes on encoder-decoder models: likelihood of targets, and generated text.
# The text that the base writes is decoded once more in a single pass beside the targets. With a changed expert, the
# same pass over these known tokens finds the first that is no longer the likeliest; text is written anew only from
# that token on.

WAITING_TOKENS = 32768  # encoded tokens that may wait until there are enough rows for full batches
NEAR_TIE = 1e-4  # in logits


@dataclass
class Base:
    """A bucket's base run. Sequences are all items of the bucket, and the texts that it wrote where they are no
    items."""

    bucket: Bucket
    written: list[list[int]]  # [rows]
    tokens: Tensor  # [sequences, tokens], -1 where there is none
    of_row: Tensor  # [sequences]: which row of the bucket each belongs to
    item: Tensor  # [sequences]: its place in the scorer's items, -1 for none
    output_of: Tensor  # [sequences]: whether it is the text that the base wrote for the row
    encoded: Tensor  # [rows, source tokens, d_model]
    calls: dict[LayerKey, Call]
    after: dict[str, list[Tensor]]  # by stack: the states that left each layer, over rows or over sequences
    nats: Tensor  # [sequences, tokens], float64
    kls: Tensor
    best: Tensor  # [sequences, tokens]: the likeliest token

    @property
    def real(self) -> Tensor:
        return self.tokens >= 0


@dataclass
class Answers:
    """The results for a list of probes; text to write anew is written when all passes are done."""

    nats: Tensor  # [probes, items]
    kls: Tensor
    rewritten: list[dict[int, list[int]]]  # by probe: place in the order of the buckets → token ids
    near_ties: list[int]


class Rerun(NamedTuple):
    """Sequences that were run again: row r is `sequence[r]` under `probe[r]`, computed anew at `where` [rows, tokens],
    with its last hidden states `final` [rows, tokens, d_model], and `encoded` [rows, ...] where the encoder's states
    are not the base's."""

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
        # a pass over all tokens drops some that writing one by one does not: it can't tell the text that is written
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
        """Returns, for each layer, the rows of each expert: of the inputs in the encoder, of targets and written text
        in the decoder."""
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
        """Returns nats, divergences, likeliest tokens and their lead [rows], of final states [rows, d_model]."""
        reference = self.scorer.reference
        if reference is not None:
            # a text that is no item has no reference: its comparison is not used
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
            # nothing attends to the states that leave the last layer: there, only the changed rows themselves differ
            where = changed_rows(pairs, found, len(positions)) if layer + 1 == len(after) else active
            rerun = Rerun(pairs.probe, pairs.sequence, where, final)
            yield self._compare(base, rerun, answers, offset)
        if self.starts_over:  # even a row that has none of the expert's tokens in the pass
            every = [(probe, row) for probe in range(len(probes)) for row in range(len(base.bucket.rows))]
            yield [_from_start(base, probe, row, base.encoded[row], offset) for probe, row in every]

    def _compare(self, base: Base, rerun: Rerun, answers: Answers, offset: int) -> list[Rewrite]:
        """Puts nats and divergences in the place of the base's; returns the outputs that change, to be written anew."""
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
    """Returns all sequences that are decoded in one pass (see Base): the items, and each row's written text where it is
    none of its items."""
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


def _keeping(after: list[Tensor], active: Tensor, pairs: Pairs) -> After:
    """Returns a function that gives places that are not `active` the states of the base again."""

    def keep(at: int, hidden: Tensor) -> Tensor:
        return torch.where(active[:, :, None], hidden, after[at][pairs.sequence])

    return keep


# Memory of a sweep beside the model, and the number of blocks in which its samples fit a bound.

_STATES_A_TOKEN = 12  # hidden states alive at once while a batch runs
_FLOAT = 4


def kept_bytes(spec: ModelSpec, volume: Volume) -> int:
    """Returns the bytes kept of a base run: for each token and layer, the states that leave the layer and the inputs of
    its experts; and the scored states."""
    a_layer = (spec.stream_width + spec.expert_width) * _FLOAT + 16 * spec.moe.router.top_k
    encoder_layers = len(spec.encoder) if spec.encoder else 0
    layers = volume.encoder_tokens * encoder_layers + volume.decoder_tokens * len(spec.decoder)
    scored = volume.decoder_tokens * (2 * spec.d_model * _FLOAT + 32)
    return layers * a_layer + scored + volume.encoder_tokens * spec.d_model * _FLOAT


def batch_bytes(spec: ModelSpec) -> int:
    """Returns the most bytes that the running batch takes. While text is written, every decoder layer keeps its keys
    and values of the inputs, twice when finished rows leave the batch."""
    states = BATCH_TOKENS * spec.stream_width * _FLOAT * _STATES_A_TOKEN + 3 * LOGIT_BYTES
    if spec.encoder is None:
        return states
    heads = [spec.decoder[layer].attention for layer in range(len(spec.decoder))]
    keys_and_values = sum(2 * each.kv_features for each in heads if each is not None)
    return states + (WRITTEN_TOKENS * 2 * keys_and_values + WAITING_TOKENS * spec.d_model) * _FLOAT


def blocks_for(spec: ModelSpec, volume: Volume, memory_bytes: int) -> int:
    """Returns the fewest blocks in which a sweep stays within `memory_bytes`. Raises SettingsError if it is too
    little."""
    kept, batch = kept_bytes(spec, volume), batch_bytes(spec)
    room = memory_bytes - batch
    least = batch + math.ceil(2 * kept / volume.samples)  # blocks are not quite equal
    if room <= 0 or memory_bytes < least:
        raise SettingsError(
            f"--memory {memory_bytes / 1e6:,.0f}MB is too little for the sweep beside the model: give at least "
            f"{math.ceil(least / 1e6):,}MB"
        )
    return min(volume.samples, math.ceil(kept / room))
