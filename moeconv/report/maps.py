"""Maps of layers by experts: one number, or one width, for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from moeconv.report.chart import GRID, SOFT, Chart, draw
from moert.pack.codec import WIDTHS
from moert.pack.manifest import ExpertEntry
from moert.pack.model_spec import ExpertKey, ModelSpec

WIDTH_COLOURS = ("#46327e", "#277f8e", "#4ac16d", "#bddf26", "#f7e8a0")
"""From few bits (dark) to many (light): told apart by lightness alone, so also by the colour-blind and in print."""
_PAPER_INK = "#101418"
_WIDTH_IN = 6.4
_NUMBERED = 300  # cells; more numbers than that make a heavy page and say little
_FARTHEST = 1e18  # drawn for anything beyond

F64 = npt.NDArray[np.float64]


def number_map(name: str, label: str, values: Mapping[ExpertKey, float], spec: ModelSpec, counts: bool) -> Chart:
    """A heat map; experts without a value are grey. `counts`: values are tokens, drawn on a logarithmic scale."""
    cells = grid(values, spec)

    def paint(figure: Any) -> None:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.ticker import FuncFormatter, PercentFormatter

        axes = figure.subplots()
        known = cells[np.isfinite(cells)] if np.isfinite(cells).any() else np.zeros(1)
        if counts:
            norm: Any = LogNorm(vmin=1, vmax=max(2.0, known.max()))
            shown = np.where(cells > 0, cells, np.nan)
            extend = "neither"
            form: Any = FuncFormatter(lambda value, _: f"{value:,.0f}")
        else:
            low, high = float(known.min()), float(np.percentile(known, 98))
            norm, shown = Normalize(low, max(high, low + 1e-9)), cells
            extend = "max" if known.max() > norm.vmax else "neither"
            form = PercentFormatter(1.0) if name.endswith("metric") else FuncFormatter(lambda value, _: f"{value:.3g}")
        image = _image(axes, shown, spec, cmap="viridis", norm=norm)
        axes.set_xlabel("expert")
        bar = figure.colorbar(
            image, ax=axes, orientation="horizontal", extend=extend, format=form, label=label, fraction=0.08, aspect=40
        )
        bar.outline.set_visible(False)
        bar.ax.minorticks_off()

    return draw(name, _WIDTH_IN, _height(cells, 1) + 1.1, paint)


def width_map(name: str, experts: tuple[ExpertEntry, ...], spec: ModelSpec) -> Chart:
    """One panel for each projection; a single one where every expert has all its projections at the same width."""
    projections = spec.moe.ffn.projections
    alike = all(len(set(entry.bits.values())) == 1 for entry in experts)
    panels = {"all projections": projections[0]} if alike else {projection: projection for projection in projections}
    cells = {
        title: grid({entry.key: float(entry.bits[projection]) for entry in experts}, spec)
        for title, projection in panels.items()
    }
    used = [width for width in WIDTHS if any((panel == width).any() for panel in cells.values())]

    def paint(figure: Any) -> None:
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.patches import Patch

        colours = dict(zip(WIDTHS, WIDTH_COLOURS, strict=True))
        edges = [0, *(width + 0.5 for width in WIDTHS)]
        rows = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
        for axes, (title, panel) in zip(rows, cells.items(), strict=True):
            _image(axes, panel, spec, cmap=ListedColormap(WIDTH_COLOURS), norm=BoundaryNorm(edges, len(WIDTHS)))
            axes.set_title(title)
            if panel.shape[1] <= 16 and sum(cell.size for cell in cells.values()) <= _NUMBERED:
                for row, column in np.ndindex(panel.shape):
                    width = int(panel[row, column])
                    colour = "#ffffff" if width in WIDTHS[:2] else _PAPER_INK
                    axes.text(column, row, width, ha="center", va="center", color=colour, fontsize=8)
        rows[-1].set_xlabel("expert")
        handles = [Patch(facecolor=colours[width], edgecolor=SOFT, label=f"{width} bits") for width in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(used), handlelength=1.2)

    return draw(name, _WIDTH_IN, _height(next(iter(cells.values())), len(cells)) + 0.9, paint)


def grid(values: Mapping[ExpertKey, float], spec: ModelSpec) -> F64:
    """[layers with experts, experts], in the order of execution; NaN where there is no value."""
    rows = {place: row for row, place in enumerate(spec.moe_layers())}
    cells = np.full((len(rows), spec.moe.n), np.nan)
    for key, value in values.items():
        cells[rows[key.at], key.expert] = min(max(value, -_FARTHEST), _FARTHEST) if value == value else value
    return cells


def _image(axes: Any, cells: F64, spec: ModelSpec, **colours: Any) -> Any:
    """Pixels are cells: the browser enlarges them without smoothing."""
    image = axes.imshow(np.ma.masked_invalid(cells), aspect="auto", interpolation="none", **colours)
    step = max(1, -(-len(cells) // 16))
    places = list(enumerate(spec.moe_layers()))[::step]
    axes.set_yticks([row for row, _ in places], [str(at) for _, at in places])
    every = max(1, -(-cells.shape[1] // 16))
    axes.set_xticks(range(0, cells.shape[1], every))
    axes.set_facecolor(GRID)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if cells.size <= 512:
        axes.set_xticks(np.arange(cells.shape[1] - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(cells) - 1) + 0.5, minor=True)
        axes.tick_params(which="minor", length=0)
        axes.grid(which="minor", color=GRID, linewidth=0.6)
    return image


def _height(cells: F64, panels: int) -> float:
    """Inches for the panels alone."""
    return panels * (0.45 + min(4.5, max(0.7, 0.24 * len(cells))))
