"""What an adapter says when it can't represent a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moeconv.errors import ConversionError
from moert.pack.errors import PackError


class UnsupportedModel(ConversionError):
    """The checkpoint uses something that a pack can't say. The message is one line, fit to be shown to a user."""


class ConfigInvalid(ConversionError):
    """Settings that transformers can't take, or that mean nothing. The message is a part of a line."""


class ShapeDiffers(ValueError):
    """A tensor has another shape than config.json implies; the message is a part of a sentence."""


class ModelFailed(ConversionError):
    """Transformers can't build or run the model."""


@contextmanager
def transformers_model(path: Path) -> Iterator[None]:
    """Around what builds a model from `path` or runs it first. Raises ModelFailed: whatever transformers raises inside
    comes from the model's own files, and is one line."""
    try:
        yield
    except (ConversionError, PackError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelFailed(
            f"transformers can't run the model in {path} ({type(error).__name__}: {reason}): its config.json asks for "
            "what this family can't compute, or its weights are not those that it describes"
        ) from error
