"""Predictions become reads: one background thread that fills the cache while the model computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moert.experts.cache import ExpertCache
from moert.pack.model_spec import ExpertKey

_CLOSE_S = 10.0  # for the read under way; the thread is a daemon, so a dead disk does not keep the process alive


class Prefetcher:
    """Reads predicted experts in order of probability until the next router has decided.

    An error while reading is raised, unchanged, by the next call on the model's thread.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._work: Sequence[ExpertKey] = ()
        self._error: BaseException | None = None
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="moert-prefetch", daemon=True)
        self._thread.start()

    def submit(self, keys: Sequence[ExpertKey]) -> None:
        """What the next layer is likely to need, most probable first; replaces what was left of the last call."""
        self._raise_error()
        self._cache.predict(keys)
        with self._wake:
            self._work = tuple(keys)
            self._wake.notify()

    def cancel(self) -> None:
        """The router has decided: nothing more is started."""
        with self._wake:
            self._work = ()
        self._raise_error()

    def close(self) -> None:
        """Ends the thread after the read under way. Further calls do nothing."""
        with self._wake:
            self._closed = True
            self._work = ()
            self._wake.notify()
        self._cache.predict(())
        self._thread.join(timeout=_CLOSE_S)

    def _raise_error(self) -> None:
        with self._wake:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _loop(self) -> None:
        while (key := self._next()) is not None:
            try:
                fits = self._cache.prefetch(key)
            except BaseException as error:
                with self._wake:
                    self._error, self._work = error, ()
                continue
            if not fits:
                self._drop_after(key)

    def _next(self) -> ExpertKey | None:
        """Waits for work; None when closed."""
        with self._wake:
            while not self._work and not self._closed:
                self._wake.wait()
            if self._closed:
                return None
            key, self._work = self._work[0], self._work[1:]
            return key

    def _drop_after(self, key: ExpertKey) -> None:
        """No room for `key`: nor is there for what is less probable in the same layer."""
        with self._wake:
            if self._work and self._work[0][:2] == key[:2]:
                self._work = ()
