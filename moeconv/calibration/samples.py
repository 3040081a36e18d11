"""Samples of text in every form, and their parts that share nothing."""

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
    """Running text: `source` alone. Input and target: `source` and `target`. Input and choices: `source`, the texts
    that its label may have, and in `label` the right one's place; `target` is then `choices[label]`. `document` names
    what the sample is a part of (see `calibration.documents`), empty where nothing tells; samples of equal text are
    equal whatever they are a part of."""

    source: str
    target: str = ""
    choices: tuple[str, ...] = ()
    label: int = -1
    document: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """Equal for samples that differ in white space, or in the order of their choices, alone."""
        return " ".join(self.source.split()), " ".join(self.target.split())

    @property
    def is_short_row(self) -> bool:
        """True for a short row of running text: a blank line or a heading says nothing when it stands twice."""
        return not self.target and len(self.source) < SHORT_ROW


@dataclass(frozen=True)
class Splits:
    """Two disjoint lists of samples, and a hash of each. `seq2seq` is true of samples that have an input and a target
    (or choices), false of running text. `metric` is the catalogue's choice, if it has one. `why`: in words what the
    documents of the calibration text are."""

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
    """sha256 over the samples' texts in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        parts = [sample.source, sample.target, *([sample.choices] if sample.choices else [])]
        digest.update(json.dumps(parts).encode() + b"\n")
    return digest.hexdigest()


# Rows out of text files, each with the place where it stands, for messages.
# Files are read line by line, and no line is longer than MAX_ROW_BYTES: what a row takes in memory is bounded by
# that.

Rows = Iterator[tuple[str, Any]]
"""Pairs of a place, such as `words.jsonl:12`, and what stands there: a dict of fields, if the row is well formed."""

MAX_TEXT_BYTES = 1 << 29
"""Of all text of a file or data set: a hundred million tokens, more than a conversion reads in a month."""
MAX_ROW_BYTES = 1 << 26
MAX_ROWS = 1 << 22
_MOST_VALUES = 1 << 22  # of a row, as JSON
_MARK = b"\xef\xbb\xbf"  # of the order of bytes, which some programs write before UTF-8


def lines_of(path: Path) -> Iterator[str]:
    """The lines of the file, each with its end, which is \\n. Raises CalibrationError with the line that is not UTF-8,
    before it gives any."""
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
    """Raises CalibrationError."""
    if nbytes > MAX_ROW_BYTES:
        raise CalibrationError(f"{place}: a row of over {MAX_ROW_BYTES >> 20} MiB: cut the text into shorter ones")


def parsed(text: str) -> Any:
    """JSON of one row. Raises ValueError, whose message is a part of a line."""
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
    """Lines for csv, which joins them to rows. `taken`: letters of this row so far."""

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
    """One row for each paragraph, with the blank lines after it: the rows, joined, are the text again."""
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
"""Read apart."""


# Which document each sample comes from: as the rows say, as the text shows, or runs of rows where neither tells.
# Samples of one document (an article, a package, a chapter) are alike, so a document is the unit that text is
# divided by and that a promise counts. A field `document` says it. In running text, headings do: a document begins
# at each heading of the highest level that stands there twice (` = Title = ` of WikiText, `#` of Markdown, deeper
# ones else); without headings, places with two blank lines; without those, each row, where rows are long (an
# article a row).
# Short rows of running text that tell nothing stay without a document: windows of that text are counted in runs
# (see `runs`). So are rows of other kinds: in runs, since neighbours in a file are often alike. A run is as long as
# leaves RUNS of them, so that half of a text, and three quarters of that half, still are twice the number that a
# promise takes. Longer runs hold larger lumps, fewer of them say less. Where rows prove to be hardly alike, they
# are counted themselves (`promise.evidence`); that they are not, the name ROW for the field `document` says
# outright.

RUNS = 160
LONG_ROW = 1000  # characters, on average; a window of 256 tokens has about as many
DEEPEST = 6
IN_RUNS = "runs of neighbours, since nothing tells which of them are alike (--fields document=row: none are)"
_HEADING = re.compile(r"\s*(?:(#{1,6}) +\S|((?:= ){1,6})[^=\s].* =)")
_GAP = 3  # ends of lines behind the last letter: two lines are blank


def runs(count: int, wanted: int = RUNS) -> list[int]:
    """The number of its run for each of `count` things in a row: about `wanted` runs of one length."""
    length = max(1, count // wanted)
    return [place // length for place in range(count)]


def with_documents(samples: Sequence[Sample], *, running: bool) -> tuple[list[Sample], str]:
    """Returns the samples with a document each, where one can be told, and in words what the documents are. Those of
    one document come to stand together, where the first of them stands."""
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
    """That of the heading that the row begins with: 1 is the highest, 0 stands for none."""
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


# Samples in two parts that share none: one to measure on, one to judge by.

RANKING_SHARE = 0.25  # of the calibration text ranks experts; plans are judged on the rest

Parts = tuple[tuple[Sample, ...], tuple[Sample, ...]]


def divide(samples: Sequence[Sample], seq2seq: bool, share: float, seed: int) -> Parts:
    """The first part gets about `share` of the samples, the second the rest; both get some, and no document is torn.

    Samples of input and target are dealt by `seed`, documents whole, those without one singly. Running text is cut
    once, at the border of documents (of rows, where it has none) that is nearest to `share` of its characters, so that
    each part stays running text. What is equal but for white space lies in one part only, short rows of running text
    excepted. Raises CalibrationError when there are not two different samples, or all are of one document.
    """
    parts = _dealt(samples, share, seed) if seq2seq else _cut(samples, share)
    if not all(parts):
        found = f"{len(samples)} {'sample' if seq2seq else 'row'}{'s' * (len(samples) != 1)}"
        one = " of one document" * (len(samples) > 1 and samples[0].document != "")
        raise CalibrationError(f"the text is {found}{one} with nothing to divide: give more, or --heldout")
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
    """How many of the documents come first, so that they have about `share` of all; neither side is empty where there
    are two of them at all."""
    goal, border, length = share * sum(sizes), 0, 0
    for size in sizes:
        if length + size / 2 > goal:
            break
        border, length = border + 1, length + size
    return max(1, min(border, len(sizes) - 1))


# Fields of a row → a sample; what is no usable text is refused with the place where it stands.

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
