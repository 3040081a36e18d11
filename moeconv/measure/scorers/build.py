"""The scorer that fits a model, its text and a metric; or one line that says why they don't fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from moeconv.calibration import Sample, Splits
from moeconv.errors import CalibrationError, SettingsError
from moeconv.measure.metrics import Metric
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.generated import LENGTH_SPREAD, SPARE_TOKENS, GeneratedScorer, targets_of
from moeconv.measure.scorers.items import I64, documents_of, texts_of
from moeconv.measure.scorers.text import TextScorer, choices_of, windows_of
from moeconv.measure.tokenizer import Tokenizer
from moert.pack.model_spec import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Extent:
    """How much of a text is taken: at most `limit` samples or windows (None: all), spread evenly over what is there;
    `context` tokens in a window of running text; outputs of `max_new_tokens` (None: a little more than the longest
    target has)."""

    limit: int | None
    context: int
    max_new_tokens: int | None

    def window(self, spec: ModelSpec) -> int:
        """Tokens in a window: no more than the model takes."""
        return min(self.context, spec.max_positions or self.context)


def build_scorers(
    subject: Subject,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    metric: Metric,
    extent: Extent,
    blocks: int = 1,
) -> list[TextScorer] | list[GeneratedScorer]:
    """One scorer for each of `blocks` parts of the samples, or of the windows that running text is cut into. Raises
    CalibrationError."""
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
    """How much text a scorer works on: samples (or windows), and at most how many tokens pass through the encoder and
    through the decoder, those that fill rows up among them. `documents` [samples] says which of them are of one
    document, as numbers. `entropy` is that of the tokens' frequencies in the text that is scored, in nats a token: what
    guessing by them alone would lose."""

    samples: int
    encoder_tokens: int
    decoder_tokens: int
    documents: I64
    entropy: float


def volume(
    spec: ModelSpec,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    extent: Extent,
) -> Volume:
    """What `build_scorers` would lay out. An encoder-decoder model decodes every text to score, and what it writes.

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
    """Of the tokens' frequencies, in nats, corrected for what a short text can't show (Miller 1955)."""
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
    """The tokenizer of a file, or of what stands for it. Raises SettingsError."""
    return Tokenizer.read(path, spelled)


def spread(count: int, limit: int | None) -> list[int]:
    """`limit` places spread evenly over `count`."""
    if limit is None or limit >= count:
        return list(range(count))
    return [place * count // limit for place in range(limit)]


def dealt(items: Sequence[T], blocks: int) -> list[list[T]]:
    """The items in `blocks` parts of like size, each spread over all of them."""
    if blocks > len(items):
        raise CalibrationError(f"{len(items)} samples can't be divided into {blocks} blocks: give more text")
    return [list(items[block::blocks]) for block in range(blocks)]


def check_fit(spec: ModelSpec, splits: Splits, metric: Metric, max_new_tokens: int | None = None) -> None:
    """Raises SettingsError when the text or the metric is not for this kind of model."""
    encoder_decoder = spec.encoder is not None
    if splits.seq2seq != encoder_decoder and not splits.choices:
        wanted = "the fields 'input' and 'target'" if encoder_decoder else "the field 'text'"
        raise SettingsError(f"--calib {splits.name} does not fit this {spec.family} model, which needs {wanted}")
    if max_new_tokens is not None and not encoder_decoder:
        raise SettingsError("--max-new-tokens has no effect on a model that continues text: leave it out")
    if metric.generates and not encoder_decoder:
        raise SettingsError(f"--metric {metric.name} needs an encoder-decoder model: use perplexity here")
    if (metric.reads == "choice") != splits.choices:
        needs = "samples with 'choices' and a 'label'" if metric.reads == "choice" else "samples without choices"
        raise SettingsError(f"--metric {metric.name} needs {needs}: {splits.name} has other ones")


def _longest_target(samples: Sequence[Sample], tokenizer: Tokenizer, spec: ModelSpec) -> int:
    texts = [text for sample in samples for text in (sample.choices or (sample.target,))]
    return max(len(ids) for ids in targets_of(texts, tokenizer, spec))
