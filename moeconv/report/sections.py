"""The sections with figures: importance, widths, the size–loss curve, paths, coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeconv.artifacts import SIGNALS, ConversionReport, SensitivityTable
from moeconv.report.chart import Chart
from moeconv.report.curves import loss_curve, path_curve, prediction_bars, read_curve
from moeconv.report.maps import number_map, width_map
from moeconv.report.page import Section, figure, paragraph
from moeconv.report.routing import path_shares, prediction, top_share
from moeconv.report.units import percent, size
from moert.pack.manifest import Manifest
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.paths import TransitionTable
from moert.pack.reader import bits_histogram

_SIGNAL_NAMES = {
    "metric": "rise of the loss",
    "nll": "rise of the negative log-likelihood, nats a token",
    "kl": "rise of the divergence from the unquantised model, nats a token",
}
_TABS = {"metric": "metric", "nll": "log-likelihood", "kl": "divergence"}
_NAMED = 40  # experts listed by name before the rest is only counted


def importance_section(report: ConversionReport, spec: ModelSpec) -> Section:
    name, title = "importance", "How much each expert matters"
    table = report.sensitivity
    bits = None if table is None else probed_bits(table)
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


def probed_bits(table: SensitivityTable) -> int | None:
    """The least width that experts were probed at with all their projections."""
    return min((probe.bits[0] for probe in table.costs if len(set(probe.bits)) == 1), default=None)


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
    chart = width_map("widths", manifest.experts, manifest.model)
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
    chart = loss_curve("size-loss", report, asked)
    how = (
        "Each plan is a choice of widths for all experts. The line is the loss predicted from the experts one by one, "
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
    """For a report with residences."""
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
    paths = path_curve("paths-share", shares)
    how_paths = (
        "A path is the experts that a token takes in three successive layers with experts. The steeper the line "
        f"rises, the fewer paths carry the text: the 20% most frequent serve {top}."
    )
    bars = prediction_bars("paths-prediction", guessed)
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
