"""How far a long work is: what shows it on stderr, and what is told of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from moert.pack.messages import in_one_line

LINE_EVERY_S = 30.0


class Bar(Protocol):
    """Shows how far a long work is."""

    def update(self, n: int) -> Any: ...


class Progress(Protocol):
    """Makes a bar for a work of `total` parts; `unit` says what these are."""

    def __call__(self, label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Bar]: ...


def say(line: str) -> None:
    """Tells a person something, on one line, whatever it quotes of a model or a pack."""
    print(in_one_line(line), file=sys.stderr, flush=True)


@contextmanager
def bar(label: str, total: int, unit: str = "probe", /) -> Iterator[Bar]:
    """A bar with the time left, over `total` of what `unit` names; plain lines now and then where stderr is not a
    terminal."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=label, total=total, unit=unit) as shown:
            yield shown
    else:
        yield _Lines(label, total)


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, total, 0
        self.started = self.said = time.monotonic()

    def update(self, n: int) -> None:
        self.done += n
        now = time.monotonic()
        if self.done and now - self.said > LINE_EVERY_S:
            left = (now - self.started) / self.done * (self.total - self.done)
            print(f"{self.label}: {self.done} of {self.total}, about {left:.0f} s left", file=sys.stderr, flush=True)
            self.said = now


class _Silent:
    def update(self, n: int) -> None:
        pass


def unseen(label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Bar]:
    """A bar that nobody looks at."""
    return nullcontext(_Silent())
