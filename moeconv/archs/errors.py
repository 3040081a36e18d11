"""What an adapter says when it can't represent a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeconv.errors import ConversionError

_LIMITS = ("activation_limit", "swiglu_limit")


class UnsupportedModel(ConversionError):
    """The checkpoint uses something that a pack can't say. The message is one line, fit to be shown to a user."""


def refuse_limit(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where a config.json limits activations: no supported family's feed-forward does."""
    for name in _LIMITS:
        if config.get(name) is not None:
            raise UnsupportedModel(
                f"config.json sets {name} {config[name]!r}: this family computes without a limit in transformers, so "
                "that the model would be measured wrongly"
            )
