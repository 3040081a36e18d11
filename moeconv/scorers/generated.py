"""Generated text against target text, for encoder-decoder models: greedy, in batches, with the metric's judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from moeconv.calibration import Sample
from moeconv.metrics import Metric
from moeconv.scorers import Scores, Subject
from moert.pack.model_spec import ModelSpec

BATCH_ROWS = 512
BATCH_TOKENS = 16384
SPARE_TOKENS = 8


@dataclass(frozen=True)
class Batch:
    """Samples of like length. `rows` are their places in the list of samples; padding is on the right."""

    rows: list[int]
    inputs: Tensor  # [rows, source tokens]
    mask: Tensor  # [rows, source tokens], 1 where there is a token
    targets: Tensor  # [rows, target tokens], -100 where there is none


class GeneratedScorer:
    """With `keep`, the encoder's outputs and the generated tokens are remembered: later calls skip the encoder while
    its experts have the same widths, and generate only the outputs that change. Perplexity is scored too: nats and
    words of the targets, given the inputs."""

    def __init__(
        self,
        subject: Subject,
        samples: Sequence[Sample],
        tokenizer: Tokenizer,
        metric: Metric,
        max_new_tokens: int | None,
    ) -> None:
        self.subject = subject
        self.samples = samples
        self.tokenizer = tokenizer
        self.metric = metric
        self.batches = batches_of(samples, tokenizer, _pad(subject.spec))
        longest = max(batch.targets.shape[1] for batch in self.batches)
        self.max_new_tokens = max_new_tokens or longest + SPARE_TOKENS
        self._kept_state: tuple[tuple[int, ...], ...] | None = None
        self._kept: list[Tensor] = []
        self._kept_outputs: list[list[list[int]]] = []  # for each batch, what was generated when states were kept

    @property
    def n_samples(self) -> int:
        return len(self.samples)

    @torch.inference_mode()
    def score(self, *, keep: bool = False) -> Scores:
        encoded = self._encoded(keep)
        outputs = [""] * len(self.samples)
        nats, tokens = np.zeros(len(self.samples)), 0
        generated: list[list[list[int]]] = []
        for index, (batch, hidden) in enumerate(zip(self.batches, encoded, strict=True)):
            nats[batch.rows] = self._target_nats(batch, hidden).double().numpy()
            tokens += int((batch.targets != -100).sum())
            if self.metric.generates:
                known = self._kept_outputs[index] if self._kept_outputs and not keep else None
                generated.append(
                    self._generate(batch, hidden) if known is None else self._changed(batch, hidden, known)
                )
                for row, ids in zip(batch.rows, generated[-1], strict=True):
                    outputs[row] = self.tokenizer.decode(self._without_end(ids), skip_special_tokens=True)
        if keep and self._resumable():
            self._kept_outputs = generated
        return Scores(self._per_sample(outputs, nats), float(nats.sum() / tokens), tuple(outputs))

    def generated_ids(self) -> list[list[int]]:
        """Greedy output of every sample as token ids, without start, end and padding."""
        ids: list[list[int]] = [[] for _ in self.samples]
        with torch.inference_mode():
            for batch, hidden in zip(self.batches, self._encoded(False), strict=True):
                for row, tokens in zip(batch.rows, self._generate(batch, hidden), strict=True):
                    ids[row] = self._without_end(tokens)
        return ids

    def _per_sample(self, outputs: list[str], nats: np.ndarray) -> np.ndarray:
        judge = self.metric.judge
        if judge is None:
            words = [max(1, len(sample.target.split())) for sample in self.samples]
            return np.stack([nats, np.array(words, dtype=np.float64)], axis=1)
        judged = [judge(output, sample.target) for output, sample in zip(outputs, self.samples, strict=True)]
        return np.stack([np.array(judged), np.ones(len(judged))], axis=1)

    def _encoded(self, keep: bool) -> list[Tensor]:
        state = self.subject.stack_state("encoder")
        if state == self._kept_state:
            return self._kept
        encoder = self.subject.model.get_encoder()
        encoded = [
            encoder(input_ids=batch.inputs, attention_mask=batch.mask).last_hidden_state for batch in self.batches
        ]
        if keep:
            self._kept, self._kept_state = encoded, state
        return encoded

    def _target_nats(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Nats of each row's target given its input. [rows]"""
        logits = self._teacher_forced(batch, hidden, batch.targets)
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none", ignore_index=-100)
        return losses.sum(dim=1)

    def _teacher_forced(self, batch: Batch, hidden: Tensor, outputs: Tensor) -> Tensor:
        """Logits [rows, tokens, vocab] at each place of `outputs` [rows, tokens] (below 0: padding)."""
        start = torch.full((len(batch.rows), 1), self.subject.spec.decoder_start_token_id or 0)
        logits: Tensor = self.subject.model(
            encoder_outputs=_encoder_output(hidden),
            attention_mask=batch.mask,
            decoder_input_ids=torch.cat([start, outputs[:, :-1].clamp(min=0)], dim=1),
            use_cache=False,
        ).logits
        return logits

    def _changed(self, batch: Batch, hidden: Tensor, known: list[list[int]]) -> list[list[int]]:
        """What is generated now, given what was before: one pass over the known outputs finds the rows in which some
        token is no longer the likeliest; only these are generated again."""
        outputs = _padded(known, -100)
        likeliest = self._teacher_forced(batch, hidden, outputs).argmax(dim=-1)
        differs = ((likeliest != outputs) & (outputs >= 0)).any(dim=1).nonzero()[:, 0]
        if not len(differs):
            return known
        rows = differs.tolist()
        part = Batch([batch.rows[row] for row in rows], batch.inputs[rows], batch.mask[rows], batch.targets[rows])
        found = list(known)
        for row, ids in zip(rows, self._generate(part, hidden[rows]), strict=True):
            found[row] = ids
        return found

    def _resumable(self) -> bool:
        """A pass over a whole output drops tokens beyond an expert's capacity, generating token by token does not."""
        capacity = self.subject.spec.moe.capacity
        return capacity is None or capacity >= self.max_new_tokens

    def _without_end(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token not in self.subject.spec.eos_token_ids]

    def _generate(self, batch: Batch, hidden: Tensor) -> list[list[int]]:
        """Greedy output of each row, its end mark included."""
        from transformers import DynamicCache, EncoderDecoderCache

        spec = self.subject.spec
        start = spec.decoder_start_token_id or 0
        stops = torch.tensor(spec.eos_token_ids)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        token = torch.full((len(batch.rows), 1), start)
        finished = torch.zeros(len(batch.rows), dtype=torch.bool)
        columns: list[Tensor] = []
        for _ in range(self.max_new_tokens):
            logits = self.subject.model(
                encoder_outputs=_encoder_output(hidden), attention_mask=batch.mask, decoder_input_ids=token,
                past_key_values=cache, use_cache=True,
            ).logits  # fmt: skip
            token = logits[:, -1].argmax(dim=-1, keepdim=True)
            columns.append(token[:, 0].masked_fill(finished, -1))
            finished |= torch.isin(token[:, 0], stops)
            if finished.all():
                break
        return [[token for token in row if token >= 0] for row in torch.stack(columns, dim=1).tolist()]


