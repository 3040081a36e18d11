"""A progress bar with time left, on stderr; plain lines now and then where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from moeconv.progress import Bar

LINE_EVERY_S = 30.0


@contextmanager
def bar(label: str, total: int, unit: str = "probe") -> Iterator[Bar]:
    """A bar over `total` of what `unit` names."""
    if sys.stderr.isatty():
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
