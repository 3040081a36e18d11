"""The page of a report and the charts on it: HTML and SVG, units of sizes and times."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from moeconv.artifacts import ConversionReport
from moeconv.errors import ConversionError
from moert.pack.manifest import LossEstimate, in_words

# Numbers as text for a person.


def percent(value: float, digits: int = 1) -> str:
    return f"{round(value, digits + 2) + 0.0:.{digits}%}"  # adding zero takes the sign from -0


def size(nbytes: float) -> str:
    """Returns a number of bytes as text in decimal units: 1 MB is 1,000,000 bytes."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * factor:
            shown = nbytes / factor
            return f"{shown:.3g} {unit}" if shown < 999.5 else f"{shown:,.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def many(count: int) -> str:
    """Returns a number of weights as text for a person."""
    for factor, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:,}"


def duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


# A drawn figure: SVG with the page's colours, light or dark, and a PNG on white.

INK, SOFT, GRID, BLUE, ORANGE = "#1b1f24", "#59636e", "#d8dee4", "#0072b2", "#d55e00"
_VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", BLUE: "--blue", ORANGE: "--orange"}
_ALONE = (
    "<style>:root{--ink:#1b1f24;--soft:#59636e;--grid:#d8dee4;--blue:#0072b2;--orange:#d55e00;--paper:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#a3acb6;--grid:#39414a;--blue:#5ab4e5;"
    "--orange:#f0a24a;--paper:#14181d}}svg{background:var(--paper)}text{font-family:system-ui,sans-serif}</style>"
)
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 10,
    "axes.titlelocation": "left", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": SOFT,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID,
    "axes.facecolor": "none", "figure.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "legend.fontsize": 9, "axes.linewidth": 0.8, "lines.linewidth": 1.8,
    "axes.unicode_minus": False,
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """A drawn figure: `inline` belongs in a page that defines the colours, `svg` and `png` stand alone."""

    name: str
    inline: str
    svg: bytes
    png: bytes


