"""Samples of text: their files, their kinds, their documents, and their division into parts that share none."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeconv.errors import CalibrationError

# One sample of text, and the two lists of samples that a conversion works with.

SHORT_ROW = 80  # characters


@dataclass(frozen=True)
class Sample:
    """A sample of text. Running text: `source` alone. Input and target: `source` and `target`. Input and choices:
    `source`, the possible texts of its label, and in `label` the place of the right one; `target` is then
    `choices[label]`. `document` names the document that the sample is a part of (see `with_documents`), empty if it is
    unknown; samples of equal text are equal, whatever their documents."""

    source: str
    target: str = ""
    choices: tuple[str, ...] = ()
    label: int = -1
    document: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """A key that is equal for samples which differ only in white space, or in the order of their choices."""
        return " ".join(self.source.split()), " ".join(self.target.split())

    @property
    def is_short_row(self) -> bool:
        """True for a short row of running text: a blank line or a heading may stand in both parts of a text."""
        return not self.target and len(self.source) < SHORT_ROW


@dataclass(frozen=True)
class Splits:
    """Two disjoint lists of samples. `seq2seq` is true for samples that have an input and a target (or choices), false
    for running text. `metric` is the catalogue's choice, if it has one. `why` describes, in words, the documents of the
    calibration text."""

    name: str
    seq2seq: bool
    calibration: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    metric: str | None = None
    why: str = ""

    @property
    def choices(self) -> bool:
        """True when the samples have choices."""
        return bool(self.calibration and self.calibration[0].choices)

    def digest(self, split: str) -> str:
        return samples_digest(self.calibration if split == "calibration" else self.heldout)


def samples_digest(samples: Iterable[Sample]) -> str:
    """Returns the sha256 of the samples' texts in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        parts = [sample.source, sample.target, *([sample.choices] if sample.choices else [])]
        digest.update(json.dumps(parts).encode() + b"\n")
    return digest.hexdigest()


# Rows of text files, each with its place, for messages.
# Files are read line by line, and no line is longer than MAX_ROW_BYTES, which bounds the memory that a row takes.

Rows = Iterator[tuple[str, Any]]
"""Pairs of a place, for example `words.jsonl:12`, and the row there: a dict of fields, if it is well formed."""

MAX_TEXT_BYTES = 1 << 29
"""Bytes of text in a file or data set: a hundred million tokens, more than a conversion reads in a month."""
MAX_ROW_BYTES = 1 << 26
MAX_ROWS = 1 << 22
_MOST_VALUES = 1 << 22  # of a row, as JSON
_MARK = b"\xef\xbb\xbf"  # of the order of bytes, which some programs write before UTF-8


def lines_of(path: Path) -> Iterator[str]:
    """Yields the lines of the file, each with its end, which is \\n. Raises CalibrationError naming the line that is
    not UTF-8, before it yields any."""
    for _ in _decoded(path):
        pass
    yield from _decoded(path)


def _decoded(path: Path) -> Iterator[str]:
    number, before = 0, 0
    for number, line in enumerate(_raw(path), 1):
        try:
            text = line.removeprefix(_MARK).decode() if number == 1 else line.decode()
        except UnicodeDecodeError as error:
            skipped = len(_MARK) if number == 1 and line.startswith(_MARK) else 0
            at = before + skipped + error.start
            raise CalibrationError(f"{path}:{number}: not UTF-8 text at byte {at} of the file: convert it") from None
        before += len(line)
        yield text[:-2] + "\n" if text.endswith("\r\n") else text


def _raw(path: Path) -> Iterator[bytes]:
    try:
        if (nbytes := path.stat().st_size) > MAX_TEXT_BYTES:
            raise CalibrationError(
                f"{path}: has {nbytes >> 20} MiB, at most {MAX_TEXT_BYTES >> 20} are read: give a part of it"
            )
        with open(path, "rb") as handle:
            number = 0
            while line := handle.readline(MAX_ROW_BYTES + 1):
                number += 1
                check_row(len(line), f"{path}:{number}")
                yield line
    except OSError as error:
        raise CalibrationError(f"{path}: can't be read ({error.strerror})") from None


