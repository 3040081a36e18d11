"""From a template and a result to the text that a reader sees. Pure.

A template names rows in braces: `{g2p: hit rate}`, with `@low`, `@high`, `@n`, `@runs`, `@spread` or `@unit` another
field of the row. Behind a bar stands how to write it: `%` (as a share), `.1%`, `interval` (with its ends), `interval%`,
or what Python's format takes; by default it has three significant digits. A value that was measured several times has
half the distance between its quartiles behind it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from moert.pack.manifest import in_words
from recipes.bench.result import Result, Row

_PLACE = re.compile(r"\{(?P<name>[^{}|@]+)(?:@(?P<field>[a-z]+))?(?:\|(?P<form>[^{}|]+))?\}")
FAILED = "failed"


class RowMissing(ValueError):
    """A template names a row that the result does not have, though nothing failed in that run."""


def names(template: str) -> Iterator[str]:
    """The rows that a template needs."""
    return (place["name"] for place in _PLACE.finditer(template))


def filled(template: str, result: Result) -> str:
    """Returns a cell of a table, or running text, with its figures."""
    return _PLACE.sub(lambda place: _shown(place, result), template).strip()


def number(value: float, form: str, unit: str) -> str:
    """One number as `form` says; a share is a fraction, or in per cent where its unit says so."""
    if form.endswith("%"):
        percent = value if unit.startswith("%") else 100 * value
        short = abs(percent) >= 10 or round(percent, 6) == round(percent)
        decimals = form.removesuffix("%") or (".0" if short else ".1")
        return _unsigned_zero(f"{percent:{decimals}f}") + "%"
    if form:
        return _unsigned_zero(f"{value:{form}}")
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _unsigned_zero(text: str) -> str:
    return text.removeprefix("-") if re.fullmatch(r"-[0.]+", text) else text


def _row(name: str, result: Result) -> Row | None:
    """None where the part of the run that should have measured it failed."""
    row = result.by_name.get(name)
    if row is None and not result.context["settings"].get(FAILED):
        near = difflib.get_close_matches(name, result.by_name, 3, 0)
        raise RowMissing(f"there is no row {name!r}; nearest: {', '.join(map(repr, near)) or 'none'}")
    return row


def _about(row: Row, form: str) -> str:
    """Returns ± half the distance between the quartiles of repeated measurements, in as many digits as the value has;
    nothing where that is less than they show."""
    half = number(row.spread / 2, form, row.unit) if row.spread else "0"
    if not form and row.spread:
        half = f"{row.spread / 2:,.0f}" if abs(row.value) >= 1000 else f"{row.spread / 2:.2g}"
    return f" ± {half}" if re.search("[1-9]", half) else ""


def _shown(place: re.Match[str], result: Result) -> str:
    row, field, form = _row(place["name"], result), place["field"], place["form"] or ""
    if row is None:
        return FAILED
    if field == "unit":
        return in_words(row.unit)
    value = getattr(row, field or "value")
    if value is None:
        return ""
    if not form.startswith("interval"):
        return number(value, form, row.unit) + (_about(row, form) if field is None else "")
    form = form.removeprefix("interval")
    shown = number(value, form, row.unit)
    if row.low is None or row.high is None:
        return shown
    return f"{shown} ({number(row.low, form, row.unit)} to {number(row.high, form, row.unit)})"
