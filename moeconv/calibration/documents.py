"""Which document each sample comes from: as the rows say, as the text shows, or runs of rows where neither tells.

Samples of one document (an article, a package, a chapter) are alike, so a document is the unit that text is divided by
and that a promise counts. A field `document` says it. In running text, headings do: a document begins at each heading
of the highest level that stands there twice (` = Title = ` of WikiText, `#` of Markdown, deeper ones else); without
headings, places with two blank lines; without those, each row, where rows are long (an article a row).

Short rows of running text that tell nothing stay without a document: windows of that text are counted in runs (see
`runs`). So are rows of other kinds: in runs, since neighbours in a file are often alike. A run is as long as leaves
RUNS of them, so that half of a text, and three quarters of that half, still are twice the number that a promise takes.
Longer runs hold larger lumps, fewer of them say less. Where rows prove to be hardly alike, they are counted themselves
(`promise.evidence`); that they are not, the name ROW for the field `document` says outright.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from moeconv.calibration.sample import Sample

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
