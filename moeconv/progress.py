"""Progress of long work on stderr: bars, and single lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from moert.pack.messages import complain, in_one_line

LINE_EVERY_S = 30.0


class Bar(Protocol):
    """A progress bar: `update(n)` adds `n` finished parts."""

    def update(self, n: int) -> Any: ...


class Progress(Protocol):
    """Makes a progress bar for work of `total` parts; `unit` is the word for one part."""

    def __call__(self, label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Bar]: ...


def say(line: str) -> None:
    """Writes a message to stderr as one line, also where it quotes text of a model or a pack that has line breaks."""
    complain(in_one_line(line))


@contextmanager
def bar(label: str, total: int, unit: str = "probe", /) -> Iterator[Bar]:
    """Shows a progress bar of `total` parts, each called `unit`, with the time left; plain lines now and then if stderr
    is no terminal."""
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
            complain(f"{self.label}: {self.done} of {self.total}, about {left:.0f} s left")
            self.said = now


class _Silent:
    def update(self, n: int) -> None:
        pass


def unseen(label: str, total: int, unit: str = "probe", /) -> AbstractContextManager[Bar]:
    """Returns a progress bar that shows nothing."""
    return nullcontext(_Silent())
