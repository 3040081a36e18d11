"""Numbers as a person reads them."""

from __future__ import annotations


def percent(value: float, digits: int = 1) -> str:
    return f"{round(value, digits + 2) + 0.0:.{digits}%}"  # adding zero takes the sign from -0


def size(nbytes: float) -> str:
    """In decimal units: 1 MB is 1,000,000 bytes."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * factor:
            shown = nbytes / factor
            return f"{shown:.3g} {unit}" if shown < 999.5 else f"{shown:,.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def many(count: int) -> str:
    """Returns a number of weights as a person reads it."""
    for factor, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:,}"


def duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
