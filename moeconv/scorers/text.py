"""Likelihood of running text, in windows, for decoder-only models. Scores are nats and words of each window."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from moeconv.calibration import Sample
from moeconv.errors import CalibrationError
from moeconv.scorers import Scores, Subject

BATCH_TOKENS = 4096
KEEP_BYTES = 1 << 30


def windows_of(samples: Sequence[Sample], tokenizer: Tokenizer, context: int) -> tuple[Tensor, np.ndarray]:
    """Samples in their order, as one text → token windows [n, context] and the words that each window predicts [n].

    Windows don't overlap and the first token of each is context only. Words are what white space separates, counted
    where they end, so that the figures of different tokenizers can be compared.
    """
    text = "".join(sample.source if sample.source.endswith("\n") else sample.source + "\n" for sample in samples)
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
    return torch.tensor(ids[: count * context]).view(count, context), words


class TextScorer:
    """Scores windows [n, context]. With `keep`, the hidden states at every layer boundary are remembered, and later
    calls start at the first layer whose experts have other widths (resuming is exact)."""

    def __init__(self, subject: Subject, windows: Tensor, words: np.ndarray) -> None:
        self.subject = subject
        self.windows = windows
        self.words = words
        self._kept_states: tuple[tuple[int, ...], ...] = ()
        self._kept: list[list[Tensor]] = []  # per batch, per layer: the hidden states that enter it

    @property
    def n_samples(self) -> int:
        return len(self.windows)

    @torch.inference_mode()
    def score(self, *, keep: bool = False) -> Scores:
        states = self.subject.stack_state("decoder")
        start = 0 if keep else self._first_change(states)
        nats, kept = [], []
        for index, batch in enumerate(self.batches()):
            boundary = self._kept[index][start] if start else None
            logits, entering = self._forward(batch, start, boundary)
            nats.append(_nats(logits, batch))
            if keep and self._fits():
                kept.append(entering)
        if keep:
            self._kept, self._kept_states = kept, states if kept else ()
        per_window = torch.cat(nats).double().numpy()
        per_sample = np.stack([per_window, self.words.astype(np.float64)], axis=1)
        return Scores(per_sample, float(per_window.sum() / (len(self.windows) * (self.windows.shape[1] - 1))))

    def _first_change(self, states: tuple[tuple[int, ...], ...]) -> int:
        """The layer to resume at: the first with other widths than when states were kept; 0 without any kept."""
        if not self._kept:
            return 0
        differs = [layer for layer, state in enumerate(states) if state != self._kept_states[layer]]
        return min(differs[0] if differs else len(states) - 1, len(states) - 1)

    def _fits(self) -> bool:
        spec = self.subject.spec
        return self.windows.numel() * spec.d_model * 4 * spec.decoder.n_layers <= KEEP_BYTES

    def batches(self) -> Iterator[Tensor]:
        rows = max(1, BATCH_TOKENS // self.windows.shape[1])
        for start in range(0, len(self.windows), rows):
            yield self.windows[start : start + rows]

    def _forward(self, batch: Tensor, start: int, boundary: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Logits [rows, context, vocab], and the hidden states that entered each layer from `start` on."""
        tower = self.subject.model.model
        layers, entering = tower.layers, []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            for layer in layers[start:]
        ]
        tower.layers = nn.ModuleList(list(layers)[start:])
        try:
            inputs = {"input_ids": batch} if boundary is None else {"inputs_embeds": boundary}
            return self.subject.model(**inputs, use_cache=False).logits, entering
        finally:
            tower.layers = layers
            for hook in hooks:
                hook.remove()


def _nats(logits: Tensor, batch: Tensor) -> Tensor:
    """Negative log-likelihood of each row's tokens 1.. given what precedes them. [rows]"""
    losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none")
    return losses.sum(dim=1)
