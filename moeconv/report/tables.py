"""The sections without figures: the slowest steps, sample outputs, every expert."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import Match, SequenceMatcher
from html import escape

from moeconv.artifacts import ConversionReport, Step
from moeconv.report.page import Section, interval_text, paragraph
from moeconv.report.sections import probed_bits
from moeconv.report.units import duration, percent, size
from moert.pack.manifest import BACKBONE, Manifest

_SLOWEST, _SAMPLES, _LONGEST = 12, 12, 4000
_MOST_PAIRS = 1 << 24
"""Of equal words in two texts that are looked at to mark what differs; texts that are meant well take a tenth of it."""


def dense_section(report: ConversionReport, manifest: Manifest) -> Section:
    """The matrices outside the experts: their widths, bytes and loss."""
    name, title, dense = "dense", "All but the experts", report.dense
    nbytes = manifest.files[BACKBONE].nbytes if BACKBONE in manifest.files else 0
    if dense is None:
        return Section(name, title, paragraph(f"Stored as in the source, in {size(nbytes)}."))
    head = '<tr><th>matrices</th><th class="number">bits</th></tr>'
    rows = "".join(
        f'<tr><td>{escape(role)}</td><td class="number">{bits}</td></tr>' for role, bits in dense.bits.items()
    )
    lost = ""
    if dense.alone is not None:
        lost = (
            f" With unquantised experts these widths lose {interval_text(dense.alone)}; that is part of every loss on "
            "this page."
        )
    groups = f"in groups of {dense.group_size}" if dense.group_size else "one scale for each output channel"
    text = (
        f"Stored in {size(nbytes)}, {percent(dense.nbytes / dense.source_nbytes, 0)} of what they have in the source "
        f"(quantizer {dense.quantizer}, {groups}); what has no width here is as it was.{lost}"
    )
    return Section(name, title, paragraph(text) + _table("dense", head, rows))


def step_section(report: ConversionReport) -> Section:
    name, title = "steps", "Where the time went"
    text = (
        f"{report.evaluations} assignments of widths took {duration(report.evaluation_seconds)} to evaluate, in this "
        f"run or an earlier one; this run took {duration(report.seconds)}."
    )
    cost = report.sweep_cost
    if cost is not None:
        text += (
            f" The sweep asked {cost.probes:,} questions, {cost.free_probes:,} of them free, since no token went there"
        )
        if cost.naive_flops:
            text += f"; it spent {percent(cost.flops / cost.naive_flops)} of the expert operations of full evaluations"
        if cost.measured_share < 1:
            text += f"; racing measured {percent(cost.measured_share, 0)} of all samples"
        text += "."
    steps = sorted(report.steps, key=lambda step: -_whole(step))[:_SLOWEST]
    if not steps:
        return Section(name, title, paragraph(text))
    reused = sum(step.reused_seconds for step in steps)
    if reused:
        text += f" Measurements of earlier runs were reused, which had taken {duration(reused)}; the bars count them."
    longest = max(_whole(steps[0]), 1e-9)
    rows = "".join(
        f'<tr><td>{escape(step.name)}</td><td class="number">{duration(step.seconds)}</td>'
        + (f'<td class="number">{duration(step.reused_seconds) if step.reused_seconds else "–"}</td>' if reused else "")
        + f'<td class="bar"><i style="width:{100 * _whole(step) / longest:.1f}%"></i></td></tr>'
        for step in steps
    )
    earlier = '<th class="number">reused from earlier runs</th>' if reused else ""
    head = f'<tr><th>step</th><th class="number">time</th>{earlier}<th></th></tr>'
    how = "The slowest steps first; the bars compare them with the slowest. "
    return Section(name, title, paragraph(how + text) + _table("steps", head, rows))


def _whole(step: Step) -> float:
    """Seconds that the step would have taken without a journal."""
    return step.seconds + step.reused_seconds


def sample_section(report: ConversionReport) -> Section:
    name, title = "samples", "Sample outputs"
    if not report.samples:
        return Section(name, title, paragraph("None were kept: the conversion compared no generated text."))
    how = (
        "What the unquantised model (reference) and this pack make of the same input. Struck through: what the pack "
        "no longer says; underlined: what it says instead."
    )
    body = "".join(_sample(sample) for sample in report.samples[:_SAMPLES])
    same = sum(sample.get("reference") == sample.get("pack") for sample in report.samples)
    count = f"{same} of {len(report.samples)} outputs are word for word the same."
    return Section(name, title, paragraph(f"{how} {count}") + body)


def _sample(sample: Mapping[str, str]) -> str:
    shown = {name: escape(_cut(text)) for name, text in sample.items()}
    if "reference" in sample and "pack" in sample:
        shown["reference"], shown["pack"] = marked(_cut(sample["reference"]), _cut(sample["pack"]))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in shown.items())
    return f'<div class="sample"><dl>{rows}</dl></div>'


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


class _TooAlike(Exception):
    """Of two texts that too many equal words are in to compare them."""


class _Matcher(SequenceMatcher[str]):
    """Counts what it looks at: texts of few different words, arranged for it, would take for ever."""

    b2j: dict[str, list[int]]  # word → its places on the right

    def __init__(self, left: list[str], right: list[str]) -> None:
        super().__init__(None, left, right, autojunk=False)
        self._words, self._left = left, _MOST_PAIRS

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        self._left -= sum(len(self.b2j.get(word, ())) for word in self._words[alo:ahi])
        if self._left < 0:
            raise _TooAlike
        return super().find_longest_match(alo, ahi, blo, bhi)


def marked(before: str, after: str) -> tuple[str, str]:
    """Both texts as HTML; words that only one has are marked, unless that would take too long."""
    left, right = re.findall(r"\s+|[^\s]+", before), re.findall(r"\s+|[^\s]+", after)
    out: tuple[list[str], list[str]] = ([], [])
    try:
        found = _Matcher(left, right).get_opcodes()
    except _TooAlike:
        return escape(before), escape(after)
    for kind, a, b, c, d in found:
        for words, tag, into in ((left[a:b], "del", out[0]), (right[c:d], "ins", out[1])):
            text = escape("".join(words))
            into.append(text if kind == "equal" or not text else f"<{tag}>{text}</{tag}>")
    return "".join(out[0]), "".join(out[1])


def expert_section(report: ConversionReport, manifest: Manifest) -> Section:
    table = report.sensitivity
    bits = None if table is None else probed_bits(table)
    importance = table.importance(bits) if table is not None and bits is not None else {}
    coverage = table.coverage if table is not None else {}
    rows = []
    for entry in manifest.experts:
        value = importance.get(entry.key, entry.importance)
        tokens = coverage.get(entry.key)
        widths = [entry.bits[projection] for projection in manifest.model.moe.ffn.projections]
        rows.append(
            f"<tr><td>{entry.key}</td>{_number(sum(widths) / len(widths), '/'.join(map(str, widths)))}"
            f"{_number(value, None if value is None else percent(value, 3))}"
            f"{_number(tokens, None if tokens is None else f'{tokens:,}')}"
            f"{_number(entry.tensor_bytes, f'{entry.tensor_bytes:,}')}</tr>"
        )
    projections = "/".join(manifest.model.moe.ffn.projections)
    heads = [("expert", ""), (f"bits {projections}", "number"), ("importance", "number"), ("tokens seen", "number"),
             ("bytes", "number")]  # fmt: skip
    head = "".join(f'<th class="{kind}"><button type="button">{name}</button></th>' for name, kind in heads)
    how = "Press a heading to sort by it. Importance is the loss when this expert alone goes to few bits."
    total = f"{len(rows):,} experts, {size(manifest.expert_tensor_bytes())}"
    body = _table("sortable", f"<tr>{head}</tr>", "".join(rows))
    details = f"<details><summary>{total}</summary>{body}</details>"
    return Section("experts", "All experts", paragraph(how) + details)


def _table(kind: str, head: str, rows: str) -> str:
    return f'<div class="wide"><table class="{kind}"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _number(value: float | None, text: str | None) -> str:
    """A cell that sorts by its value and shows the text."""
    return f'<td class="number" data-value="{"" if value is None else f"{value:.6g}"}">{text or "–"}</td>'
