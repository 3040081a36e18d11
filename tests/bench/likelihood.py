"""Teacher-forced likelihood of calibration text under a transformers model, and the divergence from a reference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from moeconv.calibration import Sample

CONTEXT = 256
_BATCH_TOKENS = 4096

Batch = dict[str, Tensor]  # what the model takes, with labels


@dataclass
class Text:
    """Batches of one split, and the unquantised model's log-probabilities of them once `judge` has been called."""

    batches: list[Batch]
    reference: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Likelihoods:
    """Of each sample the sum of nats and of divergences, and the tokens that they are of; all [samples]."""

    nats: npt.NDArray[np.float64]
    kls: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]

    @property
    def nll(self) -> float:
        """Nats a token; the perplexity is its exponential."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def kl(self) -> float:
        """Nats a token."""
        return float(self.kls.sum() / self.tokens.sum())


def windows(samples: Sequence[Sample], model_dir: Path, first: int, count: int) -> list[Batch]:
    """`count` windows of running text from the `first` on, that don't overlap; the first token is context only."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "".join(sample.source if sample.source.endswith("\n") else sample.source + "\n" for sample in samples)
    ids = tokenizer.encode(text, add_special_tokens=False).ids[first * CONTEXT : (first + count) * CONTEXT]
    if len(ids) < count * CONTEXT:
        raise ValueError(f"the text has fewer than {first + count} windows of {CONTEXT} tokens")
    rows = _BATCH_TOKENS // CONTEXT
    whole = torch.tensor(ids).view(count, CONTEXT)
    return [{"input_ids": part, "labels": part} for part in whole.split(rows)]


def pairs(samples: Sequence[Sample], model_dir: Path) -> list[Batch]:
    """Inputs and targets of equal lengths share a batch, so that there is no padding."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    alike: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = defaultdict(list)
    for sample in samples:
        source, target = tokenizer.encode(sample.source).ids, tokenizer.encode(sample.target).ids
        alike[len(source), len(target)].append((source, target))
    batches = []
    for (length, _), rows in sorted(alike.items()):
        many = max(1, _BATCH_TOKENS // length)
        for start in range(0, len(rows), many):
            sources, targets = zip(*rows[start : start + many], strict=True)
            batches.append({"input_ids": torch.tensor(sources), "labels": torch.tensor(targets)})
    return batches


@torch.inference_mode()
def run(model: Any, batches: Sequence[Batch]) -> None:
    """Sends the text through the model, for its hooks to see."""
    for batch in batches:
        logits_of(model, batch)


@torch.inference_mode()
def judge(model: Any, text: Text) -> Likelihoods:
    """The first call sets the reference that the divergences of later ones are measured against."""
    first = not text.reference
    nats, kls, tokens = [], [], []
    for index, batch in enumerate(text.batches):
        logits, labels = logits_of(model, batch)
        logs = logits.log_softmax(-1)
        if first:
            text.reference.append(logs)
        was = text.reference[index]
        nats.append(-logs.gather(2, labels[..., None]).squeeze(2).double().sum(1))
        kls.append((was.exp() * (was - logs)).sum(-1).double().sum(1))
        tokens.append(torch.full((len(labels),), labels.shape[1], dtype=torch.float64))
    return Likelihoods(*(torch.cat(part).numpy() for part in (nats, kls, tokens)))


def logits_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [rows, tokens, vocab] and the tokens they predict [rows, tokens]."""
    ids, labels = batch["input_ids"], batch["labels"]
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, labels=labels).logits, labels
    return model(input_ids=ids, use_cache=False).logits[:, :-1], labels[:, 1:]
