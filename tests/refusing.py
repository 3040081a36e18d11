"""Errors that a user sees: one line that says what was wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def one_line(error: type[BaseException] | tuple[type[BaseException], ...], match: str = "") -> Iterator[None]:
    """Expects an error whose message matches and is one line."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)
