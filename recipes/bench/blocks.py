"""`make tables`: writes the picture, and the blocks of README.md and docs/ that show results, from docs/results.

A block lies between `<!-- table: NAME -->` and `<!-- end -->`. recipes/bench/tables defines its tables, and the
sentences below them that quote figures. A block whose result is not kept yet stays as it is.
"""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moert.pack.manifest import in_words
from recipes.bench import picture
from recipes.bench.program import as_program
from recipes.bench.result import Result, Row, read
from recipes.bench.tables import Block, Line, Part, mechanisms, papers, quality, speed

# From a template and a result to the text that a reader sees. Pure.
# A template names rows in braces: `{g2p: hit rate}`, with `@low`, `@high`, `@n`, `@runs`, `@spread` or `@unit`
# another field of the row. Behind a bar stands how to write it: `%` (as a share), `.1%`, `interval` (with its
# ends), `interval%`, or what Python's format takes; by default it has three significant digits. A value that was
# measured several times has half the distance between its quartiles behind it.

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


# Every block by its name, as markers in the text call it.

MISSED = "missed"
"""The block that lists the missed aims of all results."""
PER_KIND = ("kernels", "peers")
"""Results that are kept for each kind of processor, as NAME-KIND.json."""

PAPERS = {f"paper-{name}": claims for name, claims in papers.PAPERS.items()}
"""Blocks of several results: a table of a paper's claims, and the results that it is from."""

BLOCKS: Mapping[str, Block] = {
    "front": Block("demo", speed.two_models),
    "picture": Block("stream", speed.front_beside_llama),
    "demo": Block("demo", speed.demo_parts),
    "models": Block("models", quality.models_parts),
    "references": Block("references", speed.demo_parts),
    "peers": Block("peers", speed.peers_parts),
    "kernels": Block("kernels", speed.kernels_parts),
    "rounding": Block("rounding", quality.rounding_parts),
    "stream": Block("stream", speed.shaped),
    "stream-trained": Block("stream", speed.trained),
    "ahead": Block("ahead", speed.ahead_parts),
    "less": Block("less", mechanisms.less_parts),
    "sweep": Block("sweep", quality.sweep_parts),
    "gradients": Block("gradients", quality.gradients_parts),
    "plans": Block("plans", quality.plans_parts),
    "answers": Block("answers", quality.answers_parts),
    "quant": Block("quant", quality.quant_parts),
    "quant_smollm2": Block("quant_smollm2", quality.quant_parts),
    "mixed": Block("mixed", quality.mixed_parts),
    "hash-names": Block("hashed", mechanisms.names),
    "hash-routing": Block("hashed", mechanisms.routing),
    "hash-hits": Block("hashed", mechanisms.hits),
    "hash-speeds": Block("hashed", mechanisms.hash_speeds),
    "beforehand": Block("beforehand", mechanisms.beforehand),
    "flash-bytes": Block("flash", mechanisms.nbytes),
    "flash-speeds": Block("flash", mechanisms.flash_speeds),
    "flash-curves": Block("flash", mechanisms.curves),
    "promise": Block("promise", quality.promise_parts),
    "size": Block("size", quality.size_parts),
    "workers": Block("workers", quality.size_parts),
    "large": Block("large", speed.large_parts),
    "many": Block("many", speed.many_parts),
    "serve": Block("serve", speed.serve_parts),
    "methods": Block("methods", mechanisms.methods),
    "devices": Block("devices", mechanisms.devices_parts),
    "fiddler": Block("fiddler", mechanisms.fiddler_parts),
    "card": Block("card", mechanisms.card_parts),
    "outlook": Block("outlook", mechanisms.outlook_parts),
}


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
    if name in PAPERS:
        return paper_table(PAPERS[name], results)
    if name not in BLOCKS:
        raise ValueError(f"no table is called {name}: recipes/bench/blocks.py has {', '.join([*BLOCKS, *PAPERS])}")
    block = BLOCKS[name]
    found = of_kinds(block, results)
    return together([block.parts(each) for each in found], found) if found else None


def paper_table(claims: Sequence[papers.Claim], results: Mapping[str, Result]) -> str | None:
    """Returns claims as a table with their figures, and the commits of the results that these are from; None where one
    of them is not kept."""
    quoted = list(dict.fromkeys(claim.result for claim in claims if claim.result))
    if not set(quoted) <= set(results):
        return None
    lines: list[Line] = [papers.HEAD]
    for claim in claims:
        lines.append([filled(cell, results[claim.result]) for cell in claim.line] if claim.result else claim.line)
    of_commits = ", ".join(f"{name} of commit {results[name].context['commit'][:7]}" for name in quoted)
    return f"{markdown(lines)}\n\n" + textwrap.fill(f"*From the results {of_commits}.*", WIDTH)


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
                line = said + filled(part, result)
                texts.append(textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False))
                continue
            head, *rest = [[filled(each, result) for each in line] for line in part]
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
    """A table; the first line is its head. Raises ValueError for a line with more or fewer cells."""
    if unlike := next((line for line in lines if len(line) != len(lines[0])), None):
        raise ValueError(f"the line {unlike[0]!r} has {len(unlike)} cells under a head of {len(lines[0])}")
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
                lines.append((name, row.name, f"{number(row.value, '', '')} {row.unit}", str(row.aim)))
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
    as_program(main, __doc__)
