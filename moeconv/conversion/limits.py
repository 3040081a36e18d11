"""Notes on options that ask for more than there is, or that have no effect: what is done instead; and on a tokenizer
that does not go with its model."""

from __future__ import annotations

from collections.abc import Iterator

from moeconv.conversion.settings import DEFAULT_CONTEXT, Settings
from moeconv.errors import SettingsError
from moeconv.measure.metrics import is_module
from moeconv.measure.tokenizer import Tokenizer
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import json_object
from moert.pack.model_spec import ModelSpec
from moert.pack.tensors import TOKENIZER

_MOST_TOKENS = 0.9  # of a vocabulary, whose last rows are often there to fill it up


def samples_note(option: str, asked: int | None, there: int, what: str) -> str | None:
    """`there` is what is used; less than was asked for only where there is no more. None where nothing was cut."""
    if asked is None or there >= asked:
        return None
    return f"note: {option} {asked:,}: there are only {there:,} {what}, all of them are used"


def module_note(metric: str | None) -> str | None:
    """What is to be known of a metric that is the path of a module, before it runs; None for others."""
    if metric is None or not is_module(metric):
        return None
    return (
        f"note: --metric {metric} is a program: it runs now, here, and may do everything that you may; take only one "
        "that you trust"
    )


def context_note(context: int | None, spec: ModelSpec) -> str | None:
    """What `--context` does not do; None where it was not given, or windows are as long as was asked for."""
    limit = spec.max_positions
    if context is None:
        return None
    if spec.encoder is not None:
        return f"note: --context {context:,} has no effect: an encoder-decoder model takes each input whole"
    if limit is None or context <= limit:
        return None
    return (
        f"note: --context {context:,}: the model takes at most {limit:,} tokens (its config.json), windows have as many"
    )


def end_note(checkpoint: Checkpoint) -> str | None:
    """Returns a line on an end token of the tokenizer at which texts of the model do not end; None without one."""
    said = (json_object(checkpoint.path / "tokenizer_config.json") or {}).get("eos_token")
    name = said.get("content") if isinstance(said, dict) else said
    if not isinstance(name, str) or not (checkpoint.spelled or (checkpoint.path / TOKENIZER).is_file()):
        return None
    try:
        number = Tokenizer.read(checkpoint.path / TOKENIZER, checkpoint.spelled).get_vocab().get(name)
    except SettingsError:  # whoever needs it says so
        return None
    ends = checkpoint.spec.tokens.eos
    if number is None or number in ends:
        return None
    own = ", ".join(map(str, ends)) or "none"
    return (
        f"note: the tokenizer's end token is {name!r} ({number}), the model's by generation_config.json or config.json "
        f"{own}; moert chat stops at all of them, moert run at the model's alone"
    )


def vocabulary_note(tokenizer: Tokenizer, spec: ModelSpec) -> str | None:
    """What a tokenizer has that the model has not, or lacks; None where they go together. Text with a token of the
    first kind is refused, a few tokens are always missing."""
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    beyond = sorted((number, name) for name, number in numbers.items() if number >= spec.vocab_size)
    if beyond:
        number, name = beyond[0]
        return (
            f"note: {len(beyond):,} token(s) of tokenizer.json have no place in the model, whose vocab_size is "
            f"{spec.vocab_size:,}: {name!r} is token {number:,}; text with them is refused"
        )
    if len(numbers) < _MOST_TOKENS * spec.vocab_size:
        return (
            f"note: tokenizer.json knows {len(numbers):,} of the model's {spec.vocab_size:,} tokens: is it the "
            "model's own"
        )
    return None


def notes(settings: Settings, spec: ModelSpec, ranked: int, judged: int, heldout: int) -> Iterator[str]:
    """One line for each option of a conversion that is cut; the numbers are those of the samples that are used."""
    found = (
        context_note(None if settings.context == DEFAULT_CONTEXT else settings.context, spec),
        samples_note("--samples", settings.samples, judged, "calibration samples to judge plans by"),
        samples_note("--sweep-samples", settings.sweep_samples, ranked, "calibration samples to rank experts by"),
        samples_note("--heldout-samples", settings.heldout_samples, heldout, "held-out samples"),
    )
    return (note for note in found if note)
