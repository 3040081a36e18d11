"""Sections and tables of a report's page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from difflib import Match, SequenceMatcher
from html import escape

from moeconv.artifacts import SIGNALS, ConversionReport, SensitivityTable, Step
from moeconv.report.curves import (
    loss_curve,
    number_map,
    path_curve,
    path_shares,
    prediction,
    prediction_bars,
    read_curve,
    top_share,
    width_map,
)
from moeconv.report.page import Chart, Section, duration, figure, interval_text, paragraph, percent, size
from moert.pack.manifest import BACKBONE, Manifest, dense_width
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.paths import TransitionTable
from moert.pack.reader import bits_histogram

# The sections with figures: importance, widths, the size–loss curve, paths, coverage.

_SIGNAL_NAMES = {
    "metric": "rise of the loss",
    "nll": "rise of the negative log-likelihood, nats a token",
    "kl": "rise of the divergence from the unquantized model, nats a token",
}
_TABS = {"metric": "metric", "nll": "log-likelihood", "kl": "divergence"}
_NAMED = 40  # experts listed by name before the rest is only counted


def importance_section(report: ConversionReport, spec: ModelSpec) -> Section:
    name, title = "importance", "How much each expert matters"
    table = report.sensitivity
    bits = None if table is None else table.probed_bits
    if table is None or bits is None:
        return Section(name, title, paragraph("Not measured: the conversion probed no expert on its own."))
    costs = {probe.key: cost for probe, cost in table.costs.items() if set(probe.bits) == {bits}}
    charts = tuple(
        number_map(f"importance-{signal}", _SIGNAL_NAMES[signal], {key: cost[at] for key, cost in costs.items()}, spec,
                   counts=False)
        for at, signal in enumerate(SIGNALS)
    )  # fmt: skip
    how = (
        f"Each cell is one expert (rows: layers in the order of execution, E encoder, D decoder): what it costs to "
        f"store this one at {bits} bits while all others stay at {table.base_bits}. Light experts need their bits, "
        "dark ones can do with few; small values, also those below zero, are within the noise. Colours end at the "
        "98th percentile."
    )
    told = {key: cost[0] for key, cost in costs.items() if math.isfinite(cost[0])}
    top = sorted(told, key=lambda key: -told[key])[:3]
    named = ", ".join(f"{key} ({percent(told[key], 2)})" for key in top)
    most = f"Most costly by the metric: {named}." if told else "The metric could not tell them apart on this text."
    return Section(name, title, paragraph(how) + _tabs(charts, report.signal) + paragraph(most), charts)


def _tabs(charts: Sequence[Chart], signal: str) -> str:
    parts = []
    first = signal if signal in SIGNALS else SIGNALS[0]
    for key in SIGNALS:
        mark = " checked" if key == first else ""
        parts.append(f'<input type="radio" name="signal" id="signal-{key}"{mark}>'
                     f'<label for="signal-{key}">{_TABS[key]}</label>')  # fmt: skip
    drawn = [
        figure(chart, f"importance of each expert by {_TABS[key]}") for key, chart in zip(SIGNALS, charts, strict=True)
    ]
    return f'<div class="tabs">{"".join(parts)}{"".join(drawn)}</div>'


def width_section(manifest: Manifest) -> Section:
    chart = width_map(manifest.experts, manifest.model)
    counts = ", ".join(f"{count:,} at {bits} bits" for bits, count in bits_histogram(manifest.experts).items())
    how = (
        f"Each cell is one expert's width: the darker, the fewer bits. Matrices by width: {counts}; with their scales "
        f"that makes {manifest.effective_bits():.2f} bits a weight."
    )
    return Section(
        "widths", "Bits given to each expert", paragraph(how) + figure(chart, "width of each expert"), (chart,)
    )


def curve_section(report: ConversionReport, spec: ModelSpec) -> Section:
    name, title = "curve", "Size against loss"
    if not report.curve:
        return Section(name, title, paragraph("No curve: the conversion weighed no plans against each other."))
    weights = len(spec.expert_keys()) * spec.weights_per_expert()
    asked = {"size": report.target.value, "bits": report.target.value * weights / 8}.get(report.target.kind)
    chart = loss_curve(report, asked)
    chosen_too = report.dense is not None and report.dense.purpose is not None
    what = "all experts and all other matrices" if chosen_too else "all experts"
    how = (
        f"Each plan is a choice of widths for {what}. The line is the loss predicted from them one by one, "
        "the points are plans whose loss was really measured, each with the bound that it stays under; the dashed line "
        "is the target, the circle the plan in this pack. Farther left is smaller, lower is better."
    )
    chosen = next((point for point in report.curve if point.chosen), None)
    text = ""
    if chosen is not None and chosen.predicted_loss is not None and chosen.loss is not None:
        text = paragraph(
            f"Chosen: {size(chosen.nbytes)}, predicted to lose {percent(chosen.predicted_loss, 2)}, measured "
            f"{percent(chosen.loss, 2)}."
        )
    return Section(name, title, paragraph(how) + figure(chart, "size against loss") + text, (chart,))


def read_section(report: ConversionReport) -> Section:
    """Returns the section on bytes read for a token, for a report with residences."""
    charts = [read_curve(f"read-{100 * one.share:g}", one, report.target) for one in report.residences]
    how = (
        "A token reads the experts that it needs and memory does not hold. Routing that prefers those used lately asks "
        "for less, and costs a part of the loss that widths could have had; the points are plans whose loss was "
        "measured, each with the bound that it stays under."
    )
    parts = [paragraph(how)]
    for one, chart in zip(report.residences, charts, strict=True):
        text = (
            f"With {percent(one.share, 0)} of the experts in memory a token reads {size(int(one.bytes))} of held-out "
            f"text, {size(int(one.exact_bytes))} where routing is exact; held-out loss {percent(one.heldout.loss, 2)}."
        )
        parts += [figure(chart, f"bytes a token against loss, {percent(one.share, 0)} in memory"), paragraph(text)]
    return Section("read", "Bytes a token against loss", "".join(parts), tuple(charts))


def path_section(table: TransitionTable | None, top_k: int) -> Section:
    name, title = "paths", "Paths through the experts"
    if table is None:
        return Section(
            name, title, paragraph("Not counted yet: moeconv profile-paths PACK adds the paths to the pack.")
        )
    found = {stack: path_shares(table, stack) for stack in dict.fromkeys(at.stack for at in table.layers)}
    shares = {str(stack): share for stack, share in found.items() if share is not None}
    guessed = prediction(table, top_k)
    if not shares or guessed is None:
        return Section(name, title, paragraph("No paths to show: that takes three layers with experts in one stack."))
    top = ", ".join(f"{percent(top_share(share), 0)} of tokens ({stack})" for stack, share in shares.items())
    paths = path_curve(shares)
    how_paths = (
        "A path is the experts that a token takes in three successive layers with experts. The steeper the line "
        f"rises, the fewer paths carry the text: the 20% most frequent serve {top}."
    )
    bars = prediction_bars(guessed)
    among = "the n most frequent" if top_k == 1 else f"the n × {top_k} most frequent"
    how_bars = (
        f"How often the next expert is among {among} ones (top-n), by how many of the layers before are known; the "
        "runtime loads experts ahead on such guesses. Judged on the counted text, each choice by the counts of all "
        "others; moeconv profile-paths prints the same for held-out text."
    )
    body = paragraph(how_paths) + figure(paths, "share of tokens against share of paths")
    return Section(name, title, body + paragraph(how_bars) + figure(bars, "accuracy of prediction"), (paths, bars))


def coverage_section(report: ConversionReport, spec: ModelSpec) -> Section:
    name, title = "coverage", "What the calibration text reached"
    table = report.sensitivity
    if table is None or not table.coverage:
        return Section(name, title, paragraph("Not counted: the conversion ran without a sweep of calibration text."))
    chart = number_map("coverage", "tokens seen, logarithmic", dict(table.coverage), spec, counts=True)
    how = (
        "How many calibration tokens each expert saw. The darker, the less is known of it: its importance rests on few "
        "tokens. Grey cells saw none."
    )
    return Section(
        name,
        title,
        paragraph(how)
        + figure(chart, "tokens seen by each expert")
        + paragraph(_unseen(table, spec) + _fallbacks(report)),
        (chart,),
    )


def _fallbacks(report: ConversionReport) -> str:
    if not report.fallbacks:
        return ""
    more = f" and {len(report.fallbacks) - _NAMED} more" if len(report.fallbacks) > _NAMED else ""
    return f" The quantizer saw too little text for: {', '.join(report.fallbacks[:_NAMED])}{more}."


def _unseen(table: SensitivityTable, spec: ModelSpec) -> str:
    unseen: list[ExpertKey] = [key for key in spec.expert_keys() if not table.coverage.get(key)]
    if not unseen:
        least = min(spec.expert_keys(), key=lambda key: table.coverage[key])
        return f"Every expert saw some; the least, {least}, saw {table.coverage[least]:,}."
    names = ", ".join(map(str, unseen[:_NAMED]))
    more = f" and {len(unseen) - _NAMED} more" if len(unseen) > _NAMED else ""
    return f"Without a single token ({len(unseen)} of {len(spec.expert_keys())}): {names}{more}."


# The sections without figures: the slowest steps, sample outputs, every expert.

_SLOWEST, _SAMPLES, _LONGEST = 12, 12, 4000
_MOST_PAIRS = 1 << 24
"""Most pairs of equal words in two texts that are compared to mark their differences; ordinary texts take a tenth of
them."""


def dense_section(report: ConversionReport, manifest: Manifest) -> Section:
    """Returns the section on the matrices outside the experts: their widths, bytes and loss."""
    name, title, dense = "dense", "All but the experts", report.dense
    nbytes = manifest.files[BACKBONE].nbytes if BACKBONE in manifest.files else 0
    if dense is None:
        return Section(name, title, paragraph(f"Stored as in the source, in {size(nbytes)}."))
    head = '<tr><th>matrices</th><th class="number">bits</th></tr>'
    stored, spec = manifest.quantization.dense, manifest.model
    widths = {name: width for name in spec.tensors if (width := dense_width(spec, stored, name)) is not None}
    each = widths if dense.matrices else dense.bits
    rows = "".join(f'<tr><td>{escape(name)}</td><td class="number">{bits}</td></tr>' for name, bits in each.items())
    lost = ""
    if dense.alone is not None:
        lost = (
            f" With unquantized experts these widths lose {interval_text(dense.alone)}; that is part of every loss on "
            "this page."
        )
    groups = f"in groups of {dense.group_size}" if dense.group_size else "one scale for each output channel"
    trellis = f", trellis codes of {', '.join(stored.trellis)}" if stored is not None and stored.trellis else ""
    text = (
        f"Stored in {size(nbytes)}, {percent(dense.nbytes / dense.source_nbytes, 0)} of what they have in the source "
        f"(quantizer {dense.quantizer}, {groups}{trellis}); what has no width here is as it was.{lost}"
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
            text += f"; it measured {percent(cost.measured_share, 0)} of all samples"
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
    """Returns the seconds that the step would have taken without a journal."""
    return step.seconds + step.reused_seconds


def sample_section(report: ConversionReport) -> Section:
    name, title = "samples", "Sample outputs"
    if not report.samples:
        return Section(name, title, paragraph("None were kept: the conversion compared no generated text."))
    how = (
        "What the unquantized model (reference) and this pack make of the same input. Struck through: what the pack "
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
    """Error for two texts with too many pairs of equal words to compare them."""


class _Matcher(SequenceMatcher[str]):
    """A matcher that limits the pairs of words it compares: texts of few different words could take for ever."""

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
    """Returns both texts as HTML; words that only one has are marked, unless that would take too long."""
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
    bits = None if table is None else table.probed_bits
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
    """Returns a table cell that sorts by its value and shows the text."""
    return f'<td class="number" data-value="{"" if value is None else f"{value:.6g}"}">{text or "–"}</td>'
