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
_TOO_FEW = 100  # bytes: who writes such a number without a unit meant another one


class NotASize(ValueError):
    """The text, what is wrong with it and what was expected, on one line; the name of the option goes before it."""


def parse_size(text: str) -> int:
    """'2GB' or '2g' (powers of 1000), '512MiB' (powers of 1024), '123456' (bytes) → bytes. Raises NotASize."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise NotASize(f"{text!r} is not a size: expected one like {EXAMPLES}")
    (whole, _, part), unit = match[1].partition("."), match[2].upper()
    number, one = int(whole + part), 10 ** len(part)  # the size is number / one
    if not unit and (0 < number <= _TOO_FEW * one or number % one):
        raise NotASize(f"{text!r} is a number of bytes: did you mean {match[1]}GB")
    nbytes: int = number * _UNITS[unit] // one
    if not 0 < nbytes < 1 << 62:
        raise NotASize(f"{text!r} is not a size that a machine can have: expected one like {EXAMPLES}")
    return nbytes