def check_row(nbytes: int, place: str) -> None:
    """Raises CalibrationError if a row is larger than MAX_ROW_BYTES."""
    if nbytes > MAX_ROW_BYTES:
        raise CalibrationError(f"{place}: a row of over {MAX_ROW_BYTES >> 20} MiB: cut the text into shorter ones")


def parsed(text: str) -> Any:
    """Returns the JSON value of one row. Raises ValueError, whose message is a part of a line."""
    if sum(text.count(mark) for mark in "[{,") > _MOST_VALUES:
        raise ValueError(f"over {_MOST_VALUES} values")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_jsonl(path: Path) -> Rows:
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", parsed(line.removesuffix("\n"))
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: not JSON ({error})") from None


def read_csv(path: Path) -> Rows:
    csv.field_size_limit(MAX_ROW_BYTES)
    feed = _Feed(path)
    reader = csv.DictReader(feed.lines(), strict=True)
    try:
        for row in reader:
            inner = sum(cell.count("\n") for cell in row.values() if isinstance(cell, str))
            place = f"{path}:{reader.line_num - inner}"
            if None in row:
                raise CalibrationError(f"{place}: more cells than the header names: put quotes around commas")
            yield place, row
            feed.taken = 0
    except csv.Error as error:
        raise CalibrationError(f"{path}:{reader.line_num + 1}: not CSV from here on ({error})") from None


