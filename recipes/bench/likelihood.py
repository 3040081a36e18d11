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
    """Batches of one split, of which document each of their rows is, in their order, and the unquantised model's
    log-probabilities of them once `judge` has been called."""

    batches: list[Batch]
    documents: Sequence[int]
    reference: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Likelihoods:
    """Of each document the sum of nats and of divergences, and the tokens that they are of; all [documents]."""

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


def windows(samples: Sequence[Sample], model_dir: Path, count: int) -> tuple[list[Batch], list[int]]:
    """`count` windows of running text, spread evenly over all samples, and which sample each is from.

    A window lies within one sample, and no two overlap; the first token is context only.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    found: list[tuple[int, list[int]]] = []
    for number, sample in enumerate(samples):
        ids = tokenizer.encode(sample.source, add_special_tokens=False).ids
        found += [(number, ids[at : at + CONTEXT]) for at in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    if len(found) < count:
        raise ValueError(f"the text has {len(found)} windows of {CONTEXT} tokens, {count} are needed")
    chosen = [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]
    whole = torch.tensor([ids for _, ids in chosen])
    batches = [{"input_ids": part, "labels": part} for part in whole.split(_BATCH_TOKENS // CONTEXT)]
    return batches, [number for number, _ in chosen]


def pairs(samples: Sequence[Sample], model_dir: Path) -> tuple[list[Batch], list[int]]:
    """Inputs and targets, and which document each is from: a sample is one where it names none.

    Those of equal lengths share a batch, so that there is no padding.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    numbers: dict[object, int] = {}
    alike: dict[tuple[int, int], list[tuple[list[int], list[int], int]]] = defaultdict(list)
    for place, sample in enumerate(samples):
        source, target = tokenizer.encode(sample.source).ids, tokenizer.encode(sample.target).ids
        document = numbers.setdefault(sample.document or place, len(numbers))
        alike[len(source), len(target)].append((source, target, document))
    batches: list[Batch] = []
    found: list[int] = []
    for (length, _), rows in sorted(alike.items()):
        many = max(1, _BATCH_TOKENS // length)
        for start in range(0, len(rows), many):
            sources, targets, documents = zip(*rows[start : start + many], strict=True)
            batches.append({"input_ids": torch.tensor(sources), "labels": torch.tensor(targets)})
            found += documents
    return batches, found


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
    names, places = np.unique(text.documents, return_inverse=True)
    return Likelihoods(
        *(np.bincount(places, torch.cat(part).numpy(), len(names)) for part in (nats, kls, tokens))
    )  # fmt: skip


def logits_of(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [rows, tokens, vocab] and the tokens they predict [rows, tokens]."""
    ids, labels = batch["input_ids"], batch["labels"]
    if model.config.is_encoder_decoder:
        return model(input_ids=ids, labels=labels).logits, labels
    return model(input_ids=ids, use_cache=False).logits[:, :-1], labels[:, 1:]
