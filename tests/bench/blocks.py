"""`make tables`: the blocks of README.md and docs/ that show results, and the picture, from the files in docs/results.

A block lies between `<!-- table: NAME -->` and `<!-- end -->`. What is in it is defined in tests/bench/tables: tables,
and below them the sentences that quote figures. A block whose result is not kept yet stays as it is.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.bench import figures, picture
from tests.bench.result import Result, read
from tests.bench.tables import Line, Part
from tests.bench.tables.catalogue import BLOCKS, MISSED

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
        raise ValueError(f"no table is called {name}: tests/bench/tables/catalogue.py has {', '.join(BLOCKS)}")
    block = BLOCKS[name]
    return rendered(block.parts(results[block.result]), results[block.result]) if block.result in results else None


def rendered(parts: Sequence[Part], result: Result) -> str:
    """Tables and paragraphs as Markdown; behind the last table, or all that is said if there is none, a line on the run
    that it is from."""
    last = max((at for at, part in enumerate(parts) if not isinstance(part, str)), default=len(parts) - 1)
    texts = []
    for at, part in enumerate(parts):
        if isinstance(part, str):
            filled = figures.sentence(part, result)
            texts.append(textwrap.fill(filled, WIDTH, break_long_words=False, break_on_hyphens=False))
        else:
            texts.append(markdown([[figures.cell(each, result) for each in line] for line in part]))
        if at == last:
            texts.append(origin(result))
    return "\n\n".join(texts)


def markdown(lines: Sequence[Line]) -> str:
    """A table; the first line is its head."""
    head, *rest = ["|" + "".join(f" {each} |" if each else " |" for each in line) for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def origin(result: Result) -> str:
    """Commit, date, machine, and how many aims were met, also by rows that no table shows."""
    where, left_out = result.context, result.context.get("left_out", {})
    machine, aims = where["hardware"], [row.met for row in result.rows if row.met is not None]
    met, count = (sum(aims) + left_out.get("aims_met", 0), len(aims) + left_out.get("aims_met", 0))
    said = (
        f"Commit {where['commit'][:7]}, {where['date'][:10]}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['isa']}"
    )
    return f"*{said}; {met} of {count} aims met.*" if count else f"*{said}.*"


def missed_table(results: Mapping[str, Result]) -> str:
    """Every row of every result that missed its aim."""
    lines: list[Line] = [("result", "row", "value", "aim")]
    for name, result in results.items():
        for row in result.rows:
            if row.met is False:
                lines.append((name, row.name, f"{figures.number(row.value, '', '')} {row.unit}", str(row.aim)))
    return markdown(lines) if len(lines) > 1 else "None."


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