class _Feed:
    """The lines of a file for csv, which joins them to rows. `taken`: letters of this row so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, 0

    def lines(self) -> Iterator[str]:
        for number, line in enumerate(lines_of(self.path), 1):
            self.taken += len(line)
            check_row(self.taken, f"{self.path}:{number}")
            if "\r" in line:
                yield from io.StringIO(line, newline="")
            else:
                yield line


def read_paragraphs(path: Path) -> Rows:
    """Yields one row for each paragraph, with the blank lines after it: the rows, joined, are the text again."""
    lines: list[str] = []
    start, taken, full, blank = 1, 0, False, False
    for number, line in enumerate(lines_of(path), 1):
        is_text = bool(line.strip())
        if is_text and full and blank:
            yield f"{path}:{start}", {"text": "".join(lines)}
            lines, taken, full = [], 0, False
        start = start if lines else number
        lines.append(line)
        taken, full, blank = taken + len(line), full or is_text, not is_text
        check_row(taken, f"{path}:{start}")
    if lines:
        yield f"{path}:{start}", {"text": "".join(lines)}


READERS: dict[str, Callable[[Path], Rows]] = {".jsonl": read_jsonl, ".csv": read_csv, ".txt": read_paragraphs}
PARQUET = ".parquet"
"""The ending of parquet files, which another process reads (moeconv.calibration.apart)."""


# The document of each sample: from a field of the rows, from marks in the text, or else a run of rows.
# Samples of one document (an article, a package, a chapter) are alike, so a document is the unit that text is divided
# by and that a promise counts. A field `document` names it. Running text shows it by headings: a document begins at
# each heading of the highest level that occurs twice (` = Title = ` of WikiText, `#` of Markdown, deeper ones else);
# without headings, at places with two blank lines; without these, at each row if rows are long (an article a row).
# Short rows of running text without any mark stay without a document: windows of that text are counted in runs (see
# `runs`). Rows of other kinds are counted in runs too, since neighbours in a file are often alike. A run is long enough
# to leave RUNS of them, so that half of a text, and three quarters of that half, still have twice the number that a
# promise takes. Longer runs hold larger groups of like rows, but fewer runs prove less. If rows prove to be hardly
# alike, they are counted themselves (`promise.evidence`); the name ROW for the field `document` declares them so
# outright.

RUNS = 160
LONG_ROW = 1000  # characters, on average; a window of 256 tokens has about as many
DEEPEST = 6
IN_RUNS = "runs of neighbours, since nothing tells which of them are alike (--fields document=row: none are)"
_HEADING = re.compile(r"\s*(?:(#{1,6}) +\S|((?:= ){1,6})[^=\s].* =)")
_GAP = 3  # ends of lines behind the last letter: two lines are blank


def runs(count: int, wanted: int = RUNS) -> list[int]:
    """Returns the number of the run of each of `count` items in a row: about `wanted` runs of one length."""
    length = max(1, count // wanted)
    return [place // length for place in range(count)]


def with_documents(samples: Sequence[Sample], *, running: bool) -> tuple[list[Sample], str]:
    """Returns the samples, each with its document if one is known, and a description of the documents in words. Samples
    of one document named by a field move to the place of its first sample."""
    if any(sample.document for sample in samples):
        return _together(samples), "as the field 'document' says"
    if not running:
        return _named(samples, runs(len(samples)), "run"), IN_RUNS
    ways = ((_headings, "from heading to heading"), (_after_gaps, "between blank lines"), (_long_rows, "each row"))
    for begins_of, why in ways:
        begins = begins_of(samples)
        if sum(begins) > 1:
            return _named(samples, list(_counted(begins)), "part"), why
    return list(samples), IN_RUNS


def level(row: str) -> int:
    """Returns the level of the heading that the row begins with: 1 is the highest, 0 stands for none."""
    match = _HEADING.match(row)
    if match is None:
        return 0
    return len(match[1]) if match[1] else match[2].count("=")


def _together(samples: Sequence[Sample]) -> list[Sample]:
    first = {document: at for at, document in reversed(list(enumerate(sample.document for sample in samples)))}
    return sorted(samples, key=lambda sample: first[sample.document])


def _named(samples: Sequence[Sample], numbers: Iterable[int], what: str) -> list[Sample]:
    return [replace(sample, document=f"{what} {number}") for sample, number in zip(samples, numbers, strict=True)]


def _counted(begins: Sequence[bool]) -> Iterable[int]:
    number = 0
    for begin in begins:
        number += begin
        yield number


def _headings(samples: Sequence[Sample]) -> list[bool]:
    levels = [level(sample.source) for sample in samples]
    counts = Counter(levels)
    top = next((depth for depth in range(1, DEEPEST + 1) if counts[depth] > 1), 0)
    return [0 < found <= top for found in levels]


def _after_gaps(samples: Sequence[Sample]) -> list[bool]:
    ends = [sample.source.count("\n", len(sample.source.rstrip())) >= _GAP for sample in samples]
    return [True, *ends[:-1]]


def _long_rows(samples: Sequence[Sample]) -> list[bool]:
    lengths = [len(sample.source) for sample in samples if sample.source.strip()]
    is_long = bool(lengths) and sum(lengths) >= LONG_ROW * len(lengths)
    return [is_long] * len(samples)


# Samples in two parts that share none: one for measuring, one for judging.

RANKING_SHARE = 0.25  # of the calibration text ranks experts; plans are judged on the rest

Parts = tuple[tuple[Sample, ...], tuple[Sample, ...]]


def divide(samples: Sequence[Sample], seq2seq: bool, share: float, seed: int) -> Parts:
    """Returns two parts of the samples: the first gets about `share` of them, the second the rest; both get some, and
    no document is torn.

    Samples of input and target are dealt by `seed`, documents whole, samples without one singly. Running text is cut
    once, at the border of documents (of rows, if it has none) that is nearest to `share` of its characters, so that
    each part stays running text. Samples that are equal but for white space lie in one part only, short rows of running
    text excepted. Raises CalibrationError for fewer than two different samples, or if all are of one document.
    """
    parts = _dealt(samples, share, seed) if seq2seq else _cut(samples, share)
    if not all(parts):
        found = f"{len(samples)} {'sample' if seq2seq else 'row'}{'s' * (len(samples) != 1)}"
        one = " of one document" * (len(samples) > 1 and samples[0].document != "")
        different = len({sample.key for sample in samples})
        few = f" ({different} without repeats)" if different < len(samples) else ""
        raise CalibrationError(
            f"the text is {found}{one}{few} with nothing to divide: give more, or held-out text of its own"
        )
    return parts


def _dealt(samples: Sequence[Sample], share: float, seed: int) -> Parts:
    unique = list({sample.key: sample for sample in reversed(samples)}.values())[::-1]
    documents: dict[object, list[Sample]] = {}
    for place, sample in enumerate(unique):
        documents.setdefault(sample.document or place, []).append(sample)
    dealt = list(documents.values())
    random.Random(seed).shuffle(dealt)
    border = _nearest([len(document) for document in dealt], share)
    first, second = ([sample for document in part for sample in document] for part in (dealt[:border], dealt[border:]))
    return tuple(first), tuple(second)


def _cut(samples: Sequence[Sample], share: float) -> Parts:
    starts = [
        place
        for place, sample in enumerate(samples)
        if place == 0 or not sample.document or sample.document != samples[place - 1].document
    ]
    stops = [*starts[1:], len(samples)]
    lengths = [
        sum(len(sample.source) for sample in samples[start:stop]) for start, stop in zip(starts, stops, strict=True)
    ]
    border = [*starts, len(samples)][_nearest(lengths, share)]
    first = {sample.key for sample in samples[:border]}
    rest = (sample for sample in samples[border:] if sample.is_short_row or sample.key not in first)
    return tuple(samples[:border]), tuple(rest)


def _nearest(sizes: Sequence[int], share: float) -> int:
    """Returns the number of documents to put first, so that they have about `share` of the whole size; with two
    documents or more, neither side is empty."""
    goal, border, length = share * sum(sizes), 0, 0
    for size in sizes:
        if length + size / 2 > goal:
            break
        border, length = border + 1, length + size
    return max(1, min(border, len(sizes) - 1))


# Fields of a row → a sample; unusable text is refused with its place.

KINDS = {
    "running text": ("text",),
    "chat": ("messages",),
    "input and choices": ("input", "choices", "label"),
    "input and target": ("input", "target"),
}
_MOST_DIGITS = 20
DOCUMENT = "document"  # beside the fields of any kind: the name of the row's document
ROW = "row"  # as the name of that field: each row is a document, unless rows have a field of this name
FIELDS = (*dict.fromkeys(field for fields in KINDS.values() for field in fields), DOCUMENT)
RUNNING = ("running text", "chat")

Render = Callable[[Any, str], str]
"""Chat messages and their place → running text."""


def renamed(row: Any, fields: Mapping[str, str], place: str) -> Any:
    """Returns the row with only the fields that `fields` names (ours to theirs), and `choices` with a label. If it
    names the document alone, all other fields stay. Raises CalibrationError."""
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
    """Returns the first of KINDS whose fields the row has. Raises CalibrationError."""
    present = [field for field, value in row.items() if value is not None] if isinstance(row, dict) else []
    for kind, fields in KINDS.items():
        if set(present).issuperset(fields):
            return kind
    found = ", ".join(map(repr, present)) or "none"
    ways = "'input' and 'target', 'text', 'input', 'choices' and 'label', or 'messages'"
    raise CalibrationError(f"{place}: expected the fields {ways}, found {found:.200}")


def to_sample(row: Mapping[str, Any], kind: str, place: str, render: Render) -> Sample:
    """Returns a row of this kind as a sample. Raises CalibrationError."""
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
    """Returns the name of a row's document, given as text or a number; empty if the row has none."""
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
    """Returns the choices of a list of texts, or of the list as JSON (in a CSV cell)."""
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
    """Returns the place of the label's choice. The label is a choice's text, or else its place (also in digits)."""
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
