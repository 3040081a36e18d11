"""What a reader of files from strangers is tried on, and how it is judged."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_LINE = 20_000  # letters of an error


class Finding(Exception):
    """An input that a reader does not stand. The message says what it did."""


@dataclass(frozen=True)
class Target:
    """`read` is given an input as a file, and either gives something back or raises one of `errors` with one line.
    `seeds` are made anew each time, equal ones; inputs have at most `longest` bytes. An input takes at most `seconds`
    of the processor and `megabytes` more than were held before."""

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    longest: int = 4096
    seconds: float = 5.0
    megabytes: int = 400


@dataclass
class Judge:
    """Runs a target; counts what was accepted."""

    target: Target
    tried: int = 0
    accepted: int = 0

    def __call__(self, body: bytes) -> None:
        """Raises Finding."""
        self.tried += 1
        before, began = _peak_mb(), time.process_time()
        try:
            self.target.read(body)
        except self.target.errors as error:
            line = str(error)
            if not line or "\n" in line or len(line) > LONGEST_LINE:
                raise Finding(f"{type(error).__name__} is not one line: {line[:200]!r}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise Finding(f"raises {type(error).__module__}.{type(error).__qualname__}: {error}"[:500]) from error
        else:
            self.accepted += 1
        if (took := time.process_time() - began) > self.target.seconds:
            raise Finding(f"takes {took:.1f} s")
        if (grown := _peak_mb() - before) > self.target.megabytes:
            raise Finding(f"takes {grown:.0f} MB")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
