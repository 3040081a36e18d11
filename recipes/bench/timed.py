"""Where the time of a token goes: kernels, waiting for the disk, deciding what to keep and to read, other Python."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from moert.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class Spent:
    """Seconds of the thread that computes. `waiting`: for reads of experts, and for those of neurons, which it makes
    itself. `deciding`: which blocks of neurons are wanted, with the arithmetic of a predictor, who leaves, what is read
    ahead and what that is worth, without the kernels that routers are asked with; `python`: that, and all that is
    neither a kernel nor waiting."""

    whole: float
    kernels: float
    waiting: float
    deciding: float

    @property
    def python(self) -> float:
        return self.whole - self.kernels - self.waiting


class Meter:
    """Put into an engine that runs on the native kernels; it costs a microsecond a call. It stays there."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._kernels, self._deciding, self._reading = engine, 0.0, 0.0, 0.0
        backend: Any = engine.backend
        backend._call = _Timed(backend._call, self._kernel)
        runner, cache, ahead = engine.runner, engine.cache, engine.ahead
        module = sys.modules[type(runner).__module__]
        decisions: list[tuple[Any, str]] = [(module, "announce"), (cache, "take"), (cache, "give_back")]
        if ahead is not None:
            decisions.append((ahead, "look"))
        if (firing := engine._streaming.firing) is not None:
            blocks: Any = firing.blocks
            reader, timed = blocks._reader, _Timed(blocks._reader, self._read)
            reader.read, reader.read_all = timed.read, timed.read_all
            wanted = (module, "fired_blocks") if hasattr(module, "fired_blocks") else (runner, "_named")
            decisions += [(blocks, "fetch"), (blocks, "fetch_all"), wanted]
        if (scores := getattr(runner, "_scores", None)) is not None:
            scores.compressed, scores.named = self._uncounted(scores.compressed), self._uncounted(scores.named)
            decisions.append((scores, "compressed"))
        for owner, name in decisions:
            setattr(owner, name, self._decides(getattr(owner, name)))

    def during(self, work: Callable[[], object]) -> Spent:
        before = self._kernels, self._waiting, self._deciding
        started = time.perf_counter()
        work()
        whole = time.perf_counter() - started
        after = self._kernels, self._waiting, self._deciding
        return Spent(whole, *(late - early for early, late in zip(before, after, strict=True)))

    @property
    def _waiting(self) -> float:
        return self._engine.counters.stall_s + self._reading

    def _kernel(self, seconds: float) -> None:
        self._kernels += seconds

    def _read(self, seconds: float) -> None:
        self._reading += seconds

    def _uncounted(self, function: Callable[..., T]) -> Callable[..., T]:
        """Its kernels are no kernels: whoever decides by what it gives counts their time."""

        def timed(*arguments: Any) -> T:
            kernels = self._kernels
            result = function(*arguments)
            self._kernels = kernels
            return result

        return timed

    def _decides(self, function: Callable[..., T]) -> Callable[..., T]:
        """Counts what is neither a kernel nor waiting."""

        def timed(*arguments: Any, **named: Any) -> T:
            elsewhere, started = self._kernels + self._waiting, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent = time.perf_counter() - started
                self._deciding += spent - (self._kernels + self._waiting - elsewhere)

        return timed


class _Timed:
    """Functions of a library that say how long each call took."""

    def __init__(self, functions: object, tell: Callable[[float], None]) -> None:
        self._functions, self._tell = functions, tell

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, tell = getattr(self._functions, name), self._tell

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            tell(time.perf_counter() - started)
            return result

        setattr(self, name, timed)
        return timed
