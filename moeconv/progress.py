"""A progress bar with time left, on stderr; plain lines now and then where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from moeconv.sensitivity import Progress
from moert.pack.model_spec import ExpertKey

LINE_EVERY_S = 30.0


def bar(label: str) -> Progress:
    def wrap(items: Iterable[ExpertKey], total: int) -> Iterable[ExpertKey]:
        if sys.stderr.isatty():
            shown: Iterable[ExpertKey] = tqdm(items, desc=label, total=total, unit="expert")
            return shown
        return _lines(items, label, total)

    return wrap


def _lines(items: Iterable[ExpertKey], label: str, total: int) -> Iterator[ExpertKey]:
    started = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - said > LINE_EVERY_S:
            left = (now - started) / done * (total - done)
            print(f"{label}: {done} of {total} experts, about {left:.0f} s left", file=sys.stderr, flush=True)
            said = now
        yield item
