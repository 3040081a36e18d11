"""What an adapter says when it can't represent a model."""

from __future__ import annotations

from moeconv.errors import ConversionError


class UnsupportedModel(ConversionError):
    """The checkpoint uses something that a pack can't say. The message is one line, fit to be shown to a user."""