def draw(name: str, width: float, height: float, paint: Callable[[Any], None]) -> Chart:
    """Returns the chart that `paint` draws on an empty matplotlib Figure of this size in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {**_STYLE, "svg.hashsalt": name}
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        raw, png = io.StringIO(), io.BytesIO()
        figure.savefig(raw, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    text = _themed(raw.getvalue(), name)
    alone = re.sub(r"(<svg[^>]*>)", lambda match: match[1] + _ALONE, text, count=1)
    return Chart(name, text, ('<?xml version="1.0" encoding="utf-8"?>\n' + alone).encode(), png.getvalue())


def _themed(svg: str, name: str) -> str:
    """Returns the SVG with the page's variables for colours, and ids unlike those of the page's other figures."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"font-family: [^;\"]*;? ?|font: ([\d.]+px) [^;\"]*;?", _size_alone, svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    return svg.strip() + "\n"


def _size_alone(match: re.Match[str]) -> str:
    return f"font-size: {match[1]};" if match[1] else ""


def require_matplotlib() -> None:
    """Raises ConversionError where figures can't be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConversionError(
            "figures need matplotlib, which is not installed: run pip install 'moert[report]'"
        ) from None


# The page: sections in a fixed order, each a figure or a table with a sentence on how to read it, or why it lacks.

GENERATOR = "moeconv report"
MARK = (
    f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{GENERATOR}">'
)
_METRICS = {
    "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L",
    "exact_match": "exact match", "accuracy": "accuracy", "f1": "F1",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A section of the page: `body` is HTML; `charts` are the figures in it."""

    name: str
    title: str
    body: str
    charts: tuple[Chart, ...] = ()


def paragraph(text: str) -> str:
    return f'<p class="how">{escape(text)}</p>'


def figure(chart: Chart, meaning: str) -> str:
    """Returns the HTML of one figure; `meaning` is its text for readers who cannot see it."""
    svg = chart.inline.replace("<svg ", f'<svg role="img" aria-label="{escape(meaning)}" ', 1)
    return f'<figure id="figure-{chart.name}">{svg}</figure>'


def page(report: ConversionReport, n_experts: int, sections: Sequence[Section]) -> str:
    """Returns the whole document, which loads nothing from elsewhere."""
    style, script = (files("moeconv.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = " ".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    bodies = "\n".join(
        f'<section id="{section.name}">\n<h2>{escape(section.title)}</h2>\n{section.body}\n</section>'
        for section in sections
    )
    return f"""{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{escape(report.model)}: conversion report</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(report.model)}</h1>
<p id="result">{escape(result(report, n_experts))}</p>
<div class="tiles">{_tiles(report)}</div>
<nav>{links}</nav>
{bodies}
<footer>{escape(_origin(report))}</footer>
</main>
<script>{script}</script>
</body>
</html>
"""


def result(report: ConversionReport, n_experts: int) -> str:
    """Returns the outcome of the conversion in plain words."""
    sizes = report.expert_bytes
    text = f"The {n_experts:,} experts of this model are stored in {size(sizes['pack'])}{_shares(report)}. "
    if report.calibration is None and report.heldout is None:
        return text + "Its loss was not measured: the conversion had no calibration text."
    text += f"The aim was {_aim(report)}. "
    better = [found for found in (report.calibration, report.heldout) if found is not None and found.loss < 0]
    name = _METRICS.get(report.metric, in_words(report.metric))
    change = "rise" if report.metric.endswith("perplexity") or ".py:-" in report.metric else "drop"
    text += f"Loss is the relative {change} of {name} against the unquantized model"
    text += "; below zero means better than it. " if better else ". "
    if report.calibration is not None:
        text += f"On calibration text that took no part in the ranking it is {interval_text(report.calibration)}"
        if report.confidence is not None and report.upper_bound is not None:
            text += (
                f", and stays under {percent(report.upper_bound, 2)} with {percent(report.confidence, 0)} confidence"
            )
        elif report.upper_bound is not None:
            text += (
                f". No promise is given: more text of the same documents would lose less than "
                f"{percent(report.upper_bound, 2)}"
            )
        text += ". "
    if report.heldout is not None:
        text += f"On held-out text, measured once at the end, it is {interval_text(report.heldout)}. "
        text += _values(name, report.heldout)
    more = [*_scales(report), *_route(report), *_neurons(report), *_notes(report)]
    return " ".join([text + _verdict(report), *more]).strip()


def _values(name: str, measured: LossEstimate) -> str:
    """Returns the metric on the held-out text as a sentence; for a perplexity per word also the one per token."""
    text, by_tokens = (
        f"There {name} is {measured.value:.4g}, {measured.reference:.4g} unquantized",
        measured.per_token(),
    )
    if by_tokens is not None:
        text += f" (per token {by_tokens[1]:.4g}, {by_tokens[0]:.4g} unquantized)"
    return text + ". "


def _scales(report: ConversionReport) -> list[str]:
    found = report.scales
    if found is None:
        return []
    return [
        f"Scales of {found.matrices:,} matrices and the weights of {found.norms} norms were trained on the text that "
        f"ranks experts: with the widths that hold without, {found.nbytes / 1e6:,.2f} MB, the loss fell from "
        f"{found.before:.2%} to {found.after:.2%}."
    ]


def _route(report: ConversionReport) -> list[str]:
    if report.route is None:
        return []
    alone, routers = report.route.alone, report.route.routers
    return [
        "All of this is with a hash function in the routers' place, which by itself, with unquantized experts, loses "
        f"{interval_text(alone)}. With its own routers the pack loses {interval_text(routers)} of held-out text."
    ]


def _neurons(report: ConversionReport) -> list[str]:
    if report.neurons is None:
        return []
    alone, exact = report.neurons.alone, report.neurons.exact
    return [
        "All of this is with those neurons alone that a predictor names, which by itself, with unquantized experts, "
        f"loses {interval_text(alone)}. With all neurons the pack loses {interval_text(exact)} of held-out text."
    ]


def _notes(report: ConversionReport) -> list[str]:
    return [f"Note: {line}." for line in (report.standing.notes if report.standing else ())]


def _verdict(report: ConversionReport) -> str:
    found = report.heldout
    if report.target.kind != "loss" or found is None:
        return ""
    if found.loss <= report.target.value:
        return "The target is met on held-out text."
    return "The target is missed on held-out text: other text loses more than the calibration text did."


def _aim(report: ConversionReport) -> str:
    value = report.target.value
    if report.target.kind == "loss":
        return f"to lose at most {percent(value, 2).replace('.00%', '%')}"
    return f"a size of {size(value)}" if report.target.kind == "size" else f"{value:.3g} bits a weight"


def interval_text(found: LossEstimate) -> str:
    return (
        f"{percent(found.loss, 2)} (95% interval {percent(found.low, 2)} to {percent(found.high, 2)}, "
        f"{found.samples:,} samples)"
    )


def _shares(report: ConversionReport) -> str:
    sizes = report.expert_bytes
    names = {"fp16": "FP16", "int4": "uniform INT4"}
    parts = [
        f"{percent(sizes['pack'] / sizes[key], 0)} of what {name} takes"
        for key, name in names.items()
        if sizes.get(key)
    ]
    return ", " + " and ".join(parts) if parts else ""


def _tiles(report: ConversionReport) -> str:
    sizes, found = report.expert_bytes, report.heldout or report.calibration
    where = "held-out" if report.heldout is not None else "calibration"
    tiles = [
        (size(sizes["pack"]), "all experts, scales included"),
        (f"{report.effective_bits:.2f}", "bits a weight, scales included"),
        (percent(found.loss) if found else "–", f"{where} loss" if found else "loss: not measured"),
        (percent(report.confidence, 0) if report.confidence is not None else "–",
         "confidence of the promise" if report.confidence is not None
         else "no promise: too few documents" if report.upper_bound is not None else "no confidence asked for"),
    ]  # fmt: skip
    return "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in tiles
    )


def _origin(report: ConversionReport) -> str:
    groups = f"in groups of {report.group_size}" if report.group_size else "one scale for each output channel"
    parts = [f"Quantizer {report.quantizer}, {groups}", f"seed {report.seed}"]
    if report.allocation and report.sensitivity is not None:
        parts.insert(1, f"allocation {report.allocation} by {report.signal}")
    if report.calibration_source:
        parts.append(f"calibration text {report.calibration_source}")
    if report.heldout_source:
        parts.append(f"held-out text {report.heldout_source}")
    return "; ".join(parts) + "."
