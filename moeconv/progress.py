"""How far a long work is: what shows it, and what is told of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Bar(Protocol):
    """Shows how far a long work is."""

    def update(self, n: int) -> Any: ...


class Progress(Protocol):
    """Makes a bar for a work of `total` parts; `unit` says what these are."""

    def __call__(self, label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Bar]: ...


class _Silent:
    def update(self, n: int) -> None:
        pass


def unseen(label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Bar]:
    """A bar that nobody looks at."""
    return nullcontext(_Silent())
