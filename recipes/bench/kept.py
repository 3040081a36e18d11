"""`make keep-results`: copies build/bench/*.json into docs/results, the source of all figures in the docs.

A result of uncommitted changes is refused; a missed aim is kept. Results of PER_KIND are kept for each kind of
processor, and a speed that fell against the kept one is printed. A file that would be too large keeps only the rows
that the tables need and all rows that missed their aim; its context then counts the others.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from recipes.bench import blocks, picture
from recipes.bench.blocks import BLOCKS, PAPERS, PER_KIND, RESULTS, ROOT, filled, rendered
from recipes.bench.program import as_program
from recipes.bench.result import FOLDER, Result, read, write

MOST_BYTES = 200_000
BETTER = {"tokens/s": 1, "GB/s": 1, "GMAC/s": 1, "% of bandwidth": 1, "s": -1, "µs": -1}
"""Units of speed → whether more or less of it is better."""


def refusal(result: Result) -> str | None:
    """Why a result can't be kept, or None."""
    where = result.context
    if where.get("changed", True):
        commit = where["commit"].removesuffix("+")
        return f"it was measured with files that differ from commit {commit}: commit, then measure again"
    others = set(where["settings"].get("commits of the splits", [])) - {where["commit"]}
    if others:
        return f"parts of it are from other commits ({', '.join(sorted(others))}): delete those, then measure again"
    return None


def needed(name: str, result: Result) -> set[str]:
    """The rows of a result that the tables quote and the picture shows."""
    parts = chain.from_iterable(block.parts(result) for block in BLOCKS.values() if block.result == name)
    templates: Iterator[str] = chain.from_iterable(
        [part] if isinstance(part, str) else chain.from_iterable(part) for part in parts
    )
    shown = picture.needed(result) if name == picture.SOURCE else set[str]()
    return set(chain.from_iterable(map(blocks.names, chain(templates, claimed(name))))) | shown


def claimed(name: str) -> Iterator[str]:
    """Yields the templates of rows of a result in the tables of papers."""
    claims = chain.from_iterable(PAPERS.values())
    return chain.from_iterable(claim.line for claim in claims if claim.result == name)


def trimmed(result: Result, wanted: Collection[str]) -> Result:
    """Only the wanted rows and those that missed their aim."""
    rows = [row for row in result.rows if row.name in wanted or row.met is False]
    left = [row for row in result.rows if row.name not in wanted and row.met is not False]
    left_out = {"rows": len(left), "aims_met": sum(row.met is True for row in left)}
    return replace(result, context={**result.context, "left_out": left_out}, rows=rows)


def keep(source: Path, folder: Path) -> Path:
    """Copies one result. Raises ValueError where it can't be kept, or the tables can't be made from it."""
    name, result = source.stem, read(source)
    if reason := refusal(result):
        raise ValueError(reason)
    for block in BLOCKS.values():
        if block.result == name:
            rendered(block.parts(result), result)
    for template in claimed(name):
        filled(template, result)
    if source.stat().st_size > MOST_BYTES:
        result = trimmed(result, needed(name, result))
    kind = result.context["hardware"]["isa"]
    out = f"{name}-{kind}" if name in PER_KIND else name
    before = folder / f"{out}.json"
    if before.exists():
        for line in fallen(read(before), result):
            print(f"{out}: {line}", file=sys.stderr)
    return write(out, result.context, result.rows, folder)


def fallen(before: Result, now: Result) -> Iterator[str]:
    """Returns a line for each figure of speed that is worse by more than its spread than the kept one of a processor of
    the same kind."""
    if before.context["hardware"]["isa"] != now.context["hardware"]["isa"]:
        return
    for old, new in ((before.by_name.get(row.name), row) for row in now.rows):
        sign = BETTER.get(new.unit)
        if old is None or sign is None:
            continue
        if sign * (new.value - old.value) < -max(old.spread or 0.0, new.spread or 0.0):
            yield f"{new.name} was {old.value:.4g} and is {new.value:.4g} {new.unit}"


def main(sources: Sequence[Path]) -> int:
    if not sources:
        print(f"there is no result in {FOLDER}: run the benches first", file=sys.stderr)
        return 1
    failed = False
    for source in sources:
        try:
            kept = keep(source, RESULTS)
            print(f"{kept.relative_to(ROOT)} kept, of commit {read(kept).context['commit']}")
        except ValueError as error:
            print(f"{source} is not kept: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    as_program(lambda: main(sorted(FOLDER.glob("*.json"))), __doc__)
