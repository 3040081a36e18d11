"""Notes on options that ask for more than there is, or that have no effect: what is done instead."""

from __future__ import annotations

from collections.abc import Iterator

from moeconv.conversion.settings import DEFAULT_CONTEXT, Settings
from moert.pack.model_spec import ModelSpec


def samples_note(option: str, asked: int | None, there: int, what: str) -> str | None:
    """`there` is what is used; less than was asked for only where there is no more. None where nothing was cut."""
    if asked is None or there >= asked:
        return None
    return f"note: {option} {asked:,}: there are only {there:,} {what}, all of them are used"


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


def notes(settings: Settings, spec: ModelSpec, ranked: int, judged: int, heldout: int) -> Iterator[str]:
    """One line for each option of a conversion that is cut; the numbers are those of the samples that are used."""
    found = (
        context_note(None if settings.context == DEFAULT_CONTEXT else settings.context, spec),
        samples_note("--samples", settings.samples, judged, "calibration samples to judge plans by"),
        samples_note("--sweep-samples", settings.sweep_samples, ranked, "calibration samples to rank experts by"),
        samples_note("--heldout-samples", settings.heldout_samples, heldout, "held-out samples"),
    )
    return (note for note in found if note)