def batches_of(samples: Sequence[Sample], tokenizer: Tokenizer, pad: int) -> list[Batch]:
    """Samples sorted by length and cut into batches; the tokenizer adds its own end-of-text marks."""
    sources = [encoding.ids for encoding in tokenizer.encode_batch([sample.source for sample in samples])]
    targets = [encoding.ids for encoding in tokenizer.encode_batch([sample.target for sample in samples])]
    order = sorted(range(len(samples)), key=lambda row: (len(sources[row]), len(targets[row]), row))
    batches, start = [], 0
    while start < len(order):
        rows = order[start : start + BATCH_ROWS]
        while len(rows) > 1 and len(rows) * len(sources[rows[-1]]) > BATCH_TOKENS:
            rows = rows[: len(rows) // 2]
        inputs = _padded([sources[row] for row in rows], pad)
        mask = _padded([[1] * len(sources[row]) for row in rows], 0)
        batches.append(Batch(rows, inputs, mask, _padded([targets[row] for row in rows], -100)))
        start += len(rows)
    return batches


def _pad(spec: ModelSpec) -> int:
    """Any token will do, since padding is masked; some models name one that they have no embedding for."""
    pad = spec.pad_token_id
    return pad if pad is not None and pad < spec.vocab_size else 0


def _padded(rows: list[list[int]], fill: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def _encoder_output(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import MoEModelOutput

    return MoEModelOutput(last_hidden_state=hidden)
