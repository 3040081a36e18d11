"""Sizes in bytes as people write them, for both programs: 2G, 2GB and 2 GiB."""

from __future__ import annotations

import re

EXAMPLES = "1.5GB, 800MB or 512MiB"
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+)\s*([A-Za-z]*)")
_TOO_FEW = 100  # bytes: who writes such a number without a unit meant gigabytes
NO_MEMORY = 100_000  # bytes that no process can live in: who writes so many of memory without a unit meant megabytes


class NotASize(ValueError):
    """The text, what is wrong with it and what was expected, on one line; the name of the option goes before it."""


def parse_size(text: str, too_few: int = _TOO_FEW) -> int:
    """'2GB' or '2g' (powers of 1000), '512MiB' (powers of 1024), '123456' (bytes) → bytes. Raises NotASize, also for
    `too_few` bytes or less without a unit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise NotASize(f"{text!r} is not a size: expected one like {EXAMPLES}")
    (whole, _, part), unit = match[1].partition("."), match[2].upper()
    number, one = int(whole + part), 10 ** len(part)  # the size is number / one
    if not unit and (0 < number <= too_few * one or number % one):
        meant = "MB" if _TOO_FEW * one < number <= NO_MEMORY * one else "GB"
        raise NotASize(f"{text!r} is a number of bytes: did you mean {match[1]}{meant}")
    nbytes: int = number * _UNITS[unit] // one
    if not 0 < nbytes < 1 << 62:
        raise NotASize(f"{text!r} is not a size that a machine can have: expected one like {EXAMPLES}")
    return nbytes
