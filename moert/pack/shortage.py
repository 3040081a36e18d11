"""Where the system has too little memory to begin with, or none left, which is not always MemoryError. For both
programs."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import NamedTuple

from moert.machine.control_groups import ROOT, control_groups, text


class Least(NamedTuple):
    """What a program needs before it does anything: memory that its control group allows, and addresses (ulimit -v).
    With less, the system or a library ends it in a way of its own."""

    memory_bytes: int
    address_bytes: int


_SIGNS = ("failed to map segment", "cannot allocate", "can't allocate", "can't start new thread")


def refusal(least: Least, root: Path = ROOT) -> str | None:
    """Why a program can't begin here; None if it can. Where addresses are limited, numpy's library is kept from setting
    some aside for every core."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if limit < least.address_bytes:
            return f"{_needs(least.address_bytes, limit)} of addresses: raise the limit (ulimit -v)"
    for folder in control_groups(root, "memory"):
        found = (text(folder / "memory.max") or text(folder / "memory.limit_in_bytes")).strip()
        if found.isdecimal() and int(found) < least.memory_bytes:
            return f"{_needs(least.memory_bytes, int(found))} of memory in its control group: raise the limit"
    return None


def _needs(least_bytes: int, nbytes: int) -> str:
    least, found = least_bytes // 1_000_000, nbytes // 1_000_000
    return f"at least {least} MB are needed to begin, and this process may have {found} MB"


def short_of_memory(error: BaseException | None) -> bool:
    """True if that is behind an error, or behind the one that brought it about."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, (ImportError, OSError, RuntimeError)):
            text = str(error).lower()
            if any(sign in text for sign in _SIGNS):
                return True
        error = error.__cause__ or error.__context__
    return False
