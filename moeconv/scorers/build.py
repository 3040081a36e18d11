"""The scorer that fits a model, its text and a metric; or one line that says why they don't fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from moeconv.calibration import Sample, Splits
from moeconv.errors import SettingsError
from moeconv.metrics import Metric
from moeconv.scorers import Subject
from moeconv.scorers.generated import GeneratedScorer
from moeconv.scorers.text import TextScorer, windows_of
from moert.pack.model_spec import ModelSpec


def build_scorer(
    subject: Subject,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    metric: Metric,
    *,
    limit: int | None,
    context: int,
    max_new_tokens: int | None,
) -> TextScorer | GeneratedScorer:
    """`limit` bounds the samples (or, for running text, the windows of `context` tokens), spread evenly over all."""
    if subject.spec.encoder is None:
        windows, words = windows_of(samples, tokenizer, min(context, subject.spec.max_positions or context))
        chosen = spread(len(windows), limit)
        return TextScorer(subject, windows[chosen], words[chosen])
    return GeneratedScorer(
        subject, [samples[i] for i in spread(len(samples), limit)], tokenizer, metric, max_new_tokens
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer, cutting and filling up nothing, whatever its file says. Raises SettingsError."""
    if not path.is_file():
        raise SettingsError(f"{path} is not there: save the model's fast tokenizer beside it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise SettingsError(f"{path} can't be used as a tokenizer ({str(error)[:100]})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def spread(count: int, limit: int | None) -> list[int]:
    """`limit` places spread evenly over `count`."""
    if limit is None or limit >= count:
        return list(range(count))
    return [place * count // limit for place in range(limit)]


def check_fit(spec: ModelSpec, splits: Splits, metric: Metric, max_new_tokens: int | None = None) -> None:
    """Raises SettingsError when the text or the metric is not for this kind of model."""
    encoder_decoder = spec.encoder is not None
    if splits.seq2seq != encoder_decoder:
        wanted = "the fields 'input' and 'target'" if encoder_decoder else "the field 'text'"
        raise SettingsError(f"--calib {splits.name} does not fit this {spec.family} model, which needs {wanted}")
    if max_new_tokens is not None and not encoder_decoder:
        raise SettingsError("--max-new-tokens has no effect on a model that continues text: leave it out")
    if metric.generates and not encoder_decoder:
        raise SettingsError(f"--metric {metric.name} needs an encoder-decoder model: use perplexity here")
