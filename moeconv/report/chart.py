"""A drawn figure: SVG whose colours follow the page's, light or dark, and a PNG on white."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeconv.errors import ConversionError

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
    """`inline` belongs in a page that defines the colours, `svg` and `png` stand alone."""

    name: str
    inline: str
    svg: bytes
    png: bytes


def draw(name: str, width: float, height: float, paint: Callable[[Any], None]) -> Chart:
    """`paint` gets an empty matplotlib Figure of this size in inches."""
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
    """Fixed colours become the page's variables, and ids differ from those of the page's other figures."""
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
