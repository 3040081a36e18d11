"""`make tables`: the blocks of README.md and docs/ that show results, and the picture, from the files in docs/results.

A block lies between `<!-- table: NAME -->` and `<!-- end -->`. What is in it is defined in recipes/bench/tables:
tables, and below them the sentences that quote figures. A block whose result is not kept yet stays as it is.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recipes.bench import figures, picture
from recipes.bench.result import Result, read
from recipes.bench.tables import Block, Line, Part
from recipes.bench.tables.catalogue import BLOCKS, MISSED, PER_KIND

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
WIDTH = 120
_BLOCK = re.compile(r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """The texts that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def kept() -> dict[str, Result]:
    """All results in docs/results, by name."""
    return {path.stem: read(path) for path in sorted(RESULTS.glob("*.json"))}


def block_names(text: str) -> list[str]:
    """Of the blocks in a text, in order."""
    return [found["name"] for found in _BLOCK.finditer(text)]


def waiting(text: str, results: Mapping[str, Result]) -> list[str]:
    """The blocks of a text whose results are not kept. Raises ValueError for a block that nothing defines."""
    return [name for name in block_names(text) if _content(name, results) is None]


def regenerated(text: str, results: Mapping[str, Result]) -> str:
    """The text with each block as the results have it; one whose result is not there stays as it is."""

    def block(found: re.Match[str]) -> str:
        content = _content(found["name"], results)
        return found[0] if content is None else f"{found['start']}{content}\n{found['end']}"

    return _BLOCK.sub(block, text)


def _content(name: str, results: Mapping[str, Result]) -> str | None:
    if name == MISSED:
        return missed_table(results) if results else None
    if name not in BLOCKS:
        raise ValueError(f"no table is called {name}: recipes/bench/tables/catalogue.py has {', '.join(BLOCKS)}")
    block = BLOCKS[name]
    found = of_kinds(block, results)
    return together([block.parts(each) for each in found], found) if found else None


def of_kinds(block: Block, results: Mapping[str, Result]) -> list[Result]:
    """Returns what is kept for a block: one result, or where it is of speed one for each kind of processor."""
    names = [name for name in results if name == block.result or name.startswith(f"{block.result}-")]
    return [results[name] for name in sorted(names) if (name == block.result) is not (block.result in PER_KIND)]


def together(parts: Sequence[Sequence[Part]], results: Sequence[Result]) -> str:
    """Tables and paragraphs as Markdown; behind the last table, or all that is said if there is none, lines on the runs
    that it is from. `parts`: of each result; where there are several, rows and paragraphs begin with the processor."""
    texts, several = [], len(results) > 1
    last = max((at for at, part in enumerate(parts[0]) if not isinstance(part, str)), default=len(parts[0]) - 1)
    for at, same in enumerate(zip(*parts, strict=True)):
        lines = list[Line]()
        for part, result in zip(same, results, strict=True):
            if isinstance(part, str):
                said = f"{processor(result)}: " if several else ""
                filled = said + figures.filled(part, result)
                texts.append(textwrap.fill(filled, WIDTH, break_long_words=False, break_on_hyphens=False))
                continue
            head, *rest = [[figures.filled(each, result) for each in line] for line in part]
            lines += [] if lines else [["processor", *head] if several else head]
            lines += [[processor(result), *line] if several else line for line in rest]
        texts += [markdown(lines)] if lines else []
        if at == last:
            texts += map(origin, results)
    return "\n\n".join(texts)


def rendered(parts: Sequence[Part], result: Result) -> str:
    """Returns tables and paragraphs of one result as Markdown."""
    return together([parts], [result])


def processor(result: Result) -> str:
    """Returns the name of the processor that a result is from, with its kind."""
    machine = result.context["hardware"]
    return f"{machine['processor'].replace('(R)', '')}, {machine['isa']}"


def markdown(lines: Sequence[Line]) -> str:
    """A table; the first line is its head."""
    head, *rest = ["|" + "".join(f" {each} |" if each else " |" for each in line) for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def origin(result: Result) -> str:
    """Commit, date and machine."""
    where, machine = result.context, result.context["hardware"]
    return (
        f"*Commit {where['commit'][:7]}, {where['date'][:10]}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['isa']}.*"
    )


def missed_table(results: Mapping[str, Result]) -> str:
    """How many aims each result met, also by rows that were left out of its file, and every row that missed its own."""
    counts: list[Line] = [("result", "aims met")]
    lines: list[Line] = [("result", "row", "value", "aim")]
    for name, result in results.items():
        aims, left_out = [row.met for row in result.rows if row.met is not None], result.context.get("left_out", {})
        more = left_out.get("aims_met", 0)
        if aims or more:
            counts.append((name, f"{sum(aims) + more} of {len(aims) + more}"))
        for row in result.rows:
            if row.met is False:
                lines.append((name, row.name, f"{figures.number(row.value, '', '')} {row.unit}", str(row.aim)))
    return f"{markdown(counts)}\n\n{markdown(lines) if len(lines) > 1 else 'None was missed.'}"


def changes(results: Mapping[str, Result]) -> Iterator[tuple[Path, str]]:
    """The documents that differ from what the results say, and what they should be."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if (fresh := regenerated(text, results)) != text:
            yield path, fresh


def main() -> int:
    results = kept()
    for path, fresh in changes(results):
        path.write_text(fresh, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")
    drawn = picture.drawn(results)
    if drawn is not None and (not picture.PICTURE.exists() or picture.PICTURE.read_text(encoding="utf-8") != drawn):
        picture.PICTURE.write_text(drawn, encoding="utf-8")
        print(f"{picture.PICTURE.relative_to(ROOT)} written")
    for path in documents():
        if names := waiting(path.read_text(encoding="utf-8"), results):
            print(f"{path.relative_to(ROOT)}: no result is kept for {', '.join(names)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
