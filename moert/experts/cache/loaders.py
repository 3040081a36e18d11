"""The threads that read experts beside the model's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_CLOSE_S = 10.0  # for reads under way; the threads are daemons, so a dead disk does not keep the process alive


class Loaders:
    """`most` of them, started when there is something to read; each does what `serve` does."""

    def __init__(self, most: int, serve: Callable[[], None]) -> None:
        self.most, self.threads = most, list[threading.Thread]()
        self._serve = serve

    def start(self) -> None:
        """Those that do not run yet, or fewer where the system allows no more."""
        while len(self.threads) < self.most:
            thread = threading.Thread(target=self._serve, name=f"moert-load-{len(self.threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self.most = len(self.threads)
            else:
                self.threads.append(thread)

    def end(self) -> None:
        """Waits for some time until all have ended; none is started after that."""
        self.most, self._serve = 0, _nothing
        until = time.monotonic() + _CLOSE_S
        for thread in self.threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))


def _nothing() -> None:
    """What has ended holds nobody's memory."""
