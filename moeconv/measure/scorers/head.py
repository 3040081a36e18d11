"""From final hidden states to what is scored: nats of the right token, divergence from the unquantised model.

The divergence of the distribution q (of hidden state h) from the reference p is Σ p ln p − Σ p ln q. With the head's
rows w_v, ln q_v = h·w_v − lse(h), so Σ p ln q = h·m − lse(h) where m = Σ p_v w_v is the mean row under p: it is kept
for each position in place of a whole distribution, and the divergence costs no more than the nats. The rows are those
of q, also where its head is another than that of p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moert.pack.model_spec import ModelSpec

LOGIT_BYTES = 64 << 20


@dataclass(frozen=True)
class ReferenceRows:
    """What is kept of the unquantised model for each scored position: the mean row of the head [rows, d_model], and
    Σ p ln p, less the mean bias [rows]; where logits are bounded, the final state and Σ p ln p."""

    mean_row: Tensor
    negentropy: Tensor

    def __getitem__(self, rows: Tensor) -> ReferenceRows:
        return ReferenceRows(self.mean_row[rows], self.negentropy[rows])


class Head:
    """Reads the model's own output weights; `hidden` [rows, d_model] are final states, normed."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self.weight: Tensor = model.get_output_embeddings().weight
        self.bias: Tensor | None = model.get_output_embeddings().bias
        self.scale, self.softcap = spec.head.scale, spec.head.softcap
        self._original: Tensor | None = None  # the head of the unquantised model, where logits are bounded
        self.chunk = max(16, LOGIT_BYTES // (4 * len(self.weight)))

    def reference(self, hidden: Tensor, judged_head: Tensor | None = None) -> ReferenceRows:
        """`judged_head` [vocab_size, d_model] is that of what will be judged, None where it is the model's own."""
        judged = self.weight if judged_head is None else judged_head
        rows, negentropy = [], []
        if self.softcap is not None:
            self._original = self.weight if judged_head is None else self.weight.clone()
        for part in torch.split(hidden, self.chunk):
            log_p = torch.log_softmax(self._logits(part), dim=1)
            p = log_p.exp()
            rows.append(part if self.softcap is not None else p @ judged)
            mean_bias = 0 if self.bias is None or self.softcap is not None else self.bias
            negentropy.append((p * (log_p - mean_bias)).sum(dim=1))
        return ReferenceRows(torch.cat(rows), torch.cat(negentropy))

    def judge(self, hidden: Tensor, targets: Tensor, reference: ReferenceRows | None) -> tuple[Tensor, Tensor]:
        """Nats of the targets [rows] and divergence from the reference [rows] (zeros without one)."""
        lse = torch.cat([_lse(self._logits(part)) for part in torch.split(hidden, self.chunk)])
        return self._judged(hidden, targets, reference, lse)

    def best(self, hidden: Tensor) -> Tensor:
        """The likeliest next token. [rows]"""
        return torch.cat([self._logits(part).argmax(dim=1) for part in torch.split(hidden, self.chunk)])

    def judge_with_best(
        self, hidden: Tensor, targets: Tensor, reference: ReferenceRows | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, with the likeliest token [rows] and how far the second is behind it in logits [rows]."""
        lse, best, lead = [], [], []
        for part in torch.split(hidden, self.chunk):
            logits = self._logits(part)
            top = logits.topk(2, dim=1)
            best.append(top.indices[:, 0])
            lead.append(top.values[:, 0] - top.values[:, 1])
            lse.append(_lse(logits))
        return *self._judged(hidden, targets, reference, torch.cat(lse)), torch.cat(best), torch.cat(lead)

    def _judged(
        self, hidden: Tensor, targets: Tensor, reference: ReferenceRows | None, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        right = (hidden * self.scale * self.weight[targets]).sum(dim=1)
        nats = lse - self._bounded(right if self.bias is None else right + self.bias[targets])
        if reference is None:
            return nats, torch.zeros_like(nats)
        if self.softcap is not None:
            return nats, lse + reference.negentropy - self._mean_logits(hidden, reference.mean_row)
        return nats, lse + reference.negentropy - (hidden * self.scale * reference.mean_row).sum(dim=1)

    def _mean_logits(self, hidden: Tensor, original: Tensor) -> Tensor:
        """Σ p_v logit_v, with p of the states `original` of the unquantised model. Both [rows, d_model]"""
        means = []
        for mine, before in zip(torch.split(hidden, self.chunk), torch.split(original, self.chunk), strict=True):
            p = torch.softmax(self._logits(before, self._original), dim=1)
            means.append((p * self._logits(mine)).sum(dim=1))
        return torch.cat(means)

    def _bounded(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size], of few rows."""
        return torch.log_softmax(self._logits(hidden), dim=1)

    def _logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        logits = (hidden * self.scale) @ (self.weight if weight is None else weight).T
        return self._bounded(logits if self.bias is None else logits.add_(self.bias))


def _lse(logits: Tensor) -> Tensor:
    """ln Σ exp of logits [rows, vocab], which are overwritten: as torch.logsumexp, without a second such array."""
    largest = logits.amax(dim=1, keepdim=True)
    return logits.sub_(largest).exp_().sum(dim=1).log() + largest[:, 0]
