"""From a template and a result to the text that a reader sees. Pure.

A template names rows in braces: `{g2p: hit rate}`, with `@low`, `@high`, `@n`, `@runs`, `@spread` or `@unit` another
field of the row. Behind a bar stands how to write it: `%` (as a share), `.1%`, `interval` (with its ends), `interval%`,
or what Python's format takes; by default it has three significant digits. A row that missed its aim says so behind it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from tests.bench.result import Result, Row

_PLACE = re.compile(r"\{(?P<name>[^{}|@]+)(?:@(?P<field>[a-z]+))?(?:\|(?P<form>[^{}|]+))?\}")
FAILED = "failed"


class RowMissing(ValueError):
    """A template names a row that the result does not have, though nothing failed in that run."""


def names(template: str) -> Iterator[str]:
    """The rows that a template needs."""
    return (place["name"] for place in _PLACE.finditer(template))


def cell(template: str, result: Result) -> str:
    """A cell of a table; aims that were missed are said at its end, each once."""
    missed = dict.fromkeys(filter(None, (_missed(place, result) for place in _PLACE.finditer(template))))
    return " ".join([_PLACE.sub(lambda place: _shown(place, result), template), *missed]).strip()


def sentence(template: str, result: Result) -> str:
    """Running text; an aim that was missed is said right behind the value."""

    def value(place: re.Match[str]) -> str:
        return " ".join([_shown(place, result), *filter(None, [_missed(place, result)])])

    return _PLACE.sub(value, template)


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


def _shown(place: re.Match[str], result: Result) -> str:
    row, field, form = _row(place["name"], result), place["field"], place["form"] or ""
    if row is None:
        return FAILED
    if field == "unit":
        return row.unit
    value = getattr(row, field or "value")
    if value is None:
        return ""
    if not form.startswith("interval"):
        return number(value, form, row.unit)
    form = form.removeprefix("interval")
    shown = number(value, form, row.unit)
    if row.low is None or row.high is None:
        return shown
    return f"{shown} ({number(row.low, form, row.unit)} to {number(row.high, form, row.unit)})"


def _missed(place: re.Match[str], result: Result) -> str | None:
    row, form = _row(place["name"], result), (place["form"] or "").removeprefix("interval")
    if row is None or row.met is not False or place["field"]:
        return None
    sign, _, limit = (row.aim or "").partition(" ")
    try:
        return f"(aim {sign} {number(float(limit), form, row.unit)}: missed)"
    except ValueError:  # an aim in words
        return f"(aim {row.aim}: missed)"
