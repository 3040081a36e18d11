"""Fields of a row → a sample; what is no usable text is refused with the place where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moeconv.calibration.rows import parsed
from moeconv.calibration.sample import Sample
from moeconv.errors import CalibrationError

KINDS = {
    "running text": ("text",),
    "chat": ("messages",),
    "input and choices": ("input", "choices", "label"),
    "input and target": ("input", "target"),
}
_MOST_DIGITS = 20
DOCUMENT = "document"  # beside the fields of any kind: what the row is a part of
ROW = "row"  # as the name of that field, where there is none of this name: each row is a document
FIELDS = (*dict.fromkeys(field for fields in KINDS.values() for field in fields), DOCUMENT)
RUNNING = ("running text", "chat")

Render = Callable[[Any, str], str]
"""Chat messages and their place → running text."""


def renamed(row: Any, fields: Mapping[str, str], place: str) -> Any:
    """The row with only those fields that `fields` gives names for (ours to theirs), and `choices` with a label. Where
    that is the document alone, all others stay."""
    if not fields or not isinstance(row, dict):
        return row
    if fields.get(DOCUMENT) == ROW:
        row = {ROW: place, **row}
    for ours, theirs in fields.items():
        if ours not in FIELDS:
            raise CalibrationError(f"--fields {ours}={theirs}: {ours} is no field; there are {', '.join(FIELDS)}")
        if theirs not in row:
            raise CalibrationError(f"{place}: no field {theirs!r}; there are {', '.join(map(str, row)):.200}")
    kept = {"choices": row["choices"]} if "label" in fields and "choices" in row else {}
    if set(fields) == {DOCUMENT}:
        kept = row  # all other fields have our names
    return kept | {ours: row[theirs] for ours, theirs in fields.items()}


def kind_of(row: Any, place: str) -> str:
    """The first of KINDS whose fields the row has."""
    present = [field for field, value in row.items() if value is not None] if isinstance(row, dict) else []
    for kind, fields in KINDS.items():
        if set(present).issuperset(fields):
            return kind
    found = ", ".join(map(repr, present)) or "none"
    ways = "'input' and 'target', 'text', 'input', 'choices' and 'label', or 'messages'"
    raise CalibrationError(f"{place}: expected the fields {ways}, found {found:.200}")


def to_sample(row: Mapping[str, Any], kind: str, place: str, render: Render) -> Sample:
    """The row, which is of this kind, as a sample. Raises CalibrationError."""
    document = _document(row.get(DOCUMENT), place)
    if kind == "chat":
        return Sample(_text(render(row["messages"], place), "messages", place), document=document)
    if kind == "running text":
        return Sample(_text(row["text"], "text", place, blank=True), document=document)
    source = _text(row["input"], "input", place)
    if kind == "input and target":
        return Sample(source, _text(row["target"], "target", place), document=document)
    choices = _choices(row["choices"], place)
    label = _label(row["label"], choices, place)
    return Sample(source, choices[label], choices, label, document)


def _document(value: Any, place: str) -> str:
    """A text or a number that names it; empty where the row has none."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise CalibrationError(f"{place}: expected a name in the field 'document', found {value!r:.40}")
    return str(value)


def _text(value: Any, field: str, place: str, *, blank: bool = False) -> str:
    if not isinstance(value, str):
        raise CalibrationError(f"{place}: expected text in the field {field!r}, found {value!r:.40}")
    if not blank and not value.strip():
        raise CalibrationError(f"{place}: the field {field!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CalibrationError(f"{place}: holds half of a character pair, which is not text") from None
    for broken, name in (("\ufffd", "U+FFFD, which stands for a lost one"), ("\0", "NUL")):
        if broken in value:
            where = value[max(0, value.index(broken) - 20) :][:40]
            raise CalibrationError(
                f"{place}: the field {field!r} holds the character {name}: read the source with its own encoding "
                f"(near {where!r})"
            )
    return value


def _choices(value: Any, place: str) -> tuple[str, ...]:
    """A list of texts; in a CSV cell, the list as JSON."""
    if isinstance(value, str):
        try:
            value = parsed(value)
        except ValueError:
            value = None
    if not isinstance(value, (list, tuple)):
        raise CalibrationError(f'{place}: expected a list of texts in the field \'choices\', such as ["no", "yes"]')
    choices = tuple(_text(choice, "choices", place) for choice in value)
    if len(choices) < 2:
        raise CalibrationError(f"{place}: {len(choices)} choices: give at least two")
    if len(set(choices)) < len(choices):
        raise CalibrationError(f"{place}: two of the choices are the same")
    return choices


def _label(value: Any, choices: tuple[str, ...], place: str) -> int:
    """The label, given as a choice's text or else as its place (also in digits), as a place."""
    if isinstance(value, str):
        if value in choices:
            return choices.index(value)
        if len(value) < _MOST_DIGITS and value.strip().isdecimal():
            value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    raise CalibrationError(
        f"{place}: the label {value!r:.40} is none of the choices {', '.join(choices)!r:.80}, "
        f"nor a place from 0 to {len(choices) - 1}"
    )
